"""--dry-run refuses what a start would refuse, with the same sentence and status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import train
from tests.args import make_argv


@dataclass
class Case:
    flags: dict[str, Any]
    said: str


CASES = [
    Case({"input_key": "prompt"}, "no key 'prompt'; the keys are input, label"),
    Case({"label_key": "nolabel"}, "no key 'nolabel'; the keys are input, label"),
    Case({"custom_rm_path": "nomod.f"}, "--custom-rm-path nomod.f: module 'nomod' does not exist"),
    Case({"custom_rm_path": "json.nofn"}, "--custom-rm-path json.nofn"),
    Case({"rollout_batch_size": None}, "slime: --rollout-batch-size is missing"),
    Case({"num_rollout": None}, "slime: how long to train is missing"),
    Case({"rollout_temperature": 0}, "slime: --rollout-temperature must be above 0"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.flags))
def test_refused_as_at_a_start(case, capsys):
    assert train.main([*make_argv(**case.flags), "--dry-run"]) == 2
    output = capsys.readouterr()
    assert case.said in output.err
    assert "Not for this machine" not in output.out
