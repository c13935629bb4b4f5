"""The limits on the package's size and shape, and the measuring of the main path."""

import pytest

from tools.house import House

# Measure -> (limit, target). New capabilities and fixed defects raise the files and lines; no other limit is
# raised. Lower a limit when the figure has gone down, until it has reached the target.
LIMITS = {
    "files on the main path": (50, 50),
    "files in slime/": (392, 300),
    "lines in slime/": (70_600, 40_000),
    "files in one folder": (25, 25),
    "lines in one file": (400, 400),
    "lines in one function": (80, 80),
    "percent of lines not checked by pyright": (0, 0),
}


@pytest.fixture(scope="module")
def figures():
    house = House()
    return {
        "files on the main path": len(house.main_path()),
        "files in slime/": len(house.modules),
        "lines in slime/": house.lines,
        "files in one folder": max(house.folders().values()),
        "lines in one file": house.largest_file()[0],
        "lines in one function": house.largest_function()[0],
        "percent of lines not checked by pyright": 100 * (1 - house.type_checked()),
    }


@pytest.mark.parametrize("measure", LIMITS)
def test_within_the_limit(figures, measure):
    limit, target = LIMITS[measure]
    assert target <= limit
    assert figures[measure] <= limit, "python tools/house.py --main-path shows where it went up"


FILES = {
    "entry.py": """
from __future__ import annotations
from typing import TYPE_CHECKING
from slime import api
from slime.parts import Part, Unused
if TYPE_CHECKING:
    from slime.given import Given
    from slime.types_only import Shape

class Runner:
    def __init__(self, given: Given):
        self.given = given
        self.part = api.make_part()
    def run(self, shape: Shape):
        return self.part.work() + self.given.help()
    def other(self):
        return Unused()
""",
    "api.py": "from slime.factory import make_part\n",
    "factory.py": "from slime.parts import Part\ndef make_part():\n    return Part()\n",
    "parts.py": """
from slime.work import do_work
from slime.rest import do_rest
class Part:
    def work(self):
        return do_work()
    def rest(self):
        return do_rest()
class Unused:
    pass
""",
    "work.py": "def do_work():\n    from slime.late import late\n    return late()\n",
    "late.py": "def late():\n    return {}.get(1)\n",
    "rest.py": "def do_rest():\n    pass\n",
    "given.py": "class Given:\n    def help(self):\n        return 1\n",
    "types_only.py": "class Shape:\n    def work(self):\n        pass\n",
}


@pytest.fixture
def small_house(tmp_path):
    (tmp_path / "slime").mkdir()
    for name, text in FILES.items():
        (tmp_path / "slime" / name).write_text(text)
    return House(tmp_path)


def test_main_path_follows_what_runs(small_house):
    path = small_house.main_path(["slime.entry.Runner.run"])
    assert path == [f"slime/{name}.py" for name in ("entry", "given", "late", "parts", "work")]


def test_main_path_of_another_method(small_house):
    path = small_house.main_path(["slime.entry.Runner.other"])
    assert path == ["slime/entry.py", "slime/parts.py"]


# Two classes with a method of the same name; both are known, because the constructor makes them.
WORKERS = {
    "entry.py": """
from slime.good import Good
from slime.bad import Bad
class Runner:
    def __init__(self, given: Good):
        self.given, self.good, self.bad = given, Good(), Bad()
    def run(self{parameter}):
        {body}
def make_good() -> Good:
    return Good()
""",
    "good.py": """
from slime.done import done
class Good:
    def work(self):
        return done()
    def forward(self):
        pass
""",
    "bad.py": """
from slime.wrong import wrong
class Bad:
    def work(self):
        return wrong()
""",
    "better.py": "from slime.good import Good\nclass Better(Good):\n    def work(self):\n        pass\n",
    "done.py": "def done():\n    pass\n",
    "wrong.py": "def wrong():\n    pass\n",
}
GOOD = ["done", "entry", "good"]


def worker_path(folder, parameter, body, **options):
    (folder / "slime").mkdir()
    for name, text in WORKERS.items():
        text = text.replace("{parameter}", parameter).replace("{body}", body)
        (folder / "slime" / name).write_text(text)
    files = House(folder).main_path(["slime.entry.Runner.run"], **options)
    return [file.removeprefix("slime/").removesuffix(".py") for file in files]


@pytest.mark.parametrize(
    ("parameter", "body"),
    [
        ("", "return self.good.work()"),  # a field from a constructor
        ("", "return self.given.work()"),  # a field from a typed parameter
        (", part: Good", "return part.work()"),
        (", parts: list[Good]", "return [part.work() for part in parts]"),
        (", parts: dict[str, Good]", "return sorted(parts.values())[0].work()"),
        ("", "part = Good(); return part.work()"),
        ("", "return make_good().work()"),
    ],
)
def test_a_receiver_of_known_type(tmp_path, parameter, body):
    assert worker_path(tmp_path, parameter, body) == GOOD


@pytest.mark.parametrize("parameter", [", part", ", part: object", ", part: Unknown"])
def test_a_receiver_of_unknown_type_falls_back_to_the_name(tmp_path, parameter):
    assert worker_path(tmp_path, parameter, "return part.work()") == sorted([*GOOD, "bad", "wrong"])


def test_a_method_of_a_subclass_may_run_instead(tmp_path):
    body = "from slime.better import Better; part: Good = Better(); return part.work()"
    assert worker_path(tmp_path, "", body) == sorted([*GOOD, "better"])


def test_handlers_of_exceptions_do_not_count(tmp_path):
    body = """try:
            return self.good.work()
        except ValueError:
            raise KeyError(self.bad.work())"""
    assert worker_path(tmp_path, "", body) == GOOD


def test_the_forward_of_a_model_counts(tmp_path):
    assert worker_path(tmp_path, "", "return self.good(1)") == ["entry", "good"]


def test_a_method_that_is_elsewhere_is_not_followed(tmp_path):
    path = worker_path(tmp_path, "", "return self.bad.work()", elsewhere=["slime.bad.Bad.work"])
    assert path == ["entry", "good"]


def test_an_entry_that_does_not_exist(small_house):
    with pytest.raises(SystemExit, match=r"slime\.nowhere\.run"):
        small_house.main_path(["slime.nowhere.run"])


def test_sizes(small_house):
    assert len(small_house.modules) == len(FILES)
    assert small_house.lines == sum(len(text.splitlines()) for text in FILES.values())
    assert small_house.largest_function() == (3, "slime/work.py:do_work")
    assert small_house.folders() == {"slime": len(FILES)}
