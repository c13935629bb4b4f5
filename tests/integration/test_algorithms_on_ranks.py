"""The parts of the algorithms that reduce over ranks: several processes equal one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from slime.algorithms.estimators import compute_advantages
from slime.algorithms.log_probs import log_probs_from_hidden
from slime.algorithms.policy_loss import sequence_log_ratio
from slime.core.dp_schedule import make_schedule, trained_rows
from slime.core.packing import join_slices, pack, unpack
from slime.core.types import ParallelInfo
from tests.batches import random_batch
from tests.ranks import run_ranks
from tests.unit.test_log_probs import V, gradients, reference, tensors

ROWS = [2, 0, 3]


@pytest.fixture(scope="module")
def ranks():
    """Results of three ranks; one start of processes serves all tests here."""
    return run_ranks(on_rank, 3)


def on_rank(rank):
    pair = dist.new_group([0, 1])
    return {
        # seven rows, and two: then the third rank only has what it was lent
        "normalised": [normalised_share(rank, num_rows) for num_rows in (7, 2)],
        "vocab_parallel": vocab_parallel(rank, pair) if rank < 2 else None,
        "sequence_ratios": [
            context_parallel_ratio(rank, mean, pair) for mean in (False, True) if rank < 2
        ],
    }


def vocab_parallel(rank, group):
    """Values and gradients with each of two ranks holding 8 of 16 rows, of which 11 are real."""
    hidden, weight, bias, labels = (t.detach() for t in tensors())
    padded = [F.pad(weight, (0, 0, 0, 16 - V)), F.pad(bias, (0, 16 - V), value=3.0)]
    shards = [hidden, *(t[8 * rank : 8 * rank + 8] for t in padded)]
    inputs = [t.clone().requires_grad_() for t in shards]
    outputs = log_probs_from_hidden(
        inputs[0],
        inputs[1],
        labels,
        bias=inputs[2],
        temperature=0.7,
        chunk_size=5,
        with_entropy=True,
        tp_group=group,
        vocab_size=V,
    )
    return [t.detach() for t in outputs], gradients(outputs, inputs)


def test_vocabulary_parallel_equals_one_process(ranks):
    hidden, weight, bias, labels = tensors()
    expected = reference(hidden, weight, bias, labels, 0.7)
    grads = gradients(expected, [hidden, weight, bias])
    pair = [rank["vocab_parallel"] for rank in ranks[:2]]
    for outputs, (grad_hidden, _, _) in pair:
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b.detach())
        torch.testing.assert_close(grad_hidden, grads[0])
    for i in (1, 2):
        whole = torch.cat([rank_grads[i] for _, rank_grads in pair])
        torch.testing.assert_close(whole[:V], grads[i])
        assert not whole[V:].any()


def normalised_share(rank, num_rows):
    batch = random_batch(num_rows, seed=6)
    rows, schedule = make_schedule(
        batch.total_lens,
        batch.trajectory_ids,
        dp_size=dist.get_world_size(),
        global_batch_size=num_rows,
        micro_batch_size=1,
        max_tokens=30,
        balance=True,
    )[rank]
    share = batch.select(rows, schedule)
    compute_advantages(
        share, estimator="grpo", kl_coef=0.2, normalize=True, dp_group=dist.group.WORLD
    )
    owned = trained_rows(schedule, len(rows))
    return {rows[local]: share.advantages[local] for local in owned}


def test_normalisation_does_not_depend_on_the_layout(ranks):
    for case, num_rows in enumerate((7, 2)):
        whole = random_batch(num_rows, seed=6)
        compute_advantages(whole, estimator="grpo", kl_coef=0.2, normalize=True)
        spread = {row: a for rank in ranks for row, a in rank["normalised"][case].items()}
        assert sorted(spread) == list(range(num_rows))
        for row in range(num_rows):
            np.testing.assert_allclose(spread[row], whole.advantages[row], rtol=1e-6, atol=1e-7)


def context_parallel_ratio(rank, mean, group):
    packed = pack(random_batch(8), ROWS, ParallelInfo(cp_rank=rank, cp_size=2))
    ratio = sequence_log_ratio(
        packed.old_log_probs,
        packed.loss_mask,
        packed.cu_seqlens,
        mean=mean,
        cp_group=group,
    )
    return ratio


def test_sequences_are_summed_over_context_ranks(ranks):
    batch = random_batch(8)
    layout = pack(batch, ROWS, ParallelInfo(cp_size=2))
    for case in (0, 1):
        whole = join_slices([rank["sequence_ratios"][case] for rank in ranks[:2]], layout)
        for row, values in zip(ROWS, unpack(whole, layout, cp_size=2), strict=True):
            trained = batch.old_log_probs[row][batch.loss_masks[row] > 0]
            expected = trained.sum() / max(len(trained), 1) if case else trained.sum()
            np.testing.assert_allclose(values, expected, rtol=1e-5)
