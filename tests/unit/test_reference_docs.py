"""docs/reference.md is what the generator writes, and has every hook and every field of the records."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from slime.core.types import RolloutBatch, Sample, TrainBatch
from slime.rollout.hooks import HOOKS
from tools import write_reference_docs as reference


def section(title: str) -> str:
    return reference.PATH.read_text().split(f"### `{title}`\n")[1].split("\n### ")[0]


def test_the_page_is_up_to_date():
    assert reference.PATH.read_text() == reference.reference_page(), f"run `{reference.COMMAND}`"


@pytest.mark.parametrize("record", [Sample, RolloutBatch, TrainBatch])
def test_every_field_has_a_row(record):
    text = section(f"slime.utils.types.{record.__name__}")
    assert [f.name for f in dataclasses.fields(record) if f"| `{f.name}` |" not in text] == []


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_its_parameters(name):
    text = section(f"--{name.replace('_', '-')}")
    call = HOOKS[name].get_samples if name == "data_source_path" else HOOKS[name].__call__
    parameters = list(inspect.signature(call).parameters)[1:]
    assert parameters and [one for one in parameters if f"{one}: " not in text] == []
