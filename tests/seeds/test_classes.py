"""Imports, classes and methods of the documents, called as they are written there."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from tests.seeds.documents import ROOT, expect_failure, methods, paths, quotes

MODULES = {
    "MegatronTrainRayActor": "slime.backends.megatron_utils.actor",
    "FSDPTrainRayActor": "slime.backends.fsdp_utils.actor",
}


@pytest.mark.parametrize("name", methods())
def test_method_has_the_documented_signature(name, request):
    expect_failure(request, "Classes and methods", name)
    _, written = methods()[name]
    owner = name.split(".")[0]
    actor = getattr(importlib.import_module(MODULES[owner]), owner)
    assert "TrainRayActor" in [base.__name__ for base in actor.__mro__]
    signature = inspect.signature(getattr(actor, written.name))
    parameters = list(signature.parameters.values())
    wanted = written.args.args
    assert [p.name for p in parameters[: len(wanted)]] == [a.arg for a in wanted]
    assert all(p.default is not p.empty for p in parameters[len(wanted) :])
    defaults = [ast.literal_eval(default) for default in written.args.defaults]
    optional = parameters[len(wanted) - len(defaults) : len(wanted)] if defaults else []
    assert [p.default for p in optional] == defaults


@pytest.mark.parametrize("name", paths())
def test_path_exists(name, request):
    expect_failure(request, "Files, modules and functions", name)
    if "/" in name:
        assert (ROOT / name).exists()
        return
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize("q", quotes("python"), ids=lambda q: q.place)
def test_import_works(q):
    first = q.text.splitlines()[0]
    assert first.startswith("from slime.")
    exec(first, {})
