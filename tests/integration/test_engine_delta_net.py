"""Models with gated delta nets in the engine, against Hugging Face's forward over each whole text.

Whatever the engine does with a request (chunks of any size, prefixes from the cache, retraction, other
requests beside it), the log-probs must be those of one forward, in which no state is ever saved.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from slime.core.errors import ConfigError, UserError
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.state_keeper import INTERVAL
from slime.weights.checksum import tensor_checksums
from tests.adapters import make_adapter, peft_log_probs
from tests.engines import LocalEngine, local_engine
from tests.tiny import make_tiny_checkpoint
from tests.waiting import wait_for

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
TOLERANCE = 1e-4
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny_checkpoint(root / family, family, weight_scale=5.0, **LAYERS)
        for family in FAMILIES
    }


@functools.lru_cache(maxsize=4)
def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def log_probs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of all tokens but the first."""
    log_probs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens)[1:, None]).squeeze(1)


def check(path: Path, requests: list[Request]) -> None:
    for request in requests:
        expected = log_probs_of(reference(path), request.token_ids)
        output = torch.tensor(request.output_log_probs)
        assert len(output) == request.num_output
        error = (output - expected[request.prompt_len - 1 :]).abs()
        assert not len(error) or error.max() < TOLERANCE, (request.rid, error)
        if request.logprob_start_len == 0:
            scored = torch.tensor(request.input_log_probs)
            assert (scored - expected[: request.prompt_len - 1]).abs().max() < TOLERANCE


def make_prompts(*lens: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lens]


@pytest.mark.parametrize("index", range(3), ids=FAMILIES)
def test_prompts_cut_into_chunks_of_1_to_64(models: dict[str, Path], index: int):
    path = models[FAMILIES[index]]
    prompts = make_prompts(3, 17, 40, 75, seed=index)
    for size in range(1 + index, 65, 3):
        with local_engine(path, chunked_prefill_size=size) as engine:
            check(path, engine.generate(prompts, start_len=0, max_new_tokens=3, **GREEDY))


def test_the_plain_path_in_bf16(models: dict[str, Path]):
    """Hugging Face's modules in place of kernels; chunks round otherwise than one forward."""
    path, prompts = models["qwen3_5"], make_prompts(17, 40, 75)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with local_engine(path, dtype="bfloat16", chunked_prefill_size=21) as engine:
        requests = engine.generate(prompts, max_new_tokens=8, **GREEDY)
        again = engine.generate(prompts, max_new_tokens=8, **GREEDY)
    assert [request.num_cached for request in again] == [16, 32, 64]
    for request in (*requests, *again):
        expected = log_probs_of(model, request.token_ids)[request.prompt_len - 1 :].float()
        assert (torch.tensor(request.output_log_probs) - expected).abs().mean() < 0.05


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_reused_up_to_saved_states(models: dict[str, Path], family: str, plain: bool):
    if plain and family == "qwen3_5":
        pytest.skip("it has no experts to return, which is what takes the plain path here")
    path = models[family]
    shared, *rests = make_prompts(64, 21, 22, 23)
    prompts = [shared + rest for rest in rests]
    with local_engine(path, enable_return_routed_experts=plain) as engine:
        found = [engine.generate([p], max_new_tokens=5, **GREEDY)[0] for p in prompts]
        again = engine.generate(prompts, max_new_tokens=5, **GREEDY)
        group = engine.generate([make_prompts(50, seed=9)[0]] * 4, max_new_tokens=5, **GREEDY)
    check(path, [*found, *again, *group])
    # The second prompt finds pages but no state where it branches off, and saves one there.
    assert [request.num_cached for request in found] == [0, 0, 64]
    assert [request.num_cached for request in again] == [80, 80, 80]
    assert [request.num_cached for request in group] == [0, 48, 48, 48]


