"""The conversion tools as users start them: one process, torchrun, there and back, and what they hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.config.arguments import Args
from slime.config.env import child_env
from slime.runlog.checkpoint_folder import TRACKER, find_checkpoint, read_meta
from tests import delta_nets
from tests.args import make_args
from tests.forked import run_python
from tests.integration.test_damaged_checkpoints import flip
from tests.megatron import whole_weights
from tests.parity.tiny_families import UNTRAINED, make_family
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

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


def to_hf(checkpoint: Path, output: Path, origin: Path, *flags: str) -> subprocess.CompletedProcess:
    tool = "tools/convert_torch_dist_to_hf.py"
    folders = f"--input-dir={checkpoint}", f"--output-dir={output}", f"--origin-hf-dir={origin}"
    return run_python([tool, *folders, *flags], OMP_NUM_THREADS="1")


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


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_gated_delta_nets_there_and_back(tmp_path: Path, name: str) -> None:
    """As published: MTP layers, and beside a vision tower with fused experts; TP and PP over ranks."""
    models = {
        family: str(make_tiny_checkpoint(tmp_path / "models" / family, family))
        for family in delta_nets.FAMILIES
    }
    origin = Path(delta_nets.publish(models, tmp_path)[name])
    flags = ["--tensor-model-parallel-size=2"] if name == "qwen3_next" else []
    done = torchrun(
        2,
        "tools/convert_hf_to_torch_dist.py",
        f"--hf-checkpoint={origin}",
        f"--save={tmp_path / 'saved'}",
        *flags,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    done = to_hf(tmp_path / "saved", tmp_path / "back", origin)
    assert done.returncode == 0, done.stderr
    assert_same(origin, tmp_path / "back")
    assert any(key.startswith("mtp.") for key in tensors_in(tmp_path / "back"))


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


CHUNK = 8000


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder and its torch_dist checkpoint."""
    root = tmp_path_factory.mktemp("converted")
    origin = make_family(root / "hf", "glm4_moe", dtype="bfloat16")
    done = run(
        "tools/convert_hf_to_torch_dist.py",
        f"--hf-checkpoint={origin}",
        f"--save={root / 'saved'}",
    )
    assert done.returncode == 0, done.stderr
    return origin, root / "saved"


def test_files_of_several_workers_equal_those_of_one(converted, tmp_path: Path) -> None:
    origin, saved = converted
    for name, flags in (("one", []), ("three", ["--max-workers=3"])):
        done = to_hf(saved, tmp_path / name, origin, f"--chunk-size={CHUNK}", *flags)
        assert done.returncode == 0, done.stderr
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("one", "three")
    ]
    assert contents[0] == contents[1]
    assert_same(origin, tmp_path / "three")
    files = list((tmp_path / "three").glob("*.safetensors"))
    assert len(files) > 10
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        # The untrained tensors may be wider than the model, and one rule writes several tensors.
        assert sum(sizes) <= 2 * CHUNK or len(sizes) <= 2


def test_workers_need_neither_the_current_folder_nor_a_socket(converted, tmp_path: Path) -> None:
    """They import the slime of their tool, not one of the current folder; a socket's path has 107 bytes at most."""
    origin, saved = converted
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("raise SystemExit('another slime')")
    (temporary := tmp_path / ("t" * 100)).mkdir()
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "tools/convert_torch_dist_to_hf.py"), f"--input-dir={saved}",
            f"--output-dir={tmp_path / 'out'}", f"--origin-hf-dir={origin}", f"--chunk-size={CHUNK}",
            "--max-workers=2",
        ],
        cwd=tmp_path,
        env=child_env(OMP_NUM_THREADS="1", TMPDIR=str(temporary)),
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same(origin, tmp_path / "out")


_ONE_WORKER = """
import sys
from multiprocessing import Pipe
from pathlib import Path
from slime.backends.megatron_utils.conversion.to_hf import Plan, _write_in_worker
source, origin, folder = sys.argv[1:]
plan = Plan(source=source, origin=origin, file_bytes=8000, add_missing=False)
receiver, sender = Pipe(duplex=False)
_write_in_worker(plan, Path(folder), [0], 1, sender)
print(receiver.recv())
"""


