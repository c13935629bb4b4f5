"""Adapters in the engine: what is served is what PEFT computes, alone and in mixed batches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slime.core.errors import ConfigError, UserError
from slime.engine.arguments import parse_engine_args
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import RequestError, SamplingParams
from slime.weights.checksum import tensor_checksums
from slime.weights.fp8 import Fp8Format, convert_to_fp8, load_causal_lm
from tests.adapters import ALL, make_adapter, peft_log_probs
from tests.engines import LocalEngine, local_engine
from tests.tiny import make_tiny_checkpoint

# Each name: rank, targets, options. None is the base.
ADAPTERS = {
    "r2": (2, ["q_proj", "v_proj"], {}),
    "r8": (8, ALL, {"use_rslora": True}),
    "r3": (3, ["k_proj", "o_proj", "up_proj", "down_proj"], {}),
}
NAMES = [None, *ADAPTERS]
PROMPTS = [[(7 * i + 13 * k) % 250 for i in range(20 + k)] for k in range(8)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


class Fixture:
    """A tiny base and three adapters of different ranks and targets."""

    def __init__(self, root: Path, family: str = "qwen3") -> None:
        self.base = make_tiny_checkpoint(root / "base", family, weight_scale=3.0)
        self.folders: dict[str | None, Path | None] = {None: None}
        for seed, (name, (rank, targets, options)) in enumerate(ADAPTERS.items()):
            self.folders[name] = make_adapter(
                *(self.base, root / name), seed=seed, rank=rank, targets=targets, **options
            )

    @property
    def paths(self) -> tuple[tuple[str, str], ...]:
        return tuple((str(name), str(path)) for name, path in self.folders.items() if name)

    def assert_served(self, request: Request, name: str | None) -> None:
        expected = peft_log_probs(self.base, self.folders[name], request.token_ids)
        found = torch.tensor([*request.input_log_probs, *request.output_log_probs])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Fixture:
    return Fixture(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def engine(made: Fixture):
    with local_engine(made.base, lora_paths=made.paths, page_size=4) as engine:
        yield engine


def generate(engine: LocalEngine, names: list[str | None], **options) -> list[Request]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    return engine.generate(prompts, adapters=names, start_len=0, **{**GREEDY, **options})


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_pefts(made: Fixture, engine: LocalEngine, name: str | None):
    [request] = generate(engine, [name])
    made.assert_served(request, name)


def test_adapters_and_the_base_in_one_batch(made: Fixture, engine: LocalEngine):
    names = [*NAMES, *NAMES]
    together = generate(engine, names)
    assert len({tuple(request.output_ids) for request in together[:4]}) == 4
    for request, name in zip(together, names, strict=True):
        made.assert_served(request, name)


def test_chunked_prefill(made: Fixture):
    options = {"lora_paths": made.paths, "page_size": 4, "chunked_prefill_size": 7}
    with local_engine(made.base, **options) as engine:
        for request, name in zip(generate(engine, NAMES), NAMES, strict=True):
            made.assert_served(request, name)


def test_the_base_keeps_its_bits_beside_adapters(made: Fixture, engine: LocalEngine):
    """The same batch shapes with and without adapters in the other rows."""
    with local_engine(made.base, page_size=4) as plain:
        expected = generate(plain, [None] * 4)
    found = generate(engine, ["r8", None, "r2", None])
    for index in (1, 3):
        assert found[index].output_ids == expected[index].output_ids
    # The first prefill is one batch in both engines.
    assert found[1].input_log_probs == expected[1].input_log_probs
    assert found[3].input_log_probs == expected[3].input_log_probs


def test_deterministic_mode_gives_the_same_bits_in_any_batch(made: Fixture):
    options = {"lora_paths": made.paths, "enable_deterministic_inference": True}
    with local_engine(made.base, **options) as engine:
        together = generate(engine, NAMES)
        for index, name in enumerate(NAMES):
            [alone] = engine.generate([PROMPTS[index]], adapters=[name], start_len=0, **GREEDY)
            assert alone.token_ids == together[index].token_ids
            assert alone.input_log_probs == together[index].input_log_probs
            assert alone.output_log_probs == together[index].output_log_probs
    made.assert_served(together[2], NAMES[2])


def test_speculation_changes_no_token(made: Fixture, engine: LocalEngine):
    options = {"lora_paths": made.paths, "page_size": 4, "speculative_algorithm": "NGRAM"}
    expected = generate(engine, NAMES, max_new_tokens=16)
    with local_engine(made.base, **options) as drafting:
        found = generate(drafting, NAMES, max_new_tokens=16)
    assert [r.output_ids for r in found] == [r.output_ids for r in expected]


def test_prefixes_are_shared_within_an_adapter_only(made: Fixture, engine: LocalEngine):
    prompt = [(11 * i + 3) % 250 for i in range(24)]
    for name in NAMES:
        first, second = (engine.generate([prompt], adapters=[name], **GREEDY)[0] for _ in range(2))
        assert first.num_cached == 0
        assert second.num_cached == 20  # five full pages; the last token is always computed
        assert second.output_ids == first.output_ids
        made.assert_served(generate(engine, [name])[0], name)


def test_an_update_takes_no_prefix_of_the_old_version(made: Fixture, tmp_path: Path):
    """Only the adapter's own prefixes are dropped: the base's and other adapters' stay."""
    newer = make_adapter(made.base, tmp_path / "new", seed=9, rank=2, targets=["q_proj", "v_proj"])
    prompt = PROMPTS[0]
    with local_engine(made.base, lora_paths=made.paths, page_size=4) as local:
        for name in (None, "r2", "r8"):
            local.generate([prompt], adapters=[name], **GREEDY)
        store = local.engine.lora
        assert store is not None
        local.engine.call(lambda: store.load_folder("r2", str(newer), "1")).result(30)
        found = [local.generate([prompt], adapters=[n], **GREEDY)[0] for n in (None, "r2", "r8")]
        assert [request.num_cached > 0 for request in found] == [True, False, True]
        assert [span.version for span in found[1].version_spans] == ["1"]
        made.folders["new"] = newer
        [request] = local.generate([prompt], adapters=["r2"], start_len=0, **GREEDY)
        made.assert_served(request, "new")


