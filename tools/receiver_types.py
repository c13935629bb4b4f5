"""Resolve names and the types of receivers in a package, from its syntax trees.

A type is the set of the package's classes that an object may be, or hold as elements: `list[Part]`, a loop
variable over it and `Part` itself are all {Part}; a `str` or an object of a library is the empty set. It is
known from annotations, constructor calls, return types, fields and assignments. None is an unknown type:
`Any`, a type variable, a protocol, a parameter without annotation.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Key = tuple[str, str]  # module, name of a top-level definition
Types = frozenset[Key] | None
NOTHING: Types = frozenset()
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Definition:
    """A top-level function, class body, method or constant."""

    module: Module
    nodes: list[ast.AST]
    owner: Key | None = None  # the class of a method
    methods: dict[str, Definition] = field(default_factory=dict)

    @cached_property
    def names(self) -> set[str]:
        return {node.id for node in self.walk() if isinstance(node, ast.Name)}

    def walk(self) -> Iterator[ast.AST]:
        return (each for top in self.nodes for each in walk(top))


class Module:
    """One file: its definitions, and where its imported names come from."""

    def __init__(self, file: Path, path: str, name: str):
        self.path, self.name = path, name
        text = file.read_text()
        self.tree = ast.parse(text)
        self.lines = len(text.splitlines())

    @cached_property
    def imports(self) -> dict[str, str]:
        """Return the dotted name of each local name, without what only the type checker imports."""
        return _imports(walk(self.tree))

    @cached_property
    def all_imports(self) -> dict[str, str]:
        return _imports(ast.walk(self.tree))

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        found: dict[str, Definition] = {}
        for node in self.tree.body:
            if isinstance(node, Function):
                found[node.name] = Definition(self, [node])
            elif isinstance(node, ast.ClassDef):
                found[node.name] = self._class(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = Definition(self, [node])
        return found

    def _class(self, node: ast.ClassDef) -> Definition:
        rest = [each for each in node.body if not isinstance(each, Function)]
        own = Definition(self, [*node.bases, *node.decorator_list, *rest])
        key = (self.name, node.name)
        for function in node.body:
            if isinstance(function, Function):  # a property's setter adds to its getter
                method = own.methods.setdefault(function.name, Definition(self, [], key))
                method.nodes.append(function)
        return own


class Package:
    """All modules of a package, and the types of the expressions in them."""

    def __init__(self, root: Path, name: str = "slime"):
        self.modules: dict[str, Module] = {}
        self._members: dict[tuple[Key, str], Types] = {}
        self._ancestors: dict[Key, set[Key]] = {}
        for file in sorted((root / name).rglob("*.py")):
            path = file.relative_to(root)
            dotted = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            self.modules[dotted] = Module(file, str(path), dotted)

    def find(self, dotted: str) -> tuple[Module, str] | None:
        """Return the module that defines this name, through any re-exports; the name is '' for a module."""
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

    def definition(self, key: Key) -> Definition:
        return self.modules[key[0]].definitions[key[1]]

    def attributes(self, definition: Definition) -> Iterator[tuple[str, str, Types]]:
        """Yield (receiver's first name, attribute, type of the receiver) of every attribute it mentions."""
        scope = Scope(self, definition)
        for node in definition.walk():
            if isinstance(node, ast.Attribute):
                yield _root(node), node.attr, scope.type_of(node.value)

    # ---- classes

    def ancestors(self, key: Key) -> set[Key]:
        """Return the class and its bases in the package."""
        if key not in self._ancestors:
            found, node = {key}, self._class_node(key)
            for base in node.bases if node else ():
                for each in self.annotation(self.modules[key[0]], base, protocols=True) or ():
                    found |= self.ancestors(each)
            self._ancestors[key] = found
        return self._ancestors[key]

    def related(self, one: Key, other: Key) -> bool:
        """Return whether an object can be of both classes: some class has both among its ancestors."""
        return any({one, other} <= self.ancestors(key) for key in self._classes)

    @cached_property
    def _classes(self) -> list[Key]:
        return [
            (module.name, node.name)
            for module in self.modules.values()
            for node in module.tree.body
            if isinstance(node, ast.ClassDef)
        ]

    def constructor_types(self, key: Key, constructors: set[str]) -> set[Key]:
        """Return the classes in the types of a class's fields and of its constructors' parameters."""
        definition, found = self.definition(key), set()
        if self._class_node(key) is None:
            return found
        annotations = [n.annotation for n in definition.nodes if isinstance(n, ast.AnnAssign)]
        for name in constructors & definition.methods.keys():
            for node in definition.methods[name].nodes:
                assert isinstance(node, Function)
                annotations += [each.annotation for each in _parameters(node) if each.annotation]
        for node in (each for top in annotations for each in ast.walk(top)):
            if isinstance(node, ast.Name):
                found |= self.annotation(definition.module, node, protocols=True) or set()
        return found

    def member(self, key: Key, name: str) -> Types:
        """Return the type of a field or property; for a method, of what it returns."""
        if (key, name) not in self._members:
            self._members[key, name] = NOTHING  # where a field's value depends on itself
            self._members[key, name] = self._member(key, name)
        return self._members[key, name]

    def _member(self, key: Key, name: str) -> Types:
        for owner in sorted(self.ancestors(key), key=lambda each: each != key):
            definition = self.definition(owner)
            if name in definition.methods:
                node = definition.methods[name].nodes[0]
                assert isinstance(node, Function)
                return self.annotation(definition.module, node.returns)
            for node in definition.nodes:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                    return self.annotation(definition.module, node.annotation)
            scopes = [Scope(self, method) for method in definition.methods.values()]
            if values := [each for scope in scopes for each in scope.assigned(f"self.{name}")]:
                return _union(values)
        return None

    # ---- annotations

    def annotation(self, module: Module, node: ast.AST | None, *, protocols: bool = False) -> Types:
        """Return the classes that an annotation names; with `protocols` those of a protocol are known too."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            return None if isinstance(node.value, str) else NOTHING
        if isinstance(node, ast.Attribute):  # of a library
            return NOTHING
        if not isinstance(node, ast.Name):
            parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            return _union(self.annotation(module, each, protocols=protocols) for each in parts)
        if node.id in module.definitions:
            return self._named((module.name, node.id), protocols)
        if node.id not in module.all_imports:
            return NOTHING if hasattr(builtins, node.id) and node.id != "object" else None
        dotted = module.all_imports[node.id]
        found = self.find(dotted)
        if found is not None:
            return self._named((found[0].name, found[1]), protocols) if found[1] else None
        return None if dotted in ("typing.Any", "typing.Self") else NOTHING

    def _named(self, key: Key, protocols: bool) -> Types:
        definition, node = self.definition(key), self._class_node(key)
        if node is not None:
            protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
            return None if protocol and not protocols else frozenset({key})
        alias = definition.nodes[0]
        if not isinstance(alias, ast.Assign) or isinstance(alias.value, ast.Call):
            return None  # a type variable
        return self.annotation(definition.module, alias.value, protocols=protocols)

    def _class_node(self, key: Key) -> ast.ClassDef | None:
        for node in self.modules[key[0]].tree.body:
            if isinstance(node, ast.ClassDef) and node.name == key[1]:
                return node
        return None


class Scope:
    """The types of expressions inside one definition; assignments count wherever they stand."""

    def __init__(self, package: Package, definition: Definition):
        self._package, self._definition = package, definition
        self._module, self._owner = definition.module, definition.owner
        self._known: dict[str, Types] = {}

    @cached_property
    def _bindings(self) -> dict[str, list[tuple[ast.AST | None, bool]]]:
        """Return what each name or `self.name` is bound to, and whether that is an annotation."""
        found = defaultdict(list)
        for node in (each for top in self._definition.nodes for each in ast.walk(top)):
            for target, value, annotated in _bound(node):
                for each in ast.walk(target):
                    if isinstance(each, ast.Name | ast.Attribute):
                        found[ast.unparse(each)].append((value, annotated))
        return dict(found)

    def assigned(self, name: str) -> list[Types]:
        """Return the types of everything that is bound to this name."""
        given = self._bindings.get(name, [])
        declared = [each for each in given if each[1]] or given
        return [
            self._package.annotation(self._module, value) if annotated else self.type_of(value)
            for value, annotated in declared
        ]

    def type_of(self, node: ast.AST | None) -> Types:
        if isinstance(node, ast.Name):
            return self._type_of_name(node.id)
        if isinstance(node, ast.Attribute):
            return self._type_of_attribute(node)
        if isinstance(node, ast.Call):
            return self._type_of_call(node)
        if isinstance(node, ast.Await | ast.Starred | ast.Subscript | ast.NamedExpr):
            return self.type_of(node.value)
        if isinstance(node, ast.BoolOp | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.BinOp):
            parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            return _union(self.type_of(each) for each in parts)
        if isinstance(node, ast.IfExp):
            return _union([self.type_of(node.body), self.type_of(node.orelse)])
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self.type_of(node.elt)
        if isinstance(node, ast.DictComp):
            return _union([self.type_of(node.key), self.type_of(node.value)])
        constant = ast.Constant | ast.JoinedStr | ast.Compare | ast.UnaryOp
        return NOTHING if isinstance(node, constant) else None

    def _type_of_name(self, name: str) -> Types:
        if name in ("self", "cls", "super") and self._owner is not None:
            return frozenset({self._owner})
        if name not in self._known:
            self._known[name] = NOTHING  # where its value depends on itself
            self._known[name] = self._resolve(name)
        return self._known[name]

    def _resolve(self, name: str) -> Types:
        if name in self._bindings:
            return _union(self.assigned(name))
        if name in self._module.definitions:
            return self._type_of_definition(self._module, name)
        if name in self._module.imports:
            found = self._package.find(self._module.imports[name])
            if found is not None:
                return self._type_of_definition(*found) if found[1] else None
            return NOTHING
        return NOTHING if hasattr(builtins, name) and name != "getattr" else None

    def _type_of_definition(self, module: Module, name: str) -> Types:
        """Return the type of a class itself, of what a function returns, or of a constant's value."""
        node = module.definitions[name].nodes[:1]
        if (module.name, name) in self._package._classes:
            return frozenset({(module.name, name)})
        if node and isinstance(node[0], Function):
            return self._package.annotation(module, node[0].returns)
        return Scope(self._package, module.definitions[name])._type_of_name(name)

    def _type_of_attribute(self, node: ast.Attribute) -> Types:
        if isinstance(node.value, ast.Name) and node.value.id in self._module.imports:
            found = self._package.find(f"{self._module.imports[node.value.id]}.{node.attr}")
            if found is not None and found[1]:
                return self._type_of_definition(*found)
        owners = self.type_of(node.value)
        if not owners or (owners is not None and hasattr(dict, node.attr)):
            return owners  # an element of a container
        return _union(self._package.member(owner, node.attr) for owner in owners)

    def _type_of_call(self, node: ast.Call) -> Types:
        returned = self.type_of(node.func)
        if returned != NOTHING:
            return returned
        # A library returns its own objects or what it was given.
        given = [*node.args, *(each.value for each in node.keywords)]
        return _union(self.type_of(each) for each in given)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that runs if nothing fails: no annotations, nothing under `if TYPE_CHECKING`, no `raise`
    and no handlers of exceptions."""
    if isinstance(node, ast.ExceptHandler | ast.Raise):
        return
    yield node
    checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    skipped = ("annotation", "returns", "body" if checking else "")
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                yield from walk(child)


def _bound(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, bool]]:
    """Yield (target, value or annotation, whether it is an annotation) of what a node binds."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            pair = [getattr(each, "elts", [node]) for each in (target, node.value)]
            if len(pair[0]) == len(pair[1]) > 1:
                yield from ((one, other, False) for one, other in zip(*pair, strict=True))
            else:
                yield target, node.value, False
    elif isinstance(node, ast.AnnAssign):
        yield node.target, node.annotation, True
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value, False
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter, False
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr, False
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield ast.Name(node.name), node.type, True
    elif isinstance(node, Function | ast.Lambda):
        for parameter in _parameters(node):
            yield ast.Name(parameter.arg), parameter.annotation, True
        if isinstance(node, Function):
            yield ast.Name(node.name), node.returns, True


def _parameters(node: Function | ast.Lambda) -> list[ast.arg]:
    given = node.args
    extra = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]


def _imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name] = alias.name
    return found


def _root(node: ast.expr) -> str:
    """Return the first name of `a.b(c)[d].e`, or ''."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def _union(types: Iterable[Types]) -> Types:
    """Return the union, which is unknown if one of them is."""
    found: set[Key] = set()
    for each in types:
        if each is None:
            return None
        found |= each
    return frozenset(found)
