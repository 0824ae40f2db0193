"""``python -m mindformers_adaptive`` is the program ``adaptive-loss-scale``."""

import sys

from mindformers_adaptive.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