def test_a_request_whose_adapter_was_unloaded_on_the_way_is_refused(made: Fixture):
    with local_engine(made.base, lora_paths=made.paths) as local:
        asked = Request(
            rid="late",
            token_ids=list(PROMPTS[0]),
            prompt_len=len(PROMPTS[0]),
            params=SamplingParams(max_new_tokens=2),
            seed=0,
            adapter=local.engine.find_adapter("r2"),
        )
        local.engine.call(lambda: local.engine.unload_adapter("r2")).result(30)
        local.engine.submit([asked])
        local.wait([asked])
    assert asked.finish is not None and asked.finish.status_code == 400
    assert "'r2' was unloaded" in asked.finish.message


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_other_families(tmp_path: Path, family: str):
    """Qwen2 has biases on query, key and value."""
    made = Fixture(tmp_path, family)
    with local_engine(made.base, lora_paths=made.paths) as engine:
        for request, name in zip(generate(engine, NAMES), NAMES, strict=True):
            made.assert_served(request, name)


def test_hugging_face_modules(made: Fixture):
    """bfloat16 on a CPU runs on the plain path; so does everything that has no fast forward."""
    options = {"lora_paths": made.paths, "dtype": "bfloat16", "chunked_prefill_size": 16}
    with local_engine(made.base, **options) as engine:
        for request, name in zip(generate(engine, NAMES), NAMES, strict=True):
            expected = peft_log_probs(made.base, made.folders[name], request.token_ids)
            found = torch.tensor([*request.input_log_probs, *request.output_log_probs])
            assert (found - expected).abs().mean() < 0.05


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
def test_attention_of_a_moe_base(tmp_path: Path, plain: bool, deterministic: bool):
    base = make_tiny_checkpoint(tmp_path / "base", "qwen3_moe", weight_scale=3.0)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    folder = make_adapter(base, tmp_path / "a", rank=5, targets=attention)
    options = {
        "lora_paths": (("a", str(folder)),),
        "enable_return_routed_experts": plain,  # reads the Hugging Face modules, in fp32
        "enable_deterministic_inference": deterministic,
    }
    with local_engine(base, **options) as engine:
        found = generate(engine, ["a", None, "a", None])
    for request in found:
        expected = peft_log_probs(base, folder if request.adapter else None, request.token_ids)
        served = torch.tensor([*request.input_log_probs, *request.output_log_probs])
        torch.testing.assert_close(served, expected, atol=2e-4, rtol=2e-4)


