"""Counterparts of ``mindspore.amp`` for loss scaling: the adaptive rule, and support for CPU."""
