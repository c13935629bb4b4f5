"""Hugging Face weights -> torch_dist checkpoint, in one process or under torchrun.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint DIR --save DIR

MODEL_ARGS are checked against the model's config.json and may be left out. Under torchrun the model is
spread over all processes as one pipeline, unless parallel sizes are given.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-torch-dist", *sys.argv[1:]]))