EXPERT_ADAPTERS = {
    "both": (3, ["q_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "down": (5, [], ["experts.down_proj"]),
    "attention": (4, ["q_proj", "o_proj"], None),
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Fixture:
    root = tmp_path_factory.mktemp("moe")
    made = Fixture.__new__(Fixture)
    made.base = make_tiny_checkpoint(root / "base", "qwen3_moe", weight_scale=3.0)
    made.folders = {None: None}
    for seed, (name, (rank, targets, parameters)) in enumerate(EXPERT_ADAPTERS.items()):
        options = {"target_parameters": parameters} if parameters else {}
        made.folders[name] = make_adapter(
            *(made.base, root / name), seed=seed, rank=rank, targets=targets, **options
        )
    return made


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
def test_experts(moe: Fixture, plain: bool, deterministic: bool):
    """Adapters of experts, of attention and the base in one batch, and each alone."""
    options = {
        "lora_paths": moe.paths,
        "enable_return_routed_experts": plain,
        "enable_deterministic_inference": deterministic,
        "chunked_prefill_size": 16,
    }
    names = [None, *EXPERT_ADAPTERS]
    with local_engine(moe.base, **options) as engine:
        together = generate(engine, names)
        for index, (request, name) in enumerate(zip(together, names, strict=True)):
            moe.assert_served(request, name)
            [alone] = engine.generate([PROMPTS[index]], adapters=[name], start_len=0, **GREEDY)
            moe.assert_served(alone, name)
            if deterministic:
                assert alone.output_log_probs == request.output_log_probs
        store = engine.engine.lora
        assert store is not None
        bound = list(store.adapters["both"].modules)
        assert len(bound) == 6 and "model.layers.0.mlp.experts.base_layer" in bound
        sent = load_file(moe.folders["both"] / "adapter_model.safetensors")
        assert store.checksums("both") == tensor_checksums(sent.items())
    with local_engine(moe.base, **{**options, "lora_paths": ()}) as base:
        [request] = generate(base, [None])
    assert request.output_ids == together[0].output_ids


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_adapters_of_experts_without_slots_are_refused(moe: Fixture, plain: bool):
    """Slots of experts take much memory: an engine has them if an option or a first adapter says so."""
    common = {"enable_return_routed_experts": plain, "max_lora_rank": 4}
    with local_engine(moe.base, enable_lora=True, **common) as engine:
        store = engine.engine.lora
        assert store is not None
        with pytest.raises(
            RequestError, match=r"experts.gate_up_proj.*--lora-target-modules all ex"
        ):
            store.load_folder("both", str(moe.folders["both"]), "0")
    with local_engine(moe.base, lora_target_modules=("all", "experts"), **common) as engine:
        store = engine.engine.lora
        assert store is not None
        engine.engine.call(lambda: store.load_folder("both", str(moe.folders["both"]), "0")).result(
            30
        )
        moe.assert_served(generate(engine, ["both"])[0], "both")


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_adapters_of_single_experts_are_refused(tmp_path: Path, plain: bool):
    """Experts run as one fused parameter: adapters of one expert would bind to nothing."""
    base = make_tiny_checkpoint(tmp_path / "base", "qwen3_moe")
    folder = make_adapter(base, tmp_path / "a", targets=["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    tensors[f"{expert}.lora_A.weight"] = torch.zeros(4, 64)
    tensors[f"{expert}.lora_B.weight"] = torch.zeros(32, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    options = {"lora_paths": (("a", str(folder)),), "enable_return_routed_experts": plain}
    with pytest.raises(UserError, match=r"--lora-path a=.*bind to nothing.*experts.0.gate_proj"):
        local_engine(base, **options).__enter__()


def test_an_fp8_base(tmp_path: Path):
    """Its weights are unpacked when they are loaded, so adapters add to the unpacked ones."""
    layout = Fp8Format(strategy="block", block=(32, 32))
    plain = make_tiny_checkpoint(tmp_path / "plain", weight_scale=3.0)
    convert_to_fp8(plain, tmp_path / "fp8", layout)
    unpacked = load_causal_lm(
        str(tmp_path / "fp8"), AutoConfig.from_pretrained(tmp_path / "fp8"), dtype=torch.float32
    )
    state = {name: tensor.contiguous() for name, tensor in unpacked.state_dict().items()}
    twin = AutoModelForCausalLM.from_pretrained(plain)
    twin.load_state_dict(state)
    twin.save_pretrained(tmp_path / "twin")
    folder = make_adapter(plain, tmp_path / "a", rank=8)
    options = {"lora_paths": (("a", str(folder)),), "dtype": "float32"}
    with local_engine(tmp_path / "fp8", **options) as engine:
        for request, used in zip(generate(engine, ["a", None]), (folder, None), strict=True):
            expected = peft_log_probs(tmp_path / "twin", used, request.token_ids)
            served = torch.tensor([*request.input_log_probs, *request.output_log_probs])
            torch.testing.assert_close(served, expected, atol=2e-4, rtol=2e-4)


def test_slots_of_chosen_modules(made: Fixture):
    """An adapter of other modules is refused, and not applied in part."""
    options = {"lora_target_modules": ("q_proj", "v_proj"), "max_lora_rank": 8}
    with local_engine(made.base, lora_paths=made.paths[:1], **options) as engine:
        made.assert_served(generate(engine, ["r2"])[0], "r2")
        store = engine.engine.lora
        assert store is not None
        with pytest.raises(RequestError, match="bind to nothing"):
            store.load_folder("r8", str(made.folders["r8"]), "0")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(made: Fixture, tmp_path: Path, value: float):
    """They would spoil tokens of other adapters: kernels multiply what they mask by 0."""
    folder = Path(shutil.copytree(made.folders["r2"], tmp_path / "odd"))
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[sorted(tensors)[0]][0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    with local_engine(made.base, lora_paths=made.paths[:1]) as engine:
        store = engine.engine.lora
        assert store is not None
        with pytest.raises(RequestError, match="not finite"):
            store.load_folder("odd", str(folder), "0")
        made.assert_served(generate(engine, ["r2"])[0], "r2")


def test_memory_released_and_resumed(made: Fixture, engine: LocalEngine):
    before = generate(engine, NAMES)
    for call in (engine.engine.release_memory, engine.engine.resume_memory):
        engine.engine.call(lambda call=call: call(["weights", "kv_cache", "cuda_graph"])).result(30)
    after = generate(engine, NAMES)
    assert [r.output_ids for r in after] == [r.output_ids for r in before]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-path", "a=/x", "a=/y"], "same name"),
        (["--lora-path", "a=/x", "b=/y", "--max-loras-per-batch", "1"], "--max-loras-per-batch"),
        (["--lora-path", "=x"], "NAME=FOLDER"),
        (["--enable-lora", "--max-lora-rank", "0"], "--max-lora-rank must be at least 1"),
    ],
)
def test_wrong_options(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_engine_args(["--model-path", "/m", *argv])


def test_options_as_sglang_spells_them():
    args = parse_engine_args(["--model-path", "/m", "--lora-paths", "a=/x", "/y"])
    assert args.lora_paths == (("a", "/x"), ("/y", "/y")) and args.serves_lora
