"""Every run script passes `slime plan` with the facts of its model, as it is and before its job starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.launch.site import ROOT
from tests.parity.model_facts import MODELS

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# script -> folder below BASE_DIR, GPUs it is for
SCRIPTS = {
    "qwen3-4B": ("Qwen3-4B", 8),
    "glm4-9B": ("GLM-4-9B-0414", 8),
    "qwen3-30B-A3B": ("Qwen3-30B-A3B", 8),
    "glm4.5-355B-A32B": ("GLM-4.5-355B-A32B", 64),
    "deepseek-v3": ("DeepSeek-V3", 128),
    "smollm2-135M": ("SmolLM2-135M-Instruct", 1),
}


def smollm2() -> LlamaConfig:
    """As published with SmolLM2-135M-Instruct."""
    return LlamaConfig(
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


def make_config(name: str, folder: Path, **extra: object) -> None:
    config = (smollm2() if name == "smollm2-135M" else MODELS[name]()).to_dict()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, **extra}))


def run(script: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / f"run-{script}.sh"), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_every_run_script_is_here():
    found = {path.stem.removeprefix("run-") for path in (ROOT / "scripts").glob("run-*.sh")}
    assert found == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_fits(script, tmp_path):
    folder, gpus = SCRIPTS[script]
    published = {"quantization_config": FP8} if script == "deepseek-v3" else {}
    make_config(script, tmp_path / folder, **published)
    done = run(script, "--json", "--gpu-memory", "80", PLAN="1", BASE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert plan["verdict"] in ("fits", "tight")
    assert plan["gpus"] == gpus


def test_fp8_rollout_fits(tmp_path):
    name = "glm4.5-355B-A32B"
    make_config(name, tmp_path / "GLM-4.5-355B-A32B-FP8", quantization_config=FP8)
    settings = {"PLAN": "1", "FP8": "1", "BASE_DIR": str(tmp_path)}
    done = run(name, "--json", "--gpu-memory", "80", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert [len(engine["gpus"]) for engine in plan["engines"]] == [32, 32]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--rollout-num-gpus", "8", "--no-colocate"],
            "8 for rollout = 16, and there are 8: add --colocate",
        ),
        (["--sglang-mem-fraction-static", "1.5"], "must be between 0 and 1"),
    ],
)
def test_what_cannot_work_is_refused_before_ray_starts(flags, sentence, tmp_path):
    base = tmp_path
    make_config("qwen3-4B", base / "Qwen3-4B")
    (base / "Qwen3-4B_torch_dist").mkdir()
    (base / "dapo-math-17k").mkdir()
    (base / "dapo-math-17k" / "dapo-math-17k.jsonl").touch()
    done = run("qwen3-4B", *flags, BASE_DIR=str(base))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Ray" not in done.stdout


def test_what_does_not_fit_is_not_started(tmp_path):
    base = tmp_path
    make_config("qwen3-4B", base / "Qwen3-4B")
    (base / "Qwen3-4B_torch_dist").mkdir()
    (base / "dapo-math-17k").mkdir()
    (base / "dapo-math-17k" / "dapo-math-17k.jsonl").touch()
    done = run("qwen3-4B", "--max-tokens-per-gpu", "4000000", BASE_DIR=str(base))
    assert done.returncode == 2
    assert "does not fit" in done.stderr and "SKIP_PLAN=1" in done.stderr
