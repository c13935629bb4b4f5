"""`--rm-type code`: 1 if the program in the response passes every test, else 0.

The program is the last fenced block behind `</think>`, or the whole text without one. Tests are in
`metadata["tests"]`, or as JSON in the label: a list of `{"input": ..., "output": ...}` (standard input
and expected standard output), or of Python statements such as `"assert add(1, 2) == 3"`, which run behind
the program.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson

from slime.rollout.rm_hub.settings import RewardArgs, isolated
from slime.rollout.sandbox import run_python
from slime.utils.errors import UserError
from slime.utils.types import Sample

TIME_LIMIT_S = 6.0  # per test
_LONGEST_PROGRAM = 100_000  # characters
_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


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
    text = response.rsplit("</think>", 1)[-1][-_LONGEST_PROGRAM:]
    blocks = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip()


async def _passes_statements(program: str, statements: list[str], isolate: bool) -> bool:
    """Behind the tests a word is printed that a program which leaves early does not know."""
    passed = secrets.token_hex(8)
    body = "\n".join([program, *statements, f"print({passed!r})"])
    result = await run_python(body, time_limit_s=TIME_LIMIT_S, isolate=isolate)
    lines = result.stdout.rstrip().splitlines()
    return result.ok and bool(lines) and lines[-1] == passed


async def _passes_case(program: str, test: dict[str, Any], isolate: bool) -> bool:
    result = await run_python(
        program, stdin=_as_text(test["input"]), time_limit_s=TIME_LIMIT_S, isolate=isolate
    )
    return result.ok and _lines(result.stdout) == _lines(_as_text(test["output"]))


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
