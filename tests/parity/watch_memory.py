"""The conversion to torch_dist with its memory watched; a script, for torchrun.

Prints MEMORY and, as JSON, the bytes of this rank's parameters, of the largest of them, and the most it
held above the start. Only anonymous memory counts: pages of files belong to the system's cache.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


class Watch(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak = anonymous_bytes()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.002)


def watched(argv: list[str]) -> None:
    """The steps of the tool's main, one by one."""
    from slime.backends.megatron_utils.conversion import to_torch_dist as steps
    from slime.backends.megatron_utils.conversion.setup import conversion_args, process_group
    from slime.backends.megatron_utils.hf_weights.reader import HfReader
    from slime.backends.megatron_utils.model_config import read_config

    args = conversion_args(argv)
    config, reader = read_config(args.hf_checkpoint), HfReader(args.hf_checkpoint)
    with process_group():
        args = steps.with_sharding(args, config, reader)
        watch = Watch()
        watch.start()
        chunks = steps.build(args, config)
        sizes = [p.nbytes for chunk in chunks for p in chunk.parameters()]
        steps.load(chunks, args, config, reader)
        steps.save(chunks, args, config)
        peak = watch.peak - watch.start_bytes
        result = {"share": sum(sizes), "largest": max(sizes), "peak": peak}
        print("MEMORY " + json.dumps(result), flush=True)


if __name__ == "__main__":
    watched(sys.argv[1:])
