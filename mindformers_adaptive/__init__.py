"""Adaptive loss scaling for MindSpore and MindFormers.

Importing this package does not import MindSpore: a name that needs MindSpore is loaded on first use. If MindSpore or
MindFormers is missing, the first use raises an ImportError that says what to install.
"""

from mindformers_adaptive.public_names import lazy_names

__version__ = "2.0.0"

__getattr__, __dir__, __all__ = lazy_names(__name__)
