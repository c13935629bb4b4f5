"""Odd batches from the rollout to the training rows, each with the numbers it must give."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slime.core.types import Status
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import samples_to_batch, split_batch
from tests.fake_engine import Reply
from tests.prompts import flat, rollout_args
from tests.tiny import EOS_ID, make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
HOOKS = "tests.rollout_hooks"


def rows_of(args, output):
    batch = samples_to_batch(args, flat(output))
    (part,) = split_batch(args, batch, dp_size=1, cp_size=1)
    return part


def rollout(tmp_path, fake_engines, script, rows, **flags):
    (engine,) = fake_engines(script)
    values = {"rollout_batch_size": len(rows), "n_samples_per_prompt": 2, **flags}
    args = rollout_args(tmp_path, rows, **values)
    return args, generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)), engine


def test_uneven_groups_are_normalised_by_their_own_size(tmp_path, fake_engines):
    """Group 0 has segments of lengths 1 and 2 per execution, group 1 plain samples."""
    rows = [{"input": "0=", "label": "x"}, {"input": "1=", "label": "x"}]
    args, output, _ = rollout(
        tmp_path, fake_engines, lambda r: Reply(text="a" * (1 + r.number)), rows,
        custom_generate_function_path=f"{HOOKS}.generate_uneven", custom_rm_path=f"{HOOKS}.reward_length",
    )  # fmt: skip
    part = rows_of(args, output)
    sizes = [len(group) for group in output.samples]
    assert sizes == [3, 2]
    for group in output.samples:
        raw = np.array([s.reward for s in group])
        expected = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-6)
        mine = part.rewards[part.group_indices == group[0].group_index]
        assert mine == pytest.approx(expected, abs=1e-4)
    # Four executions weigh a quarter each, however many segments and tokens they have.
    for execution in range(4):
        weights = [
            w.sum()
            for w, r in zip(part.loss_weights, part.trajectory_ids, strict=True)
            if r == execution
        ]
        assert sum(weights) == pytest.approx(1 / 4)


def test_equal_rewards_give_zero_advantages_and_no_nan(tmp_path, fake_engines):
    args, output, _ = rollout(
        tmp_path, fake_engines, lambda r: Reply(text="same"), [{"input": "0=", "label": "x"}],
        custom_rm_path=f"{HOOKS}.reward_length", n_samples_per_prompt=4,
    )  # fmt: skip
    part = rows_of(args, output)
    assert part.rewards.tolist() == [0.0] * 4
    assert output.metrics["rollout/zero_std_groups"] == 1


def test_a_zero_length_response_keeps_its_place_without_weight(tmp_path, fake_engines):
    """One of two samples of a group is empty: rewards and group size count both, the loss only one."""

    def script(request):
        if request.number == 0:
            return Reply(text="", tokens=[], finish="length")
        return Reply(text="ab")

    args, output, _ = rollout(
        tmp_path, fake_engines, script, [{"input": "0=", "label": "x"}],
        custom_rm_path=f"{HOOKS}.reward_length",
    )  # fmt: skip
    part = rows_of(args, output)
    empty = next(i for i, s in enumerate(flat(output)) if s.response == "")
    full = 1 - empty
    assert part.response_lens[empty] == 1 and part.loss_masks[empty].tolist() == [0]
    assert part.tokens[empty][-1] == EOS_ID
    assert part.loss_weights[empty].tolist() == [0.0]
    # rewards 0 and 2: mean 1, sample standard deviation sqrt(2)
    assert part.rewards[full] == pytest.approx(1 / math.sqrt(2), abs=1e-4)
    assert part.rewards[empty] == pytest.approx(-1 / math.sqrt(2), abs=1e-4)
    # "ab" and end-of-text share the weight of one of two executions.
    assert part.loss_weights[full] == pytest.approx([1 / 2 / 3] * 3)


def test_truncated_at_the_limit(tmp_path, fake_engines):
    args, output, _ = rollout(
        tmp_path, fake_engines, lambda r: Reply(text="abcdefgh"), [{"input": "0=", "label": "x"}],
        custom_rm_path=f"{HOOKS}.reward_length", rollout_max_response_len=5,
        overlong_buffer_len=4, overlong_penalty_factor=0.5,
    )  # fmt: skip
    part = rows_of(args, output)
    assert part.response_lens.tolist() == [5, 5] and part.truncated.tolist() == [1, 1]
    assert all(len(t) == len("0=") + 5 and t[-1] != EOS_ID for t in part.tokens)
    # DAPO's soft punishment at the limit is the whole factor: 5 - 0.5.
    assert part.raw_rewards.tolist() == [4.5, 4.5]


@pytest.mark.parametrize("context", [6, 7])
def test_a_response_that_fills_the_whole_context(tmp_path, fake_engines, context):
    """Prompt of two tokens; a prompt that leaves no room at all gets a token that counts for nothing."""
    rows = [{"input": "0=", "label": "x"}, {"input": "x" * context + "=", "label": "x"}]
    args, output, engine = rollout(
        tmp_path, fake_engines, lambda r: Reply(text="abcdefgh"), rows,
        custom_rm_path=f"{HOOKS}.reward_length", rollout_max_response_len=100,
        rollout_max_context_len=context,
    )  # fmt: skip
    part = rows_of(args, output)
    by_group = {
        int(g): (t, m)
        for g, t, m in zip(part.group_indices, part.tokens, part.loss_masks, strict=True)
    }
    tokens, mask = by_group[0]
    assert len(tokens) == context and mask.tolist() == [1] * (context - 2)
    assert TOKENIZER.decode(tokens[2:]) == "abcdefgh"[: context - 2]
    tokens, mask = by_group[1]
    assert len(tokens) == context + 2 and mask.tolist() == [0]
    assert {s.status for s in flat(output)} == {Status.TRUNCATED}
    assert all(len(r.input_ids) == 2 for r in engine.requests)
