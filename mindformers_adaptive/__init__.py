"""Adaptive loss scaling for MindSpore and MindFormers.

Importing this package does not import MindSpore: a name that needs it is loaded on first use, and raises an ImportError
that says what to install where MindSpore or MindFormers is missing.
"""

from mindformers_adaptive.public_names import lazy_names

__version__ = "2.0.0"

__getattr__, __dir__, __all__ = lazy_names(__name__)
