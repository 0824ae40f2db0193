"""Launch MindFormers with adaptive loss scaling: the options and the lines of MindFormers' own script of this name."""

import sys

from mindformers_adaptive.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", "--verbose", *sys.argv[1:]]))
