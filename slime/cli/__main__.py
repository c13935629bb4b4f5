"""`python -m slime.cli COMMAND`."""

import sys

from slime.cli import main

if __name__ == "__main__":
    sys.exit(main())
