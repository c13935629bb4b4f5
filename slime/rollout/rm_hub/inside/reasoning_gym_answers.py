"""Inside the sandbox: the score that a reasoning-gym task gives to an answer.

Some tasks pass the answer to `eval` or to sympy's `parse_expr`, which is `eval` as well. While an answer is
scored both accept expressions without names, attributes and calls, sympy's also elementary functions:
what an answer can be, and nothing that runs code or remains for the next question.
"""

import ast
import contextlib
import functools
import re
import sys

_PLAIN = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load,
    ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator,
)  # fmt: skip
_SYMBOLIC = (*_PLAIN, ast.Name, ast.Call, ast.keyword)
_MAKERS = {"Symbol", "Integer", "Float", "Rational"}  # what sympy's parser writes round its parts
_FUNCTIONS = {
    "sqrt", "exp", "log", "ln", "Abs", "sign", "root", "cbrt", "factorial", "binomial",
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "atan2",
    "sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "acoth",
    "erf", "erfc", "erfi", "Ei", "li", "Si", "Ci", "gamma", "floor", "ceiling", "Max", "Min", "Pow", "Mul", "Add",
}  # fmt: skip


def load():
    import reasoning_gym
    from sympy.parsing import sympy_parser

    make_dataset = functools.cache(
        lambda task, seed, size: reasoning_gym.create_dataset(task, seed=seed, size=size)
    )

    def score(question):
        task, seed, size, row, answer = question
        rows = make_dataset(task, seed, size)
        entry = rows[row]
        if is_no_number(answer) and not is_no_number(str(entry["answer"])):
            return 0.0
        with nothing_evaluated(sympy_parser):
            return float(rows.score_answer(answer, entry))

    return score


def is_no_number(text):
    """Return whether the text contains a NaN: tasks score by `min(1.0, nan)`, which is 1.0."""
    return bool(re.search("(?<![a-z])nan[ij]?(?![a-z])", "".join(text.lower().split())))


@contextlib.contextmanager
def nothing_evaluated(sympy_parser):
    """Let `eval` of reasoning-gym's modules and of sympy's parser take plain expressions only."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("reasoning_gym.") and hasattr(module, "__dict__")
    ]
    eval_expr = sympy_parser.eval_expr

    def checked_eval_expr(code, local_dict, global_dict):
        check_symbolic(code, local_dict)
        return eval_expr(code, local_dict, global_dict)

    for module in modules:
        module.__dict__["eval"] = plain_value
    sympy_parser.eval_expr = checked_eval_expr
    try:
        yield
    finally:
        sympy_parser.eval_expr = eval_expr
        for module in modules:
            del module.__dict__["eval"]


def plain_value(text):
    """Evaluate numbers, strings, containers and operators, and nothing else."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _PLAIN):
            raise ValueError(f"an answer with a {type(node).__name__}")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})


def check_symbolic(code, local_dict):
    """Raise ValueError unless sympy's translation of an answer calls elementary functions alone."""
    tree = ast.parse(code.strip(), mode="eval")
    makers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _MAKERS | _FUNCTIONS:
                raise ValueError("an answer that calls something else")
            if node.func.id in _MAKERS:
                makers.update(map(id, node.args))
        if not isinstance(node, _SYMBOLIC):
            raise ValueError(f"an answer with a {type(node).__name__}")
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
        if is_text and id(node) not in makers:
            raise ValueError("an answer with a text in it")
