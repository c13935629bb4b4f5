"""Who is waited for, from what every process says of itself."""

import pytest

from slime.config.flags.run import PHASE_MINUTES, phase_timeouts
from slime.core.errors import ConfigError
from slime.diagnosis.process_status import BusyThread, GroupCount, ProcessStatus
from slime.diagnosis.stall import MemberStatus, describe, late_members

TP = ((0, 1), (2, 3))
DP = ((0, 2), (1, 3))


def answer(rank, begun, stack=("train.py:1 in step",)):
    """`begun`: collectives in the TP and in the DP group of the rank."""
    groups = []
    for kind, count in zip((TP, DP), begun, strict=True):
        (ranks,) = (group for group in kind if rank in group)
        groups.append(GroupCount(name=f"{ranks}", ranks=list(ranks), count=count))
    work = [BusyThread(phases=[("train", 30.0), ("train/steps", 29.0)], stack=list(stack))]
    status = ProcessStatus(pid=100 + rank, work=work, groups=groups)
    return MemberStatus(
        label=f"trainer rank {rank}", place=f"pid {100 + rank}", status=status, rank=rank
    )


def labels(answers):
    return [one.label for one in late_members(answers)]


@pytest.mark.parametrize("late", range(4))
def test_the_rank_at_the_root_of_a_chain_of_waits(late):
    """Its TP partner waits for it, and the DP partners of both wait for these two."""
    (partner,) = (r for group in TP if late in group for r in group if r != late)
    begun = dict.fromkeys(range(4), (8, 5))
    begun[late], begun[partner] = (7, 4), (8, 4)
    assert labels([answer(r, begun[r]) for r in range(4)]) == [f"trainer rank {late}"]


def test_nobody_is_blamed_while_all_are_equally_far():
    assert labels([answer(r, (8, 5)) for r in range(4)]) == []


def test_who_cannot_answer_is_late_members_first():
    answers = [answer(0, (8, 5)), answer(1, (7, 4))]
    answers.append(
        MemberStatus(label="trainer rank 2", place="pid 102", status="is stopped", rank=2)
    )
    assert labels(answers) == ["trainer rank 2"]


def test_without_counts_the_one_outside_of_a_collective():
    waiting = ("x/torch/distributed/distributed_c10d.py:9 in all_reduce",)
    answers = [answer(0, (8, 5), waiting), answer(1, (8, 5)), answer(2, (8, 5), waiting)]
    assert labels(answers) == ["trainer rank 1"]


def test_the_text_has_phase_call_stack_and_cause():
    text = describe([answer(0, (8, 5)), answer(1, (7, 5), ("hook.py:3 in nap",))])
    assert "trainer rank 1 (pid 101) has been in train/steps for 29 s (train > train/steps)" in text
    assert "    hook.py:3 in nap" in text
    assert text.endswith("The others wait for trainer rank 1 (pid 101).")


def test_deadlines_are_given_in_minutes_and_only_for_phases():
    seconds = phase_timeouts({"train": 0.5})
    assert seconds["train"] == 30 and seconds["save"] == 60 * PHASE_MINUTES["save"]
    with pytest.raises(ConfigError, match="no phase 'training'; one of start, generate"):
        phase_timeouts({"training": 1})
    for wrong in (0, -1, "1", True):
        with pytest.raises(ConfigError, match="train must be a number above 0"):
            phase_timeouts({"train": wrong})
