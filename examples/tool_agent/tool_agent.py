"""A model that computes with tools: `<calc>2*(3+4)</calc>` or `<python>print(sum(range(10)))</python>`.

What a tool answers is appended as tokens that are not trained on. The history is never tokenized again:
the engine continues exactly the tokens it produced.
"""

from __future__ import annotations

import ast
import operator
import re

from slime.rollout.observation import add_observation
from slime.rollout.sandbox import run_python
from slime.rollout.sglang_rollout import generate as one_turn
from slime.utils.types import Sample, Status

MAX_CALLS = 4
MAX_OUTPUT = 400  # characters
STOPS = ["</calc>", "</python>"]
_CALL = re.compile(r"<(calc|python)>((?:(?!<(?:calc|python)>).)*)</\1>\s*$", re.DOTALL)


async def generate(args, sample: Sample, sampling_params: dict) -> Sample:
    """Turns of the model and outputs of its tools, until it stops without a call."""
    params = {**sampling_params, "stop": [*(args.rollout_stop or []), *STOPS], "no_stop_trim": True}
    for _ in range(MAX_CALLS + 1):
        sample = await one_turn(args, sample, params)
        call = _CALL.search(sample.response)
        if sample.status != Status.COMPLETED or call is None:
            return sample
        output = await use_tool(call[1], call[2], isolate=not args.allow_unsandboxed_code)
        if not add_observation(args, sample, f"\n<output>{output}</output>\n", params):
            return sample
    sample.status = Status.TRUNCATED
    return sample


async def use_tool(name: str, text: str, *, isolate: bool = True) -> str:
    if name == "calc":
        return calculate(text)
    done = await run_python(text.strip(), time_limit_s=5.0, isolate=isolate)
    output = done.stdout if done.ok else done.stderr.strip().splitlines()[-1:] or ["timed out"]
    output = output if isinstance(output, str) else output[0]
    return output.strip()[:MAX_OUTPUT]


_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def calculate(text: str) -> str:
    """Arithmetic on numbers and nothing else; odd input is answered, not raised."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
        return f"{value:.10g}" if isinstance(value, float) else str(value)[:MAX_OUTPUT]
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("only arithmetic")
