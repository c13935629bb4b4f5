"""The code reward and its sandbox; and rewards that block hold up no generation."""

from __future__ import annotations

import asyncio
import secrets
import stat
import time
from pathlib import Path

import pytest

from slime.rollout import sandbox
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks import check_hooks
from slime.rollout.rm_hub import async_rm, code
from slime.rollout.sandbox import run_python
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.errors import UserError
from slime.utils.http import background_loop, run
from slime.utils.types import Sample
from tests import rollout_hooks
from tests.args import make_args
from tests.fake_engine import Reply
from tests.odd_texts import ODD
from tests.prompts import flat, rollout_args

ADD = "Sure.\n```python\ndef add(a, b):\n    return a + b\n```"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = "```python\nn = int(input())\nprint(n * 2)\n```"


def grade(response, **fields):
    args = make_args(rm_type="code")
    return run(async_rm(args, Sample(response=response, **fields)))


@pytest.mark.parametrize(
    ("response", "tests", "reward"),
    [
        (ADD, ASSERTS, 1.0),
        (ADD.replace("+", "-"), ASSERTS, 0.0),
        ("```\ndef add(a, b): return 1\n```\n" + ADD, ASSERTS, 1.0),  # the last block
        ("<think>```python\nx\n```</think>" + ADD, ASSERTS, 1.0),
        ("def add(a, b): return a + b", ASSERTS, 1.0),
        ("```python\nimport sys\nsys.exit(0)\n```", ASSERTS, 0.0),  # leaving early proves nothing
        ("```python\nwhile True: pass\n```", ASSERTS, 0.0),
        (ECHO, [{"input": "4", "output": "8\n"}, {"input": "5", "output": "10"}], 1.0),
        (ECHO, [{"input": "4", "output": "8"}, {"input": "5", "output": "11"}], 0.0),
        ("", ASSERTS, 0.0),
    ],
)
def test_code_reward(response, tests, reward):
    assert grade(response, metadata={"tests": tests}) == reward


def test_tests_may_be_in_the_label_and_must_be_tests():
    assert grade(ECHO, label='[{"input": "1", "output": "2"}]') == 1.0
    assert grade(ADD, label="assert add(2, 2) == 4") == 1.0
    with pytest.raises(UserError, match="needs metadata"):
        grade(ADD, metadata={"tests": [{"in": 1}]})


def test_odd_programs_are_wrong_and_nothing_else():
    for text in ODD[:8]:
        assert (
            run(code.grade(Sample(response=text, metadata={"tests": ASSERTS}), isolate=True)) == 0.0
        )


def sandboxed(program, time_limit_s=30.0, **options):
    """Time enough for a busy machine, where time is not what is tested."""
    return run(run_python(program, time_limit_s=time_limit_s, **options))


def test_programs_have_no_network():
    done = sandboxed("import socket; socket.create_connection(('127.0.0.1', 1), timeout=1)")
    # The loopback of a new network namespace is down: not even a refusal comes back.
    assert "Network is unreachable" in done.stderr or "Cannot assign" in done.stderr


def test_programs_cannot_write_outside_their_folder(tmp_path):
    target = tmp_path / "x"
    done = sandboxed(f"open('y', 'w').write('1'); print('here'); open({str(target)!r}, 'w')")
    assert done.stdout == "here\n" and "Read-only file system" in done.stderr
    assert not target.exists()


def test_programs_see_no_environment_and_no_other_process():
    done = sandboxed("import os; print(sorted(os.environ), os.getpid())")
    assert done.stdout == "['LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR'] 1\n"


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)"],
)
def test_time_is_limited_whatever_a_program_does(program):
    program += f"  # {secrets.token_hex(8)}"
    start = time.monotonic()
    assert not sandboxed(program, time_limit_s=2.0).ok
    assert time.monotonic() - start < 50
    assert not is_running(program)


def test_a_running_program_can_be_found_by_its_text():
    """What the test above looks for is there while a program runs."""
    program = "import time; time.sleep(60)  # " + secrets.token_hex(8)
    call = asyncio.run_coroutine_threadsafe(
        run_python(program, time_limit_s=60.0), background_loop()
    )
    while not (found := is_running(program)) and not call.done():
        time.sleep(0.01)
    call.cancel()
    assert found


