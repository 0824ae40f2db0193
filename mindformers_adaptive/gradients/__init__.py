"""Measures what a number format does to a network's gradients at each loss scale, and finds an initial loss scale."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
