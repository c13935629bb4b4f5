"""`python -m slime.engine.server --model-path DIR`."""

import sys

from slime.engine.server.main import main

if __name__ == "__main__":
    sys.exit(main())
