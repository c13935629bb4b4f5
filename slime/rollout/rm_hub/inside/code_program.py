"""Inside the sandbox: the process of a program that a model wrote.

It runs the program, then looks up names and makes calls for the tests, which are in another process
together with the expected values. Whatever the program does here (patch the interpreter, write to the pipe
itself), it can only return values, and has to compute the right ones without knowing them.
"""

import builtins
import operator
import os
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from code_values import Channel, Unencodable, decode, encode, plain_base

del sys.path[0]
_MAX_OBJECTS = 100_000


def main():
    channel = Channel()
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, ["program.py"]
    program = channel.read()["program"]
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        channel.write({"failed": repr(error)[:1000]})
        os._exit(1)
    channel.write({"ready": True})
    Objects(channel, module.__dict__).serve()


class Objects:
    """The program's objects that the tests refer to by number."""

    def __init__(self, channel, names):
        self._channel, self._names, self._objects = channel, names, []

    def serve(self):
        """Answer requests until a reply to our own request arrives; return the reply."""
        while True:
            message = self._channel.read()
            if "op" not in message:
                return message
            self._channel.write(self._answer(message))

    def _answer(self, message):
        try:
            arguments = [decode(part, self._find) for part in message["arguments"]]
            named = {key: decode(part, self._find) for key, part in message["named"].items()}
            result = self._apply(message["op"], arguments, named)
            changed = [
                encode(part, self._keep)
                for part in arguments[1:]
                if type(part) in (list, dict, set, bytearray)
            ]
            return {"value": encode(result, self._keep), "changed": changed}
        except StopIteration:
            return {"stop": True}
        except BaseException as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)}

    def _apply(self, op, arguments, named):
        if op == "name":
            return self._names[arguments[0]]
        if op == "call":
            return arguments[0](*arguments[1:], **named)
        if op == "isinstance":
            return isinstance(*arguments)
        return (vars(operator).get(op) or vars(builtins)[op])(*arguments)

    def _keep(self, value):
        if isinstance(value, CallBack):
            return {"yours": value.number}
        if isinstance(value, types.ModuleType):
            raise KeyError("modules are imported by the tests themselves")
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [kind.__name__ for kind in value.__mro__]}
        if len(self._objects) >= _MAX_OBJECTS:
            raise Unencodable("too many objects")
        self._objects.append(value)
        reference = {"object": len(self._objects) - 1}
        plain = plain_base(value)
        return reference if plain is None else {**reference, "plain": encode(plain, self._keep)}

    def _find(self, reference):
        if "yours" in reference:
            return self._objects[reference["yours"]]
        if "builtin" in reference:
            return getattr(builtins, reference["builtin"])
        return CallBack(self, reference["object"])

    def call_back(self, number, arguments):
        request = {"op": "call", "number": number}
        request["arguments"] = [encode(part, self._keep) for part in arguments]
        self._channel.write(request)
        reply = self.serve()
        if "raised" in reply:
            raise getattr(builtins, reply["raised"], RuntimeError)("a function of the tests")
        return decode(reply["value"], self._find)


class CallBack:
    """A function of the tests that was given to the program."""

    def __init__(self, objects, number):
        self._objects, self.number = objects, number

    def __call__(self, *arguments):
        return self._objects.call_back(self.number, arguments)


def _text(error):
    try:
        return str(error)[:1000]
    except BaseException:
        return ""


if __name__ == "__main__":
    main()
