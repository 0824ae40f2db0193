"""Constants that say which version of MindFormers is installed."""

import importlib.metadata
import importlib.util

import pytest

# Look for a module instead of comparing version numbers as text, in which "1.10" is smaller than "1.7".
BEFORE_1_7 = importlib.util.find_spec("mindformers.checkpoint") is None
BEFORE_2 = importlib.metadata.version("mindformers").startswith("1.")

NEEDS_LOSS_PER_TOKEN = pytest.mark.skipif(BEFORE_1_7, reason="this version of MindFormers has no loss per token")
NEEDS_SECTION = pytest.mark.skipif(BEFORE_1_7, reason="this version of MindFormers has no `checkpoint:` section")
