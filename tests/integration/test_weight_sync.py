"""Trainer ranks with FSDP send their weights to real engines, in all three ways."""

import os
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.core.errors import WeightMismatchError
from slime.core.types import EngineInfo, SyncReport
from slime.utils.sync_http import get_json, post_json
from slime.weights import ipc
from slime.weights.checksum import format_checksum, tensor_checksum
from slime.weights.transport import TensorTransport
from tests.args import make_args
from tests.engines import TOKEN, engine_server
from tests.ranks import run_ranks
from tests.tiny import make_tiny_checkpoint

PROMPT = [5, 9, 5, 7, 61]
NUM_TOKENS = 6


@contextmanager
def engine_process(model_path: Path, dtype: str = "float32"):
    """A server of its own; yields where it is."""
    options = ("--dtype", dtype, "--max-total-tokens", "2048")
    with engine_server(model_path, *options) as server:
        yield EngineInfo(url=server.url)


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """family -> its checkpoint and two engines that serve it, started once."""
    with ExitStack() as stack:

        @cache
        def start(family: str) -> tuple[Path, list[EngineInfo]]:
            folder = tmp_path_factory.mktemp(family)
            checkpoint = make_tiny_checkpoint(folder / "model", family)
            engines = [stack.enter_context(engine_process(checkpoint)) for _ in range(2)]
            return checkpoint, engines

        yield start


def trainer(rank: int, world_size: int, checkpoint: Path, **options) -> FSDPTrainRayActor:
    """A rank whose weights are no longer those of the checkpoint."""
    os.environ["SLIME_ENGINE_TOKEN"] = TOKEN
    args = make_args(
        hf_checkpoint=str(checkpoint),
        actor_num_gpus_per_node=world_size,
        update_weight_buffer_size=50_000,
        **options,
    )
    actor = FSDPTrainRayActor(args, rank=rank, world_size=world_size)
    actor.init(args)
    with torch.no_grad():
        for param in actor.model.params.values():
            param.mul_(1.05)
    return actor


def update_and_export(
    rank: int,
    world_size: int,
    checkpoint: Path,
    engines: list[EngineInfo],
    options: dict,
    out: Path,
) -> tuple[int, list[SyncReport]]:
    actor = trainer(rank, world_size, checkpoint, **options)
    reports = [actor.update_weights(engines, version) for version in (1, 2)]
    actor.export_hf(str(out))
    return os.getpid(), reports


def engine_log_probs(engine: EngineInfo) -> tuple[list[int], list[float], dict]:
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    info = post_json(f"{engine.url}/generate", body)["meta_info"]
    values = info["output_token_logprobs"]
    return [entry[1] for entry in values], [entry[0] for entry in values], info


def hf_log_probs(path: Path, tokens: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0]
    log_probs = logits.log_softmax(-1)
    return [log_probs[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("family", "transport"),
    [("qwen3", "tensor"), ("qwen3", "distributed"), ("qwen3", "disk"), ("qwen3_moe", "tensor")],
)
def test_two_ranks_update_two_engines(serve, family, transport, tmp_path):
    checkpoint, engines = serve(family)
    options = {"update_weight_transport": transport}
    if transport == "tensor":
        options["colocate"] = True
    if transport == "disk":
        options["update_weight_disk_dir"] = str(tmp_path / "weights")
    out = tmp_path / "export"
    results = run_ranks(update_and_export, 2, 2, checkpoint, engines, options, out)
    for pid, _ in results:  # other processes of this machine may have theirs
        assert not list(ipc.SHM_DIR.glob(f"slime_{pid}_*"))
    reports = [reports for _, reports in results]
    assert reports[0][1].num_buckets > 3 and reports[0][1].version == 2
    for engine in engines:
        assert get_json(f"{engine.url}/model_info")["weight_version"] == "2"
        tokens, log_probs, info = engine_log_probs(engine)
        assert info["weight_version"] == "2"
        assert log_probs == pytest.approx(hf_log_probs(out, tokens), abs=1e-4)
        old = hf_log_probs(checkpoint, tokens)
        assert max(abs(a - b) for a, b in zip(log_probs, old, strict=True)) > 1e-3


def test_one_rank_sends_its_weights_in_the_type_of_the_engine(tmp_path):
    """Cast from float32 right into the memory that is shared."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    options = {
        "update_weight_transport": "tensor",
        "colocate": True,
        "sglang_dtype": "float16",
        "rollout_engine": "slime",
    }
    out = tmp_path / "export"
    with engine_process(checkpoint, "float16") as engine:
        run_ranks(update_and_export, 1, 1, checkpoint, [engine], options, out)
        body = {"action": "checksum"}
        reply = post_json(f"{engine.url}/weights_checker", body, token=TOKEN)
    held = reply["ranks"][0]["checksums"]
    tensors = {name: t for path in out.glob("*.safetensors") for name, t in load_file(path).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    for name, value in held.items():
        assert value == format_checksum(tensor_checksum(name, tensors[name])), name


class Corrupting(TensorTransport):
    """Flips one bit of `target` in the shared segment, after the trainer took its checksum."""

    target = "model.layers.1.self_attn.o_proj.weight"

    def send(self, bucket) -> None:
        tensors = [
            (name, self.changed(tensor) if name == self.target else tensor)
            for name, tensor in bucket.tensors
        ]
        super().send(type(bucket)(index=bucket.index, tensors=tensors))

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        copy.view(torch.int32)[3, 5] ^= 1
        return copy


def corrupted_update(rank: int, checkpoint: Path, engines: list[EngineInfo]) -> str:
    actor = trainer(rank, 2, checkpoint, update_weight_transport="tensor", colocate=True)
    actor.update_weights(engines, 1)
    actor.weight_sync.transport = Corrupting(torch.device("cpu"))
    try:
        actor.update_weights(engines, 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_one_corrupted_tensor_stops_every_rank_by_name(serve):
    checkpoint, engines = serve("qwen3")
    first, second = run_ranks(corrupted_update, 2, checkpoint, engines)
    for text in (first, second):
        assert text.startswith(WeightMismatchError.__name__)  # the driver must not retry
        assert f"({Corrupting.target})" in text
        assert all(engine.url in text for engine in engines)
