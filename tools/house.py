"""Measure how easy the package is to enter: sizes, folders, the main path, types.

    python tools/house.py              the table
    python tools/house.py --main-path  also the files of the main path

The main path is what one generate + train + update of weights runs, with FSDP, the tensor transport
and the default rollout function. It is computed from the syntax trees, starting from `ENTRIES`:

- a function, class or constant is on the path if code on the path refers to it by name;
- a method is on the path if its class is known and code on the path mentions an attribute of its
  name. Known are the classes on the path, and those that known classes refer to in constructors,
  in the types of constructors' parameters and in the types of fields;
- other annotations, imports under `TYPE_CHECKING`, re-exports and constructors do not count;
- `ELSEWHERE` is not followed: the engine, what is settled before a run starts, what only records,
  and what another flag would choose.

It is an estimate: a method called on an object of unknown type may belong to another class.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = {
    "rollout": [
        "slime.ray.rollout_group.RolloutGroup.generate",
        "slime.ray.rollout.RolloutManager.generate",
        "slime.rollout.sglang_rollout.generate_rollout",
    ],
    "train": [
        "slime.ray.train_group.TrainGroup.train",
        "slime.backends.fsdp_utils.actor.FSDPTrainRayActor.train",
    ],
    "update": [
        "slime.ray.train_group.TrainGroup.update_weights",
        "slime.backends.fsdp_utils.actor.FSDPTrainRayActor.update_weights",
    ],
}
ELSEWHERE = [
    "slime/engine/*",
    "slime/config/*",
    "slime/utils/*",
    "slime/runlog/*",
    "slime/diagnosis/*",
    "slime/backends/megatron_utils/*",
    "slime/backends/sglang_utils/*",
    "slime/weights/sglang_*",
    "slime/weights/distributed_transport.py",
    "slime/weights/hf_folder.py",  # the disk transport
    "slime/weights/fp8*",
    "slime/rollout/agents/*",
    "slime/rollout/sandbox/*",
]
# Method names of built-in types: counted only on attributes of `self`.
GENERIC = {name for kind in (dict, list, str, set, bytes, type(sys.stdout)) for name in dir(kind)}
CONSTRUCTORS = {"__init__", "__post_init__", "init"}


@dataclass
class Definition:
    """A top-level function, class body, method or constant, and what its code mentions."""

    module: str
    names: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)  # (first name of the chain, last)
    dotted: set[tuple[str, str]] = field(default_factory=set)  # (name, attribute of it)
    methods: dict[str, Definition] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)  # of a class's fields and constructor's parameters


class Module:
    """One file: its definitions, and where its imported names come from."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.lines = len(self.text.splitlines())

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> dotted name, without what only the type checker imports."""
        return self._imports(_walk(self.tree))

    @cached_property
    def all_imports(self) -> dict[str, str]:
        return self._imports(ast.walk(self.tree))

    def _imports(self, nodes: Iterable[ast.AST]) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name] = alias.name
        return found

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        found: dict[str, Definition] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name] = _mentions(self.name, [node])
            elif isinstance(node, ast.ClassDef):
                found[node.name] = self._class(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and node.value is not None:
                        found[target.id] = _mentions(self.name, [node.value])
        return found

    def _class(self, node: ast.ClassDef) -> Definition:
        functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        rest = [n for n in node.body if n not in functions]
        own = _mentions(self.name, [*node.bases, *node.decorator_list, *rest])
        fields = [n.annotation for n in rest if isinstance(n, ast.AnnAssign)]
        for function in functions:  # a property's setter adds to its getter
            if function.name in CONSTRUCTORS:
                parameters = [*function.args.args, *function.args.kwonlyargs]
                fields += [a.annotation for a in parameters if a.annotation]
            method = _mentions(self.name, [function])
            known = own.methods.setdefault(function.name, method)
            known.names |= method.names
            known.attributes |= method.attributes
            known.dotted |= method.dotted
        own.types = {n.id for top in fields for n in ast.walk(top) if isinstance(n, ast.Name)}
        return own

    @property
    def functions(self) -> list[tuple[int, str]]:
        """(lines, name) of every function."""
        nodes = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return [((node.end_lineno or 0) - node.lineno + 1, node.name) for node in nodes]


def _walk(node: ast.AST):
    """Every node that runs: no annotations, nothing under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        children: list[ast.AST] = [*node.orelse]
    else:
        skipped = {"annotation", "returns"}
        children = []
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                children += value if isinstance(value, list) else [value]
    yield node
    for child in children:
        if isinstance(child, ast.AST):
            yield from _walk(child)


