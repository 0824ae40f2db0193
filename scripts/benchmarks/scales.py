"""How long a backward pass takes at each loss scale, and what share of its gradients FP16 has as subnormal numbers."""

import math

import numpy as np

from scripts.benchmarks.paired_timing import compare, ratio, with_error

EXPONENTS = range(0, 17, 2)
# Of FP16; what is below it and not 0 is subnormal.
SMALLEST_NORMAL = 2.0**-14


def measure_scales(task, arguments):
    """Return by log2 of the loss scale the time of the same backward pass, and shares of the gradients.

    The pass is of the first batch and the weights of the start, by one compiled graph at every scale.

    Args:
        task: a task of ``worth_tasks``.
        arguments (Namespace): ``copies`` and ``rounds`` of the measurement.

    Returns:
        dict: ``times``, as ``paired_timing.typical_times`` has them; and ``shares``, of the gradients of the weights,
        that are ``subnormal`` in FP16 and that are ``zero``.
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
    """Return the shares of some arrays, before they are unscaled, that are subnormal in FP16, and 0.

    Examples:
        >>> shares_of([np.array([0.0, 2.0**-15]), np.array([2.0**-14, -1.0])])
        {'subnormal': 0.25, 'zero': 0.25}
    """
    sizes = np.abs(np.concatenate([gradient.ravel() for gradient in gradients]))
    subnormal = (sizes > 0) & (sizes < SMALLEST_NORMAL)
    return {"subnormal": float(np.mean(subnormal)), "zero": float(np.mean(sizes == 0))}


def scales_table(measured, base):
    """Return the rows of what was measured, with the time at one scale as the unit; the columns first."""
    rows = [["loss scale", "time", "subnormal gradients", "gradients that are 0"]]
    for name, shares in measured["shares"].items():
        taken = with_error(*ratio(measured["times"], name, str(round(math.log2(base)))), 2)
        rows.append([f"2^{name}", taken, *(f"{100 * share:.1f} %" for share in shares.values())])
    return rows
