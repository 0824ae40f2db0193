"""Imports MindFormers and this package once; the processes of :class:`tests.shared.launched.ForkedRun` are forked then.

Run as a script, this module is the scheduler through which the processes of a ``ForkedCluster`` find each other.
"""

import inspect
import sys
from pathlib import Path

# At import, MindSpore notes this script, run_mindformer.py. The files that the noted script imports decide whether
# MindSpore uses a cached graph.
sys.argv = [str(Path(__file__).resolve().parents[2] / "scripts" / "launch" / "run_mindformer.py")]

import mindformers  # noqa: E402, F401

import mindformers_adaptive.mindformers.trainer  # noqa: E402, F401
from tests.shared.source_memo import remember_source_lines  # noqa: E402

remember_source_lines()

# MindFormers looks up a module before each training. The first such look-up lists the files of all modules, and Python
# keeps this list.
inspect.getmodule(inspect.currentframe())

if __name__ == "__main__":
    import mindspore
    from mindspore.communication import init

    mindspore.set_context(device_target="CPU")
    init()