def test_workers_do_not_read_the_checkpoint_to_verify_it_again(converted, tmp_path: Path) -> None:
    """The parent process verifies all files; a damaged one that is not converted shows who does."""
    origin, saved = converted
    damaged = tmp_path / "saved"
    shutil.copytree(saved, damaged)
    checkpoint = find_checkpoint(str(damaged))
    assert checkpoint is not None
    flip(checkpoint / "rng_0.pt")
    done = to_hf(damaged, tmp_path / "out", origin, "--max-workers=2")
    assert done.returncode == 2 and "rng_0.pt" in done.stderr, done.stderr
    done = run("-c", _ONE_WORKER, str(checkpoint), str(origin), str(tmp_path))
    assert done.returncode == 0 and "model-00001.safetensors" in done.stdout, done.stderr


def test_a_killed_worker_is_reported_and_leaves_nothing(converted, tmp_path: Path) -> None:
    origin, saved = converted
    command = [
        "tools/convert_torch_dist_to_hf.py", f"--input-dir={saved}", f"--output-dir={tmp_path / 'out'}",
        f"--origin-hf-dir={origin}", f"--chunk-size={CHUNK}", "--max-workers=2",
    ]  # fmt: skip
    tool = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    workers: list[psutil.Process] = []
    while not workers and tool.poll() is None:
        children = psutil.Process(tool.pid).children()
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    workers[0].kill()
    _, said = tool.communicate(timeout=120)
    assert tool.returncode == 1 and "a worker process ended with status -9" in said, said
    assert "lower --max-workers or --chunk-size" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_the_checkpoint_lacks(converted, tmp_path: Path) -> None:
    origin, saved = tmp_path / "hf", converted[1]
    shutil.copytree(converted[0], origin)
    extra = {"model.extra.weight": torch.ones(3, dtype=torch.bfloat16)}
    save_file(extra, origin / "model-extra.safetensors", metadata={"format": "pt"})
    index = origin / "model.safetensors.index.json"
    names = {name: file.name for file in origin.glob("*.safetensors") for name in load_file(file)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    done = to_hf(saved, tmp_path / "out", origin)
    assert done.returncode == 0, done.stderr
    assert "has no model.extra.weight (1 tensors" in done.stderr
    assert "model.extra.weight" not in tensors_in(tmp_path / "out")
    (tmp_path / "forced").mkdir()
    (tmp_path / "forced" / "old.txt").write_text("x")
    flags = ["--add-missing-from-origin-hf", "--force", "--model-name=glm4-moe"]
    done = to_hf(saved, tmp_path / "forced", origin, *flags)
    assert done.returncode and "holds no model: it is not replaced" in done.stderr
    (tmp_path / "forced" / "config.json").write_text("{}")
    done = to_hf(saved, tmp_path / "forced", origin, *flags)
    assert done.returncode == 0 and "has no" not in done.stderr, done.stderr
    assert_same(origin, tmp_path / "forced")
    assert not (tmp_path / "forced" / "old.txt").exists()
    assert not list(tmp_path.glob("*.previous"))


def test_bad_options_of_the_way_back_are_one_sentence(converted, tmp_path: Path) -> None:
    origin, saved = converted
    int4 = tmp_path / "int4"
    shutil.copytree(origin, int4)
    config = json.loads((int4 / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    (int4 / "config.json").write_text(json.dumps(config))
    folders = [f"--input-dir={saved}", f"--output-dir={tmp_path / 'out'}"]
    cases = [
        (["--vocab-size=7"], 2, "config.json says"),
        (["--model-name=qwen3"], 2, "config.json has model_type glm4_moe"),
        (["--max-workers=0"], 2, "must be at least 1"),
        ([f"--output-dir={saved.parent}"], 2, "--output-dir is --origin-hf-dir, or holds it"),
        ([f"--input-dir={tmp_path}"], 2, "is not a checkpoint and contains no complete one"),
        ([f"--origin-hf-dir={int4}"], 1, "INT4 (pack-quantized of compressed-tensors)"),
    ]
    lines = [[*folders, f"--origin-hf-dir={origin}", *flags] for flags, *_ in cases]
    script = (
        "import sys, json; from slime.cli import main\n"
        "print(json.dumps([main(['convert', 'torch-dist-to-hf', *argv]) for argv in json.loads(sys.argv[1])]))"
    )
    done = run("-c", script, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [status for _, status, _ in cases]
    said = [line for line in done.stderr.splitlines() if line.startswith("slime: ")]
    assert all(sentence in line for (*_, sentence), line in zip(cases, said, strict=True)), said
    assert not (tmp_path / "out").exists()


BAD_INPUT = [  # flags after --hf-checkpoint and --save, and the sentence
    (["--num-layers=5"], "--num-layers 5 disagrees with config.json"),
    (["--lr=1e-6"], "--lr has no effect in a conversion"),
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
