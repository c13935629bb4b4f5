"""`python train.py FLAGS` is `slime train FLAGS`; the loop is in slime/cli/loop.py."""

import sys

from slime.cli.loop import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    sys.exit(main())
