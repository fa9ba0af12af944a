"""`python -m tessel` is the `tessel` command."""

import sys

from tessel.cli import main

if __name__ == "__main__":
    sys.exit(main())
