"""The update cells of rules whose step is one text: the gradient-guided rule, and those of users."""

import numpy as np
from mindspore import dtype as mstype
from mindspore import jit, ops

from mindformers_adaptive.cells.graph_backend import count, graph_form, to_tensor
from mindformers_adaptive.cells.update_cell import RuleUpdateCell, read_restored_scale
from mindformers_adaptive.rules import make_rule
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.text_rule import BOUNDS, TextRule, possible_exponents

__all__ = ["GradientGuidedLossScaleUpdateCell", "RuleLossScaleUpdateCell", "TextUpdateCell"]

# In place of an exponent where the largest gradient shows nothing.
_NOTHING = -1024


class TextUpdateCell(RuleUpdateCell):
    """Update cell of a rule whose step is one text, which MindSpore compiles here.

    Args:
        rule (TextRule): the rule.
        loss_scale_value (Union[int, float, Tensor, Parameter]): the initial loss scale.
        history_size (int): as in :class:`~mindformers_adaptive.cells.update_cell.RuleUpdateCell`. Default: 0.
        track_per_parameter (bool): as there. Default: False.
    """

    def __init__(self, rule, loss_scale_value, history_size=0, track_per_parameter=False):
        start = rule.start(read_restored_scale(rule, loss_scale_value))
        super().__init__(rule, start, history_size, track_per_parameter)
        self.text = graph_form(type(rule).text)
        self.by_bits, self.keeps_bounds = rule.moves_by_bits, rule.keeps_bounds
        # Where each input of the text comes from: an attribute, or None for what the update computes first.
        bounds = {name: getattr(rule, name) for name in BOUNDS}
        attributes = dict.fromkeys(("loss_scale", "exponent", "overflow", "gradient_known", "max_safe_exponent"))
        for name, value in {**bounds, **rule.constants}.items():
            attributes[name] = f"given_{name}"
            setattr(self, f"given_{name}", to_tensor(value))
        self.inputs = tuple((name, attributes.get(name, name)) for name in rule.inputs)
        if self.by_bits:
            self.below_lowest = to_tensor(rule.min_exponent - 1)
            self.powers = to_tensor([2.0**n for n in range(rule.min_exponent, rule.max_exponent + 1)])
        if self.signals:
            # A gradient that is at most so many of these shows that exponent: inf and NaN none, 0 all of them.
            exponents = possible_exponents(rule.gradient_format)
            fits_at = [min(rule.gradient_format.largest * 2.0**-n, LARGEST_FLOAT32) for n in exponents]
            self.fits_at = to_tensor([*fits_at, float(np.nextafter(np.float32(SMALLEST_FLOAT32), np.float32(0)))])
            self.shown = to_tensor([_NOTHING, *exponents, _NOTHING])
            self.nothing = to_tensor(_NOTHING)
        self.kept = tuple(field.name for field in rule.fields)
        self.recorded = tuple(_place_of(rule, key) for key in rule.recorded)

    # One graph in PyNative mode too, and not construct itself, as in AdaptiveLossScaleUpdateCell.
    @jit(backend="ms_backend")
    def _compiled_update(self, loss_scale, overflow):
        known, shown, exponent = overflow, loss_scale, loss_scale
        if self.by_bits:
            exponent = self.below_lowest + count(self.less_equal(self.powers, loss_scale))
        if self.signals:
            fitting = count(self.less_equal(self.largest_gradient, self.fits_at))
            shown = ops.gather(self.shown, fitting, 0)
            known = self.logic_and(ops.less(self.nothing, shown), self.logic_not(overflow))
        computed = {
            "loss_scale": loss_scale,
            "exponent": exponent,
            "overflow": overflow,
            "gradient_known": known,
            "max_safe_exponent": shown,
        }
        given = ()
        for name, attribute in self.inputs:
            given = (*given, computed[name] if attribute is None else getattr(self, attribute))
        after = self.text(*given)
        if self.by_bits:
            next_exponent = after["exponent"]
            if not self.keeps_bounds:
                next_exponent = ops.minimum(self.max(next_exponent, self.given_min_exponent), self.given_max_exponent)
            next_loss_scale = ops.gather(self.powers, next_exponent - self.given_min_exponent, 0)
        else:
            wanted = after["loss_scale"]
            bounded = ops.minimum(self.max(wanted, self.given_min_loss_scale), self.given_max_loss_scale)
            # NaN is not equal to itself.
            next_loss_scale = self.select(ops.equal(wanted, wanted), bounded, loss_scale)

        # At the limit the steps are no longer counted.
        is_counted = ops.less(self.cur_iter, self.step_limit)
        counted = ops.cast(is_counted, mstype.int32)
        overflowed = ops.cast(overflow, mstype.int32)
        counted_overflow = overflowed * counted
        in_a_row = self.consecutive_overflows * overflowed + counted_overflow
        if self.keeps_history:
            # Before the assignments, because the step's loss scale and number are read from Parameters.
            self._remember(loss_scale, next_loss_scale, overflowed, counted_overflow, in_a_row, after)
        is_event = self.logic_or(overflow, ops.less(loss_scale, next_loss_scale))
        last_event = self.select(self.logic_and(is_event, is_counted), self.cur_iter, self.last_overflow_iter)
        ops.assign(loss_scale, next_loss_scale)
        for name in self.kept:
            ops.assign(getattr(self, name), after[name])
        ops.assign(self.last_overflow_iter, last_event)
        ops.assign(self.consecutive_overflows, in_a_row)
        ops.assign_add(self.cur_iter, counted)
        ops.assign_add(self.skipped_steps, counted_overflow)
        return overflow

    def _remember(self, loss_scale, next_loss_scale, overflowed, counted_overflow, in_a_row, after):
        counts, floats = (overflowed,), ()
        for name, place, is_count in self.recorded:
            value = after[name] if place is None else ops.gather(after[name], place, 0)
            if is_count:
                counts = (*counts, value)
            else:
                floats = (*floats, value)
        counts = (*counts, self.skipped_steps + counted_overflow, in_a_row)
        for name in self.signals:
            floats = (*floats, getattr(self, name))
        self.history(loss_scale, next_loss_scale, self.cur_iter, counts, floats)


