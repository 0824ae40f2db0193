"""Reads the learning rate of an optimizer of MindSpore or MindFormers."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

__all__ = ["learning_rate_of"]

# A schedule is asked for the learning rate of these steps, of which the largest is taken: it can begin at 0.
_STEPS = (0, 1, 10, 100, 1000, 10000)


def learning_rate_of(optimizer: Any) -> float | None:
    """Return the largest learning rate of an optimizer, or None if it is not known or not above 0.

    Args:
        optimizer (Optional[Cell]): an optimizer of ``mindspore.nn``, ``mindspore.mint.optim`` or MindFormers.

    Examples:
        >>> from mindspore import Parameter
        >>> learning_rate_of(nn.SGD([Parameter(Tensor([1.0]))], learning_rate=0.5)), learning_rate_of(None)
        (0.5, None)
    """
    groups = getattr(optimizer, "param_groups", None)
    rates = [group["lr"] for group in groups] if groups else getattr(optimizer, "learning_rate", None)
    largest = [_largest(rate) for rate in (rates if isinstance(rates, list | tuple) else [rates])]
    rate = max((each for each in largest if each is not None and np.isfinite(each)), default=0.0)
    return rate if rate > 0 else None


def _largest(rate: Any) -> float | None:
    if isinstance(rate, nn.Cell):
        # MindSpore puts a list of learning rates into a cell that looks up the step.
        listed = getattr(rate, "learning_rate", None)
        if isinstance(listed, Tensor):
            return float(listed.asnumpy().max())
        return max(float(rate(Tensor(step, mstype.int32)).asnumpy().max()) for step in _STEPS)
    if isinstance(rate, Tensor):
        return float(rate.asnumpy().max())
    return float(rate) if isinstance(rate, int | float) else None
