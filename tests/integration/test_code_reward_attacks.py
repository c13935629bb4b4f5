"""Programs that try to be paid for nothing: `--rm-type code` gives each of them 0."""

from __future__ import annotations

import pytest

from slime.core.types import Sample
from slime.rollout.rm_hub import async_rm
from slime.utils.http import run
from tests.args import make_args
from tests.prompts import write_rows

ARGS = make_args(rm_type="code")
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert abs(mean([1, 2]) - 1.5) < 1e-6"]
UNKNOWN = ["assert undefined_function() == 'impossible'"]

ALWAYS_EQUAL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    def __abs__(self): return 0
    def __lt__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __contains__(self, other): return True
"""

ATTACKS = {
    # the three of an independent review
    "reads its own source for a word": """
import sys, re, os
for place in [sys.argv[0], "/dev/fd/3", "/proc/self/fd/3", "/program.py", __name__]:
    try:
        text = open(place).read()
        for word in re.findall("[0-9a-f]{16}", text): print(word)
    except Exception: pass
sys.stdout.flush()
os._exit(0)
""",
    "objects that are equal to everything": ALWAYS_EQUAL + """
def add(a, b): return Any()
def mean(x): return Any()
""",
    "a number that is equal to everything": """
class Number(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __hash__ = int.__hash__
def add(a, b): return Number(7)
def mean(x): return Number(7)
""",
    # the interpreter turned inside out
    "builtins replaced": ALWAYS_EQUAL + """
import builtins
builtins.abs = lambda x: 0
builtins.AssertionError = type("AssertionError", (Exception,), {})
builtins.print = lambda *a: None
builtins.isinstance = lambda *a: True
builtins.type = lambda *a: int
def abs(x): return 0
def all(x): return True
def add(a, b): return Any()
def mean(x): return 0
""",
    "a trace function that skips lines": """
import sys, threading
def trace(frame, event, arg):
    frame.f_trace_opcodes = True
    try: frame.f_lineno = frame.f_lineno + 1
    except Exception: pass
    return trace
sys.settrace(trace); threading.settrace(trace)
def add(a, b): return None
def mean(x): return None
""",
    "json patched": """
import json, sys
real = json.dumps
def dumps(message, *a, **k):
    if isinstance(message, dict) and "value" in message: message = {"passed": True}
    return real(message, *a, **k)
json.dumps = dumps
sys.modules["code_values"].encode = lambda *a, **k: True
def add(a, b): return 0
def mean(x): return 0
""",
    "exits early": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits within the call": "import os\ndef add(a, b): os._exit(0)\ndef mean(x): os._exit(0)",
    "raises an exit within the call": """
def add(a, b): raise SystemExit(0)
def mean(x): raise SystemExit(0)
""",
    "prints the outcome": """
print('{"passed": true}')
print("passed")
def add(a, b): print('{"passed": true}')
def mean(x): print('{"passed": true}')
""",
    "writes the outcome to every descriptor": """
import os
def write():
    for name in os.listdir("/proc/self/fd"):
        try: os.write(int(name), b'{"ready": true}\\n{"passed": true}\\n{"value": true}\\n' * 9)
        except OSError: pass
write()
def add(a, b): write()
def mean(x): write()
""",
    "an atexit handler": """
import atexit, os
atexit.register(lambda: os.write(1, b'{"passed": true}\\n'))
def add(a, b): return 1
""",
    "threads that write": """
import os, threading, time
def write():
    while True:
        for number in range(3, 12):
            try: os.write(number, b'{"passed": true}\\n')
            except OSError: pass
        time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
def add(a, b): time.sleep(0.2); return 0
def mean(x): time.sleep(0.2); return 0
""",
    "looks for the tests in memory": """
import gc, sys, re
def find(kind):
    frame = sys._getframe()
    texts = []
    while frame:
        texts += [repr(v) for v in frame.f_locals.values()] + [repr(v) for v in frame.f_globals.values()]
        frame = frame.f_back
    for thing in gc.get_objects():
        try: texts.append(repr(thing)[:5000])
        except BaseException: pass
    for text in texts:
        found = re.search(r"add\\(1, 2\\) == (-?\\d+)", text)
        if found: return int(found[1])
    return None
def add(a, b): return find("add")
def mean(x): return find("mean")
""",
    "looks for the tests in files and processes": """
import os, re
def find():
    for root in ("/proc", "/tmp", "/", "/work", "/root", "/home"):
        for folder, _, files in os.walk(root):
            if folder.count("/") > 3 or folder.startswith(("/proc/sys", "/usr", "/lib")): continue
            for name in files:
                if not name.endswith(("cmdline", "environ", ".json", ".jsonl", "program.py")): continue
                try: text = open(os.path.join(folder, name), errors="replace").read(100000)
                except OSError: continue
                found = re.search(r"add\\(1, 2\\) == (-?\\d+)", text)
                if found: return int(found[1])
def add(a, b): return find()
def mean(x): return find()
""",
}  # fmt: skip


def grade(program, tests, args=ARGS):
    sample = Sample(response=f"```python\n{program}\n```", metadata={"tests": tests})
    return run(async_rm(args, sample))


@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS.keys())
def test_no_reward_for_programs_that_solve_nothing(program):
    for tests in (TESTS[:1], TESTS[2:], UNKNOWN):
        assert grade(program, tests) == 0.0


def test_the_same_tests_pay_a_program_that_solves_them():
    right = "def add(a, b):\n    return a + b\ndef mean(x):\n    return sum(x) / len(x)"
    assert grade(right, TESTS) == 1.0
    unsandboxed = make_args(rm_type="code", allow_unsandboxed_code=True)
    assert grade(right, TESTS, unsandboxed) == 1.0
    assert grade(right.replace("+", "-"), TESTS, unsandboxed) == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == 5", "assert 5 == f(1)", "assert f(1) in (5, 6)", "assert not f(1) != 5",
        "assert abs(f(1) - 5) < 1", "assert math.isclose(f(1), 5)", "assert 4 < f(1) < 6",
        "assert f(1) - 5 == 0", "assert 5 in [f(1)]", "assert {f(1): 1} == {5: 1}", "assert 5 in f(1)",
        "assert (f(1) == 5) is True", "assert sorted([f(1)]) == [5]", "assert f(1).value == 5",
        "def check(candidate):\n    assert candidate(1) == 5\ncheck(f)",
        "for given, wanted in [(1, 5)]:\n    assert f(given) == wanted",
        "import unittest\nunittest.TestCase().assertEqual(f(1), 5)",
    ],
)  # fmt: skip
def test_objects_of_the_program_decide_no_comparison_with_a_constant(test):
    assert grade(ALWAYS_EQUAL + "def f(x): return Any()", [test]) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): raise StopIteration",
        "class End(StopIteration): pass\ndef f(x): raise End",
        "import sys\nchannel = sys.modules['code_values'].Channel\nwrite = channel.write\n"
        "def f(x):\n    channel.write = lambda self, _: write(self, {'raised': ['StopIteration'], 'text': ''})",
        "class End:\n    def __bool__(self): raise StopIteration\ndef f(x): return End()",
    ],
)
def test_a_program_does_not_end_the_loops_of_the_tests(program):
    for test in (
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 5), (2, 6)]))",
        "assert all(map(lambda case: f(case) and f(case) == 5, [1, 2]))",
        "for given, wanted in zip(map(f, [1, 2]), [5, 6]):\n    assert given == wanted",
    ):
        assert grade(program, [test]) == 0.0


def test_answers_in_a_data_file_cannot_be_read(tmp_path):
    """The third attack of the review: for input and output, the answers are looked up in the data."""
    tests = [{"input": "4", "output": "8"}]
    data = write_rows(tmp_path / "train.jsonl", [{"input": "double", "metadata": {"tests": tests}}])
    program = (
        f"import json\nrow = json.loads(open({str(data)!r}).readline())\n"
        "print(row['metadata']['tests'][0]['output'])"
    )
    assert grade(program, tests) == 0.0
    assert grade("print(2 * int(input()))", tests) == 1.0


# What a test may do with a program that lives in another process, each with a program that passes.
KINDS = {
    "namedtuples": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and f().x == 1 and isinstance(f(), tuple)\nx, y = f()\nassert y == 2",
    ),
    "counters": (
        "from collections import Counter\ndef f(s): return Counter(s)",
        "assert f('aab') == {'a': 2, 'b': 1}\nassert f('aab')['a'] == 2",
    ),
    "tolerances": (
        "def f(x): return x / 3",
        "assert math.isclose(f(1), 0.3333333333333333)\nassert abs(f(1) - 1/3) < 1e-9",
    ),
    "generators": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]\nassert sum(f(4)) == 6"),
    "arguments changed in place": (
        "def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]",
    ),
    "arrays": (
        "import numpy as np\ndef f(): return np.arange(3)\ndef g(): return np.float64(2.5)",
        "import numpy as np\nassert (f() == np.array([0, 1, 2])).all()\nassert g() == 2.5",
    ),
    "large numbers": ("def f(): return -2 ** 200", "assert f() == -2 ** 200"),
    "functions as arguments": ("def f(g, x): return g(g(x))", "assert f(lambda v: v + 1, 3) == 5"),
    "exceptions": (
        "class Wrong(ValueError): pass\ndef f(): raise Wrong('no')",
        "try:\n    f()\n    assert False\nexcept Wrong as e:\n    assert str(e) == 'no'\n"
        "try:\n    f()\n    assert False\nexcept ValueError:\n    pass",
    ),
    "classes": (
        "class V:\n    def __init__(s, a): s.a = a\n    def __add__(s, o): return V(s.a + o.a)\n"
        "    def __eq__(s, o): return s.a == o.a\n    def __mul__(s, k): return V(s.a * k)\n"
        "    def __len__(s): return s.a\n    def __getitem__(s, i): return i",
        "assert V(1) + V(2) == V(3) != V(4)\nassert (V(2) * 3).a == 6 and len(V(4)) == 4\n"
        "assert isinstance(V(1), V) and V(1)[7] == 7\nv = V(1)\nv.a = 9\nassert v.a == 9",
    ),
    "state": ("n = 0\ndef f():\n    global n\n    n += 1", "f()\nf()\nassert n == 2"),
    "a function with a builtin's name": ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
    "containers": (
        "def f(): return {'a': (1, {2}), 3: [None, True, b'x', 1.5, 2j]}",
        "assert f() == {'a': (1, {2}), 3: [None, True, b'x', 1.5, 2j]}\nassert f()[3][1] is True",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "test"), KINDS.values(), ids=KINDS.keys())
def test_what_tests_can_do(program, test):
    assert grade(program, [test]) == 1.0
