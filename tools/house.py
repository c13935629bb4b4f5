"""Measure how easy the package is to enter: sizes, folders, the main path, types.

    python tools/house.py              the table
    python tools/house.py --main-path  also the files of the main path

The main path is what one generate + train + update of weights runs if nothing fails, with FSDP, the tensor
transport and the default rollout function. It is computed from the syntax trees, from `ENTRIES`:

- a function, class or constant is on the path if code on the path refers to it by name;
- a method is on the path if code on the path mentions an attribute of its name on an object of its class,
  of a base or of a subclass (receiver_types.py), or on an object of unknown type. In the latter case
  the class must be known: on the path, or one that known classes refer to in constructors, in the types
  of constructors' parameters and in the types of fields;
- `__call__` and `forward` of known classes are on the path: calls of an object do not name them;
- annotations, imports under `TYPE_CHECKING`, re-exports, constructors, handlers of exceptions and
  `raise` do not count;
- `ELSEWHERE` is not followed: the engine, what is settled before a run starts, what only records,
  what another flag would choose, and what runs only after a failure.

It is an estimate: a method called on an object of unknown type may belong to another class.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatch
from pathlib import Path

if __name__ == "__main__":  # the folder above this one holds the package `tools`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.receiver_types import Definition, Function, Key, Module, Package

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
        "slime.backends.base.TrainRayActor.train",
    ],
    "update": [
        "slime.ray.train_group.TrainGroup.update_weights",
        "slime.backends.fsdp_utils.actor.FSDPTrainRayActor.update_weights",
        "slime.backends.base.TrainRayActor.update_weights",
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
    "slime/compat/*",  # imported only by hooks
    # other flags: adapters, expert parallelism, external engines, router, debugging, reward types
    "slime/backends/fsdp_utils/expert_parallel.py",
    "slime/backends/lora.py",
    "slime/backends/fsdp_utils/lora*",
    "slime/data/images.py",  # --multimodal-keys
    "slime/data/stored_samples.py",  # --save-debug-*, --load-debug-*
    "slime/rollout/rm_hub/math_reward.py",  # --rm-type boxed_*; graders are loaded by name
    "slime/weights/lora*",
    "slime/serving/external.py",
    "slime/serving/router.py",
    # other families of models: gated delta nets
    "slime/backends/fsdp_utils/delta_net.py",
    "slime/algorithms/delta_kernels.py",
    "slime/algorithms/triton_delta_*",
    "slime/algorithms/gated_delta.py",
    # another verb of the loop
    "slime.rollout.evaluation.evaluate",
    # after a failure
    "slime.ray.engine_group.EngineGroup.restart",
    "slime.ray.watch.Watch._stalled",
]
# Method names of built-in types: counted only on attributes of `self`.
GENERIC = {name for kind in (dict, list, str, set, bytes, type(sys.stdout)) for name in dir(kind)}
CONSTRUCTORS = {"__init__", "__post_init__", "init"}


class House:
    """All files of the package: their sizes, and those of the main path."""

    def __init__(self, root: Path = ROOT):
        self.root, self.package = root, Package(root)
        self.modules = self.package.modules

    # ---- sizes

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules.values())

    def packages(self) -> dict[str, tuple[int, int]]:
        """Return the files and lines of each package of the first level."""
        files: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        for module in self.modules.values():
            parts = Path(module.path).parts
            package = parts[1] if len(parts) > 2 else "(top)"
            files[package] += 1
            lines[package] += module.lines
        return {package: (files[package], lines[package]) for package in sorted(files)}

    def folders(self) -> Counter[str]:
        """Return how many Python files are directly in each folder."""
        return Counter(str(Path(module.path).parent) for module in self.modules.values())

    def largest_file(self) -> tuple[int, str]:
        return max((module.lines, module.path) for module in self.modules.values())

    def largest_function(self) -> tuple[int, str]:
        return max(
            (lines, f"{module.path}:{name}")
            for module in self.modules.values()
            for lines, name in _functions(module)
        )

    # ---- types

    def type_checked(self) -> float:
        """Return the share of the lines of slime/, tools/, benchmarks/ and the loops that pyright checks."""
        settings = (self.root / "pyproject.toml").read_text().split("[tool.pyright]")[1]
        include = ast.literal_eval(_setting(settings, "include"))
        ignore = ast.literal_eval(_setting(settings, "ignore")) if "\nignore =" in settings else []
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

    def main_path(
        self, entries: list[str] | None = None, elsewhere: list[str] = ELSEWHERE
    ) -> list[str]:
        """Return the files that hold any definition reached from these functions and methods."""
        path = MainPath(self.package, elsewhere)
        for entry in entries or [entry for leg in ENTRIES.values() for entry in leg]:
            path.enter(entry)
        return path.files()


class MainPath:
    """Two sets that grow together: what runs on the path, and what constructors of its classes run.

    A class that only constructors mention is `known`: its methods run on the path if code there
    mentions an attribute of that name, and only then its file counts.
    """

    def __init__(self, package: Package, elsewhere: list[str]):
        self.package, self.elsewhere = package, elsewhere
        self.on_path: set[Key] = set()
        self.known: set[Key] = set()
        # By whether code on the path mentions it: method -> classes of receivers, None for any.
        self.mentioned: dict[bool, dict[str, set[Key | None]]] = {
            True: defaultdict(set, {"__call__": {None}, "forward": {None}}),
            False: defaultdict(set),
        }
        self.waiting: dict[str, list[Key]] = defaultdict(list)  # method -> classes that have it
        self.followed: set[tuple[str, str, str, bool]] = set()

    def files(self) -> list[str]:
        return sorted({self.package.modules[module].path for module, _ in self.on_path})

    def enter(self, entry: str) -> None:
        found = self.package.find(entry)
        if found is None:  # a method, of this class or of one of its bases
            owner, _, method = entry.rpartition(".")
            found = self.package.find(owner)
            if found is None or not found[1]:
                raise SystemExit(f"tools/house.py: ENTRIES names {entry}, which does not exist")
            self._reach(*found, on_path=True)
            self._mention(method, (found[0].name, found[1]), on_path=True)
        else:
            self._reach(*found, on_path=True)

    def _reach(self, module: Module, name: str, *, on_path: bool) -> None:
        key = (module.name, name)
        seen = self.on_path if on_path else self.known
        if key in seen or self._is_elsewhere(module, name):
            return
        seen.add(key)
        definition = module.definitions[name]
        self._follow(definition, on_path)
        for owner in self.package.constructor_types(key, CONSTRUCTORS):
            self._reach_key(owner, on_path=False)
        for method in definition.methods:
            self.waiting[method].append(key)
            self._run_method(key, method)

    def _run_method(self, key: Key, method: str) -> None:
        definition = self.package.definition(key)
        if self._is_elsewhere(definition.module, f"{key[1]}.{method}"):
            return
        constructor = method in CONSTRUCTORS
        if constructor or self._is_mentioned(key, method, on_path=False):
            self._follow_once(key, method, definition.methods[method], on_path=False)
        special = method.startswith("__") and key in self.on_path
        if not constructor and (special or self._is_mentioned(key, method, on_path=True)):
            self.on_path.add(key)
            self._follow_once(key, method, definition.methods[method], on_path=True)

    def _is_mentioned(self, key: Key, method: str, *, on_path: bool) -> bool:
        receivers = self.mentioned[on_path][method]
        return any(
            receiver is None or self.package.related(receiver, key) for receiver in receivers
        )

    def _follow_once(self, key: Key, method: str, body: Definition, *, on_path: bool) -> None:
        if (*key, method, on_path) not in self.followed:
            self.followed.add((*key, method, on_path))
            self._follow(body, on_path)

    def _follow(self, definition: Definition, on_path: bool) -> None:
        module = definition.module
        for name in definition.names:
            if name in module.definitions:
                self._reach(module, name, on_path=on_path)
            elif name in module.imports:
                self._reach_dotted(module.imports[name], on_path)
        for root, attribute, receivers in self.package.attributes(definition):
            if root in module.imports:  # of a module, or of a name that is found above
                self._reach_dotted(f"{module.imports[root]}.{attribute}", on_path)
            if receivers is None:
                foreign = module.imports.get(root, "slime.").split(".")[0] != "slime"
                if root == "self" or not (attribute in GENERIC or foreign):
                    self._mention(attribute, None, on_path=on_path)
            else:
                for receiver in receivers:
                    self._reach_key(receiver, on_path=False)
                    self._mention(attribute, receiver, on_path=on_path)

    def _reach_key(self, key: Key, *, on_path: bool) -> None:
        self._reach(self.package.modules[key[0]], key[1], on_path=on_path)

    def _reach_dotted(self, dotted: str, on_path: bool) -> None:
        found = self.package.find(dotted)
        if found is not None and found[1]:
            self._reach(*found, on_path=on_path)

    def _mention(self, attribute: str, receiver: Key | None, *, on_path: bool) -> None:
        receivers = self.mentioned[on_path][attribute]
        if receiver not in receivers:
            receivers.add(receiver)
            for key in list(self.waiting[attribute]):
                self._run_method(key, attribute)

    def _is_elsewhere(self, module: Module, name: str) -> bool:
        labels = (module.path, f"{module.name}.{name}")
        return any(fnmatch(label, part) for label in labels for part in self.elsewhere)


def _functions(module: Module) -> list[tuple[int, str]]:
    """Return (lines, name) of every function."""
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, Function)]
    return [((node.end_lineno or 0) - node.lineno + 1, node.name) for node in nodes]


def _setting(toml: str, name: str) -> str:
    """Return the list after `name =`; tomllib is not in Python 3.10."""
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
