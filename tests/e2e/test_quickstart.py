"""`slime quickstart` as a user starts it: the reward rises, and what was promised is left behind.

The same task is then learned from the same warm-up with LoRA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slime.cli.quickstart import FULL, grpo_command
from slime.cli.quickstart_task import TaskData
from tests.e2e import runs

DATA = ("warmup", "train", "heldout")


# Of the GRPO stage, but rank 8 and ten times its learning rate.
LORA = ("--lora-rank", "8", "--lora-alpha", "16", "--lr", "1e-3", "--eval-interval", "10")
LORA_ROLLOUTS = 20


@dataclass(kw_only=True)
class Quickstart:
    folder: Path
    output: str

    def rewards(self, stage: str = "grpo") -> dict[int, float]:
        """Held-out reward by the number of rollouts that were trained on."""
        records = runs.metrics(self.folder / stage, "eval")
        return {r["rollout_id"] + 1: r["eval/sorting/reward"] for r in records}

    def rollouts_to(self, goal: float, stage: str = "grpo") -> int:
        return min(count for count, reward in self.rewards(stage).items() if reward >= goal)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Quickstart:
    folder = tmp_path_factory.mktemp("run") / "quickstart"
    command = [sys.executable, "-m", "slime.cli", "quickstart", "--run-dir", str(folder)]
    env = runs.environment(forks=True)
    done = subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Quickstart(folder=folder, output=done.stdout)


@pytest.mark.timeout(900)
def test_quickstart_turns_the_sorting_round(quickstart):
    evaluations = list(quickstart.rewards().values())
    assert evaluations[0] < 0.3
    assert evaluations[-1] > 0.8
    assert f"from {evaluations[0]:.2f} to {evaluations[-1]:.2f}" in quickstart.output
    assert quickstart.output.count("Next, try:") == 1  # the last stage alone has closing words
    _check_run_folder(quickstart.folder / "grpo")
    _check_that_the_export_sorts(quickstart.folder)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_adapters_learn_it_within_twice_the_rollouts(quickstart, backend):
    """Engines are sent the adapter alone; the base that they keep is the warm-up's."""
    folder, stage = quickstart.folder, f"lora-{backend}"
    size = replace(FULL, grpo_rollouts=LORA_ROLLOUTS)
    data = TaskData(**{name: folder / "data" / f"{name}.jsonl" for name in DATA})
    words = [*grpo_command(folder, data, size, 1), "--train-backend", backend, *LORA]
    written = {"--run-dir": stage, "--save": f"{stage}/checkpoints", "--save-hf": f"{stage}/hf"}
    for flag, name in written.items():
        words += [flag, str(folder / name)]
    status, output = runs.run(words)
    assert status == 0, output
    rewards = quickstart.rewards(stage)
    assert rewards[0] < 0.3 and rewards[LORA_ROLLOUTS] >= 0.9, rewards
    assert quickstart.rollouts_to(0.9, stage) <= 2 * quickstart.rollouts_to(0.9)
    sent = runs.metrics(folder / stage)
    nbytes = {r["perf/update_weights_bytes"] for r in sent if "perf/update_weights_bytes" in r}
    hidden, queries, keys, mlp = 128, 4 * 32, 2 * 32, 384
    widths = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + mlp)
    assert nbytes == {2 * 8 * widths * 4}  # two layers, rank 8, fp32


def _check_run_folder(run_dir: Path) -> None:
    for name in ("config.yaml", "report.html", "samples.jsonl", "logs/engine_0.log"):
        assert (run_dir / name).stat().st_size > 0
    assert (run_dir / "logs" / "trainer_0.log").exists()
    assert (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    gaps = [r["train/log_prob_gap_max"] for r in runs.metrics(run_dir, "train")]
    assert max(gaps) < 1e-4


def _check_that_the_export_sorts(folder: Path) -> None:
    """Plain transformers reads the export and gives the answers the reward asked for."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "grpo" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "grpo" / "hf")
    lines = (folder / "data" / "heldout.jsonl").read_text().splitlines()[:100]
    right = 0
    for row in map(json.loads, lines):
        chat = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(
            output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += answer == row["answer"]
    assert right > 80
