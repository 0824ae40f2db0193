"""Counterparts of ``mindspore.amp`` for loss scaling: the adaptive rule, and support for CPU."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
