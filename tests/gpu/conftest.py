"""Hugging Face is the oracle here, so it computes in plain torch.

Where flash-linear-attention is installed, transformers would take its kernels for gated delta nets, also in
fp32, which they compute in TF32, and on a CPU, where they do not run.
"""

import importlib
import sys
from importlib.util import find_spec

if find_spec("fla") is not None:
    sys.modules["fla"] = None  # type: ignore[assignment] - importing it now raises an error
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    del sys.modules["fla"]
