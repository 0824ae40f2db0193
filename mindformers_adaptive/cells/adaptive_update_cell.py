"""``AdaptiveLossScaleUpdateCell``: the rule as a MindSpore cell."""

from mindspore import Tensor, jit, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.update_cell import RuleUpdateCell, read_restored_scale
from mindformers_adaptive.rules.adaptive import EVENTS, HIDDEN_INDEX, AdaptiveRule, transition_tables
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW

__all__ = ["AdaptiveLossScaleUpdateCell"]


class AdaptiveLossScaleUpdateCell(RuleUpdateCell):
    r"""Update cell of adaptive loss scaling: the scale follows the overflows, and the window follows the scale.

    The rule is that of :class:`mindformers_adaptive.rules.adaptive.AdaptiveRule`. Its state is in int32 scalar
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
        scale_factor (Union[int, float]): what a raise multiplies the scale by, above 1.
        scale_window (int): the window to start with, in steps. One that is not on the ladder gives a warning and
            training starts at ``min_scale_window``.
        max_scale_window (int): the largest window, in steps. Below ``min_scale_window`` or not positive: a warning,
            and 1000 is used. Default: 1000, MindFormers'.
        min_scale_window (int): the smallest window, in steps. Default: 20, MindFormers'.
        min_loss_scale (float): the floor of the loss scale. Default: 1.0, as in ``nn.DynamicLossScaleUpdateCell``.
        max_loss_scale (float, optional): the cap of the loss scale. Default: None, the largest finite float32.
        hysteresis (int): how many overflows it takes to drop the scale; a raise starts the count anew, as in
            Megatron-LM. Default: 1, which tolerates none.
        shrink_from_min_window (bool): whether three drops lead to the hidden window from the smallest window too.
            Default: False, MindFormers' rule.
        backoff_factor (float, optional): what a drop multiplies the scale by, between 0 and 1. Default: None,
            1 / `scale_factor`, as in ``nn.DynamicLossScaleUpdateCell``.
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
        ``Ascend`` ``CPU``

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
        backoff_factor=None,
        history_size=0,
    ):
        rule = AdaptiveRule(
            scale_factor,
            max_scale_window,
            min_scale_window,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            hysteresis=hysteresis,
            shrink_from_min_window=shrink_from_min_window,
            backoff_factor=backoff_factor,
        )
        super().__init__(rule, rule.start(read_restored_scale(rule, loss_scale_value), scale_window), history_size)
        self.tolerates_overflows = rule.hysteresis > 1
        if self.tolerates_overflows:
            self.full_budget = Tensor(rule.hysteresis, mstype.int32)
            self.zero = Tensor(0, mstype.int32)

        self.minimum_loss_scale = Tensor(rule.min_loss_scale, mstype.float32)
        self.maximum_loss_scale = Tensor(rule.max_loss_scale, mstype.float32)
        multipliers, transitions = transition_tables(rule)
        self.multipliers = Tensor(multipliers, mstype.float32)
        self.transitions = Tensor(transitions, mstype.int32)
        # The index is (window_index, growth_num, down_num) plus the first row of the event, where the hidden window has
        # the window_index -1.
        places = len(rule.ladder) - HIDDEN_INDEX
        first_rows = [Tensor([n * places - HIDDEN_INDEX, 0, 0], mstype.int32) for n in range(len(EVENTS))]
        self.wait_row, self.raise_row, self.drop_row, self.tolerate_row = first_rows
        self.one = Tensor(1, mstype.int32)

    @classmethod
    def _for_rule(cls, rule, state, **options):
        return cls(state.loss_scale, scale_window=rule.ladder[max(state.window_index, 0)], **rule.arguments, **options)

    # One graph in PyNative mode too, as MindSpore's optimizers are. Not construct itself: in its place MindSpore would
    # compile the construct of a subclass that calls it.
    @jit(backend="ms_backend")
    def _compiled_update(self, loss_scale, overflow):
        since_event = self.cur_iter - self.last_overflow_iter
        window_is_full = self.less_equal(self.scale_window, since_event)
        overflow_row = self.drop_row
        if self.tolerates_overflows:
            is_spent = self.less_equal(self.hysteresis_budget, self.one)
            overflow_row = self.select(is_spent, self.drop_row, self.tolerate_row)
            spent = self.max(self.hysteresis_budget - self.one, self.zero)
            refilled = self.select(window_is_full, self.full_budget, self.hysteresis_budget)
            ops.assign(self.hysteresis_budget, self.select(overflow, spent, refilled))
        first_row = self.select(overflow, overflow_row, self.select(window_is_full, self.raise_row, self.wait_row))
        row = ops.stack((self.window_index, self.growth_num, self.down_num)) + first_row
        scaled = loss_scale * ops.gather_nd(self.multipliers, row)
        within_cap = self.less_equal(scaled, self.maximum_loss_scale)
        next_loss_scale = self.select(within_cap, self.max(scaled, self.minimum_loss_scale), loss_scale)
        after = ops.unstack(ops.gather_nd(self.transitions, row))
        scale_window, window_index, growth_num, down_num, overflowed, is_event = after
        # At the limit the steps are no longer counted, and the last event moves back instead.
        stuck = ops.cast(self.less_equal(self.step_limit, self.cur_iter), mstype.int32)
        counted = self.one - stuck
        consecutive_overflows = (self.consecutive_overflows + counted) * overflowed
        if self.keeps_history:
            # Before the assignments, because the step's loss scale and number are read from Parameters.
            counts = overflowed, scale_window, window_index, growth_num, down_num
            counts = (*counts, self.skipped_steps + overflowed * counted, consecutive_overflows)
            self.history(loss_scale, next_loss_scale, self.cur_iter, counts)
        ops.assign(loss_scale, next_loss_scale)
        ops.assign(self.scale_window, scale_window)
        ops.assign(self.window_index, window_index)
        ops.assign(self.growth_num, growth_num)
        ops.assign(self.down_num, down_num)

        ops.assign_add(self.last_overflow_iter, since_event * is_event - stuck)
        ops.assign_add(self.cur_iter, counted)
        ops.assign_add(self.skipped_steps, overflowed * counted)
        ops.assign(self.consecutive_overflows, consecutive_overflows)
        return overflow