def test_a_response_is_a_prefix_of_the_next_turn(models: dict[str, Path]):
    path, (first,) = models["qwen3_5"], make_prompts(30)
    with local_engine(path) as engine:
        [turn] = engine.generate([first], max_new_tokens=INTERVAL + 20, **GREEDY)
        [after] = engine.generate([[*turn.token_ids, 1, 2, 3]], max_new_tokens=5, **GREEDY)
    check(path, [turn, after])
    assert after.num_cached == INTERVAL


@pytest.mark.parametrize("family", FAMILIES)
def test_retracted_requests_continue(models: dict[str, Path], family: str):
    path = models[family]
    with local_engine(path, max_total_tokens=160, chunked_prefill_size=24) as engine:
        requests = engine.generate(make_prompts(30, 45, 20, 33), max_new_tokens=40, **GREEDY)
    check(path, requests)
    assert sum(request.num_retractions for request in requests) > 0


# ---- random loads


class Load:
    """Requests of random texts, some with a common beginning, that arrive and are aborted at random."""

    def __init__(self, seed: int, *, experts: bool) -> None:
        self.rng = rng = random.Random(seed)
        page = rng.choice([1, 2, 4, 16])
        self.options: dict[str, Any] = {
            "page_size": page,
            "chunked_prefill_size": rng.choice([1, 5, 16, 33, 64, 512]),
            "max_running_requests": rng.choice([1, 3, 8]),
            "max_total_tokens": rng.choice([208, 320, 2048]) // page * page,
            "disable_radix_cache": rng.random() < 0.1,
            "enable_deterministic_inference": rng.random() < 0.2,
            # on the plain path
            "enable_return_routed_experts": experts and rng.random() < 0.5,
        }
        self.texts: list[list[int]] = make_prompts(rng.randint(1, 90), seed=seed)

    def request(self, number: int) -> Request:
        rng = self.rng
        begin = rng.choice(self.texts)
        begin = begin[: rng.randint(0, min(len(begin), 120))]
        text = begin + make_prompts(rng.randint(1, 60), seed=rng.randrange(1 << 30))[0]
        self.texts.append(text)
        return Request(
            rid=f"r{number}",
            token_ids=list(text),
            prompt_len=len(text),
            params=SamplingParams(temperature=1.0, max_new_tokens=rng.randint(1, 20)),
            seed=number,
            return_logprob=True,
            logprob_start_len=rng.choice([-1, -1, 0]),
        )


def disturb(local: LocalEngine, load: Load, requests: list[Request]) -> None:
    """Abort one request, retract all, or flush the prefix cache."""
    engine, choice = local.engine, load.rng.random()
    if choice < 0.3:
        victim = load.rng.choice(requests)
        engine.call(lambda: engine.abort(lambda request: request is victim)).result()
    elif choice < 0.5:
        engine.call(lambda: engine.pause("retract")).result()
        engine.call(engine.resume).result()
    elif choice < 0.6:
        engine.call(engine.weights_changed).result()


@pytest.mark.parametrize("seed", range(24))
def test_random_loads(models: dict[str, Path], seed: int):
    family = FAMILIES[seed % 3]
    path, load = models[family], Load(seed, experts=family != "qwen3_5")
    requests: list[Request] = []
    with local_engine(path, **load.options) as local:
        for number in itertools.count():
            if number >= 24:
                break
            requests.append(load.request(number))
            local.engine.submit(requests[-1:])
            if load.rng.random() < 0.4:
                disturb(local, load, requests)
        local.wait(requests)
        scheduler = local.engine.scheduler
        assert not scheduler.running and scheduler.pool.num_available == scheduler.pool.num_pages
    for request in requests:
        if request.finish is not None and request.finish.kind == "abort" and not request.num_output:
            request.input_log_probs, request.logprob_start_len = [], -1
    check(path, requests)
    assert sum(request.num_output for request in requests) > 24


