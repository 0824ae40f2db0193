"""What it takes to see an overflow, against a plain pass over the gradients."""

import time
from functools import partial

import mindspore
import numpy as np
from mindformers_adaptive.cells.guided_update_cell import GradientGuidedLossScaleUpdateCell
from mindspore import Tensor, amp, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.largest_gradient import LargestGradient
from mindformers_adaptive.cells.overflow_on_cpu import has_inf_or_nan

__all__ = ["COUNTS", "ELEMENTS", "detection_table", "measure_detection"]

COUNTS = (4, 50, 200)
ELEMENTS = 5_000_000
EMPTY, PLAIN, NUMPY = "empty call", "ReduceMax alone", "NumPy, largest value"
ALL_FINITE, OVERFLOW, LARGEST = "amp.all_finite", "adaptive cell", "guided cell, with the largest gradient"

_largest_value = ops.MultitypeFuncGraph("largest_value")


@_largest_value.register("Tensor")
def _reduce_max(gradient):
    return ops.ReduceMax()(gradient)


class EmptyCall(nn.Cell):
    """Takes the gradients and looks at one of them."""

    def __init__(self):
        super().__init__()
        self.neg = ops.Neg()

    def construct(self, gradients):
        return self.neg(gradients[0][0:1])


class AllFinite(nn.Cell):
    """MindSpore's detection."""

    def construct(self, gradients):
        return amp.all_finite(gradients)


class Overflow(nn.Cell):
    """That of the train-step cells on a CPU."""

    def construct(self, gradients):
        return has_inf_or_nan(gradients)


class PlainPass(nn.Cell):
    """The largest value of each gradient: one primitive a Tensor, and nothing else."""

    def __init__(self):
        super().__init__()
        self.hyper_map = ops.HyperMap()
        self.stack = ops.Stack()

    def construct(self, gradients):
        return self.stack(self.hyper_map(_largest_value, gradients))


def run(cell, gradients):
    return cell(gradients).asnumpy()


def largest_of(arrays):
    return [array.max() for array in arrays]


def measure_detection(rounds, elements=ELEMENTS, counts=COUNTS):
    """Return by number of Tensors the shortest times in milliseconds, by name, over rounds in which all take turns."""
    times = {}
    for count in counts:
        random = np.random.default_rng(0)
        arrays = [random.normal(size=elements // count).astype(np.float32) for _ in range(count)]
        # A tuple that is not mutable would be folded into the graph as a constant.
        gradients = mindspore.mutable(tuple(Tensor(array, mstype.float32) for array in arrays))
        cells = {
            EMPTY: EmptyCall(),
            PLAIN: PlainPass(),
            ALL_FINITE: AllFinite(),
            OVERFLOW: Overflow(),
            LARGEST: LargestGradient(GradientGuidedLossScaleUpdateCell(2**10)),
        }
        calls = {name: partial(run, cell, gradients) for name, cell in cells.items()}
        calls[NUMPY] = partial(largest_of, arrays)
        for call in calls.values():
            call()
        taken = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                taken[name].append((time.perf_counter() - start) * 1e3)
        times[count] = {name: min(each) for name, each in taken.items()}
    return times


def detection_table(times, elements=ELEMENTS):
    """The table, as lines of Markdown."""
    yield f"Overflow detection on {elements / 1e6:g} million float32 gradients, as a multiple of a plain pass over the"
    yield f"same bytes ({PLAIN}), each above an empty call; shortest of all rounds:"
    yield ""
    names = [ALL_FINITE, OVERFLOW, LARGEST]
    yield "| Tensors | " + " | ".join(names) + " | NumPy's pass |"
    yield "|" + "---|" * (len(names) + 2)
    for count, taken in times.items():
        plain = taken[PLAIN] - taken[EMPTY]
        ratios = [(taken[name] - taken[EMPTY]) / plain for name in names]
        cells = [*(f"{ratio:.1f}" for ratio in ratios), f"{taken[NUMPY] / plain:.1f}"]
        yield f"| {count} | " + " | ".join(cells) + " |"
