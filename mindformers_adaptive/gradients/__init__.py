"""What a format does to the gradients of a network, scale by scale, and which loss scale to start from."""

from mindformers_adaptive.public_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