# ---- deterministic mode, adapters, weights


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_mode_gives_the_same_bits_in_any_batch(models: dict[str, Path], family: str):
    prompts = make_prompts(3, 60, 35, 90, seed=5)
    options: dict[str, Any] = {"enable_deterministic_inference": True}
    with local_engine(models[family], disable_radix_cache=True, **options) as engine:
        alone = [engine.generate([p], max_new_tokens=8, **GREEDY)[0] for p in prompts]
    with local_engine(models[family], chunked_prefill_size=29, **options) as engine:
        together = engine.generate(prompts, max_new_tokens=8, **GREEDY)
        again = engine.generate(prompts[::-1], max_new_tokens=8, **GREEDY)[::-1]
    assert sum(request.num_cached for request in again) > 100
    for requests in (together, again):
        assert [r.output_ids for r in requests] == [r.output_ids for r in alone]
        assert [r.output_log_probs for r in requests] == [r.output_log_probs for r in alone]


TARGETS = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "out_proj", "o_proj", "up_proj"],
    "qwen3_5_moe": ["in_proj_qkv", "in_proj_b", "q_proj", "shared_expert_gate", "up_proj"],
}


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_and_the_base_in_one_batch(models: dict[str, Path], family: str, tmp_path: Path):
    path = models[family]
    folders: dict[str | None, Path | None] = {None: None}
    for seed, name in enumerate(("a", "b")):
        options = {"rank": 2 + seed, "targets": TARGETS[family][seed:]}
        folders[name] = make_adapter(path, tmp_path / name, seed=seed, **options)
    names = [None, "a", "b", "a", None, "b"]
    prompts = make_prompts(40, 40, 40, 25, 33, 18)
    paths = tuple((str(name), str(folder)) for name, folder in folders.items() if name)
    with local_engine(path, lora_paths=paths, chunked_prefill_size=31) as engine:
        for _ in range(2):  # the second time from states that each adapter saved
            requests = engine.generate(prompts, adapters=names, max_new_tokens=6, **GREEDY)
            for request, name in zip(requests, names, strict=True):
                expected = peft_log_probs(path, folders[name], request.token_ids)
                found = torch.tensor(request.output_log_probs)
                assert (found - expected[request.prompt_len - 1 :]).abs().max() < 2e-4
        assert [request.num_cached for request in requests] == [32, 32, 32, 16, 32, 16]


@torch.no_grad()
def log_probs_across_update(before: Any, after: Any, tokens: list[int], at: int) -> torch.Tensor:
    """Log-probs of a text of which the first `at` tokens went through one model, the rest the other."""
    first = before(torch.tensor([tokens[:at]]), use_cache=True)
    rows = [first.logits[0]]
    for token in tokens[at:]:
        step = after(torch.tensor([[token]]), past_key_values=first.past_key_values, use_cache=True)
        rows.append(step.logits[0])
    log_probs = torch.cat(rows)[:-1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens)[1:, None]).squeeze(1)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_updated_while_a_request_runs(family: str, mode: str, tmp_path: Path):
    """In place, the tokens before the update keep what they left in the cache and in the state."""
    # Over 350 tokens larger weights amplify rounding to the tolerance, for some texts.
    path, newer = (
        make_tiny_checkpoint(tmp_path / str(seed), family, seed=seed, weight_scale=3.0, **LAYERS)
        for seed in range(2)
    )
    params = SamplingParams(temperature=1.0, max_new_tokens=300)
    tokens = make_prompts(50)[0]
    request = Request(
        rid="r", token_ids=tokens, prompt_len=50, params=params, seed=3, return_logprob=True
    )

    with local_engine(path, weight_version="old") as local:
        engine = local.engine

        def update() -> dict[str, int]:
            engine.weights.update_from_disk(str(newer))
            engine.weight_version = "new"
            engine.weights_changed()
            return engine.weights.checksums()

        engine.submit([request])
        wait_for(lambda: request.num_output > 20)
        engine.call(lambda: engine.pause(mode)).result()
        sums = engine.call(update).result()
        engine.call(engine.resume).result()
        local.wait([request])
        [later] = local.generate([list(request.token_ids[:90])], max_new_tokens=4, **GREEDY)
    with local_engine(newer) as local:
        assert local.engine.weights.checksums() == sums
    check(newer, [later])
    (old, _), (new, switch) = request.version_starts
    assert (old, new) == ("old", "new") and 0 < switch < 300
    at = 50 + switch - 1 if mode == "in_place" else 0
    models_of = reference(path), reference(newer)
    found = torch.tensor(request.output_log_probs)
    if mode == "in_place":
        expected = log_probs_across_update(*models_of, request.token_ids, at)[49:]
    else:
        expected = torch.cat(
            [
                log_probs_of(models_of[0], request.token_ids)[49 : 49 + switch],
                log_probs_of(models_of[1], request.token_ids)[49 + switch :],
            ]
        )
    assert (found - expected).abs().max() < TOLERANCE


