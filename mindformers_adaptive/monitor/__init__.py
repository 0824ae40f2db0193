"""Callbacks that record the loss scaling of a run, in a file and in TensorBoard."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
