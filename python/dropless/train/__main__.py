"""``python -m dropless.train``."""

import sys

from dropless.train.cli import main

if __name__ == "__main__":
    sys.exit(main())
