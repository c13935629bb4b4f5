"""Whether TransformerEngine can be used here, tested in a subprocess.

Its compiled extension must match torch and needs the libraries of a GPU: an import that fails or crashes is
reported in one line and does not affect this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from slime.config.env import child_env

_TIMEOUT_S = 120
_ANSWER = "TE "
_CODE = f"""
import json
import transformer_engine.pytorch as te
import torch, transformer_engine
from transformer_engine.pytorch import quantization as q
found = {{"version": transformer_engine.__version__, "fp8": "no GPU", "blocks": "no GPU"}}
if torch.cuda.is_available():
    found["fp8"], found["blocks"] = q.check_fp8_support()[1], q.check_fp8_block_scaling_support()[1]
print("{_ANSWER}" + json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class TeProbe:
    """Reasons why features cannot be used; empty if they can."""

    error: str = ""  # why it cannot be imported
    fp8: str = ""  # why this GPU has no FP8 (recipes delayed and tensorwise)
    blocks: str = ""  # why it has no FP8 in blocks of 128


def probe_te(python: str = sys.executable) -> TeProbe:
    """Import TransformerEngine with `python` and report what this GPU supports."""
    try:
        done = subprocess.run(
            [python, "-c", _CODE],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=child_env(),
        )
    except subprocess.TimeoutExpired:
        return TeProbe(error=f"importing it did not finish within {_TIMEOUT_S} s")
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            found = json.loads(line.removeprefix(_ANSWER))
            return TeProbe(fp8=found["fp8"], blocks=found["blocks"])
    return TeProbe(error=_last_line(done.stderr) or f"the import ended with {done.returncode}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
