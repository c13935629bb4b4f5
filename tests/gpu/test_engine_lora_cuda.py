"""Adapters of the engine on one GPU, under CUDA graphs: PEFT's log-probs, mixed batches, memory released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.engine.lora import bank
from slime.engine.scheduler.request import Request
from tests.adapters import ALL, make_adapter, peft_log_probs
from tests.engines import LocalEngine, local_engine
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RANKS = {"r2": 2, "r8": 8, "r24": 24}
NAMES: list[str | None] = [None, *RANKS]
PROMPTS = [[(7 * i + 13 * k) % 250 for i in range(20 + 9 * k)] for k in range(12)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SIZES = {"max_total_tokens": 20000, "max_running_requests": 16}


class Made:
    def __init__(self, root: Path) -> None:
        self.base = make_tiny_checkpoint(root / "base", weight_scale=3.0)
        self.folders: dict[str | None, Path | None] = {None: None}
        for name, rank in RANKS.items():
            targets = ALL if rank > 2 else ["q_proj", "v_proj"]
            self.folders[name] = make_adapter(
                self.base, root / name, seed=rank, rank=rank, targets=targets
            )

    @property
    def paths(self) -> tuple[tuple[str, str], ...]:
        return tuple((str(name), str(path)) for name, path in self.folders.items() if name)

    def error(self, request: Request, name: str | None) -> torch.Tensor:
        expected = peft_log_probs(self.base, self.folders[name], request.token_ids)
        found = torch.tensor([*request.input_log_probs, *request.output_log_probs])
        return (found - expected).abs()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("lora"))


@pytest.fixture(params=[0, 8], ids=["joined", "apart"])
def layout(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """A below the base's weight, or apart from it, as for so many slots of a tiny model."""
    monkeypatch.setattr(bank, "_JOINED_SHARE", request.param)


def generate(engine: LocalEngine, names: list[str | None], **options) -> list[Request]:
    return engine.generate(
        PROMPTS[: len(names)], adapters=names, start_len=0, **{**GREEDY, **options}
    )


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 24}], ids=["whole", "chunked"])
def test_log_probs_are_pefts_in_fp32(made: Made, options: dict):
    with local_engine(
        made.base, lora_paths=made.paths, dtype="float32", **SIZES, **options
    ) as engine:
        batches: list[list[str | None]] = [[None], ["r8"], NAMES * 3]
        for names in batches:
            for request, name in zip(generate(engine, names), names, strict=True):
                assert made.error(request, name).max() < 2e-3


@pytest.mark.usefixtures("layout")
def test_log_probs_in_bfloat16(made: Made):
    with local_engine(made.base, lora_paths=made.paths, dtype="bfloat16", **SIZES) as engine:
        for request, name in zip(generate(engine, NAMES * 3), NAMES * 3, strict=True):
            assert made.error(request, name).mean() < 0.05


@pytest.mark.usefixtures("layout")
def test_steps_of_the_base_replay_its_own_graphs(made: Made):
    """Bit for bit what an engine without adapters gives, also beside loaded ones."""
    with local_engine(made.base, dtype="bfloat16", **SIZES) as plain:
        expected = generate(plain, [None] * 8)
    with local_engine(made.base, lora_paths=made.paths, dtype="bfloat16", **SIZES) as engine:
        found = generate(engine, [None] * 8)
    for one, other in zip(found, expected, strict=True):
        assert one.output_ids == other.output_ids
        assert one.output_log_probs == other.output_log_probs


@pytest.mark.usefixtures("layout")
def test_deterministic_mode_gives_the_same_bits_in_any_batch(made: Made):
    options = {"lora_paths": made.paths, "enable_deterministic_inference": True, **SIZES}
    with local_engine(made.base, dtype="bfloat16", **options) as engine:
        together = generate(engine, NAMES)
        for index, name in enumerate(NAMES):
            [alone] = engine.generate([PROMPTS[index]], adapters=[name], start_len=0, **GREEDY)
            assert alone.token_ids == together[index].token_ids
            assert alone.input_log_probs == together[index].input_log_probs
            assert alone.output_log_probs == together[index].output_log_probs


@pytest.mark.usefixtures("layout")
def test_memory_released_and_resumed(made: Made):
    with local_engine(made.base, lora_paths=made.paths, dtype="float32", **SIZES) as engine:
        before = generate(engine, NAMES)
        inner = engine.engine
        for call in (inner.release_memory, inner.resume_memory):
            inner.call(lambda call=call: call(["weights", "kv_cache", "cuda_graph"])).result(60)
        after = generate(engine, NAMES)
    assert [r.output_ids for r in after] == [r.output_ids for r in before]


@pytest.mark.usefixtures("layout")
def test_an_update_changes_replayed_graphs(made: Made, tmp_path: Path):
    newer = make_adapter(made.base, tmp_path / "new", seed=77, rank=8)
    with local_engine(made.base, lora_paths=made.paths, dtype="float32", **SIZES) as engine:
        generate(engine, ["r8"])
        store = engine.engine.lora
        assert store is not None
        engine.engine.call(lambda: store.load_folder("r8", str(newer), "1")).result(60)
        [request] = generate(engine, ["r8"])
    made.folders["new"] = newer
    assert made.error(request, "new").max() < 2e-3
    assert [span.version for span in request.version_spans] == ["1"]
