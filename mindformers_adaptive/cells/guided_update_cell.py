"""``GradientGuidedLossScaleUpdateCell``: the gradient-guided rule as a MindSpore cell."""

import numpy as np
from mindspore import Tensor, jit, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.guided_state import GuidedCellState
from mindformers_adaptive.cells.saved_state import read_restored_scale
from mindformers_adaptive.cells.scale_history import ScaleHistory, refuse_kept_graphs, require_history_size
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, require_flag
from mindformers_adaptive.rules.guided import (
    CONTRADICTIONS_PER_BIT,
    DROPS,
    LEVEL_SHARE,
    MOST_CONTRADICTIONS,
    NO_CAP,
    PLACES,
    PRIOR_STEPS,
    REACH,
    REACH_AFTER_SEVERAL,
    WINDOW_FACTOR,
    GuidedRule,
)
from mindformers_adaptive.rules.guided_names import COUNTERS
from mindformers_adaptive.rules.restored_state import STEP_LIMIT, repair_loss_scale
from mindformers_adaptive.rules.safe_exponent import LARGEST_FLOAT16

__all__ = ["GradientGuidedLossScaleUpdateCell"]

_HISTORY = ("overflow", "scale_window", "skipped_steps", "consecutive_overflows")

# The exponents n for which 65504 * 2**-n is a normal float32 number: what the largest gradient can show.
_SHOWN = range(-112, 142)
_SMALLEST_NORMAL_FLOAT32 = 2.0**-126


