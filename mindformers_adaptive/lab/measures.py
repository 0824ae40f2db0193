"""The measures of a replayed rule: skipped steps, steps that were too low, and bits below the ceiling."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.record.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

# The smallest and the largest normal float32 number. A step with a ceiling above the largest number never overflows; a
# step with a ceiling below the smallest number always overflows.
SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = SMALLEST_FLOAT32, LARGEST_FLOAT32

# Down to this many bits below the ceiling, FP16 loses at most 0.1 % of the gradient in each of the trainings that
# `python -m scripts.studies.harm` measures.
FREE_BITS = 16


@dataclass(frozen=True)
class Measures:
    r"""The measures of a rule that was replayed on a trace, such as skipped steps and bits below the ceiling.

    Step t has the ceiling :math:`c_t`, and the rule used the loss scale :math:`s_t`. The step was *skipped* if it
    overflowed (:math:`s_t > c_t`), otherwise *applied*:

    .. code-block:: text

        skipped                 number of t with s_t > c_t
        too_low                 number of applied t with log2(c_t / s_t) > 16 bits and c_t <= the largest float32
        seconds_lost            sum of seconds_t over the skipped t
        headroom_lost           mean of log2(c_t / s_t), in bits, over the applied t with c_t <= the largest float32
        longest_skip_run        largest number of skipped steps in a row
        steps_to_first_applied  number of steps before the first applied one, all of them skipped
        scale_changes           number of t with s_(t+1) != s_t, the scale after the last step included
        window_changes          number of t after which the window changes; 0 for a rule without a window
        known_share             share of t where the trace knows, and does not assume, what happens at s_t

    Down to 16 bits (``FREE_BITS``) below the ceiling, FP16 loses next to nothing of the gradient, so ``headroom_lost``
    is no loss in itself: steps that are ``too_low`` are.

    ``steps``, the length of the trace, and all other counts are integers.

    Attributes:
        seconds_lost (float, optional): None if the trace has no ``seconds``.
        headroom_lost (float): in bits; nan if there is no step to measure headroom at.
        steps_to_first_applied (int): the number of all steps if no step is applied.
        known_share (float): from 0 to 1.

    Examples:
        >>> trace = Trace.exact("sudden drop", [8.0, 8.0, 2.0, 2.0])
        >>> measures = measure(trace, [4.0, 4.0, 4.0, 2.0, 2.0])
        >>> measures.skipped, measures.headroom_lost, measures.scale_changes
        (1, 0.6666666666666666, 1)
    """

    steps: int
    skipped: int
    too_low: int
    seconds_lost: float | None
    headroom_lost: float
    longest_skip_run: int
    steps_to_first_applied: int
    scale_changes: int
    window_changes: int
    known_share: float

    def as_dict(self) -> dict[str, float | None]:
        """Return the measures of a replay by name, ready for JSON: nan becomes None."""
        return {
            name: None if value is None or math.isnan(value) else value
            for name, value in dataclasses.asdict(self).items()
        }


def overflows(loss_scale: float, ceiling: float) -> bool:
    """Return whether a step overflows: its loss scale is above the ceiling, or is not a positive float32 number.

    At a scale of 0 or beyond float32 the unscaled gradients are nan, whatever the ceiling is.

    Examples:
        >>> overflows(8.0, 4.0), overflows(4.0, 4.0), overflows(float("inf"), float("inf"))
        (True, False, True)
    """
    return not 0.0 < loss_scale <= min(ceiling, LARGEST_LOSS_SCALE)


def overflow_flags(loss_scale: NDArray[np.float64], ceiling: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each loss scale and ceiling, broadcast to a common shape, whether the step overflows."""
    return ~((loss_scale > 0.0) & (loss_scale <= np.minimum(ceiling, LARGEST_LOSS_SCALE)))


def measure(trace: Trace, loss_scale: ArrayLike, scale_window: ArrayLike | None = None) -> Measures:
    """Return the measures of a rule on a trace, from the loss scales and windows that it used.

    Args:
        trace (Trace): the replayed trace, with at least one step.
        loss_scale (ArrayLike): the scale of each step and the scale after the last step, shape (steps + 1,).
        scale_window (ArrayLike, optional): the window of each step and after the last step, of the same shape. Default:
            None, the rule has no window.

    Raises:
        ValueError: if the trace is empty or the shapes do not fit.
    """
    require_steps(trace)
    scales = _one_more_than_steps("loss_scale", loss_scale, trace)
    windows = np.zeros(1) if scale_window is None else _one_more_than_steps("scale_window", scale_window, trace)
    used = scales[:-1]
    skipped = overflow_flags(used, trace.ceiling)
    series = consecutive_runs(np.flatnonzero(skipped))
    measured = ~skipped & (trace.ceiling <= LARGEST_LOSS_SCALE)
    bits = np.log2(trace.ceiling[measured] / used[measured])
    return Measures(
        steps=len(trace),
        skipped=int(skipped.sum()),
        too_low=int((bits > FREE_BITS).sum()),
        seconds_lost=None if trace.seconds is None else float(trace.seconds[skipped].sum()),
        headroom_lost=float(bits.mean()) if len(bits) else math.nan,
        longest_skip_run=int((series[:, 1] - series[:, 0] + 1).max(initial=0)),
        steps_to_first_applied=len(trace) if skipped.all() else int(np.argmin(skipped)),
        scale_changes=int(np.count_nonzero(scales[1:] != used)),
        window_changes=int(np.count_nonzero(windows[1:] != windows[:-1])),
        known_share=float(trace.known(used).mean()),
    )


def require_steps(trace: Trace) -> None:
    """Raise ValueError if a trace has no steps, because mean values over no steps are undefined."""
    if len(trace) == 0:
        raise ValueError(f"The trace {trace.name!r} must have at least 1 step, but got none. Leave this trace out.")


def _one_more_than_steps(name: str, values: ArrayLike, trace: Trace) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (len(trace) + 1,):
        raise ValueError(
            f"'{name}' must have one number for each of the {len(trace)} steps of the trace {trace.name!r} and one "
            f"more for the time after the last step, but got shape {array.shape}. Append the value after the last step."
        )
    return array
