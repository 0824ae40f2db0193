"""Explains why a training overflows: in which layer and operator, and what helps."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
