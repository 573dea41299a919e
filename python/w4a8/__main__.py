"""``python -m w4a8``: the command ``w4a8``."""

import sys

from w4a8.command import main

if __name__ == "__main__":
    sys.exit(main())