class GradientGuidedLossScaleUpdateCell(TextUpdateCell):
    r"""Update cell of gradient-guided loss scaling: the scale follows what the largest gradient shows of its ceiling.

    The rule is that of :class:`mindformers_adaptive.rules.guided.GuidedRule`. It needs the largest absolute value of
    each step's gradients, which the train-step cells of :mod:`mindformers_adaptive.wrapper` assign to the Parameter
    ``largest_gradient``. Stock train-step cells do not, and are refused when training starts. Its state is in
    Parameters, which a checkpoint of the train-step cell contains:

    =============================== ========================= ===================================================
    Parameter in a checkpoint       attribute                 what it is
    =============================== ========================= ===================================================
    ``guided_counts``               ``counts``                int32 of shape (7,), the rule's integers
    ``guided_levels``               ``levels``                float32 of shape (3,), weight, low and level
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
        gradient_format (Union[str, dict, Format]): the format of the gradients, as in
            :class:`~mindformers_adaptive.rules.guided.GuidedRule`. Default: "float16".
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
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import Parameter, Tensor, ops
        >>> from mindformers_adaptive import GradientGuidedLossScaleUpdateCell
        >>> cell = GradientGuidedLossScaleUpdateCell(loss_scale_value=2**10)
        >>> loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
        >>> for _ in range(50):
        ...     _ = ops.assign(cell.largest_gradient, Tensor(0.25))  # a train-step cell does this
        ...     _ = cell(loss_scale, Tensor(False))
        >>> float(loss_scale), cell.state()["skipped_steps"]
        (16384.0, 0)
    """

    def __init__(
        self,
        loss_scale_value,
        scale_factor=2,
        *,
        exchange_rate=1.0,
        min_loss_scale=1.0,
        max_loss_scale=None,
        gradient_format="float16",
        history_size=0,
        track_per_parameter=False,
    ):
        rule = GuidedRule(
            exchange_rate,
            scale_factor=scale_factor,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            gradient_format=gradient_format,
        )
        super().__init__(rule, loss_scale_value, history_size, track_per_parameter)


class RuleLossScaleUpdateCell(TextUpdateCell):
    """Update cell of a rule of one's own, or of any rule whose step is one text.

    In a YAML file the rule is named by its module, which lies in the current folder or can be imported::

        scale_sense:
          type: RuleLossScaleUpdateCell
          rule: log_max.LogMaxRule
          loss_scale_value: 65536

    Args:
        loss_scale_value (Union[int, float, Tensor, Parameter]): the initial loss scale; a Tensor or Parameter of one
            element, as MindFormers passes on resume, is only read.
        rule (Union[str, type, TextRule]): ``module.Class``, the class, or the rule itself.
        history_size (int): how many of the last steps the device keeps, for :meth:`recent_steps`. Default: 0.
        track_per_parameter (bool): as in :class:`GradientGuidedLossScaleUpdateCell`, for a rule that needs the largest
            gradient. Default: False.
        **arguments: those of the rule, by name, unless it is made already.

    Inputs, outputs, platforms: as in :class:`GradientGuidedLossScaleUpdateCell`.

    Raises:
        TypeError: if an argument is not of its type, the rule has no such argument, or is no rule of this kind.
        ValueError: if an argument is out of its range, or there is no such rule.

    Examples:
        >>> cell = RuleLossScaleUpdateCell(2**10, rule="guided", exchange_rate=5)
        >>> cell.rule.patience
        200
    """

    def __init__(self, loss_scale_value, rule, *, history_size=0, track_per_parameter=False, **arguments):
        rule = make_rule(rule, **arguments)
        if not isinstance(rule, TextRule):
            raise TypeError(
                f"'rule' must be a TextRule, but got {type(rule).__name__}. Use AdaptiveLossScaleUpdateCell."
            )
        super().__init__(rule, loss_scale_value, history_size, track_per_parameter)

    @classmethod
    def _for_rule(cls, rule, state, **options):
        return cls(state.loss_scale, rule, **options)


def _place_of(rule, key):
    """Where a recorded part of the state is: its field, its place in a vector or None, whether it is an integer."""
    field = next(field for field in rule.fields if key in field.keys)
    place = to_tensor(field.parts.index(key)) if field.parts else None
    return field.name, place, field.dtype == "int32"
