"""The tool agent with a model that really calls its tools: calls happen, are answered, and pay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e import runs
from tests.tool_model import make_tokenizer, make_tool_model, write_prompts

SCRIPT = Path(__file__).parents[2] / "examples" / "tool_agent" / "run.sh"
NUM_ROLLOUT = 12
_CALL = re.compile(r"<calc>(\d)\+(\d)</calc>\n<output>(\d+)</output>\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tool_agent")
    model = make_tool_model(folder / "model")
    flags = {
        "run-dir": folder / "run", "prompt-data": write_prompts(folder / "sums.jsonl"),
        "num-rollout": NUM_ROLLOUT, "rollout-batch-size": 16, "n-samples-per-prompt": 8,
        "rollout-max-response-len": 40, "rollout-max-context-len": 60, "lr": 1e-3,
        "max-tokens-per-gpu": 4096, "actor-num-gpus-per-node": 1, "rollout-num-gpus": 1,
        "save-debug-rollout-data": folder / "{rollout_id}.pt",
    }  # fmt: skip
    words = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    # How much is learned is not left to chance.
    words.append("--sglang-enable-deterministic-inference")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), str(model), *words],
        env={**runs.environment(forks=True), "PATH": path},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def samples_of(folder: Path, rollout_id: int) -> list[dict]:
    return torch.load(folder / f"{rollout_id}.pt", weights_only=True)["samples"]


def test_calls_are_answered_and_only_what_the_model_said_is_trained_on(finished):
    """In every response the tokens with mask 0 are exactly the outputs of the calculator."""
    tokenizer, num_calls = make_tokenizer(), 0
    for sample in samples_of(finished, 0):
        response = sample["tokens"][-sample["response_length"] :]
        text = tokenizer.decode(response)
        unmasked = [t for t, mask in zip(response, sample["loss_mask"], strict=True) if not mask]
        calls = _CALL.findall(text)
        assert all(int(a) + int(b) == int(output) for a, b, output in calls)
        if text.count("</calc>") == len(calls):  # all of them proper sums, and none cut off
            outputs = "".join(f"\n<output>{output}</output>\n" for _, _, output in calls)
            assert tokenizer.decode(unmasked) == outputs
        num_calls += len(calls)
    # Of 128 samples. The model learned to call one time in four: 31 of them, give or take 5.
    assert num_calls > 8


def test_calling_pays_and_is_learned(finished):
    rewards = [r["rollout/reward_mean"] for r in runs.metrics(finished / "run", "rollout")]
    assert len(rewards) == NUM_ROLLOUT
    first, last = rewards[0], sum(rewards[-2:]) / 2
    assert first < 0.5 and last > first + 0.3, rewards
    calls = [
        sum(_CALL.search(s["response"]) is not None for s in samples_of(finished, rollout_id))
        for rollout_id in (0, NUM_ROLLOUT - 1)
    ]
    assert calls[1] > 1.5 * calls[0], calls
    gaps = [r["train/log_prob_gap_max"] for r in runs.metrics(finished / "run", "train")]
    assert max(gaps) < 1e-3  # tokens went to and fro as they were
