"""The limits on the package's size and shape, and the measuring of the main path."""

import pytest

from tools.house import House

# Measure -> (limit, target). A limit is never raised; lower it when the figure has gone down, until
# it has reached the target.
LIMITS = {
    "files on the main path": (67, 50),
    "files in slime/": (329, 300),
    "lines in slime/": (48_860, 40_000),
    "files in one folder": (25, 25),
    "lines in one file": (400, 400),
    "lines in one function": (83, 80),
    "percent of lines not checked by pyright": (14, 0),
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


def test_an_entry_that_does_not_exist(small_house):
    with pytest.raises(SystemExit, match=r"slime\.nowhere\.run"):
        small_house.main_path(["slime.nowhere.run"])


def test_sizes(small_house):
    assert len(small_house.modules) == len(FILES)
    assert small_house.lines == sum(len(text.splitlines()) for text in FILES.values())
    assert small_house.largest_function() == (3, "slime/work.py:do_work")
    assert small_house.folders() == {"slime": len(FILES)}
