"""Rollouts that were kept are read back as they were, whatever hooks left in them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slime.core.errors import ConfigError
from slime.core.types import Sample, Status
from slime.data.stored_samples import (
    decode_groups,
    encode_groups,
    load_debug_samples,
    save_debug_samples,
    save_train_data,
)
from tests.batches import random_batch


def test_samples_come_back_with_experts_and_what_hooks_left(tmp_path):
    experts = np.arange(8, dtype=np.int16).reshape(2, 2, 2)
    sample = Sample(
        group_index=4, index=9, rollout_id=9, tokens=[1, 2, 3], response_length=2,
        rollout_log_probs=[-0.5, -0.25], loss_mask=[1, 0], reward={"score": np.float32(0.5)},
        metadata={"seen": {1}, "row": np.array([1.5])}, rollout_routed_experts=experts,
        status=Status.TRUNCATED,
    )  # fmt: skip
    path = str(tmp_path / "sub" / "{rollout_id}.pt")
    save_debug_samples(path, 3, [sample, Sample(group_index=5, index=10)])
    first, second = load_debug_samples(path, 3)
    (back,) = first
    np.testing.assert_array_equal(back.rollout_routed_experts, experts)
    assert back.rollout_routed_experts.dtype == np.int16
    assert back.metadata == {"seen": "{1}", "row": [1.5]} and back.reward == {"score": 0.5}
    for name in ("tokens", "response_length", "rollout_log_probs", "loss_mask", "status", "index"):
        assert getattr(back, name) == getattr(sample, name)
    assert second[0].group_index == 5
    with pytest.raises(ConfigError, match=r"4\.pt does not exist"):
        load_debug_samples(path, 4)


def test_rows_of_a_rank_keep_the_keys_of_earlier_files(tmp_path):
    batch = random_batch(4, rows_per_trajectory=2)
    save_train_data(str(tmp_path / "{rollout_id}_{rank}.pt"), 3, 1, batch)
    record = torch.load(tmp_path / "3_1.pt", weights_only=True)
    assert (record["rollout_id"], record["rank"]) == (3, 1)
    assert record["rollout_ids"].tolist() == batch.rollout_ids.tolist() == [100, 100, 99, 99]
    assert record["executions"].tolist() == batch.executions.tolist() == [2, 2, 2, 2]
    assert [row.tolist() for row in record["tokens"]] == [row.tolist() for row in batch.tokens]


@pytest.mark.parametrize("odd", [1 << 70, "lone \ud800 surrogate"])
def test_what_json_cannot_hold_is_stored_as_text(tmp_path, odd):
    path = str(tmp_path / "{rollout_id}.pt")
    metadata = {"odd": {odd}, "row": np.arange(2), "big": [1 << 70]}
    save_debug_samples(path, 0, [Sample(group_index=0, index=0, metadata=metadata)])
    ((back,),) = load_debug_samples(path, 0)
    assert back.metadata == {"odd": repr({odd}), "row": [0, 1], "big": [1 << 70]}


def test_metadata_that_contains_itself_stays_a_dictionary(tmp_path):
    path = str(tmp_path / "{rollout_id}.pt")
    metadata: dict[str, object] = {"kept": 1}
    metadata["cycle"] = metadata
    save_debug_samples(path, 0, [Sample(group_index=0, index=0, metadata=metadata)])
    ((back,),) = load_debug_samples(path, 0)
    assert back.metadata["kept"] == 1 and isinstance(back.metadata["cycle"], str)


def test_groups_keep_integers_above_64_bits():
    group = [Sample(group_index=0, index=0, label=1 << 70, metadata={"answer": -(1 << 70)})]
    ((back,),) = decode_groups(json.loads(json.dumps(encode_groups([group]))))
    assert (back.label, back.metadata) == (1 << 70, {"answer": -(1 << 70)})
