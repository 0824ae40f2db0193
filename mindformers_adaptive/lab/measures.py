"""The measures of a replayed policy, also in comparison with the oracle, a policy that knows all ceilings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.record.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

__all__ = ["FREE_BITS", "LARGEST_LOSS_SCALE", "SMALLEST_LOSS_SCALE", "MeasureAccumulator", "Measures"]
__all__ += ["cost", "measure", "overflow_flags", "overflows", "require_steps", "rows_of"]

# The smallest and the largest normal float32 number. A step with a ceiling above the largest number never overflows; a
# step with a ceiling below the smallest number always overflows.
SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = SMALLEST_FLOAT32, LARGEST_FLOAT32

# The largest number of steps to measure at once. With all steps of a long trace at once, intermediate arrays would fill
# the memory.
_STEPS_AT_ONCE = 2**18

# Down to this many bits below the ceiling, FP16 loses at most 0.1 % of the gradient in each of the trainings that
# `python -m scripts.studies.harm` measures.
FREE_BITS = 16

# The names of the measures that count steps.
_COUNTED = [
    "skipped",
    "too_low",
    "unavoidable",
    "skipped_regret",
    "unbounded",
    "longest_skip_run",
    "steps_to_first_applied",
]
_COUNTED += ["scale_changes", "window_changes"]


@dataclass(frozen=True)
class Measures:
    r"""The measures of a policy that was replayed on a trace, such as skipped steps and bits below the ceiling.

    Step t has the ceiling :math:`c_t`, and the policy used the loss scale :math:`s_t`. The step was *skipped* if it
    overflowed (:math:`s_t > c_t`), otherwise *applied*:

    .. code-block:: text

        skipped                 number of t with s_t > c_t
        too_low                 number of applied t with log2(c_t / s_t) > 16 bits and c_t <= the largest float32
        unavoidable             number of t with c_t below the smallest float32: every loss scale overflows there
        skipped_regret          number of skipped t that are not unavoidable: the oracle applies these
        seconds_lost            sum of seconds_t over the skipped t
        headroom_lost           mean of log2(c_t / s_t), in bits, over the applied t with c_t <= the largest float32
        unbounded               number of t with c_t above the largest float32: no loss scale overflows there, so there
                                is no headroom to measure, and headroom_lost leaves them out
        longest_skip_run        largest number of skipped steps in a row
        steps_to_first_applied  number of steps before the first applied one, all of them skipped
        scale_changes           number of t with s_(t+1) != s_t, the scale after the last step included
        window_changes          number of t after which the window changes; 0 for a policy without a window
        known_share             share of t where the trace knows, and does not assume, what happens at s_t

    Down to 16 bits (``FREE_BITS``) below the ceiling, FP16 loses next to nothing of the gradient, so ``headroom_lost``
    is no loss in itself: steps that are ``too_low`` are.

    The smallest and the largest float32 mean normal numbers. The oracle knows the ceiling of each step and uses exactly
    the ceiling as the loss scale, or the largest float32 if the ceiling is above it. So the oracle skips only the
    unavoidable steps and loses no headroom, and ``headroom_regret`` equals ``headroom_lost``. The oracle is bound
    neither to powers of two nor to the floor of a policy. So no policy does better, a regret is never negative, and one
    oracle serves every policy. (A scale that must be a power of two loses at least half a bit on average if the
    ceilings are spread evenly in log2.)

    ``steps``, the length of the trace, and all other counts are integers.

    Attributes:
        seconds_lost (float, optional): None if the trace has no ``seconds``.
        headroom_lost (float), headroom_regret (float): in bits; nan if there is no step to measure headroom at.
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
    unavoidable: int
    skipped_regret: int
    seconds_lost: float | None
    headroom_lost: float
    headroom_regret: float
    unbounded: int
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
    """Return the measures of a policy on a trace, from the loss scales and windows that it used.

    Args:
        trace (Trace): the replayed trace, with at least one step.
        loss_scale (ArrayLike): the scale of each step and the scale after the last step, shape (steps + 1,).
        scale_window (ArrayLike, optional): the window of each step and after the last step, of the same shape. Default:
            None, the policy has no window.

    Raises:
        ValueError: if the trace is empty or the shapes do not fit.
    """
    scales = _one_more_than_steps("loss_scale", loss_scale, trace)
    windows = None if scale_window is None else _one_more_than_steps("scale_window", scale_window, trace)
    accumulator = MeasureAccumulator([trace], 1)
    for start in range(0, len(trace), _STEPS_AT_ONCE):
        rows = slice(start, min(start + _STEPS_AT_ONCE, len(trace)) + 1)
        accumulator.add(start, scales[rows, np.newaxis], None if windows is None else windows[rows, np.newaxis])
    return accumulator.measures()[0]


