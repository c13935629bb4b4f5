import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.core.packing import join_slices, pack, unpack
from slime.core.types import ParallelInfo, RolloutBatch
from tests.batches import random_batch

COLUMNS = [
    "loss_mask",
    "loss_weights",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "returns",
    "values",
]
SOURCE = {"loss_mask": "loss_masks"}  # where a column is called otherwise in a RolloutBatch


def naive_pack(batch, rows, unit=1, equal=False):
    """Token by token, straight from the definition of TrainBatch; rows padded to multiples of unit."""
    columns = {
        name: [] for name in ["tokens", "position_ids", "labels", "routed_experts", *COLUMNS]
    }
    longest = max(len(batch.tokens[row]) for row in rows)
    for row in rows:
        tokens = batch.tokens[row].tolist()
        prompt = len(tokens) - int(batch.response_lens[row])
        for position in range(-(-(longest if equal else len(tokens)) // unit) * unit):
            inside = position < len(tokens)
            experts = batch.routed_experts[row][position] if inside else np.full((2, 3), -1)
            columns["routed_experts"].append(experts.tolist())
            columns["tokens"].append(tokens[position] if position < len(tokens) else 0)
            columns["position_ids"].append(position)
            columns["labels"].append(tokens[position + 1] if position + 1 < len(tokens) else 0)
            response = position + 1 - prompt
            inside = 0 <= response < batch.response_lens[row]
            for name in COLUMNS:
                source = getattr(batch, SOURCE.get(name, name))[row]
                columns[name].append(float(source[response]) if inside else 0.0)
    return columns


def test_the_worked_example():
    batch = RolloutBatch(
        tokens=[[5, 9, 6, 0], [7, 8]],
        response_lens=[2, 1],
        loss_masks=[[1, 1], [1]],
        loss_weights=[[0.25, 0.25], [0.5]],
        rewards=[0, 0],
        raw_rewards=[0, 0],
        truncated=[0, 0],
        group_indices=[0, 0],
        sample_indices=[0, 1],
        trajectory_ids=[0, 1],
    )
    packed = pack(batch, [0, 1], ParallelInfo())
    assert packed.tokens.tolist() == [5, 9, 6, 0, 7, 8]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 4, 6]
    assert packed.labels.tolist() == [9, 6, 0, 0, 8, 0]
    assert packed.loss_mask.tolist() == [0, 1, 1, 0, 1, 0]
    assert packed.loss_weights.tolist() == [0, 0.25, 0.25, 0, 0.5, 0]
    assert (packed.max_seqlen, packed.prompt_lens, packed.response_lens) == (4, [2, 1], [2, 1])


def filled_batch(seed):
    """Rows with every column there is."""
    batch, rng = random_batch(6, seed=seed), np.random.default_rng(seed)
    for name in ("returns", "values", "teacher_log_probs"):
        setattr(batch, name, [rng.normal(size=n).astype(np.float32) for n in batch.response_lens])
    batch.routed_experts = [rng.integers(0, 8, (n, 2, 3), np.int16) for n in batch.total_lens]
    batch.check()
    return batch


@pytest.mark.parametrize("multiple", [None, 1, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
def test_columns_equal_the_naive_ones_whole_and_joined_from_slices(cp_size, multiple, seed, count):
    """With a multiple all rows get one length, of which each rank holds a multiple of that many."""
    batch = filled_batch(seed)
    rows = np.random.default_rng(seed).permutation(6)[:count].tolist()
    unit = 2 * cp_size if cp_size > 1 else 1
    if multiple == 4:
        unit = 4 * cp_size  # two chunks per rank of 2 * cp_size fit into it
    expected = naive_pack(batch, rows, unit=unit, equal=multiple is not None)
    slices = [
        pack(batch, rows, ParallelInfo(cp_rank=rank, cp_size=cp_size), equal_multiple=multiple)
        for rank in range(cp_size)
    ]
    for name, values in expected.items():
        parts = [getattr(part, name) for part in slices]
        if name == "routed_experts":  # the cut is along tokens; one number for each is enough
            parts, values = [part[:, 1, 2] for part in parts], [x[1][2] for x in values]
        whole = join_slices(parts, slices[0])
        wanted = torch.tensor(values, dtype=whole.dtype)
        torch.testing.assert_close(whole, wanted, rtol=0, atol=0)
    for part in slices:
        lens = [len(batch.tokens[r]) for r in rows]
        lens = lens if multiple is None else [max(lens)] * count
        padded = [-(-n // unit) * unit // cp_size for n in lens]
        assert part.cu_seqlens.tolist() == [0, *np.cumsum(padded).tolist()]
        assert part.cu_seqlens.dtype == torch.int32
        assert part.max_seqlen == max(padded)
        assert len(part.tokens) == part.cu_seqlens[-1]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_columns_of_further_tokens_stay_inside_their_row(cp_size):
    """Position i predicts token i+2 in the first column and i+3 in the second, with their weights."""
    batch = filled_batch(3)
    rows = [3, 0, 4]
    slices = [
        pack(
            batch,
            rows,
            ParallelInfo(cp_rank=rank, cp_size=cp_size),
            mtp_layers=2,
        )
        for rank in range(cp_size)
    ]
    naive = naive_pack(batch, rows, unit=2 * cp_size if cp_size > 1 else 1)
    ends = (slices[0].cu_seqlens * cp_size).tolist()
    for depth in range(2):
        for name, source in (("mtp_labels", "labels"), ("mtp_weights", "loss_weights")):
            column = join_slices([getattr(one, name)[depth] for one in slices], slices[0])
            expected = []
            for start, end in itertools.pairwise(ends):
                later = naive[source][start:end][depth + 1 :]
                expected += later + [0] * min(depth + 1, end - start)
            np.testing.assert_allclose(column.numpy(), expected, rtol=1e-6)


def test_a_dummy_micro_batch_has_no_mtp_weights():
    batch = random_batch(2, seed=3)
    alone = ParallelInfo()
    dummy = pack(batch, [0, 1], alone, dummy=True, mtp_layers=1)
    real = pack(batch, [0, 1], alone, mtp_layers=1)
    assert real.mtp_weights.any()
    assert not dummy.mtp_weights.any() and not real.as_dummy().mtp_weights.any()
    assert pack(batch, [0, 1], alone).mtp_labels is None


def test_zigzag_gives_every_rank_one_early_and_one_late_chunk():
    batch = random_batch(1, max_len=6, seed=4)
    tokens = batch.tokens[0]
    padded = np.zeros(12, np.int64)
    padded[: len(tokens)] = tokens
    assert 8 < len(tokens) <= 12
    chunks = padded.reshape(4, 3)
    for rank in range(2):
        part = pack(batch, [0], ParallelInfo(cp_rank=rank, cp_size=2))
        assert part.tokens.tolist() == [*chunks[rank], *chunks[3 - rank]]
        assert part.position_ids.tolist() == [
            *range(3 * rank, 3 * rank + 3),
            *range(3 * (3 - rank), 3 * (3 - rank) + 3),
        ]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_unpack_gives_back_the_rows(cp_size):
    batch = random_batch(5)
    rows = [3, 0, 4]
    slices = [pack(batch, rows, ParallelInfo(cp_rank=r, cp_size=cp_size)) for r in range(cp_size)]
    whole = join_slices([part.old_log_probs for part in slices], slices[0])
    for row, values in zip(rows, unpack(whole, slices[0], cp_size=cp_size), strict=True):
        np.testing.assert_array_equal(values, batch.old_log_probs[row])


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_dummy_micro_batch_has_no_weight(cp_size):
    batch = random_batch(3)
    here = ParallelInfo(cp_rank=cp_size - 1, cp_size=cp_size)
    dummy, real = (pack(batch, [1, 2], here, dummy=f) for f in (True, False))
    assert len(dummy.loss_weights) == len(dummy.loss_mask) == len(real.tokens)
    assert real.loss_weights.abs().sum() > 0
    assert not dummy.loss_weights.any() and not dummy.loss_mask.any()
    torch.testing.assert_close(dummy.tokens, real.tokens)


def test_as_dummy_returns_a_dummy_and_leaves_the_original():
    real = pack(random_batch(3), [1, 2], ParallelInfo())
    weights = real.loss_weights.clone()
    dummy = real.as_dummy()
    assert dummy.dummy and not real.dummy
    assert not dummy.loss_weights.any() and not dummy.loss_mask.any()
    torch.testing.assert_close(real.loss_weights, weights)
    assert real.loss_mask.any() and dummy.tokens is real.tokens


def test_optional_columns_stay_absent():
    packed = pack(random_batch(2, ref_log_probs=None, advantages=None), [0, 1], ParallelInfo())
    assert packed.ref_log_probs is None and packed.advantages is None
    assert packed.old_log_probs is not None


def test_a_batch_without_loss_weights_is_refused():
    with pytest.raises(ValueError, match="loss_weights"):
        pack(random_batch(2, loss_weights=None), [0, 1], ParallelInfo())
