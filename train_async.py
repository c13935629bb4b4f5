"""`python train_async.py FLAGS` is `slime train --train-async FLAGS`; the loop is in slime/cli/async_loop.py."""

import sys

from slime.cli.async_loop import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    sys.exit(main())
