"""What the processes of :class:`launched.ForkedRun` have imported when they start."""

import sys
from pathlib import Path

# When it is imported, MindSpore takes note of the script whose imports decide whether a graph in its cache is used.
sys.argv = [str(Path(__file__).resolve().parents[2] / "scripts" / "launch" / "run_mindformer.py")]

import mindformers  # noqa: E402, F401
