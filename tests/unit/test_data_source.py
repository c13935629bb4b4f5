"""Epochs, shuffling, numbering, the buffer, and a state that loses and repeats nothing."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample, Status
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from tests.prompts import rollout_args, sums, write_rows


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_groups_and_numbering_over_epochs(tmp_path):
    source = RolloutDataSource(rollout_args(tmp_path, sums(3), n_samples_per_prompt=2))
    groups = source.get_samples(4) + source.get_samples(3)
    expected = [sums(3)[i % 3]["input"] for i in range(7)]
    assert prompts(groups) == expected
    assert [s.group_index for g in groups for s in g] == [i // 2 for i in range(14)]
    assert [s.index for g in groups for s in g] == list(range(14))
    assert [s.rollout_id for g in groups for s in g] == list(range(14))
    assert all(g[0].prompt == g[1].prompt and g[0].tokens is not g[1].tokens for g in groups)
    assert len(source) == 3


def test_shuffle_is_a_new_permutation_per_epoch_and_the_same_per_seed(tmp_path):
    def epochs(seed):
        args = rollout_args(tmp_path, sums(20), rollout_shuffle=True, rollout_seed=seed)
        source = RolloutDataSource(args)
        return [prompts(source.get_samples(20)) for _ in range(2)]

    first, second = epochs(1)
    everything = sorted(row["input"] for row in sums(20))
    assert sorted(first) == sorted(second) == everything
    assert first != second and first != [row["input"] for row in sums(20)]
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


def test_resume_anywhere_continues_the_same_sequence(tmp_path):
    args = rollout_args(tmp_path, sums(7), rollout_shuffle=True)
    unbroken = RolloutDataSource(args)
    expected = [[s.to_dict() for s in group] for group in unbroken.get_samples(30)]
    for stop in range(0, 25, 4):
        source = RolloutDataSource(args)
        source.begin(0)
        source.finish(0, [group[0].group_index for group in source.get_samples(stop)])
        state = json.loads(json.dumps(source.state_dict(0)))
        resumed = RolloutDataSource(args)
        resumed.load_state_dict(state)
        rest = [[s.to_dict() for s in group] for group in resumed.get_samples(30 - stop)]
        assert rest == expected[stop:]


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        (sums(5), None),
        (sums(6), "has [6] rows, the checkpoint was written with [5]"),
        ([*sums(4), {**sums(5)[4], "label": "?"}], "but other prompts or labels"),
        ([*sums(4), {**sums(5)[4], "input": "4 + 1="}], "but other prompts or labels"),
    ],
)
def test_resume_warns_of_other_prompt_data(tmp_path, caplog, rows, warning):
    source = RolloutDataSource(rollout_args(tmp_path, sums(5)))
    state = json.loads(json.dumps(source.state_dict()))
    changed = RolloutDataSource(rollout_args(tmp_path, rows))
    changed.load_state_dict(state)
    assert (warning in caplog.text) if warning else not caplog.records
    del state["dataset_digests"]  # of a checkpoint of an earlier version
    caplog.clear()
    changed.load_state_dict(state)
    assert bool(caplog.records) == (len(rows) == 6)


def test_weights_repeat_rows(tmp_path):
    one = write_rows(tmp_path / "one.jsonl", [{"input": f"a{i}"} for i in range(4)])
    args = rollout_args(tmp_path, label_key=None)
    args = args.replace(prompt_data=[f"{one}:weight=2.5", str(tmp_path / "train.jsonl")])
    source = RolloutDataSource(args)
    assert len(source) == 4 * 2 + 2 + 10
    counts = Counter(prompts(source.get_samples(len(source))))
    assert sorted(counts[f"a{i}"] for i in range(4)) == [2, 2, 3, 3]
    assert all(counts[row["input"]] == 1 for row in sums(10))


def test_weight_that_leaves_no_row(tmp_path):
    args = rollout_args(tmp_path, sums(1))
    with pytest.raises(ConfigError, match="weights leave no row"):
        RolloutDataSource(args.replace(prompt_data=[f"{args.prompt_data[0]}:weight=0.1"]))


def test_buffered_groups_come_first_and_oldest_first(tmp_path):
    source = RolloutDataSourceWithBuffer(rollout_args(tmp_path))
    taken = source.get_samples(4)
    source.add_samples([taken[2], taken[0]])
    again = source.get_samples(3)
    assert [g[0].group_index for g in again] == [2, 0, 4]


def test_plain_source_refuses_groups(tmp_path):
    source = RolloutDataSource(rollout_args(tmp_path))
    groups = source.get_samples(1)
    with pytest.raises(UserError, match="RolloutDataSourceWithBuffer"):
        source.add_samples(groups)


def test_groups_made_by_hooks_get_numbers(tmp_path):
    source = RolloutDataSourceWithBuffer(rollout_args(tmp_path))
    source.get_samples(2)
    source.add_samples([[Sample(prompt="new"), Sample(prompt="new")]])
    (group,) = source.get_samples(1)
    assert [(s.prompt, s.group_index, s.index) for s in group] == [("new", 2, 4), ("new", 2, 5)]
    assert source.get_samples(1)[0][0].group_index == 3


def everything_in(source):
    """Group indices a resumed source hands out before it makes new ones."""
    held = len(source.buffer)
    return [group[0].group_index for group in source.get_samples(held)]


def test_state_holds_in_flight_untrained_and_buffered_groups(tmp_path):
    args = rollout_args(tmp_path, sums(50))
    source = RolloutDataSourceWithBuffer(args)
    source.begin(0)
    trained = source.get_samples(3)  # 0 1 2
    source.finish(0, [0, 1, 2])
    source.begin(1)
    source.get_samples(4)  # 3 4 5 6
    source.finish(1, [3, 5])  # generated, not trained yet
    source.add_samples([source_group(source, 4)])  # back in the buffer; 6 stays in flight
    assert len(trained) == 3

    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict(0))))
    assert everything_in(resumed) == [3, 5, 6, 4]
    assert resumed.get_samples(1)[0][0].group_index == 7

    later = RolloutDataSourceWithBuffer(args)
    later.load_state_dict(source.state_dict(1))
    assert everything_in(later) == [6, 4]


def source_group(source, index):
    return source._in_flight[index]


def test_partial_tokens_survive_the_state(tmp_path):
    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].append_response_tokens(tokens=[7, 8], log_probs=[-0.25, -1.5], weight_versions=[3, 4])
    group[0].status = Status.ABORTED
    group[0].rollout_routed_experts = np.arange(24, dtype=np.int32).reshape(6, 2, 2)
    source.add_samples([group])
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    restored = resumed.get_samples(1)[0][0]
    assert np.array_equal(restored.rollout_routed_experts, group[0].rollout_routed_experts)
    group[0].rollout_routed_experts = restored.rollout_routed_experts = None
    assert restored == group[0]


def test_handing_out_keeps_a_pristine_copy_of_what_is_in_flight(tmp_path):
    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    source.begin(0)
    (group,) = source.get_samples(1)
    before = [s.to_dict() for s in RolloutDataSourceWithBuffer(args).get_samples(1)[0]]
    group[0].append_response_tokens(tokens=[7], log_probs=[-1.0])
    group[0].metadata["seen"] = True
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(source.state_dict())
    assert [s.to_dict() for s in resumed.get_samples(1)[0]] == before


def test_a_rollout_function_that_tracks_nothing_has_used_what_it_took(tmp_path):
    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    source.get_samples(3)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(source.state_dict(0))
    assert resumed.get_samples(1)[0][0].group_index == 3


def test_save_and_load_under_the_flags(tmp_path):
    args = rollout_args(tmp_path).replace(save=str(tmp_path / "ck"), load=str(tmp_path / "ck"))
    source = RolloutDataSourceWithBuffer(args)
    source.begin(0)
    source.finish(0, [g[0].group_index for g in source.get_samples(4)])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert prompts(resumed.get_samples(2)) == prompts(source.get_samples(2))
    fresh = RolloutDataSourceWithBuffer(args)
    fresh.load(None)
    assert fresh.next_group_index == 0


def test_missing_label_is_reported_before_anything_runs(tmp_path):
    args = rollout_args(tmp_path, [{"input": "a"}], rm_type="math", label_key=None)
    with pytest.raises(ConfigError, match="--rm-type math compares with a label"):
        RolloutDataSource(args)


@pytest.mark.parametrize("taken", [0, 1, 7, 24, 25, 60, 131])
def test_epochs_shuffles_and_weights_go_on_after_a_resume_as_if_nothing_had_happened(
    tmp_path, taken
):
    """Three datasets, weights 1, 2.5 and 0.5, one of them a slice: 10 + 10 + 5 rows per epoch."""
    files = [
        str(write_rows(tmp_path / "a.jsonl", sums(10))),
        str(write_rows(tmp_path / "b.jsonl", sums(9))) + "@[2:6]:weight=2.5",
        str(write_rows(tmp_path / "c.jsonl", sums(10))) + ":weight=0.5",
    ]
    args = rollout_args(
        tmp_path, prompt_data=files, rollout_shuffle=True, rollout_seed=3, n_samples_per_prompt=1
    )
    whole = RolloutDataSourceWithBuffer(args)
    assert len(whole) == 25
    expected = [(g[0].group_index, g[0].prompt) for g in whole.get_samples(taken + 60)]
    first = RolloutDataSourceWithBuffer(args)
    first.get_samples(taken)
    second = RolloutDataSourceWithBuffer(args)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [(g[0].group_index, g[0].prompt) for g in second.get_samples(60)]
    assert rest == expected[taken:]
    epochs = [expected[i : i + 25] for i in range(0, len(expected) - 24, 25)]
    assert all(len({p for _, p in epoch}) >= 10 for epoch in epochs)
    assert len(epochs) < 2 or [p for _, p in epochs[0]] != [p for _, p in epochs[1]]


def test_whatever_hooks_left_in_a_sample_a_checkpoint_can_be_written(tmp_path, caplog):
    source = RolloutDataSourceWithBuffer(rollout_args(tmp_path, sums(2)))
    (group,) = source.get_samples(1)
    group[0].metadata = {"score": np.float32(0.5), "seen": {3}, 7: "seven", "row": np.arange(2)}
    group[0].reward = {"score": np.float64(1.0), "right": np.bool_(True)}
    source.add_samples([group])
    text = json.dumps(source.state_dict())
    other = RolloutDataSourceWithBuffer(rollout_args(tmp_path, sums(2)))
    other.load_state_dict(json.loads(text))
    first = other.buffer[0][0]
    assert first.metadata == {"score": 0.5, "seen": "{3}", "7": "seven", "row": [0, 1]}
    assert first.reward == {"score": 1.0, "right": True}
    assert "sample.metadata contains a set" in caplog.text


def test_equal_rows_and_fewer_rows_than_a_batch_are_groups_of_their_own(tmp_path):
    rows = [{"input": "1+1=", "label": "2"}] * 2
    source = RolloutDataSource(rollout_args(tmp_path, rows, n_samples_per_prompt=1))
    groups = source.get_samples(5)
    assert [g[0].group_index for g in groups] == [g[0].index for g in groups] == list(range(5))
    assert len({id(g[0].tokens) for g in groups}) == 5 and source.epoch == 2


@pytest.mark.parametrize("field", ["custom_rm_path", "generate_function_path"])
def test_a_checkpoint_cannot_name_code_to_import(tmp_path, field):
    args = rollout_args(tmp_path, sums(3), custom_rm_path="tests.rollout_hooks.reward")
    source = RolloutDataSource(args)
    source.begin(0)
    source.get_samples(1)
    state = json.loads(json.dumps(source.state_dict(0)))
    for path, refused in (("os.system", True), ("tests.odd_hooks.reward", False)):
        state["in_flight"][0][0][field] = path
        resumed = RolloutDataSource(args)
        if refused:
            with pytest.raises(UserError, match=r"os\.system"):
                resumed.load_state_dict(state)
        else:
            resumed.load_state_dict(state)
            assert getattr(resumed.buffer[0][0], field) == path


def test_samples_of_several_files_name_theirs(tmp_path):
    first, second = (
        write_rows(tmp_path / "easy.jsonl", sums(2)),
        write_rows(tmp_path / "hard.jsonl", sums(1)),
    )
    args = rollout_args(tmp_path, prompt_data=[f"{first}@[0:2]", f"{second}:weight=2"])
    groups = RolloutDataSource(args).get_samples(4)
    assert [g[0].metadata["dataset"] for g in groups] == ["easy", "easy", "hard", "hard"]
    alone = RolloutDataSource(rollout_args(tmp_path, prompt_data=[str(first)])).get_samples(1)
    assert "dataset" not in alone[0][0].metadata
    twice = rollout_args(tmp_path, prompt_data=[f"{first}@[0:1]", f"{first}@[1:2]"])
    names = [g[0].metadata["dataset"] for g in RolloutDataSource(twice).get_samples(2)]
    assert names == ["easy-0", "easy-1"]


def test_a_source_without_data_loads_a_state(tmp_path):
    """Of a run that only evaluates a checkpoint."""
    state = RolloutDataSource(rollout_args(tmp_path, sums(3))).state_dict(0)
    args = rollout_args(tmp_path, sums(3)).replace(num_rollout=0)
    source = RolloutDataSource(args)
    source.load_state_dict(state)
    assert (source.position, len(source)) == (0, 0)
