"""Programs that a model wrote, run where they can do no harm.

    result = await run_python("print(1 + 1)")                  # result.stdout == "2\\n"
    async with Sandbox() as box: ...                           # several commands, one working folder
    worker = await start([sys.executable, "worker.py"], limits=Limits(memory_bytes=2 << 30))

Each sandbox is a bubblewrap container: an empty read-only root with the interpreter, an unprivileged id
without capabilities, a list of allowed system calls, no network, and limits over all its processes.
Where the system cannot provide that, `check_sandbox` says what to type; there is no weaker substitute
unless the user asks for it (`--allow-unsandboxed-code`).
"""

from __future__ import annotations

from slime.rollout.sandbox.bubblewrap import bubblewrap_version
from slime.rollout.sandbox.episode import Sandbox, SandboxEnded
from slime.rollout.sandbox.process import Limits, SandboxProcess, start
from slime.rollout.sandbox.program import RunResult, check_sandbox, program_slots, run_python
from slime.rollout.sandbox.proxy import Allow

__all__ = [
    "Allow",
    "Limits",
    "RunResult",
    "Sandbox",
    "SandboxEnded",
    "SandboxProcess",
    "bubblewrap_version",
    "check_sandbox",
    "program_slots",
    "run_python",
    "start",
]
