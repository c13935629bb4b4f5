"""torch_dist checkpoint -> Hugging Face folder, tensor by tensor.

    python tools/convert_torch_dist_to_hf.py --input-dir DIR/iter_0000019 --output-dir DIR \
        --origin-hf-dir DIR --max-workers 4

--input-dir may be a folder of Megatron's own tools (`release` or `iter_...`); --help lists the options.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "torch-dist-to-hf", *sys.argv[1:]]))
