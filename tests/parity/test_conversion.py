"""The conversion tools as users start them: one process, torchrun, there and back, and what they hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.config.arguments import Args
from slime.config.env import child_env
from slime.runlog.checkpoint_folder import TRACKER, find_checkpoint, read_meta
from tests.args import make_args
from tests.megatron import whole_weights
from tests.parity.tiny_families import UNTRAINED, make_family
from tests.rank_pool import run_megatron_ranks

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1", **env),
        capture_output=True,
        text=True,
    )


def torchrun(count: int, *command: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return run(*launcher, *command)


def to_hf(checkpoint: Path, output: Path, origin: Path) -> subprocess.CompletedProcess:
    return run(
        "tools/convert_torch_dist_to_hf.py",
        f"--input-dir={checkpoint}",
        f"--output-dir={output}",
        f"--origin-hf-dir={origin}",
    )


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


def assert_same(folder: Path, other: Path) -> None:
    ours, theirs = tensors_in(folder), tensors_in(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def test_one_process_there_and_back(tmp_path: Path) -> None:
    """A MoE model in bfloat16 with an untrained layer; MODEL_ARGS that agree with it."""
    origin = make_family(tmp_path / "hf", "glm4_moe", dtype="bfloat16")
    flags = [
        "--num-layers",
        "4",
        "--hidden-size",
        "32",
        "--num-experts",
        "8",
        "--moe-layer-freq",
        "[0]*1+[1]*3",
    ]
    done = run(
        "tools/convert_hf_to_torch_dist.py",
        *flags,
        f"--hf-checkpoint={origin}",
        f"--save={tmp_path / 'saved'}",
    )
    assert done.returncode == 0, done.stderr
    assert "reading: 100%" in done.stdout
    assert (tmp_path / "saved" / TRACKER).read_text().strip() == "0"
    checkpoint = find_checkpoint(str(tmp_path / "saved"))
    assert checkpoint is not None and read_meta(checkpoint).train_backend == "megatron"
    assert read_meta(checkpoint).release
    done = to_hf(tmp_path / "saved", tmp_path / "back", origin)
    assert done.returncode == 0, done.stderr
    assert_same(origin, tmp_path / "back")
    assert set(UNTRAINED["glm4_moe"]) <= tensors_in(tmp_path / "back").keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    _assert_runs_start_from(tmp_path / "saved", origin, tmp_path)


def _assert_runs_start_from(saved: Path, origin: Path, folder: Path) -> None:
    """As --load, and as --ref-load with an empty --load; --hf-checkpoint has other weights."""
    other = make_family(folder / "other", "glm4_moe", seed=1)
    common = {"train_backend": "megatron", "hf_checkpoint": str(other), "num_rollout": 1}
    cases = {
        "load": make_args(**common, load=str(saved)),
        "ref_load": make_args(**common, ref_load=str(saved), load=str(folder / "empty")),
    }
    (started,) = run_megatron_ranks(_first_weights, 1, cases)
    stored = tensors_in(origin)
    for start, weights in started.values():
        assert start == 0
        assert weights.keys() == stored.keys() - set(UNTRAINED["glm4_moe"])
        assert all(torch.equal(weights[name], stored[name].float()) for name in weights)


def _first_weights(rank: int, cases: dict[str, Args]) -> dict[str, tuple[int, dict]]:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.ray.checkpointing import Checkpointer

    started = {}
    for name, args in cases.items():
        actor = MegatronTrainRayActor(args, rank, 1)
        checkpoint = Checkpointer(args).loaded
        start = actor.init(args, checkpoint=str(checkpoint) if checkpoint else None)
        started[name] = start, whole_weights(actor)
    return started


def test_torchrun_spreads_uneven_stages_and_holds_no_more_than_its_share(tmp_path: Path) -> None:
    """Seven layers over four ranks. Peak memory of each rank beside what its stage takes."""
    origin = make_family(
        tmp_path / "hf",
        "qwen3",
        hidden_size=512,
        intermediate_size=6144,
        num_hidden_layers=7,
        vocab_size=9000,
        tie_word_embeddings=False,
    )
    total = sum(t.nbytes for t in tensors_in(origin).values())
    done = torchrun(
        4,
        "tests/parity/watch_memory.py",
        f"--hf-checkpoint={origin}",
        f"--save={tmp_path / 'saved'}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(line) for line in re.findall(r"MEMORY (\{.*?\})", done.stdout)]
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["share"] < total / 2
        assert rank["peak"] < rank["share"] + rank["largest"] + SLACK, rank
    assert sum(rank["share"] for rank in ranks) == pytest.approx(total, rel=0.01)  # padding
    done = to_hf(tmp_path / "saved", tmp_path / "back", origin)
    assert done.returncode == 0, done.stderr
    assert_same(origin, tmp_path / "back")


SLACK = 8e6  # the index, rounding by the allocator (1e6 seen); one more tensor would be 25e6


BAD_INPUT = [  # flags after --hf-checkpoint and --save, and the sentence
    (["--num-layers=5"], "--num-layers 5 disagrees with config.json"),
    (["--lr=1e-6"], "--lr means nothing in a conversion"),
    (["--tensor-model-parallel-size=2"], "does not divide the 1 processes"),
    (["--num-layer=4"], "there is no flag --num-layer; did you mean --num-layers?"),
]


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    origin = make_family(tmp_path / "hf", "qwen3")
    folders = [f"--hf-checkpoint={origin}", f"--save={tmp_path / 'saved'}"]
    lines = [
        *([*folders, *flags] for flags, _ in BAD_INPUT),
        folders[:1],
        [f"--hf-checkpoint={tmp_path}", folders[1]],
    ]
    sentences = [
        *(said for _, said in BAD_INPUT),
        "--save is missing",
        "config.json does not exist",
    ]
    script = (
        "import sys, json; from slime.cli import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert main(['convert', 'hf-to-torch-dist', *argv]) == 2"
    )
    done = run("-c", script, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("slime: ")]
    assert len(said) == len(lines)
    assert all(sentence in line for sentence, line in zip(sentences, said, strict=True))
    assert not (tmp_path / "saved").exists()
