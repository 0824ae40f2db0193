"""Counts the weights of a network that FP16 cannot hold, because a cast to FP16 would turn them into inf."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.reading import WeightsBeyond, read_values

__all__ = ["weights_beyond"]

# From this number on, a cast to FP16 gives inf; smaller numbers are rounded to at most 65504.
_BEYOND_FP16 = 65520.0


def weights_beyond(network: Any, in_half: bool) -> WeightsBeyond | None:
    """Return the weights of a network that FP16 cannot hold, or None if FP16 holds all of them.

    Args:
        network (Cell): the network.
        in_half (bool): whether the network computes in FP16; otherwise only weights that are inf or NaN count.
    """
    limit = _BEYOND_FP16 if in_half else np.inf
    beyond = []
    for weight in filter(Tensor.is_floating_point, network.get_parameters()):
        array = to_numpy(weight)
        reading = read_values(array, str(weight.dtype).lower())
        is_mask = reading.only_minus_inf and not weight.requires_grad
        # Count the elements that are not below the limit: this includes NaN, for which every comparison is false.
        if not is_mask and (count := int(array.size - np.count_nonzero(np.abs(array) < limit))):
            beyond.append((weight.name, count, reading))
    if not beyond:
        return None
    names, counts, readings = zip(*sorted(beyond, key=lambda entry: -entry[2].largest), strict=True)
    infs_and_nans = sum(reading.infs_and_nans for reading in readings)
    return WeightsBeyond(sum(counts), names, readings[0].largest, infs_and_nans)