class GradientGuidedLossScaleUpdateCell(GuidedCellState, nn.DynamicLossScaleUpdateCell):
    r"""Update cell of gradient-guided loss scaling: the scale follows what the largest gradient shows of its ceiling.

    The rule is that of :class:`mindformers_adaptive.rules.guided.GuidedRule`. It needs the largest absolute value
    of each step's gradients, which the train-step cells of :mod:`mindformers_adaptive.wrapper` assign to the Parameter
    ``largest_gradient``. Stock train-step cells do not, and are refused when training starts. Its state is in
    Parameters, which a checkpoint of the train-step cell contains:

    =============================== ========================= ===================================================
    Parameter in a checkpoint       attribute                 what it is
    =============================== ========================= ===================================================
    ``guided_counters``             ``counters``              int32 of shape (9,), the rule's integers
    ``guided_level``                ``level``                 float32 of shape (), what recent gradients showed
    ``guided_overflow_rate``        ``overflow_rate``         float32 of shape (16,), the record of overflow rates
    ``largest_gradient``            ``largest_gradient``      float32 of shape (), that of the last step
    ``current_iterator_step``       ``cur_iter``              int32 of shape (), number of the next step, from 1
    ``last_overflow_iterator_step`` ``last_overflow_iter``    int32 of shape (), step of the last overflow or raise
    ``skipped_steps``               ``skipped_steps``         int32 of shape (), overflowed steps so far
    ``consecutive_overflows``       ``consecutive_overflows`` int32 of shape (), overflowed steps in a row
    =============================== ========================= ===================================================

    Args:
        loss_scale_value (Union[int, float, Tensor, Parameter]): the initial loss scale; a Tensor or Parameter of one
            element, as MindFormers passes on resume, is only read. One that is no power of two gives a warning, and
            the next power of two below is used.
        scale_factor (int): 2, and nothing else: the scale moves by whole bits. Default: 2.
        exchange_rate (float): skipped steps in 1000 that a bit of headroom is worth, 0.001 to 1000. The larger, the
            closer the scale is to the ceiling. Default: 1.0, what a fixed window of 1000 pays.
        min_loss_scale (float): the floor of the loss scale. Default: 1.0, as in ``nn.DynamicLossScaleUpdateCell``.
        max_loss_scale (float, optional): the cap of the loss scale. Default: None, the largest power of two in float32.
        history_size (int): how many of the last steps the device keeps, for :meth:`recent_steps`. Default: 0, as in
            MindSpore's cells.
        track_per_parameter (bool): whether to keep the largest gradient of each Parameter of the last step, for
            :meth:`overflowed_parameters` and for ``LossScaleMonitor``, which then names the Parameters with inf or NaN
            when a step overflows. Refused where MindSpore keeps compiled graphs. Default: False.

    Inputs:
        - **loss_scale** (Parameter) - the loss scale of this step, float32 of shape :math:`()`. It is assigned the
          scale of the next step.
        - **overflow** (Tensor) - bool of shape :math:`()`, whether the step overflowed.

    Outputs:
        Tensor, the input `overflow`.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Parameter, Tensor, ops
        >>> from mindformers_adaptive import GradientGuidedLossScaleUpdateCell
        >>> cell = GradientGuidedLossScaleUpdateCell(loss_scale_value=2**10)
        >>> loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
        >>> for _ in range(50):
        ...     _ = ops.assign(cell.largest_gradient, Tensor(0.25))  # a train-step cell does this
        ...     _ = cell(loss_scale, Tensor(False))
        >>> float(loss_scale), cell.state()["skipped_steps"]
        (4096.0, 0)
    """

    def __init__(
        self,
        loss_scale_value,
        scale_factor=2,
        *,
        exchange_rate=1.0,
        min_loss_scale=1.0,
        max_loss_scale=None,
        history_size=0,
        track_per_parameter=False,
    ):
        history_size = require_history_size(history_size)
        rule = GuidedRule(
            exchange_rate, scale_factor=scale_factor, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
        )
        if isinstance(loss_scale_value, Tensor):
            loss_scale_value = repair_loss_scale(rule, read_restored_scale(loss_scale_value), "loss_scale_value")
        start = rule.start(loss_scale_value)
        super().__init__(start.loss_scale, scale_factor, start.scale_window)
        self.rule = rule
        self.track_per_parameter = require_flag("track_per_parameter", track_per_parameter)
        if self.track_per_parameter:
            refuse_kept_graphs("track_per_parameter", "False", track_per_parameter)
        self._make_state(start)
        self.keeps_history = history_size > 0
        if self.keeps_history:
            self.history = ScaleHistory(history_size, _HISTORY, measures=("largest_gradient",))
        self._make_constants(rule)
        self.min = ops.Minimum()
        self.less = ops.Less()
        self.equal = ops.Equal()
        self.gather = ops.Gather()
        self.stack = ops.Stack()
        self.unstack = ops.Unstack()
        self.assign = ops.Assign()
        self.assign_add = ops.AssignAdd()
        self.cast = ops.Cast()
        self.floor = ops.Floor()
        self.ceil = ops.Ceil()
        self.real_div = ops.RealDiv()
        self.argmin = ops.Argmin(axis=0, output_type=mstype.int32)
        self.reduce_sum = ops.ReduceSum()

    def _make_constants(self, rule):
        # As Tensors, because a Python number in the graph becomes a primitive of its own (Muls) or a cast.
        exponents = range(rule.min_exponent, rule.max_exponent + 1)
        integers = {
            "zero": 0,
            "one": 1,
            "lowest_exponent": rule.min_exponent,
            "highest_exponent": rule.max_exponent,
            "below_lowest_exponent": rule.min_exponent - 1,
            "below_shown": _SHOWN[0] - 1,
            "drops": DROPS,
            "last_drop": len(DROPS) - 1,
            "bits_of": [n // CONTRADICTIONS_PER_BIT for n in range(MOST_CONTRADICTIONS + 1)],
            "most_contradictions": MOST_CONTRADICTIONS,
            "contradictions_per_bit": CONTRADICTIONS_PER_BIT,
            "recent": rule.recent,
            "patience": rule.patience,
            "smallest_window": rule.smallest_window,
            "largest_window": rule.largest_window,
            "window_factor": WINDOW_FACTOR,
            "no_cap": NO_CAP,
            "step_limit": STEP_LIMIT,
        }
        floats = {
            "powers": [2.0**n for n in exponents],
            "fits_at": [LARGEST_FLOAT16 * 2.0**-n for n in _SHOWN],
            "smallest_gradient": _SMALLEST_NORMAL_FLOAT32,
            "largest_float32": LARGEST_FLOAT32,
            "places": np.arange(PLACES),
            "memory": rule.memory,
            "float_one": 1.0,
            "float_patience": rule.patience,
            "prior_steps": PRIOR_STEPS + 1,
            "level_share": LEVEL_SHARE,
            "reach": REACH,
            "reach_after_several": REACH_AFTER_SEVERAL,
            "no_rate": np.zeros(PLACES),
        }
        for name, value in integers.items():
            setattr(self, name, Tensor(value, mstype.int32))
        for name, value in floats.items():
            setattr(self, name, Tensor(value, mstype.float32))
        self.is_first_exponent = Tensor([name == "first_exponent" for name in COUNTERS])

    def construct(self, loss_scale, overflow):
        return self._compiled_update(loss_scale, overflow)

    # One graph in PyNative mode too, and not construct itself, as in AdaptiveLossScaleUpdateCell.
    @jit(backend="ms_backend")
    def _compiled_update(self, loss_scale, overflow):
        before = self.unstack(self.counters)
        window, base, observed, limit, bound, trial, clean, contradictions, first = before
        was_trial = self.less(self.zero, trial)
        in_a_row = self.consecutive_overflows
        after_overflow = self.less(self.zero, in_a_row)
        exponent = self.below_lowest_exponent + self._count(self.less_equal(self.powers, loss_scale))

        # What the largest gradient of an applied step shows. What follows is of no effect after an overflow, where the
        # counters at the end are others.
        gradient = self.largest_gradient
        in_range = self.logic_and(
            self.less_equal(self.smallest_gradient, gradient), self.less_equal(gradient, self.largest_float32)
        )
        known = self.logic_and(in_range, self.logic_not(overflow))
        shown = self.below_shown + self._count(self.less_equal(gradient, self.fits_at))
        too_high = self.less(shown + self.gather(self.bits_of, contradictions, 0), exponent)
        contradicted = self.cast(self.logic_and(known, too_high), mstype.int32)
        contradictions = self.min(contradictions + contradicted, self.most_contradictions)
        shown = shown + self.gather(self.bits_of, contradictions, 0)
        explained = self.logic_and(known, self.less(shown, first))
        recent = self.logic_and(after_overflow, self.less(clean, self.recent))
        fall = self.logic_and(recent, self.logic_not(explained))

        # Record, level and base.
        fresh = self.logic_and(known, self.equal(observed, self.zero))
        shown_float = self.cast(shown, mstype.float32)
        base = self.select(fresh, shown, base)
        limit = self.select(fresh, self.zero, limit)
        level = self.select(fresh, shown_float, self.level)
        exponents = self.cast(base + self.one, mstype.float32) - self.places
        share = self.real_div(self.float_one, self.cast(observed, mstype.float32) + self.prior_steps)
        overflowed_at = self.cast(self.less(shown_float, exponents), mstype.float32)
        rates = self.overflow_rate + (overflowed_at - self.overflow_rate) * self.max(self.memory, share)
        rates = self.select(known, rates, self.overflow_rate)
        level = self.select(after_overflow, self.min(level, shown_float), level)
        level = level + (shown_float - level) * self.level_share
        above = self.select(self.less(self.one, in_a_row), self.reach_after_several, self.reach)
        highest = self.cast(self.floor(level + above), mstype.int32)
        lowest = self.cast(self.ceil(level - self.reach), mstype.int32)
        base = self.select(known, self.min(self.max(base, lowest), highest), base)
        level = self.select(known, level, self.level)
        observed = self.min(observed + self.cast(known, mstype.int32), self.patience)

        # The limit falls, or is tried one bit higher.
        clean = self.select(after_overflow, self.one, self.min(clean + self.one, self.largest_window))
        is_full = self.logic_and(self.less(self.zero, bound), self.less_equal(window, clean))
        higher = self.logic_and(is_full, self.logic_not(fall))
        limit = self.select(fall, base + self.one - exponent, limit - self.cast(higher, mstype.int32))
        fewer = self.max(contradictions - self.contradictions_per_bit, self.zero)
        contradictions = self.select(fall, fewer, contradictions)
        longer = self.min(window * self.window_factor, self.largest_window)
        after_fall = self.select(was_trial, longer, self.smallest_window)
        after_rise = self.select(self.logic_and(higher, was_trial), self.smallest_window, window)
        window = self.select(fall, after_fall, after_rise)
        trial = self.logic_and(self.logic_or(was_trial, higher), self.logic_not(fall))

        # The cheapest place, within the limit and the bounds. Of equal costs Argmin takes the first, as the rule does.
        cheapest = self.argmin(rates * self.float_patience + self.places)
        cap = self.select(self.less(self.zero, observed), cheapest, self.no_cap)
        following = base + self.one - self.max(cap, limit)
        following = self.min(self.max(following, self.lowest_exponent), self.highest_exponent)
        bound = self.logic_and(self.less(cap, limit), self.less(following, self.highest_exponent))
        clean = self.select(self.less(exponent, following), self.zero, clean)
        bound, trial = self.cast(bound, mstype.int32), self.cast(trial, mstype.int32)
        applied = self.stack((window, base, observed, limit, bound, trial, clean, contradictions, first))

        # An overflow changes the scale and remembers the first exponent of a row.
        drop = self.gather(self.drops, self.min(in_a_row, self.last_drop), 0)
        dropped = self.max(exponent - drop, self.lowest_exponent)
        skipped = self.select(self.is_first_exponent, self.select(after_overflow, first, exponent), self.counters)
        next_exponent = self.select(overflow, dropped, following)
        next_loss_scale = self.gather(self.powers, next_exponent - self.lowest_exponent, 0)
        counters = self.select(overflow, skipped, applied)

        # At the limit the steps are no longer counted.
        counted = self.cast(self.less(self.cur_iter, self.step_limit), mstype.int32)
        overflowed = self.cast(overflow, mstype.int32)
        counted_overflow = overflowed * counted
        in_a_row = in_a_row * overflowed + counted_overflow
        if self.keeps_history:
            # Before the assignments, because the step's loss scale and number are read from Parameters.
            counts = overflowed, self.gather(counters, self.zero, 0), self.skipped_steps + counted_overflow, in_a_row
            self.history(loss_scale, next_loss_scale, self.cur_iter, counts, (gradient,))
        is_event = self.logic_or(overflow, self.less(exponent, next_exponent))
        last_event = self.select(is_event, self.cur_iter, self.last_overflow_iter)
        self.assign(loss_scale, next_loss_scale)
        self.assign(self.counters, counters)
        self.assign(self.level, level)
        self.assign(self.overflow_rate, rates)
        self.assign(self.last_overflow_iter, last_event)
        self.assign(self.consecutive_overflows, in_a_row)
        self.assign_add(self.cur_iter, counted)
        self.assign_add(self.skipped_steps, counted_overflow)
        return overflow

    def _count(self, flags):
        # In float32, exact up to 254 flags, because Ascend sums float32.
        return self.cast(self.reduce_sum(self.cast(flags, mstype.float32)), mstype.int32)
