"""Write a Hugging Face checkpoint with its weights in FP8, for rollout engines.

    python tools/convert_hf_to_fp8.py --model-dir M --save-dir M-FP8 \\
        --strategy block --block-size 128 128 --max-workers 4

Started again with the same options, it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.core.errors import UserError
from slime.weights.fp8 import convert_to_fp8
from slime.weights.fp8_format import Fp8Format


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--save-dir", type=Path, required=True)
    parser.add_argument("--strategy", choices=["block", "channel", "tensor"], default="block")
    parser.add_argument("--block-size", type=int, nargs=2, default=[128, 128])
    parser.add_argument(
        "--scale-fmt", choices=["ue8m0"], help="ue8m0: scales of blocks rounded up to powers of two"
    )
    parser.add_argument("--max-workers", type=int, default=1, help="files converted at a time")
    options = parser.parse_args()
    if min(*options.block_size, options.max_workers) < 1:
        parser.error("--block-size and --max-workers must be at least 1")
    if options.scale_fmt and options.strategy != "block":
        parser.error(f"--scale-fmt {options.scale_fmt} is for --strategy block")
    layout = Fp8Format(
        strategy=options.strategy, block=tuple(options.block_size), scale_fmt=options.scale_fmt
    )
    try:
        convert_to_fp8(
            options.model_dir,
            options.save_dir,
            layout,
            max_workers=options.max_workers,
            say=lambda text: print(text, flush=True),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