def _root(node: ast.expr) -> str:
    """The first name of `a.b(c)[d].e`, or ''."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def _mentions(module: str, nodes: list[ast.AST]) -> Definition:
    found = Definition(module)
    for node in (each for top in nodes for each in _walk(top)):
        if isinstance(node, ast.Name):
            found.names.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.attributes.add((_root(node), node.attr))
            if isinstance(node.value, ast.Name):
                found.dotted.add((node.value.id, node.attr))
    return found


class House:
    """All files of the package, and the closure over what they mention."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted((root / "slime").rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            self.modules[name] = Module(path, name)

    def relative(self, module: Module) -> str:
        return str(module.path.relative_to(self.root))

    # ---- sizes

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules.values())

    def packages(self) -> dict[str, tuple[int, int]]:
        """Package of the first level -> its files and lines."""
        files: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        for module in self.modules.values():
            parts = module.path.relative_to(self.root).parts
            package = parts[1] if len(parts) > 2 else "(top)"
            files[package] += 1
            lines[package] += module.lines
        return {package: (files[package], lines[package]) for package in sorted(files)}

    def folders(self) -> Counter[str]:
        """Folder -> how many Python files are directly in it."""
        return Counter(
            str(module.path.parent.relative_to(self.root)) for module in self.modules.values()
        )

    def largest_file(self) -> tuple[int, str]:
        return max((module.lines, self.relative(module)) for module in self.modules.values())

    def largest_function(self) -> tuple[int, str]:
        return max(
            (lines, f"{self.relative(module)}:{name}")
            for module in self.modules.values()
            for lines, name in module.functions
        )

    # ---- types

    def type_checked(self) -> float:
        """Share of the lines of slime/, tools/, benchmarks/ and the loops that pyright checks."""
        settings = (self.root / "pyproject.toml").read_text().split("[tool.pyright]")[1]
        include = ast.literal_eval(_setting(settings, "include"))
        ignore = ast.literal_eval(_setting(settings, "ignore"))
        checked = total = 0
        paths = [*self.root.glob("*.py")]
        for folder in ("slime", "tools", "benchmarks"):
            paths += (self.root / folder).rglob("*.py")
        for path in paths:
            name, lines = str(path.relative_to(self.root)), len(path.read_text().splitlines())
            total += lines
            inside = any(name == part or name.startswith(part + "/") for part in include)
            checked += lines * (inside and not any(fnmatch(name, part) for part in ignore))
        return checked / total

    # ---- the main path

    def main_path(self, entries: list[str] | None = None) -> list[str]:
        """The files that hold any definition reached from these functions and methods."""
        closure = _Closure(self)
        for entry in entries or [entry for leg in ENTRIES.values() for entry in leg]:
            closure.enter(entry)
        return sorted(closure.files())

    def find(self, dotted: str) -> tuple[Module, str] | None:
        """The module that defines this name, through any re-exports; the name is '' for a module."""
        for _ in range(8):
            if dotted in self.modules:
                return self.modules[dotted], ""
            owner, _, name = dotted.rpartition(".")
            module = self.modules.get(owner)
            if module is None:
                return None
            if name in module.definitions:
                return module, name
            if name not in module.imports:
                return None
            dotted = module.imports[name]
        return None


