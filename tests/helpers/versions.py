"""What the installed version of MindFormers is."""

import importlib.util

__all__ = ["BEFORE_1_7"]

# Not by comparing the text of the number, of which "1.10" would be smaller.
BEFORE_1_7 = importlib.util.find_spec("mindformers.checkpoint") is None
