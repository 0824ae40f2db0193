"""What a run did with its loss scale: the record, the callbacks that write it, TensorBoard."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