class MeasureAccumulator:
    """The measures of several policies side by side, added up over consecutive chunks of their traces.

    Args:
        traces (Sequence[Trace]): one trace for all policies, or one trace for each; all equally long, with at least
            one step.
        lanes (int): the number of policies, each of which has one lane.

    Raises:
        ValueError: if the traces have no steps.
    """

    def __init__(self, traces: Sequence[Trace], lanes: int) -> None:
        require_steps(traces[0])
        self._traces = traces
        self._counts = {name: np.zeros(lanes, np.int64) for name in _COUNTED}
        self._measured, self._known, self._run = np.zeros((3, lanes), np.int64)
        self._headroom, self._seconds = np.zeros((2, lanes))

    def add(self, start: int, loss_scale: NDArray[np.float64], scale_window: NDArray[Any] | None) -> None:
        """Update the measures of each policy, such as the number of skipped steps, by a chunk of consecutive steps.

        Args:
            start (int): the first step of the chunk, counted from 0. All earlier steps must have been added.
            loss_scale (NDArray): the scale of each step and the scale after the last step, shape (steps + 1, lanes).
            scale_window (NDArray, optional): the windows, of the same shape; None for policies without a window.
        """
        used, steps = loss_scale[:-1], len(loss_scale) - 1
        ceiling, lower_bound, upper_bound, seconds = (
            rows_of(self._traces, name, start, start + steps)
            for name in ("ceiling", "lower_bound", "upper_bound", "seconds")
        )
        overflow, counts = overflow_flags(used, ceiling), self._counts
        skipped, unavoidable = np.count_nonzero(overflow, axis=0), ceiling < SMALLEST_LOSS_SCALE
        counts["skipped"] += skipped
        counts["unavoidable"] += np.count_nonzero(unavoidable, axis=0)
        counts["skipped_regret"] += np.count_nonzero(overflow & ~unavoidable, axis=0)
        counts["unbounded"] += np.count_nonzero(ceiling > LARGEST_LOSS_SCALE, axis=0)
        counts["scale_changes"] += np.count_nonzero(loss_scale[1:] != used, axis=0)
        if scale_window is not None:
            counts["window_changes"] += np.count_nonzero(scale_window[1:] != scale_window[:-1], axis=0)
        # If all earlier steps were skipped, the first applied step is in this chunk of steps or in a later chunk.
        before_first = np.where(skipped == steps, steps, np.argmin(overflow, axis=0))
        counts["steps_to_first_applied"] += np.where(counts["steps_to_first_applied"] == start, before_first, 0)
        # Concatenate the skip flags of all lanes (one lane per policy). Add an applied step at the end of each lane, so
        # that no series of skipped steps spans two lanes.
        lane_by_lane = np.zeros((len(self._run), steps + 1), np.bool_)
        lane_by_lane[:, :steps] = overflow.T
        lane, step = np.divmod(consecutive_runs(np.flatnonzero(lane_by_lane)), steps + 1)
        lane, (first, last) = lane[:, 0], step.T
        # If this chunk starts with skipped steps, their series may have begun in an earlier chunk. Add the number of
        # these earlier steps to the length of the series.
        lengths = last + 1 - first + np.where(first == 0, self._run[lane], 0)
        np.maximum.at(counts["longest_skip_run"], lane, lengths)
        self._run = np.zeros_like(self._run)
        self._run[lane[last == steps - 1]] = lengths[last == steps - 1]
        measured = ~overflow & (ceiling <= LARGEST_LOSS_SCALE)
        ratio = np.divide(ceiling, used, out=np.ones(used.shape), where=measured)
        self._measured += np.count_nonzero(measured, axis=0)
        bits = np.log2(ratio)
        counts["too_low"] += np.count_nonzero(bits > FREE_BITS, axis=0)
        self._headroom += bits.sum(axis=0)
        seconds_lost = np.zeros(overflow.shape)
        np.copyto(seconds_lost, seconds, where=overflow)
        self._seconds += seconds_lost.sum(axis=0)
        self._known += np.count_nonzero((used <= lower_bound) | (used >= upper_bound), axis=0)

    def measures(self) -> list[Measures]:
        """Return the measures of each policy on the whole trace."""
        steps, lanes = len(self._traces[0]), len(self._run)
        has_seconds = [trace.seconds is not None for trace in self._traces]
        recovery = np.full(lanes, math.nan)
        headroom = np.divide(self._headroom, self._measured, out=recovery, where=self._measured > 0)
        columns = {
            **self._counts,
            "steps": np.full(lanes, steps),
            "seconds_lost": np.where(has_seconds, self._seconds, np.array(None)),
            "headroom_lost": headroom,
            "headroom_regret": headroom,
            "known_share": self._known / steps,
        }
        lists = {name: column.tolist() for name, column in columns.items()}
        return [Measures(**{name: values[lane] for name, values in lists.items()}) for lane in range(lanes)]


def rows_of(traces: Sequence[Trace], name: str, start: int, stop: int) -> NDArray[np.float64]:
    """Return an attribute of traces as float64 of shape (steps, traces); nan for each trace without this attribute."""
    columns = [getattr(trace, name) for trace in traces]
    missing = np.full(stop - start, math.nan)
    return np.stack([missing if column is None else column[start:stop] for column in columns], axis=1)


def cost(measures: Measures) -> float:
    """Return the cost of a configuration: of 1000 steps, how many are skipped or more than 16 bits too low.

    .. code-block:: text

        cost = 1000 * (skipped + too_low) / steps

    A skipped step costs the time of a step. A loss scale below the ceiling costs nothing down to ``FREE_BITS`` bits,
    because FP16 loses next to nothing of the gradient there. Further below, a step loses a part of the gradient that
    depends on the model, and a trace does not show it. Such a step counts as much as a skipped step.

    Args:
        measures (Measures): the measures of a replay.

    Returns:
        float.
    """
    return 1000.0 * (measures.skipped + measures.too_low) / measures.steps


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
