"""`--rm-type code`: 1 if the program in the response passes every test, else 0.

The program is the last fenced block after `</think>`, or the whole text without one. Tests are in
`metadata["tests"]`, or as JSON in the label: a list of `{"input": ..., "output": ...}` (standard input and
expected standard output), or of Python statements such as `"assert add(1, 2) == 3"`.

Expected values are never in the process or the file system of the program. Outputs are compared here;
statements run in one sandbox, which calls the program in another:

    tests (inside/code_tests.py)  -- call, arguments -->  program (inside/code_program.py)
                                  <------- value -------
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.base_types import RewardArgs
from slime.rollout.rm_hub.workers import isolated
from slime.rollout.sandbox import Limits, SandboxProcess, program_slots, run_python, start

TIME_LIMIT_S = 6.0  # per case of input and output; for all statements together
_START_S = 4.0  # added for starting two interpreters
_MAX_PROGRAM_CHARS = 100_000
_MAX_LINE_BYTES = 8 << 20  # of one value
_LIMITS = Limits(cpu_s=TIME_LIMIT_S, output_bytes=_MAX_LINE_BYTES)
_LANGUAGES = ("", "python", "python3", "py")
_INSIDE = Path(__file__).with_name("inside")


async def reward(args: RewardArgs, sample: Sample) -> float:
    return await grade(sample, isolate=isolated(args))


async def grade(sample: Sample, *, isolate: bool) -> float:
    program, tests = find_program(sample.response), _tests(sample)
    if not program:
        return 0.0
    statements = [test for test in tests if isinstance(test, str)]
    if statements and not await _passes_statements(program, statements, isolate):
        return 0.0
    for test in tests:
        if isinstance(test, dict) and not await _passes_case(program, test, isolate):
            return 0.0
    return 1.0


def find_program(response: str) -> str:
    text = response.rsplit("</think>", 1)[-1][-_MAX_PROGRAM_CHARS:]
    blocks = list(_fenced_blocks(text))
    return (blocks[-1] if blocks else text).strip()


def _fenced_blocks(text: str) -> Iterator[str]:
    """Yield the content of code fences for Python or without a language, in linear time."""
    start = text.find("```")
    while start >= 0 and (line_end := text.find("\n", start)) >= 0:
        opening = text[start + 3 : line_end]
        if "```" in opening:  # inline code
            start = text.find("```", start + 3 + opening.rindex("```") + 3)
            continue
        if (end := text.find("```", line_end)) < 0:
            return
        if (opening.split() or [""])[0].lower() in _LANGUAGES:
            yield text[line_end + 1 : end]
        start = text.find("```", end + 3)


async def _passes_case(program: str, test: dict[str, Any], isolate: bool) -> bool:
    result = await run_python(
        program, stdin=_as_text(test["input"]), time_limit_s=TIME_LIMIT_S, isolate=isolate
    )
    return result.ok and _lines(result.stdout) == _lines(_as_text(test["output"]))


async def _passes_statements(program: str, statements: list[str], isolate: bool) -> bool:
    async with program_slots():
        try:
            return await asyncio.wait_for(
                _run_statements(program, statements, isolate), TIME_LIMIT_S + _START_S
            )
        except (asyncio.TimeoutError, ConnectionError, ValueError):  # ValueError: a line too long
            return False


async def _run_statements(program: str, statements: list[str], isolate: bool) -> bool:
    """Relay lines between the two processes until the test process reports the outcome.

    Only the test process can report it. Each side answers one line with one line, so extra lines that a
    program prints are taken as the values of later calls, not as an outcome.
    """
    async with (
        _script("code_program", isolate) as program_process,
        _script("code_tests", isolate) as test_process,
    ):
        await _send(program_process, {"program": program})
        await _send(test_process, {"tests": statements})
        if await _line(program_process) != b'{"ready": true}\n':
            return False
        while "passed" not in (message := json.loads(line := await _line(test_process))):
            program_process.stdin.write(line)
            await program_process.stdin.drain()
            test_process.stdin.write(await _line(program_process))
            await test_process.stdin.drain()
        return message["passed"] is True


async def _line(process: SandboxProcess) -> bytes:
    line = await process.stdout.readline()
    if not line:
        raise ConnectionResetError("the process ended")
    return line


async def _send(process: SandboxProcess, message: dict[str, Any]) -> None:
    process.stdin.write(json.dumps(message).encode() + b"\n")
    await process.stdin.drain()


@contextlib.asynccontextmanager
async def _script(name: str, isolate: bool) -> AsyncIterator[SandboxProcess]:
    paths = [str(_INSIDE / f"{one}.py") for one in (name, "code_values")]
    process = await start(
        [sys.executable, "-I", paths[0]], limits=_LIMITS, read_only=paths, isolate=isolate
    )
    try:
        yield process
    finally:
        await process.close()


def _tests(sample: Sample) -> list[Any]:
    tests = sample.metadata.get("tests", sample.label)
    if isinstance(tests, str):
        try:
            tests = orjson.loads(tests)
        except orjson.JSONDecodeError:
            tests = [tests]
    tests = tests if isinstance(tests, list) else [tests]
    if not tests or not all(_is_test(test) for test in tests):
        raise UserError(
            'the code reward needs metadata["tests"], or the label, to hold a list of '
            '{"input": ..., "output": ...} or of Python statements; sample '
            f"{sample.index} has {tests!r}"[:500]
        )
    return tests


def _is_test(test: object) -> bool:
    if isinstance(test, dict):
        return {"input", "output"} <= set(test)
    return isinstance(test, str) and bool(test.strip())


def _as_text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
