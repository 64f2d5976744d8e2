"""`python -m bench`: in a checkout, the same as `hicache bench`."""

import sys

from hicache.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
