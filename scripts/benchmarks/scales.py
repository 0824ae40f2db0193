"""Time a backward pass at each loss scale, and find what share of its gradients is subnormal in FP16."""

import math

import numpy as np

from scripts.benchmarks.paired_timing import compare, ratio, with_error

EXPONENTS = range(0, 17, 2)
# The smallest normal number of FP16; smaller numbers above 0 are subnormal.
SMALLEST_NORMAL = 2.0**-14


def measure_scales(task, arguments):
    """Return the times of a backward pass and the shares of tiny gradients, by log2 of the loss scale.

    The passes at all loss scales use the first batch, the initial weights and the same compiled graph.

    Args:
        task: a task of ``worth_tasks``.
        arguments (Namespace): ``copies`` and ``rounds``, as for ``paired_timing.take_turns``.

    Returns:
        dict: ``times``, as ``paired_timing.typical_times`` returns them; and ``shares``, how many of the weights'
        gradients are ``subnormal`` in FP16 and how many are ``zero``.
    """
    from mindspore import Tensor
    from mindspore import dtype as mstype

    from mindformers_adaptive.gradients.backward import backward_pass

    backward, batch = backward_pass(task.network(mstype.float16, 0)), task.data(0).batch(0)

    def at_scale(exponent):
        scale = Tensor(2.0**exponent, mstype.float32)
        return lambda: lambda _: [gradient.asnumpy() for gradient in backward(scale, *batch)[1]]

    ways = {str(exponent): at_scale(exponent) for exponent in EXPONENTS}
    shares = {name: shares_of(make()(0)) for name, make in ways.items()}
    return {"times": compare(ways, arguments.copies, arguments.rounds), "shares": shares}


def shares_of(gradients):
    """Return the share of scaled gradients that are subnormal in FP16, and the share that are 0.

    Examples:
        >>> shares_of([np.array([0.0, 2.0**-15]), np.array([2.0**-14, -1.0])])
        {'subnormal': 0.25, 'zero': 0.25}
    """
    sizes = np.abs(np.concatenate([gradient.ravel() for gradient in gradients]))
    subnormal = (sizes > 0) & (sizes < SMALLEST_NORMAL)
    return {"subnormal": float(np.mean(subnormal)), "zero": float(np.mean(sizes == 0))}


def scales_table(measured, base):
    """Return the table of the measurements, header first, with times relative to the time at loss scale ``base``."""
    rows = [["loss scale", "time", "subnormal gradients", "gradients that are 0"]]
    for name, shares in measured["shares"].items():
        taken = with_error(*ratio(measured["times"], name, str(round(math.log2(base)))), 2)
        rows.append([f"2^{name}", taken, *(f"{100 * share:.1f} %" for share in shares.values())])
    return rows