def test_released_memory_comes_back_empty(models: dict[str, Path]):
    path, prompts = models["qwen3_5_moe"], make_prompts(40, 20)
    with local_engine(path) as local:
        engine = local.engine
        before = local.generate(prompts, max_new_tokens=6, **GREEDY)
        engine.call(lambda: engine.release_memory(["weights", "kv_cache"])).result()
        assert engine.runner.cache is not None and engine.runner.cache.states is not None
        assert engine.runner.cache.states.matrices.numel() == 0
        engine.call(lambda: engine.resume_memory(["weights", "kv_cache"])).result()
        after = local.generate(prompts, max_new_tokens=6, **GREEDY)
    assert [r.num_cached for r in after] == [0, 0]
    assert [r.output_ids for r in after] == [r.output_ids for r in before]
    check(path, after)


def test_numbers_gone_wrong_leave_nothing_behind(models: dict[str, Path]):
    """Rows whose state became NaN start from zeros again."""
    path, prompts = models["qwen3_5"], make_prompts(40, 20)
    with local_engine(path, max_running_requests=2, disable_radix_cache=True) as local:
        engine = local.engine
        states = engine.runner.cache.states if engine.runner.cache else None
        assert states is not None
        engine.call(lambda: states.matrices.fill_(float("nan"))).result()
        engine.call(lambda: states.windows.fill_(float("nan"))).result()
        check(path, local.generate(prompts, max_new_tokens=6, **GREEDY))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_weights_keep_the_names_of_a_published_checkpoint(
    models: dict[str, Path], family: str, tmp_path: Path
):
    """A text model beside a vision tower, with MTP layers: the engine serves the text model alone."""
    text = AutoConfig.from_pretrained(models[family]).to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, dtype="float32")
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {**load_file(file), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(tensors, file, metadata={"format": "pt"})
    served = {
        name: t for name, t in tensors.items() if not name.startswith(("model.visual", "mtp"))
    }
    with local_engine(tmp_path, skip_tokenizer_init=True) as local:
        engine = local.engine
        assert engine.weights.checksums() == tensor_checksums(list(served.items()))
        engine.call(lambda: engine.weights.update_from_disk(str(tmp_path)), exclusive=True).result()
        check(tmp_path, local.generate(make_prompts(20, 33), max_new_tokens=4, **GREEDY))


def test_draft_tokens_are_refused_by_name(models: dict[str, Path]):
    with (
        pytest.raises(UserError, match=r"--speculative-algorithm NGRAM.* recurrent layers"),
        local_engine(models["qwen3_5"], speculative_algorithm="NGRAM"),
    ):
        pass


def test_an_option_of_linear_attention_that_slime_does_not_know_is_refused(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m", "qwen3_5")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "linear_new_option": 3}))
    with pytest.raises(ConfigError, match="linear_new_option"), local_engine(path):
        pass
