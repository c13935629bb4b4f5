"""Supervised training on conversations with tool turns, evaluated by generation as a YAML file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e import runs
from tests.tiny import make_tiny_checkpoint
from tests.unit.test_loss_mask import CHATML, tokenizer_with

EVAL = """
defaults: {n_samples_per_prompt: 2, max_response_len: 4, rm_type: f1}
datasets:
  - {name: greedy, path: DATA, temperature: 0, n_samples_per_prompt: 1}
  - {name: sampled, path: DATA, temperature: 1.0, max_response_len: 6}
"""


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {number}+1?"},
        {"role": "assistant", "content": f"<tool_call>{number}+1</tool_call>"},
        {"role": "tool", "content": str(number + 1)},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]


def naive_loss(folder: Path, conversations: list[list[dict[str, str]]]) -> float:
    """Mean over conversations of the mean over what the assistant said, each alone, by Hugging Face."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tokenizer_with(CHATML)
    losses = []
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids: list[int] = []
        trained: list[bool] = []
        rest = text
        for message in messages:
            if message["role"] != "assistant":
                continue
            said = message["content"] + "<|im_end|>"
            before, _, rest = rest.partition(said)
            for piece, on in ((before, False), (said, True)):
                tokens = tokenizer.encode(piece, add_special_tokens=False)
                ids += tokens
                trained += [on] * len(tokens)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        log_probs = logits.log_softmax(-1)
        losses.append(
            -sum(log_probs[i - 1, ids[i]] for i in range(1, len(ids)) if trained[i]) / sum(trained)
        )
    return float(sum(losses) / len(losses))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    model = make_tiny_checkpoint(folder / "model", vocab_size=328, weight_scale=2.0)
    tokenizer_with(CHATML).save_pretrained(model)
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps({"chat": conversation(n)}) + "\n" for n in range(16)))
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "What is 1+1?", "label": "It is 2."}\n')
    (folder / "eval.yaml").write_text(EVAL.replace("DATA", str(prompts)))
    words = runs.command(
        model,
        data,
        folder / "run",
        rollout_function_path="slime.rollout.sft_rollout.generate_rollout",
        eval_function_path="slime.rollout.sglang_rollout.generate_rollout",
        eval_config=folder / "eval.yaml",
        eval_interval=4,
        eval_input_key="input",
        eval_label_key="label",
        loss_type="sft_loss",
        input_key="chat",
        label_key=None,
        custom_rm_path=None,
        n_samples_per_prompt=1,
        rollout_shuffle=False,
        global_batch_size=4,
        num_rollout=8,
        lr=1e-2,
        max_tokens_per_gpu=512,
    )
    status, output = runs.run(words)
    assert status == 0, output
    return folder


def test_the_first_loss_is_that_of_hugging_face_and_the_last_is_lower(finished):
    losses = [record["train/loss"] for record in runs.metrics(finished / "run", "train")]
    expected = naive_loss(finished / "model", [conversation(n) for n in range(4)])
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.6 * losses[0]


def test_every_dataset_is_evaluated_by_its_own_settings(finished):
    samples = map(json.loads, (finished / "run" / "samples.jsonl").read_text().splitlines())
    by_kind: dict[str, list[dict]] = {}
    for sample in samples:
        by_kind.setdefault(sample["kind"], []).append(sample)
    # Before training, after rollouts 3 and 7: one greedy sample each time, two sampled ones.
    assert len(by_kind["eval/greedy"]) == 3 and len(by_kind["eval/sampled"]) == 6
    assert all(s["response_length"] <= 4 for s in by_kind["eval/greedy"])
    assert 4 < max(s["response_length"] for s in by_kind["eval/sampled"]) <= 6
    evaluated = runs.metrics(finished / "run", "eval")
    assert all(
        0 <= e[f"eval/{name}/reward"] <= 1 for e in evaluated for name in ("greedy", "sampled")
    )
