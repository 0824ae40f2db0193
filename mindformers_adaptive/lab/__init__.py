"""The lab: analyze logs, and replay and compare loss scaling offline, in plain Python and NumPy."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