class _Closure:
    """Two sets that grow together: what runs on the path, and what constructors of its classes run.

    A class that only constructors mention is `known`: its methods run on the path if code there
    mentions an attribute of that name, and only then its file counts.
    """

    def __init__(self, house: House):
        self.house = house
        self.on_path: set[tuple[str, str]] = set()
        self.known: set[tuple[str, str]] = set()
        self.mentioned: dict[bool, set[str]] = {True: set(), False: set()}  # by code on the path?
        self.waiting: dict[str, list[tuple[str, str]]] = defaultdict(list)  # method -> classes
        self.followed: set[tuple[str, str, str, bool]] = set()

    def files(self) -> set[str]:
        return {self.house.relative(self.house.modules[module]) for module, _ in self.on_path}

    def enter(self, entry: str) -> None:
        found = self.house.find(entry)
        if found is None:  # a method, of this class or of one of its bases
            owner, _, method = entry.rpartition(".")
            found = self.house.find(owner)
            if found is None or not found[1]:
                raise SystemExit(f"tools/house.py: ENTRIES names {entry}, which does not exist")
            self._mention(method, True)
        self._reach(*found, on_path=True)

    def _reach(self, module: Module, name: str, *, on_path: bool) -> None:
        key, path = (module.name, name), self.house.relative(module)
        seen = self.on_path if on_path else self.known
        if key in seen or any(fnmatch(path, part) for part in ELSEWHERE):
            return
        seen.add(key)
        definition = module.definitions[name]
        self._follow(definition, on_path)
        for type_name in definition.types:
            if type_name in module.definitions:
                self._reach(module, type_name, on_path=False)
            elif type_name in module.all_imports:
                self._reach_dotted(module.all_imports[type_name], on_path=False)
        for method in definition.methods:
            self.waiting[method].append(key)
            self._run_method(key, method)

    def _run_method(self, key: tuple[str, str], method: str) -> None:
        definition = self.house.modules[key[0]].definitions[key[1]]
        constructor = method in CONSTRUCTORS
        if constructor or method in self.mentioned[False]:
            self._follow_once(key, method, definition.methods[method], on_path=False)
        special = method.startswith("__") and key in self.on_path
        if not constructor and (special or method in self.mentioned[True]):
            self.on_path.add(key)
            self._follow_once(key, method, definition.methods[method], on_path=True)

    def _follow_once(
        self, key: tuple[str, str], method: str, body: Definition, *, on_path: bool
    ) -> None:
        if (*key, method, on_path) not in self.followed:
            self.followed.add((*key, method, on_path))
            self._follow(body, on_path)

    def _follow(self, definition: Definition, on_path: bool) -> None:
        module = self.house.modules[definition.module]
        for name in definition.names:
            if name in module.definitions:
                self._reach(module, name, on_path=on_path)
            elif name in module.imports:
                self._reach_dotted(module.imports[name], on_path)
        for name, attribute in definition.dotted:
            if name in module.imports:
                self._reach_dotted(f"{module.imports[name]}.{attribute}", on_path)
        for root, attribute in definition.attributes:
            if root == "self" or not (attribute in GENERIC or self._is_foreign(module, root)):
                self._mention(attribute, on_path)

    def _is_foreign(self, module: Module, name: str) -> bool:
        """Whether this name of the module is imported from a library."""
        return name in module.imports and not module.imports[name].startswith("slime.")

    def _reach_dotted(self, dotted: str, on_path: bool) -> None:
        found = self.house.find(dotted)
        if found is not None and found[1]:
            self._reach(*found, on_path=on_path)

    def _mention(self, attribute: str, on_path: bool) -> None:
        if attribute not in self.mentioned[on_path]:
            self.mentioned[on_path].add(attribute)
            for key in list(self.waiting[attribute]):
                self._run_method(key, attribute)


def _setting(toml: str, name: str) -> str:
    """The list after `name =`; tomllib is not in Python 3.10."""
    start = toml.index("[", toml.index(f"\n{name} ="))
    return toml[start : toml.index("]", start) + 1]


def main(argv: list[str]) -> int:
    house = House()
    print(f"{'package':<14}{'files':>6}{'lines':>8}")
    for package, (files, lines) in house.packages().items():
        print(f"{package:<14}{files:>6}{lines:>8}")
    print(f"{'slime/':<14}{len(house.modules):>6}{house.lines:>8}\n")
    path = house.main_path()
    print(f"main path: {len(path)} files", end=" (")
    print(
        ", ".join(f"{leg} {len(house.main_path(entries))}" for leg, entries in ENTRIES.items()),
        end=")\n",
    )
    print("largest file: {} lines, {}".format(*house.largest_file()))
    print("largest function: {} lines, {}".format(*house.largest_function()))
    folders = house.folders().most_common(3)
    print("fullest folders: " + ", ".join(f"{folder} {files}" for folder, files in folders))
    print(f"checked by pyright: {house.type_checked():.1%} of the lines")
    if "--main-path" in argv:
        print("\n" + "\n".join(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
