"""What the installed version of MindFormers is."""

import importlib.metadata
import importlib.util

import pytest

__all__ = ["BEFORE_1_7", "BEFORE_2", "NEEDS_LOSS_PER_TOKEN", "NEEDS_SECTION"]

# Not by comparing the text of the number, of which "1.10" would be smaller.
BEFORE_1_7 = importlib.util.find_spec("mindformers.checkpoint") is None
BEFORE_2 = importlib.metadata.version("mindformers").startswith("1.")

NEEDS_LOSS_PER_TOKEN = pytest.mark.skipif(BEFORE_1_7, reason="this version of MindFormers has no loss per token")
NEEDS_SECTION = pytest.mark.skipif(BEFORE_1_7, reason="this version of MindFormers has no `checkpoint:` section")
