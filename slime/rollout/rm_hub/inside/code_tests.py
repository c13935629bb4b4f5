"""Inside the sandbox: the process of the tests, which compares what a program answers.

Names that the tests do not define themselves are the program's, which runs in another process: calls go
there as data and come back as data. An object of the program's own class is represented by a `Remote`. It
never decides a comparison with a constant: if it could, an object equal to everything would pass any test.
"""

import ast
import builtins
import importlib
import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from code_values import Channel, Unencodable, decode, encode

del sys.path[0]
_MAX_ITEMS = 100_000
_LIBRARY_NAMES = {  # names that tests use although only the program may have imported them
    "isclose": "math", "Counter": "collections", "defaultdict": "collections", "deque": "collections",
    "OrderedDict": "collections", "Fraction": "fractions", "Decimal": "decimal",
}  # fmt: skip
_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas"}


def main():
    channel = Channel()
    tests = channel.read()["tests"]
    program = Program(channel)
    try:
        trees = [ast.parse(test) for test in tests]
        names = Names(program, trees)
        for tree in trees:
            exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
    except BaseException as error:
        channel.write({"passed": False, "why": f"{type(error).__name__}: {error}"[:1000]})
    else:
        channel.write({"passed": True})
    os._exit(0)


class Names(dict):
    """The globals of the tests: their own names first, then the program's."""

    def __init__(self, program, trees):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._program = program
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self._modules = {
            node.value.id
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        self._entry = _builtin_that_is_tested(nodes)

    def __missing__(self, name: str):
        if name != self._entry and hasattr(builtins, name):
            raise KeyError(name)
        if name in self._modules and (name in sys.stdlib_module_names or name in _ALIASES):
            return importlib.import_module(_ALIASES.get(name, name))
        if name in _LIBRARY_NAMES:
            return getattr(importlib.import_module(_LIBRARY_NAMES[name]), name)
        return self._program.ask("name", [name])


def _builtin_that_is_tested(nodes):
    """Return the builtin that the program replaces, if the tests call nothing but it: `sum(10, 15)`.

    No other builtin is taken from the program, which could then answer for `abs` or `all` itself.
    """
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    only = len(called) == 1 and called == used and not any(isinstance(n, ast.Import) for n in nodes)
    return next(iter(called)) if only else None


class Program:
    """The process of the program."""

    def __init__(self, channel):
        self._channel, self._objects, self._exceptions = channel, [], {}

    def ask(self, op, arguments, named=None):
        named = named or {}
        self._channel.write(
            {
                "op": op,
                "arguments": [encode(part, self._keep) for part in arguments],
                "named": {key: encode(part, self._keep) for key, part in named.items()},
            }
        )
        while "op" in (reply := self._channel.read()):
            self._channel.write(self._call_back(reply))
        if "raised" in reply:
            raise self._error(list(map(str, reply["raised"])), str(reply["text"]), op)
        if "stop" in reply:
            raise (
                StopIteration if op == "next" else RuntimeError("the program raised StopIteration")
            )
        if op == "call":
            _write_back(arguments[1:], [decode(part, self._find) for part in reply["changed"]])
        return decode(reply["value"], self._find)

    def _call_back(self, request):
        try:
            function = self._objects[request["number"]]
            result = function(*(decode(part, self._find) for part in request["arguments"]))
            return {"value": encode(result, self._keep)}
        except Exception as error:
            return {"raised": type(error).__name__}

    def _keep(self, value):
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if hasattr(value, "__next__") or type(value) in (type({}.keys()), type({}.values())):
            return {"I": [encode(item, self._keep) for item in itertools.islice(value, _MAX_ITEMS)]}
        if callable(value) and not isinstance(value, type):
            self._objects.append(value)
            return {"object": len(self._objects) - 1}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        raise Unencodable(f"tests can give a program plain data and functions, no {type(value)}")

    def _find(self, reference):
        if "yours" in reference:
            return self._objects[reference["yours"]]
        if "exception" in reference:
            return self._exception(list(map(str, reference["exception"])))
        plain = decode(reference["plain"], self._find) if "plain" in reference else _NOTHING
        return Remote(self, reference["object"], plain)

    def _exception(self, names):
        """Return a class for one of the program's, derived from the builtin that it is derived from."""
        if names[0] in _EXCEPTIONS:
            return _EXCEPTIONS[names[0]]
        if "StopIteration" in names:
            return RuntimeError
        if names[0] not in self._exceptions:
            base = next((_EXCEPTIONS[name] for name in names if name in _EXCEPTIONS), Exception)
            self._exceptions[names[0]] = type(names[0], (base,), {})
        return self._exceptions[names[0]]

    def _error(self, names, text, op):
        if op == "name":
            return KeyError(text)
        return self._exception(names)(text)


def _write_back(arguments, changed):
    """Copy the program's in-place changes back into lists, dictionaries and sets of the tests."""
    mutable = [part for part in arguments if type(part) in (list, dict, set, bytearray)]
    for part, content in zip(mutable, changed, strict=True):
        if type(content) is not type(part):
            continue
        if isinstance(part, (list, bytearray)):
            part[:] = content
        else:
            part.clear()
            part.update(content)


_NOTHING = object()
_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
del _EXCEPTIONS["StopIteration"]  # it would end `all(map(...))` of a test as if all had passed


class Remote:
    """An object of the program. Derived from a builtin class, it has that class's value here."""

    def __init__(self, program, number, plain):
        for name, value in (("_program", program), ("_number", number), ("_plain", plain)):
            object.__setattr__(self, name, value)

    @property
    def __class__(self):
        plain = object.__getattribute__(self, "_plain")
        return Remote if plain is _NOTHING else type(plain)

    def __getattr__(self, name):
        return _ask(self, "getattr", name)

    def __setattr__(self, name, value):
        _ask(self, "setattr", name, value)

    def __call__(self, *arguments, **named):
        return object.__getattribute__(self, "_program").ask("call", [self, *arguments], named)

    def __instancecheck__(self, instance):
        return is_remote(instance) and bool(_ask(instance, "isinstance", self))

    def __hash__(self):
        plain = object.__getattribute__(self, "_plain")
        return hash(_ask(self, "hash") if plain is _NOTHING else plain)

    def __iter__(self):
        plain = object.__getattribute__(self, "_plain")
        if plain is not _NOTHING:
            yield from plain
            return
        items = _ask(self, "iter")
        if not is_remote(items):
            yield from items
            return
        for _ in range(_MAX_ITEMS):
            try:
                yield _ask(items, "next")
            except StopIteration:
                return

    def __next__(self):
        return _ask(self, "next")

    def __contains__(self, item):
        return any(item is one or item == one for one in self)


def is_remote(value):
    return type(value) is Remote


def _ask(remote, op, *arguments):
    return object.__getattribute__(remote, "_program").ask(op, [remote, *arguments])


def _define(name, *, reflected=None, with_constants=False):
    """Define an operator of two values. Between two of the program's objects the program decides."""
    op = name.strip("_")
    function = getattr(importlib.import_module("operator"), name)

    def apply(left, right):
        left_plain, right_plain = _plain(left), _plain(right)
        if left_plain is not _NOTHING and right_plain is not _NOTHING:
            return function(left_plain, right_plain)
        if (is_remote(left) and is_remote(right)) or with_constants:
            remote = left if is_remote(left) else right
            return object.__getattribute__(remote, "_program").ask(name, [left, right])
        if op in ("eq", "ne"):
            return op == "ne"
        return NotImplemented

    setattr(Remote, name, lambda self, other: apply(self, other))
    if reflected:
        setattr(Remote, reflected, lambda self, other: apply(other, self))


def _plain(value):
    return object.__getattribute__(value, "_plain") if is_remote(value) else value


def _define_unary(name, op):
    function = getattr(builtins, op, None) or getattr(importlib.import_module("operator"), op)

    def apply(self, *arguments):
        plain = object.__getattribute__(self, "_plain")
        return _ask(self, op, *arguments) if plain is _NOTHING else function(plain, *arguments)

    setattr(Remote, name, apply)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _define(f"__{_name}__")
for _name in ("add", "mul", "matmul"):
    _define(f"__{_name}__", reflected=f"__r{_name}__", with_constants=True)
for _name in ("sub", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _define(f"__{_name}__", reflected=f"__r{_name}__")
for _name, _op in {
    "__len__": "len", "__str__": "str", "__repr__": "repr", "__int__": "int", "__float__": "float",
    "__abs__": "abs", "__neg__": "neg", "__pos__": "pos", "__invert__": "invert", "__bool__": "bool",
    "__round__": "round", "__index__": "index", "__reversed__": "reversed", "__dir__": "dir",
    "__getitem__": "getitem", "__setitem__": "setitem", "__delitem__": "delitem",
}.items():  # fmt: skip
    _define_unary(_name, _op)


if __name__ == "__main__":
    main()
