"""Runs a script whose operators in PyNative mode run one after the other, as in the mode "pynative" of conftest.py.

Start it with the script's path and the script's arguments.
"""

import runpy
import sys
from pathlib import Path

import mindspore

mindspore.set_context(pynative_synchronize=True)
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
