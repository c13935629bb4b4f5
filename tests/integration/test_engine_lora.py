"""Adapters in the engine: what is served is what PEFT computes, alone and in mixed batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.engine.scheduler.request import Request
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
        assert engine.engine.runner._fast is None
        for request, name in zip(generate(engine, NAMES), NAMES, strict=True):
            expected = peft_log_probs(made.base, made.folders[name], request.token_ids)
            found = torch.tensor([*request.input_log_probs, *request.output_log_probs])
            assert (found - expected).abs().mean() < 0.05
