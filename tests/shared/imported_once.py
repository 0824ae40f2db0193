"""What the processes of :class:`tests.shared.launched.ForkedRun` have imported when they start.

Run as a script, it is the scheduler by which the processes of a ``ForkedCluster`` find each other.
"""

import sys
from pathlib import Path

# When it is imported, MindSpore takes note of the script whose imports decide whether a graph in its cache is used.
sys.argv = [str(Path(__file__).resolve().parents[2] / "scripts" / "launch" / "run_mindformer.py")]

import mindformers  # noqa: E402, F401

if __name__ == "__main__":
    import mindspore
    from mindspore.communication import init

    mindspore.set_context(device_target="CPU")
    init()
