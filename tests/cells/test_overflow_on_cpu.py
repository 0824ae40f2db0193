"""Any inf or NaN in the gradients is found, by the overflow detection on a CPU and by ``LargestGradient``."""

import itertools

import mindspore
import numpy as np
import pytest
from mindformers.core.clip_grad import get_square_sum
from mindspore import Tensor, amp, nn, ops

from mindformers_adaptive.cells.detection import LargestGradient, has_inf_or_nan
from mindformers_adaptive.cells.update_cells import GradientGuidedLossScaleUpdateCell

pytestmark = pytest.mark.slow

SHAPES = [(2, 3), (), (5,), (40, 70)]
# Gradients with extreme but finite values, and gradients that are not finite.
FINITE = [0.0, -0.0, 1e-45, 3.4028235e38, -3.4028235e38]
NOT_FINITE = [np.inf, -np.inf, np.nan, -np.nan]


class Detection(nn.Cell):
    """Run this package's two overflow detections and MindSpore's overflow detection on the same gradients."""

    def __init__(self):
        super().__init__()
        self.update_cell = GradientGuidedLossScaleUpdateCell(2**10)
        self.update_cell.declare_signal()
        self.largest_gradient = LargestGradient(self.update_cell)
        self.beside_clipping = LargestGradient(self.update_cell, sum_of_squares=get_square_sum)

    def construct(self, gradients):
        of_mindspore = ops.logical_not(amp.all_finite(gradients))
        measured = self.largest_gradient(gradients), self.beside_clipping(gradients)
        return has_inf_or_nan(gradients), *measured, of_mindspore


def gradients_of(dtype, value, number, at):
    arrays = [np.random.default_rng(7).normal(size=shape).astype(np.float32) for shape in SHAPES]
    arrays[number].reshape(-1)[at] = value
    return mindspore.mutable(tuple(Tensor(array, dtype) for array in arrays))


def elements(size):
    return sorted({0, size // 2, size - 1})


PLACES = [(number, at) for number, shape in enumerate(SHAPES) for at in elements(int(np.prod(shape)))]


@pytest.mark.parametrize(
    ("dtype", "mode"), [("float32", "graph"), ("float16", "graph"), ("float16", "pynative")], indirect=["mode"]
)
def test_inf_or_nan_anywhere_is_an_overflow(mode, dtype):
    detection = Detection()
    largest_of = {"float32": np.finfo(np.float32).max, "float16": 65504.0}[dtype]
    finite = [float(np.clip(value, -largest_of, largest_of)) for value in FINITE]
    seen = set()
    # A step takes long in PyNative mode, whose kernels are the same.
    places = PLACES if mode == "graph" else PLACES[::3]
    for value, (number, at) in [*zip(finite, PLACES, strict=False), *itertools.product(NOT_FINITE, places)]:
        gradients = gradients_of(getattr(mindspore, dtype), value, number, at)
        answers = {bool(answer) for answer in detection(gradients)}
        assert answers == {not np.isfinite(value)}, (value, number, at)
        seen |= answers
    assert seen == {True, False}