def test_programs_and_tests_may_be_longer_than_an_argument_of_a_process():
    """128 KiB is all that Linux takes; a response of garbage must be wrong, not an error."""
    assert grade("汉" * 90_000, metadata={"tests": ASSERTS}) == 0.0
    padding = [f"assert add({i}, 1) == {i + 1}  # {'x' * 1000}" for i in range(200)]
    assert grade(ADD, metadata={"tests": padding}) == 1.0


def test_a_traceback_names_no_random_folder():
    """It becomes part of the tokens that a model sees, which must not differ from run to run."""
    first, second = (sandboxed("import nothing_of_this_name").stderr for _ in range(2))
    assert first == second and "ModuleNotFoundError" in first


def is_running(program):
    return any(read(path) == program.encode() for path in Path("/proc").glob("[0-9]*/fd/3"))


def read(path):
    """Files only: to read another process's pipe would wait for what it is sent, and take it away."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.stat().st_mode) else b""
    except OSError:
        return b""


def test_memory_and_output_are_limited():
    done = sandboxed("x = bytearray(10 ** 9)", memory_bytes=200 << 20)
    assert "MemoryError" in done.stderr
    assert not sandboxed("while True: print('x' * 10000)").ok


@pytest.mark.parametrize("isolate", [True, False])
def test_programs_start_threads_but_no_processes(isolate):
    done = sandboxed("import os\nos.fork()", isolate=isolate)
    assert "PermissionError" in done.stderr
    done = sandboxed("import subprocess\nsubprocess.run(['true'])", isolate=isolate)
    assert "PermissionError" in done.stderr
    threads = "import threading\nt = threading.Thread(target=lambda: print(5))\nt.start(); t.join()"
    assert sandboxed(threads, isolate=isolate).stdout == "5\n"


def test_without_namespaces_the_limits_still_hold_if_the_user_says_so():
    assert run(run_python("print(3)", isolate=False)).stdout == "3\n"
    start = time.monotonic()
    assert not run(run_python("while True: pass", time_limit_s=1.0, isolate=False)).ok
    assert time.monotonic() - start < 60


def test_a_system_that_refuses_namespaces_is_refused_at_start(monkeypatch, tmp_path):
    """A child that cannot unshare: the same script with the call's number of a closed door."""
    child = tmp_path / "child.py"
    child.write_text(Path(sandbox._CHILD).read_text().replace("_libc.unshare(", "_refused("))
    text = child.read_text().replace(
        "def main()", "def _refused(flags):\n    ctypes.set_errno(1)\n    return -1\n\n\ndef main()"
    )
    child.write_text(text)
    monkeypatch.setattr(sandbox, "_CHILD", str(child))
    sandbox.check_isolation.cache_clear()
    try:
        with pytest.raises(
            UserError, match=r"unshare: Operation not permitted.*--allow-unsandboxed-code"
        ):
            check_hooks(make_args(rm_type="code"))
        check_hooks(make_args(rm_type="code", allow_unsandboxed_code=True))
    finally:
        sandbox.check_isolation.cache_clear()


def test_a_reward_that_blocks_its_event_loop_does_not_stall_generation(tmp_path, fake_engines):
    """One request at a time, and no reward comes back before the last one is made."""
    fake_engines(rollout_hooks.opening_at(3), concurrency=1)
    args = rollout_args(
        tmp_path, rollout_batch_size=2, n_samples_per_prompt=2,
        custom_rm_path="tests.rollout_hooks.reward_blocks_its_loop",
    )  # fmt: skip
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.reward for s in flat(output)] == [1.0] * 4  # generation waits for no reward
    assert rollout_hooks.seen == ["begins", "ends"] * 4  # they wait for each other


def test_a_reward_may_ask_the_engines(tmp_path, fake_engines):
    (engine,) = fake_engines(lambda request: Reply(text="7"))
    args = rollout_args(
        tmp_path, rollout_batch_size=2, n_samples_per_prompt=1,
        custom_rm_path="tests.rollout_hooks.reward_by_the_engine",
    )  # fmt: skip
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.reward for s in flat(output)] == [7.0, 7.0]
    assert len(engine.requests) == 4
