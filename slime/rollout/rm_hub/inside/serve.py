"""A worker process: `python serve.py answers.py` reads one JSON line per question and writes one per answer.

`answers.py` has a function `load()` that returns the answering function; `UserMistake` raised by it is an
error in the data that the user must see. There is no time limit here, since code cannot always be stopped
from within; the parent kills the process.
"""

import sys

del sys.path[0]  # this folder; its modules are not top-level ones

import importlib.util  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402

_MEMORY_BYTES = 4 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(5000)
    module = load(sys.argv[1])
    answer, mistakes = module.load(), getattr(module, "UserMistake", ())
    # What a library prints must neither mix with the replies nor fill a pipe that nobody reads.
    questions, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    send(replies, {"ready": True})
    for line in questions:
        try:
            reply = {"value": answer(json.loads(line))}
        except mistakes as mistake:
            reply = {"mistake": str(mistake)}
        except Exception:  # libraries raise anything on malformed text, also MemoryError
            reply = {"value": None}
        send(replies, reply)


def load(path):
    spec = importlib.util.spec_from_file_location("answers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def send(replies, reply) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
