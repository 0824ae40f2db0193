"""``AdaptiveLossScaleUpdateCell``: the rule as a MindSpore cell."""

import warnings

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.scale_history import ScaleHistory, require_history_size
from mindformers_adaptive.rule.adaptive_rule import HIDDEN_INDEX, AdaptiveRule
from mindformers_adaptive.rule.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.rule.restored_state import (
    PARAMETER_NAMES,
    from_rule_state,
    holds_no_window,
    repair_loss_scale,
    repair_state,
)
from mindformers_adaptive.rule.state_dict import LossScaleStateDict
from mindformers_adaptive.rule.transition_tables import COUNTER_VALUES, transition_tables

__all__ = ["AdaptiveLossScaleUpdateCell"]


class AdaptiveLossScaleUpdateCell(LossScaleStateDict, nn.DynamicLossScaleUpdateCell):
    r"""Update cell of adaptive loss scaling: the scale follows the overflows, and the window follows the scale.

    The rule is that of :class:`mindformers_adaptive.rule.adaptive_rule.AdaptiveRule`. Its state is in int32 scalar
    Parameters, which a checkpoint of the train-step cell contains:

    =============================== ========================= ===================================================
    Parameter in a checkpoint       attribute                 meaning
    =============================== ========================= ===================================================
    ``scale_window``                ``scale_window``          window in force, in steps
    ``list_index``                  ``window_index``          its place on the ladder, -1 for the hidden window 1
    ``scale_window_up_count``       ``growth_num``            raises since the window last changed
    ``scale_window_down_count``     ``down_num``              drops since the last raise or window change
    ``current_iterator_step``       ``cur_iter``              number of the next step, from 1
    ``last_overflow_iterator_step`` ``last_overflow_iter``    step of the last overflow or raise
    ``skipped_steps``               ``skipped_steps``         overflowed steps so far
    ``consecutive_overflows``       ``consecutive_overflows`` overflowed steps in a row
    ``hysteresis_budget``           ``hysteresis_budget``     overflows left before a drop; only if hysteresis > 1
    =============================== ========================= ===================================================

    The first six names are those that MindFormers' own cell of this name writes.

    Args:
        loss_scale_value (Union[int, float, Tensor, Parameter]): the initial loss scale; a Tensor or Parameter of one
            element, as MindFormers passes on resume, is only read.
        scale_factor (Union[int, float]): what the scale is multiplied or divided by, above 1.
        scale_window (int): the window to start with, in steps. One that is not on the ladder gives a warning and
            training starts at ``min_scale_window``.
        max_scale_window (int): the largest window, in steps. Below ``min_scale_window`` or not positive: a warning,
            and 1000 is used. Default: 1000, MindFormers'.
        min_scale_window (int): the smallest window, in steps. Default: 20, MindFormers'.
        min_loss_scale (float): the floor of the loss scale. Default: 1.0, as in ``nn.DynamicLossScaleUpdateCell``.
        max_loss_scale (float, optional): the cap of the loss scale. Default: None, the largest finite float32.
        hysteresis (int): overflows tolerated before the scale drops, refilled by a raise only (Megatron-LM).
            Default: 1, every overflow drops.
        shrink_from_min_window (bool): whether three drops lead to the hidden window from the smallest window too.
            Default: False, MindFormers' rule.
        history_size (int): how many of the last steps the device keeps, for :meth:`recent_steps`. Checkpoints do not
            contain them, and ``mindspore.export`` refuses a network that has some. Default: 0, as in MindSpore's cells.

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
        >>> from mindspore import Parameter, Tensor
        >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
        >>> cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
        >>> loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
        >>> overflow = cell(loss_scale, Tensor(True))
        >>> float(loss_scale), cell.state()["skipped_steps"]
        (32768.0, 1)
    """

    def __init__(
        self,
        loss_scale_value,
        scale_factor,
        scale_window,
        max_scale_window=DEFAULT_MAX_SCALE_WINDOW,
        min_scale_window=DEFAULT_MIN_SCALE_WINDOW,
        *,
        min_loss_scale=1.0,
        max_loss_scale=None,
        hysteresis=1,
        shrink_from_min_window=False,
        history_size=0,
    ):
        history_size = require_history_size(history_size)
        rule = AdaptiveRule(
            scale_factor,
            max_scale_window,
            min_scale_window,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            hysteresis=hysteresis,
            shrink_from_min_window=shrink_from_min_window,
        )
        if isinstance(loss_scale_value, Tensor):
            loss_scale_value = _restored_loss_scale(loss_scale_value, rule)
        start = rule.start(loss_scale_value, scale_window)
        super().__init__(start.loss_scale, rule.scale_factor, start.scale_window)
        self.rule = rule
        self.start_window = start.scale_window
        self.written_state = self.checked_state = None
        self.bind_loss_scale(None)

        for name, value in from_rule_state(rule, start, steps=0).items():
            # The base class has a constant scale_window; here the window moves.
            parameter = Parameter(Tensor(value, mstype.int32), name=PARAMETER_NAMES[name], requires_grad=False)
            setattr(self, name, parameter)
        self.tolerates_overflows = rule.hysteresis > 1
        if self.tolerates_overflows:
            self.full_budget = Tensor(rule.hysteresis, mstype.int32)
            self.zero = Tensor(0, mstype.int32)

        self.keeps_history = history_size > 0
        if self.keeps_history:
            self.history = ScaleHistory(history_size)

        self.minimum_loss_scale = Tensor(rule.min_loss_scale, mstype.float32)
        self.maximum_loss_scale = Tensor(rule.max_loss_scale, mstype.float32)
        multipliers, transitions = transition_tables(rule)
        self.multipliers = Tensor(multipliers, mstype.float32)
        self.transitions = Tensor(transitions, mstype.int32)
        # The row is ((first + window_index) * 4 + growth_num) * 4 + down_num; `first` includes 1 because the hidden
        # window's index is -1.
        levels = len(rule.ladder) + 1
        self.wait_rows = Tensor(-HIDDEN_INDEX, mstype.int32)
        self.raise_rows = Tensor(-HIDDEN_INDEX + levels, mstype.int32)
        self.drop_rows = Tensor(-HIDDEN_INDEX + 2 * levels, mstype.int32)
        # As Tensors, because a Python number in the graph becomes a primitive of its own (Muls) or a cast.
        self.one = Tensor(1, mstype.int32)
        self.counter_values = Tensor(COUNTER_VALUES, mstype.int32)
        self.gather = ops.Gather()
        self.unstack = ops.Unstack()
        self.assign = ops.Assign()
        self.assign_add = ops.AssignAdd()
        self.cast = ops.Cast()

    @classmethod
    def from_rule(cls, rule, state, steps=0):
        """Return a cell that goes on by a rule from a state.

        Args:
            rule (AdaptiveRule): the rule.
            state (LossScaleState): its state.
            steps (int): how many steps led to it. Default: 0, it is the start.

        Returns:
            AdaptiveLossScaleUpdateCell, whose ``state()`` and loss scale are those of ``state``.

        Examples:
            >>> rule = AdaptiveRule(hysteresis=2)
            >>> state = rule.step(rule.start(2.0**16), overflow=True)
            >>> AdaptiveLossScaleUpdateCell.from_rule(rule, state, steps=1).state()["hysteresis_budget"]
            1
        """
        cell = cls(
            state.loss_scale,
            rule.scale_factor,
            rule.ladder[max(state.window_index, 0)],
            rule.ladder[-1],
            rule.ladder[0],
            min_loss_scale=rule.min_loss_scale,
            max_loss_scale=rule.max_loss_scale,
            hysteresis=rule.hysteresis,
            shrink_from_min_window=rule.shrink_from_min_window,
        )
        cell._write_state(state.loss_scale, from_rule_state(rule, state, steps))
        return cell

    def construct(self, loss_scale, overflow):
        window_is_full = self.less_equal(self.scale_window, self.cur_iter - self.last_overflow_iter)
        first = self.select(
            overflow, self._overflow_rows(), self.select(window_is_full, self.raise_rows, self.wait_rows)
        )
        if self.tolerates_overflows:
            self._spend_or_refill_budget(overflow, window_is_full)

        row = (first + self.window_index) * self.counter_values + self.growth_num
        row = row * self.counter_values + self.down_num
        scaled = loss_scale * self.gather(self.multipliers, row, 0)
        within_cap = self.less_equal(scaled, self.maximum_loss_scale)
        next_loss_scale = self.select(within_cap, self.max(scaled, self.minimum_loss_scale), loss_scale)
        scale_window, window_index, growth_num, down_num = self.unstack(self.gather(self.transitions, row, 0))
        overflowed = self.cast(overflow, mstype.int32)
        consecutive_overflows = (self.consecutive_overflows + self.one) * overflowed
        if self.keeps_history:
            # Before the assignments, because the step's loss scale and number are read from Parameters.
            counts = overflowed, scale_window, window_index, growth_num, down_num
            counts = (*counts, self.skipped_steps + overflowed, consecutive_overflows)
            self.history(loss_scale, next_loss_scale, self.cur_iter, counts)
        self.assign(loss_scale, next_loss_scale)
        self.assign(self.scale_window, scale_window)
        self.assign(self.window_index, window_index)
        self.assign(self.growth_num, growth_num)
        self.assign(self.down_num, down_num)

        starts_over = self.logic_or(overflow, window_is_full)
        self.assign(self.last_overflow_iter, self.select(starts_over, self.cur_iter, self.last_overflow_iter))
        self.assign_add(self.cur_iter, self.one)
        self.assign_add(self.skipped_steps, overflowed)
        self.assign(self.consecutive_overflows, consecutive_overflows)
        return overflow

    def state(self):
        """Return all Parameters as dict[str, int] by attribute name, see the table above; this waits for the device."""
        return {name: int(getattr(self, name).asnumpy()) for name in PARAMETER_NAMES if hasattr(self, name)}

    def bind_loss_scale(self, parameter):
        """Tell the cell which Parameter is its first input, for ``state_dict()`` and ``load_state_dict()``.

        The train-step cells of this package do it.
        """
        # Not through nn.Cell, which would make it a child of this cell too.
        object.__setattr__(self, "bound_loss_scale", parameter)

    def _read_state(self):
        counters = self.state()
        if self.bound_loss_scale is not None:
            return float(self.bound_loss_scale.asnumpy()), counters
        if counters["cur_iter"] > 1 and counters != self.written_state:
            raise RuntimeError(
                "The update cell does not know its loss scale, because its train-step cell is not one of "
                "mindformers_adaptive.wrapper. Call update_cell.bind_loss_scale(train_step.scale_sense) first."
            )
        return float(self.loss_scale_value), counters

    def _write_state(self, loss_scale, counters):
        self.loss_scale_value = loss_scale
        if self.bound_loss_scale is not None:
            self.bound_loss_scale.set_data(Tensor(loss_scale, mstype.float32))
        self.written_state = self.checked_state = dict(counters)
        self._set_counters(counters)

    def _set_counters(self, counters):
        for name, value in counters.items():
            getattr(self, name).set_data(Tensor(value, mstype.int32))

    def recent_steps(self, since=0):
        """Return the steps after ``since``, oldest first, at most the last ``history_size``.

        Args:
            since (int): the number of a step, counted from 1 as ``cur_iter`` is. Default: 0.

        Returns:
            list[dict], one for each step, without gaps up to the last step: ``step`` (int), ``overflow`` (bool),
            ``loss_scale`` (float) that the step used, ``next_loss_scale`` (float), and the values after the step of
            ``scale_window``, ``window_index``, ``growth_num``, ``down_num``, ``skipped_steps`` and
            ``consecutive_overflows`` (int). Steps from before a checkpoint was loaded are missing. Reading waits for
            the device.

        Examples:
            >>> from mindspore import Parameter, Tensor
            >>> cell = AdaptiveLossScaleUpdateCell(2**16, 2, 20, history_size=2)
            >>> loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
            >>> for overflow in (True, True, False):
            ...     _ = cell(loss_scale, Tensor(overflow))
            >>> [(step["step"], step["overflow"], step["loss_scale"]) for step in cell.recent_steps()]
            [(2, True, 32768.0), (3, False, 16384.0)]
        """
        if not self.keeps_history:
            return []
        return self.history.steps(since, last=int(self.cur_iter.asnumpy()) - 1)

    def add_flags_recursive(self, **flags):
        """As in ``nn.Cell``; the start of training also checks a restored state.

        ``set_train()`` of this cell or of one that contains it calls this, and so does ``Model.train``.
        """
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self.check_state()
        return self

    def check_state(self):
        """Repair a restored state that this cell cannot go on with.

        A checkpoint may come from another cell, or from this one with other windows. Each change gives a warning that
        names the Parameter, its value and the value used instead. The start of training calls this; call it yourself
        if you load a checkpoint without calling ``set_train()`` afterwards.

        Examples:
            >>> import warnings
            >>> from mindspore import Tensor
            >>> cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
            >>> _ = cell.window_index.set_data(Tensor(99, mstype.int32))
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     cell.check_state()
            >>> cell.state()["window_index"], len(caught)
            (0, 1)
        """
        state = self.state()
        if state == self.checked_state:
            return
        repaired, problems = repair_state(self.rule, state)
        if not problems and holds_no_window(state, self.start_window):
            repaired["last_overflow_iter"] = repaired["cur_iter"] - 1
            problems = [
                "The checkpoint has steps but no window, as one of dynamic loss scaling: the ladder starts afresh at "
                f"window {self.start_window}."
            ]
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
        self._set_counters({name: value for name, value in repaired.items() if value != state[name]})
        # Warn once: a repaired state may still look foreign when it is checked again.
        self.checked_state = repaired

    def _overflow_rows(self):
        if not self.tolerates_overflows:
            return self.drop_rows
        return self.select(self.less_equal(self.hysteresis_budget, self.one), self.drop_rows, self.wait_rows)

    def _spend_or_refill_budget(self, overflow, window_is_full):
        spent = self.max(self.hysteresis_budget - self.one, self.zero)
        refilled = self.select(window_is_full, self.full_budget, self.hysteresis_budget)
        self.assign(self.hysteresis_budget, self.select(overflow, spent, refilled))


def _restored_loss_scale(loss_scale_value, rule):
    # Kept as it is, a Parameter would become a trainable child of the cell.
    if loss_scale_value.size != 1:
        raise ValueError(
            f"'loss_scale_value' must hold one number, but got a Tensor of shape {loss_scale_value.shape}. Give a "
            "number, or a Tensor of shape () or (1,)."
        )
    return repair_loss_scale(rule, float(loss_scale_value.asnumpy().item()), "loss_scale_value")
