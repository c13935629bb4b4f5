"""`python -m slime.engine.server.main --model-path DIR`."""

import sys

from slime.engine.server.main import main

if __name__ == "__main__":
    sys.exit(main())
