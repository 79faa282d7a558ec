"""`python -m pagefuzz`: the command line, where its script is not installed."""

import sys

from pagefuzz.harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
