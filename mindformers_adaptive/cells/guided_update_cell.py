"""``GradientGuidedLossScaleUpdateCell``: the gradient-guided rule as a MindSpore cell."""

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
import numpy as np

from mindformers_adaptive.rule.guided_rule import (
    CONTRADICTIONS_PER_BIT, DROPS, LEVEL_SHARE, MOST_CONTRADICTIONS, PLACES, PRIOR_STEPS, REACH, REACH_AFTER_SEVERAL, WINDOW_FACTOR, GuidedRule,
)

# The integers that only this rule has, in the order in which one Parameter holds them.
COUNTERS = ("scale_window", "base", "observed_steps", "limit", "bound", "trial", "clean_steps", "contradictions", "first_exponent")
NO_CAP = -1024
# 65504 * 2^-n for the n from this one on, as long as that is a normal float32 number.
FIRST_SHOWN = -112
SHOWN = 254


class GradientGuidedLossScaleUpdateCell(nn.DynamicLossScaleUpdateCell):
    def __init__(self, loss_scale_value, scale_factor=2, *, exchange_rate=1.0, min_loss_scale=1.0, max_loss_scale=None):
        rule = GuidedRule(exchange_rate, scale_factor=scale_factor, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        start = rule.start(loss_scale_value)
        super().__init__(start.loss_scale, 2.0, start.scale_window)
        self.rule = rule
        def integer(value, name):
            return Parameter(Tensor(value, mstype.int32), name=name, requires_grad=False)
        self.largest_gradient = Parameter(Tensor(0.0, mstype.float32), name="largest_gradient", requires_grad=False)
        self.level = Parameter(Tensor(start.level, mstype.float32), name="gradient_level", requires_grad=False)
        self.overflow_rate = Parameter(Tensor(start.overflow_rate, mstype.float32), name="overflow_rate", requires_grad=False)
        self.counters = integer([int(getattr(start, name)) for name in COUNTERS], "guided_counters")
        self.skipped_steps = integer(0, "skipped_steps")
        self.consecutive_overflows = integer(0, "consecutive_overflows")

        exponents = range(rule.min_exponent, rule.max_exponent + 1)
        self.powers = Tensor([2.0**n for n in exponents], mstype.float32)
        self.fits_at = Tensor([65504 * 2.0**-n for n in range(FIRST_SHOWN, FIRST_SHOWN + SHOWN)], mstype.float32)
        self.below_shown = Tensor(FIRST_SHOWN - 1, mstype.int32)
        self.lowest = Tensor(rule.min_exponent, mstype.int32)
        self.highest = Tensor(rule.max_exponent, mstype.int32)
        self.below_lowest = Tensor(rule.min_exponent - 1, mstype.int32)
        self.smallest_gradient = Tensor(2.0**-126, mstype.float32)
        self.largest_float32 = Tensor(np.finfo(np.float32).max, mstype.float32)
        self.drops = Tensor(DROPS, mstype.int32)
        self.last_drop = Tensor(len(DROPS) - 1, mstype.int32)
        self.bits_of = Tensor([n // CONTRADICTIONS_PER_BIT for n in range(MOST_CONTRADICTIONS + 1)], mstype.int32)
        self.most_contradictions = Tensor(MOST_CONTRADICTIONS, mstype.int32)
        self.per_bit = Tensor(CONTRADICTIONS_PER_BIT, mstype.int32)
        self.places = Tensor(np.arange(PLACES), mstype.float32)
        self.recent = Tensor(rule.recent, mstype.int32)
        self.memory = Tensor(rule.memory, mstype.float32)
        self.patience = Tensor(rule.patience, mstype.int32)
        self.float_patience = Tensor(rule.patience, mstype.float32)
        self.real_div = ops.RealDiv()
        self.no_rate = Tensor(np.zeros(PLACES), mstype.float32)
        self.is_first_exponent = Tensor([name == "first_exponent" for name in COUNTERS])
        self.prior = Tensor(PRIOR_STEPS + 1, mstype.float32)
        self.level_share = Tensor(LEVEL_SHARE, mstype.float32)
        self.reach = Tensor(REACH, mstype.float32)
        self.reach_after_several = Tensor(REACH_AFTER_SEVERAL, mstype.float32)
        self.smallest_window = Tensor(rule.smallest_window, mstype.int32)
        self.largest_window = Tensor(rule.largest_window, mstype.int32)
        self.window_factor = Tensor(WINDOW_FACTOR, mstype.int32)
        self.no_cap = Tensor(NO_CAP, mstype.int32)
        self.zero, self.one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        self.one_float = Tensor(1.0, mstype.float32)
        self.min = ops.Minimum()
        self.less = ops.Less()
        self.equal = ops.Equal()
        self.gather = ops.Gather()
        self.stack, self.unstack = ops.Stack(), ops.Unstack()
        self.assign, self.assign_add = ops.Assign(), ops.AssignAdd()
        self.cast = ops.Cast()
        self.floor, self.ceil = ops.Floor(), ops.Ceil()
        self.argmin = ops.Argmin(axis=0, output_type=mstype.int32)
        self.sum = ops.ReduceSum()

    def construct(self, loss_scale, overflow):
        window, base, observed, limit, bound, trial, clean, contradictions, first = self.unstack(self.counters)
        was_trial = self.less(self.zero, trial)
        in_a_row = self.consecutive_overflows
        after_overflow = self.less(self.zero, in_a_row)
        exponent = self.below_lowest + self.how_many(self.less_equal(self.powers, loss_scale))

        # What the largest gradient shows of the ceiling, if the step was applied.
        gradient = self.largest_gradient
        known = self.logic_and(
            self.less_equal(self.smallest_gradient, gradient), self.less_equal(gradient, self.largest_float32)
        )
        shown = self.below_shown + self.how_many(self.less_equal(gradient, self.fits_at))
        too_high = self.less(shown + self.gather(self.bits_of, contradictions, 0), exponent)
        contradictions = self.min(
            contradictions + self.cast(self.logic_and(known, too_high), mstype.int32), self.most_contradictions
        )
        shown = shown + self.gather(self.bits_of, contradictions, 0)
        explained = self.logic_and(known, self.less(shown, first))
        fall = self.logic_and(
            self.logic_and(after_overflow, self.less(clean, self.recent)), self.logic_not(explained)
        )

        # Record, level and base.
        fresh = self.logic_and(known, self.equal(observed, self.zero))
        shown_float = self.cast(shown, mstype.float32)
        base = self.select(fresh, shown, base)
        limit = self.select(fresh, self.zero, limit)
        level = self.select(fresh, shown_float, self.level)
        exponents = self.cast(base + self.one, mstype.float32) - self.places
        rates = self.overflow_rate
        weight = self.max(self.memory, self.real_div(self.one_float, self.cast(observed, mstype.float32) + self.prior))
        overflowed_at = self.cast(self.less(shown_float, exponents), mstype.float32)
        rates = self.select(known, rates + (overflowed_at - rates) * weight, rates + self.no_rate)
        level = self.select(after_overflow, self.min(level, shown_float), level)
        level = level + (shown_float - level) * self.level_share
        above = self.select(self.less(self.one, in_a_row), self.reach_after_several, self.reach)
        highest = self.cast(self.floor(level + above), mstype.int32)
        lowest = self.cast(self.ceil(level - self.reach), mstype.int32)
        base = self.select(known, self.min(self.max(base, lowest), highest), base)
        level = self.select(known, level, self.level)
        observed = self.min(observed + self.cast(known, mstype.int32), self.patience)

        # The limit falls, or is tried one bit higher.
        clean = self.select(after_overflow, self.one, clean + self.one)
        window_is_full = self.logic_and(self.less(self.zero, bound), self.less_equal(window, clean))
        higher = self.logic_and(window_is_full, self.logic_not(fall))
        at_fall = base + self.one - exponent
        limit = self.select(fall, at_fall, limit - self.cast(higher, mstype.int32))
        contradictions = self.select(fall, self.max(contradictions - self.per_bit, self.zero), contradictions)
        longer = self.min(window * self.window_factor, self.largest_window)
        window = self.select(
            fall,
            self.select(was_trial, longer, self.smallest_window),
            self.select(self.logic_and(higher, was_trial), self.smallest_window, window),
        )
        trial = self.logic_and(self.logic_or(was_trial, higher), self.logic_not(fall))

        # The cheapest place, within the limit and the bounds.
        cheapest = self.argmin(rates * self.float_patience + self.places)
        cap = self.select(self.less(self.zero, observed), cheapest, self.no_cap)
        following = base + self.one - self.max(cap, limit)
        following = self.min(self.max(following, self.lowest), self.highest)
        bound = self.logic_and(self.less(cap, limit), self.less(following, self.highest))
        clean = self.select(self.less(exponent, following), self.zero, clean)
        applied = self.stack(
            (
                window,
                base,
                observed,
                limit,
                self.cast(bound, mstype.int32),
                self.cast(trial, mstype.int32),
                clean,
                contradictions,
                first,
            )
        )

        # An overflow changes the scale and which one is the first in a row.
        first = self.select(after_overflow, first, exponent)
        drop = self.gather(self.drops, self.min(in_a_row, self.last_drop), 0)
        dropped = self.max(exponent - drop, self.lowest)
        skipped = self.select(self.is_first_exponent, first, self.counters)
        next_exponent = self.select(overflow, dropped, following)
        next_loss_scale = self.gather(self.powers, next_exponent - self.lowest, 0)
        overflowed = self.cast(overflow, mstype.int32)
        new_counters = self.select(overflow, skipped, applied)
        new_level = self.select(overflow, self.level, level)
        new_rates = self.select(overflow, self.overflow_rate, rates)
        new_in_a_row = (in_a_row + self.one) * overflowed
        starts_over = self.logic_or(overflow, self.less(exponent, next_exponent))
        last = self.select(starts_over, self.cur_iter, self.last_overflow_iter)
        self.assign(loss_scale, next_loss_scale)
        self.assign(self.counters, new_counters)
        self.assign(self.level, new_level)
        self.assign(self.overflow_rate, new_rates)
        self.assign(self.consecutive_overflows, new_in_a_row)
        self.assign(self.last_overflow_iter, last)
        self.assign_add(self.cur_iter, self.one)
        self.assign_add(self.skipped_steps, overflowed)
        return overflow

    def how_many(self, flags):
        return self.cast(self.sum(self.cast(flags, mstype.float32)), mstype.int32)
