"""Whether it is MindSpore's own ``build_train_network`` that asks a manager for its update cell."""

import sys

__all__ = ["is_called_by_stock_amp"]


def is_called_by_stock_amp() -> bool:
    """Return whether the function that calls this one was itself called by ``mindspore.train.amp``."""
    return bool(sys._getframe(2).f_globals.get("__name__") == "mindspore.train.amp")
