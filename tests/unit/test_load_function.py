"""Import paths: what is wrong, in which flag, and what was expected."""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol

import pytest

from slime.core.errors import ConfigError
from slime.utils.load_function import accepts, load_class, load_function


class Call(Protocol):
    async def __call__(self, args: Any, sample: Any, evaluation: bool = False) -> Any: ...


class Keywords(Protocol):
    def __call__(self, *, args: Any, pg_loss: Any) -> Any: ...


class OpenEnded(Protocol):
    def __call__(self, args: Any, samples: Any, **kwargs: Any) -> Any: ...


class Source(Protocol):
    def __init__(self, args: Any) -> None: ...
    def get_samples(self, num_samples: int) -> list: ...
    def __len__(self) -> int: ...


MODULE = """
async def good(args, sample, evaluation=False): return 1
async def minimal(args, sample): return 2
async def other_names(a, b): return 3
async def too_few(args): ...
async def too_many(args, sample, extra): ...
def plain(args, sample): ...
def keywords(*, args, pg_loss, **rest): ...
def positional_only(args, pg_loss, /): ...
def open_ended(args, samples, **kwargs): ...
def closed(args, samples): ...
number = 5
class Callable:
    async def __call__(self, args, sample): return 4
instance = Callable()
class Good:
    def __init__(self, args): ...
    def get_samples(self, num_samples): ...
    def __len__(self): return 0
class NoLen:
    def __init__(self, args): ...
    def get_samples(self, n): ...
class Unbuildable:
    def get_samples(self, n): ...
    def __len__(self): return 0
class WrongMethod(Good):
    def get_samples(self): ...
"""


@pytest.fixture(scope="module", autouse=True)
def hooks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "lf_hooks.py").write_text(MODULE)
    (folder / "lf_broken.py").write_text("x = 1\nimport json\njson.loads('{')\n")
    (folder / "lf_lacking.py").write_text("import package_that_is_not_there\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.mark.parametrize("name", ["good", "minimal", "other_names", "instance"])
def test_functions_that_take_the_call(name):
    assert callable(
        load_function(f"lf_hooks.{name}", flag="--x", protocol=Call, must_be_async=True)
    )


def message(path, protocol=Call, load=load_function, **options):
    with pytest.raises(ConfigError) as caught:
        load(path, flag="--my-flag", protocol=protocol, **options)
    assert "--my-flag" in str(caught.value) and path in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["too_few", "too_many"])
def test_wrong_signature_shows_expected_and_found(name):
    text = message(f"lf_hooks.{name}")
    assert f"def {name}(args, sample, evaluation=False)" in text
    assert f"found:    async def {name}(args" in text


def test_async_is_demanded_only_where_it_is_needed():
    load_function("lf_hooks.plain", flag="--x", protocol=Call)
    text = message("lf_hooks.plain", must_be_async=True)
    assert "not an async function" in text and "async def plain(" in text


def test_keyword_calls():
    load_function("lf_hooks.keywords", flag="--x", protocol=Keywords)
    message("lf_hooks.positional_only", Keywords)
    load_function("lf_hooks.open_ended", flag="--x", protocol=OpenEnded)
    load_function("lf_hooks.closed", flag="--x", protocol=OpenEnded)
    assert "def too_few(args, samples, **kwargs)" in message("lf_hooks.too_few", OpenEnded)


def test_paths_that_lead_nowhere():
    assert "module 'lf_nowhere' does not exist" in message("lf_nowhere.fn")
    assert "module 'lf_hooks.sub' does not exist" in message("lf_hooks.sub.fn")
    assert "did you mean lf_hooks.good" in message("lf_hooks.god")
    assert "expected an import path" in message("good")
    for path in ("lf_hooks.py", "./lf_hooks.good", "/elsewhere/lf_hooks.py"):
        assert "an import path such as lf_hooks.function, not a file" in message(path)
    assert "is a int; expected a function" in message("lf_hooks.number")
    assert "expected a function" in message("lf_hooks.Good")


def test_module_that_fails_while_imported_is_told_apart_from_a_missing_one():
    text = message("lf_broken.fn")
    assert "JSONDecodeError" in text and "importing lf_broken failed" in text
    text = message("lf_lacking.fn")
    assert "package_that_is_not_there" in text and "importing lf_lacking failed" in text


def test_classes():
    assert load_class("lf_hooks.Good", flag="--x", protocol=Source).__name__ == "Good"
    assert "no method __len__" in message("lf_hooks.NoLen", Source, load_class)
    assert "def get_samples(self, num_samples)" in message(
        "lf_hooks.WrongMethod", Source, load_class
    )
    assert "__init__" in message("lf_hooks.Unbuildable", Source, load_class)
    assert "expected a class" in message("lf_hooks.good", Source, load_class)


def test_accepts_asks_for_a_keyword():
    assert accepts(lambda a, evaluation: 0, "evaluation")
    assert accepts(lambda a, **kw: 0, "evaluation")
    assert not accepts(lambda a: 0, "evaluation")
    assert accepts(functools.partial(lambda a, evaluation: 0, 1), "evaluation")
