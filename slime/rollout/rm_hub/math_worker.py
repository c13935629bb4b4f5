"""A process that compares answers with math-verify: one JSON line in, one JSON line out.

Started by file path, without slime on its way, so that it is up in a second and small. It has no time
limit of its own: math-verify's uses signals and cannot stop every computation; the parent kills it.
"""

import sys

del sys.path[0]  # this folder; its modules are not top-level ones

import ctypes  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402

_MEMORY_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1


def main() -> None:
    # A parent that was killed cannot end a worker that computes for hours.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(5000)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def equal(label: str, answer: str) -> bool:
        gold, found = (
            parse(f"\\boxed{{{text}}}", config, parsing_timeout=0) for text in (label, answer)
        )
        return bool(gold) and bool(found) and verify(gold, found, timeout_seconds=0)

    # Nothing a library prints may land between the replies, or fill a pipe nobody reads any more.
    replies = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for line in sys.stdin:
        label, answer = json.loads(line)
        try:
            result = equal(label, answer)
        except (Exception, RecursionError, MemoryError):
            result = False
        replies.write(json.dumps(result) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
