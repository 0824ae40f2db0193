"""Replaying policies on traces: one by one, many at once, and tuning."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
