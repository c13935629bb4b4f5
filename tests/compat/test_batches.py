"""Batches that trainer hooks read like dictionaries."""

import numpy as np
import pytest
import torch

from slime.compat.batches import with_rollout_view, with_train_view
from slime.core.errors import UserError
from slime.core.packing import pack
from slime.core.types import ParallelInfo
from tests.batches import random_batch


def call(fn, batch):
    with_rollout_view(fn)(None, batch)
    batch.check()


def test_columns_of_a_rollout_by_their_former_names():
    batch = random_batch(3)

    def hook(args, data):
        assert data["response_lengths"] == batch.response_lens.tolist()
        assert data["total_lengths"] == [len(row) for row in batch.tokens]
        assert data["raw_reward"] == pytest.approx(batch.raw_rewards.tolist())
        for name, attribute in (("log_probs", "old_log_probs"), ("advantages", "advantages")):
            for read, row in zip(data[name], getattr(batch, attribute), strict=True):
                assert read.dtype == torch.float32
                np.testing.assert_array_equal(read.numpy(), row)
        assert data["tokens"][0].dtype == torch.int64 and data["loss_masks"][0].dtype == torch.int32
        assert data.advantages is batch.advantages  # the attributes are those of the batch
        assert "values" not in data and data.get("values") is None and data.get("x", 5) == 5
        assert {"log_probs", "rewards"} <= set(data.keys()) and "values" not in dict(data.items())
        with pytest.raises(KeyError, match=r"the batch has no 'values'; it has response_lengths"):
            _ = data["values"]

    call(hook, batch)


def test_columns_that_a_hook_sets():
    batch = random_batch(3)
    lens = batch.response_lens.tolist()

    def hook(args, data):
        data["advantages"] = [torch.full((n,), float(n), dtype=torch.bfloat16) for n in lens]
        data["returns"] = tuple(torch.zeros(n, requires_grad=True) for n in lens)
        data["rewards"] = [1, 2, 3]
        with pytest.raises(KeyError, match="has no column 'my_column'"):
            data["my_column"] = [1, 2, 3]

    call(hook, batch)
    assert [row.tolist() for row in batch.advantages] == [[float(n)] * n for n in lens]
    assert batch.advantages[0].dtype == batch.returns[0].dtype == np.float32
    assert batch.rewards.tolist() == [1, 2, 3]


def test_changes_inside_of_what_was_read():
    batch = random_batch(3)
    for row in batch.advantages:
        row.flags.writeable = False  # as rows from Ray's object store are
    before = [row.copy() for row in batch.advantages]

    def hook(args, data):
        for row in data["advantages"]:
            row *= 2
        data["advantages"][0] = torch.zeros(len(before[0]))
        data["rewards"][1] = 7.0

    call(hook, batch)
    assert not batch.advantages[0].any() and batch.rewards[1] == 7.0
    np.testing.assert_allclose(batch.advantages[1], before[1] * 2)


def test_an_attribute_that_is_set_after_it_was_read_by_key():
    batch = random_batch(3)

    def hook(args, data):
        data.advantages = [row.numpy() + 1 for row in data["advantages"]]

    before = [row.copy() for row in batch.advantages]
    call(hook, batch)
    np.testing.assert_allclose(batch.advantages[2], before[2] + 1)


def test_a_column_of_the_wrong_length_is_refused():
    def hook(args, data):
        data["advantages"] = [torch.zeros(1000)] * 3

    with pytest.raises(ValueError, match="row 0: advantages has 1000 entries"):
        call(hook, random_batch(3))


def test_a_packed_batch_by_sample():
    batch = random_batch(4)
    packed = pack(batch, [2, 0], ParallelInfo())
    seen = []

    def hook(args, data, logits, reduce):
        seen.append(data)
        for number, row in enumerate([2, 0]):
            assert data["response_lengths"][number] == batch.response_lens[row]
            assert data["total_lengths"][number] == len(batch.tokens[row])
            np.testing.assert_array_equal(data["unconcat_tokens"][number], batch.tokens[row])
            for name, attribute in (
                ("log_probs", "old_log_probs"), ("loss_masks", "loss_masks"), ("advantages", "advantages"),
                ("ref_log_probs", "ref_log_probs"), ("rollout_log_probs", "rollout_log_probs"),
            ):  # fmt: skip
                np.testing.assert_allclose(data[name][number], getattr(batch, attribute)[row])
        assert data["tokens"] is packed.tokens and data.labels is packed.labels
        assert "values" not in data
        flat = torch.cat(data["advantages"]).requires_grad_()
        seen.extend([flat, reduce(flat)])
        assert reduce(packed.advantages) == reduce(flat)  # a packed column is as good
        return reduce(flat), {}

    loss, _ = with_train_view(hook)(None, packed, None, lambda x: (x * packed.loss_weights).sum())
    weights = torch.cat([torch.tensor(batch.loss_weights[row]) for row in (2, 0)])
    expected = (seen[1].detach() * weights).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    np.testing.assert_allclose(seen[1].grad, weights)


def test_a_slice_of_context_parallelism_has_no_whole_samples():
    packed = pack(random_batch(2, max_len=40), [0, 1], ParallelInfo(cp_size=2, world_size=2))

    def hook(args, data, logits, reduce):
        assert data["response_lengths"] == packed.response_lens
        return data["advantages"]

    with pytest.raises(UserError, match=r"--context-parallel-size above 1 .* packed columns"):
        with_train_view(hook)(None, packed, None, None)


def test_edits_by_attribute_survive_a_reading_by_key():
    batch = random_batch(3)
    wanted = [2 * row for row in batch.advantages]

    def hook(args, data):
        dict(data.items())
        for row in data.advantages:
            row *= 2

    call(hook, batch)
    for found, row in zip(batch.advantages, wanted, strict=True):
        np.testing.assert_array_equal(found, row)
