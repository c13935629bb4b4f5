"""Imports go one way, third parties have owners, arguments and environment are read in one place.

Read from the syntax trees, so nothing heavy is imported; the last test starts a process instead. The rules are functions from a file's
path and tree to complaints, and each is also shown a line it must complain about.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What each part of slime may import of slime; every part may import itself, `core` and `utils`.
# Entry points, which stand above, may import any.
MAY_IMPORT = {
    "core": set(),
    "utils": {"config"},
    "config": set(),
    "algorithms": set(),
    "diagnosis": {"config", "runlog"},
    "runlog": {"config", "diagnosis"},
    "data": {"config"},
    "weights": {"config", "data", "runlog"},
    "engine": {"config", "data", "algorithms", "weights"},
    "rollout": {"config", "data", "algorithms"},
    "backends": {"config", "data", "algorithms", "weights", "runlog"},
    "serving": {"config", "data", "runlog", "weights"},
    "compat": {"config", "data", "rollout"},
    "ray": {
        "config", "data", "algorithms", "weights", "backends", "rollout", "serving", "runlog",
        "diagnosis",
    },
}  # fmt: skip
EVERYWHERE = {"core", "utils"}
ENTRY_POINTS = ("cli",)
# Short re-exports under paths that users' code imports.
PUBLIC = [
    "slime/utils/data.py", "slime/utils/tokenizer.py", "slime/utils/http_utils.py",
    "slime/utils/misc.py", "slime/utils/processing_utils.py", "slime/utils/mask_utils.py",
    "slime/rollout/rm_hub/math_dapo_utils.py", "slime/rollout/rm_hub/math_utils.py",
]  # fmt: skip

# Who may import what: module prefix -> path prefixes.
OWNERS = {
    "megatron": ["slime/backends/megatron_utils/"],
    "sglang": ["slime/backends/sglang_utils/", "slime/weights/sglang_transport.py"],
    "sglang_router": ["slime/backends/sglang_utils/"],
    "torch.distributed.fsdp": ["slime/backends/fsdp_utils/"],
    "torch.distributed._composable.fsdp": ["slime/backends/fsdp_utils/"],
    "ray": ["slime/ray/", "slime/backends/", "slime/cli/doctor/", "slime/utils/addresses.py"],
    "fla": ["slime/algorithms/delta_kernels.py"],
    "huggingface_hub": ["slime/config/hub.py"],
    "llguidance": ["slime/engine/scheduler/constraint.py"],
    "wandb": ["slime/runlog/tracking.py"],
    "tensorboard": ["slime/runlog/tracking.py"],
    "torch.utils.tensorboard": ["slime/runlog/tracking.py"],
}

ARGUMENTS = ["slime/config/"]
ENVIRONMENT = ["slime/config/"]


def imported(tree):
    """(line, dotted module) of every import, also those inside functions and by import_module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def inside_functions(tree):
    """Lines inside of functions, which run when these are called."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for node in functions for line in range(node.lineno + 1, node.end_lineno + 1)}


def inside(module, package):
    return module == package or module.startswith(package + ".")


def wrong_directions(path, tree):
    parts = path.split("/")
    if parts[0] != "slime" or len(parts) < 3 or parts[1] in ENTRY_POINTS:
        return
    for line, module in imported(tree):
        if not inside(module, "slime") or module == "slime":
            continue
        target = module.split(".")[1]
        if target == "compat" and line in inside_functions(tree):  # only when a hook asks for it
            continue
        allowed = MAY_IMPORT[parts[1]] | EVERYWHERE | {parts[1], "__version__"}
        if target not in allowed and path not in PUBLIC:
            yield f"{path}:{line}: {parts[1]} must not import {module}"


def foreign_imports(path, tree):
    for line, module in imported(tree):
        for package, owners in OWNERS.items():
            if inside(module, package) and not path.startswith(tuple(owners)):
                yield f"{path}:{line}: {module} is imported only in {', '.join(owners)}"


def environment_reads(path, tree):
    if path.startswith(tuple(ENVIRONMENT)):
        return
    names = {"environ", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in names
        if attribute and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield f"{path}:{node.lineno}: os.{node.attr}; use slime/config/env.py"
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        if from_os and names & {alias.name for alias in node.names}:
            yield f"{path}:{node.lineno}: imports the environment; use slime/config/env.py"


def is_args(node):
    """`args` or `<something>.args`."""
    return (isinstance(node, ast.Name) and node.id == "args") or (
        isinstance(node, ast.Attribute) and node.attr == "args"
    )


def argument_writes(path, tree):
    if path.startswith(tuple(ARGUMENTS)):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            if not isinstance(node.ctx, ast.Load):
                yield f"{path}:{node.lineno}: args.{node.attr} is written; use args.replace"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in ("setattr", "delattr") and is_args(node.args[0]):
                yield f"{path}:{node.lineno}: {node.func.id} on args; use args.replace"
            if node.func.id == "getattr" and len(node.args) == 3 and is_args(node.args[0]):
                yield f"{path}:{node.lineno}: getattr(args, ..., default); every flag exists"


RULES = [wrong_directions, foreign_imports, environment_reads, argument_writes]


def sources():
    files = [*ROOT.glob("*.py"), *(ROOT / "slime").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    assert len(files) > 30
    return [(str(file.relative_to(ROOT)), ast.parse(file.read_text())) for file in sorted(files)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    complaints = [c for path, tree in sources() for c in rule(path, tree)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(
    ("rule", "path", "line"),
    [
        (wrong_directions, "slime/utils/x.py", "from slime.rollout.data_source import A"),
        (wrong_directions, "slime/rollout/x.py", "import slime.engine.server.__main__"),
        (
            wrong_directions,
            "slime/algorithms/x.py",
            "def f():\n    from slime.backends import base",
        ),
        (wrong_directions, "slime/engine/x.py", "from slime import rollout"),
        (wrong_directions, "slime/rollout/x.py", "from slime.compat import batches"),
        (foreign_imports, "slime/rollout/x.py", "import ray"),
        (foreign_imports, "train.py", "from ray.util import state"),
        (foreign_imports, "slime/backends/base.py", "from megatron.core import mpu"),
        (
            foreign_imports,
            "slime/ray/x.py",
            "import importlib; importlib.import_module('sglang.srt')",
        ),
        (
            foreign_imports,
            "slime/backends/base.py",
            "from torch.distributed.fsdp import fully_shard",
        ),
        (foreign_imports, "slime/runlog/x.py", "from torch.utils import tensorboard"),
        (environment_reads, "slime/ray/x.py", "import os\nos.environ['A'] = '1'"),
        (environment_reads, "slime/ray/x.py", "from os import getenv"),
        (argument_writes, "slime/ray/x.py", "args.lr = 1"),
        (argument_writes, "slime/ray/x.py", "self.args.lr += 1"),
        (argument_writes, "slime/ray/x.py", "del args.lr"),
        (argument_writes, "slime/ray/x.py", "setattr(self.args, 'lr', 1)"),
        (argument_writes, "slime/ray/x.py", "getattr(args, 'lr', None)"),
    ],
)
def test_rule_complains(rule, path, line):
    assert len(list(rule(path, ast.parse(line)))) >= 1


@pytest.mark.parametrize(
    ("rule", "path", "line"),
    [
        (wrong_directions, "slime/ray/x.py", "from slime.rollout.data_source import A"),
        (wrong_directions, "slime/cli/__init__.py", "from slime.engine import server"),
        (wrong_directions, "slime/rollout/x.py", "def f():\n    from slime.compat import batches"),
        (foreign_imports, "slime/rollout/x.py", "import raylib"),
        (foreign_imports, "slime/ray/x.py", "import ray"),
        (environment_reads, "slime/config/env.py", "import os\nos.environ"),
        (argument_writes, "slime/ray/x.py", "self.args = args; x = args.lr; getattr(args, 'lr')"),
    ],
)
def test_rule_lets_pass(rule, path, line):
    assert not list(rule(path, ast.parse(line)))


def test_the_driver_does_not_import_torch():
    """It would delay every start by seconds."""
    program = "import sys, slime.ray.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
