"""Runs a script, with its arguments, so that in PyNative mode MindSpore waits for each operator.

The script computes the same, but takes less time: see ``mindspore_mode`` in tests/conftest.py.
"""

import runpy
import sys
from pathlib import Path

import mindspore

mindspore.set_context(pynative_synchronize=True)
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
