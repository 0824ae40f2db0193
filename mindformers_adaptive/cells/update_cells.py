"""The public update cells: one for each rule of this package, one for any other rule, and one without loss scaling."""

import warnings
from collections.abc import Mapping
from typing import Any

from mindspore import Tensor, nn

from mindformers_adaptive.cells.refusals import warn_of_large_factor
from mindformers_adaptive.cells.update_cell import RuleUpdateCell
from mindformers_adaptive.rules import Format, Rule, make_rule
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule, refuses_exchange_rate
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.rules.saved_state import repair_loss_scale


class AdaptiveLossScaleUpdateCell(RuleUpdateCell):
    r"""Update cell of adaptive loss scaling: overflows decide the loss scale, and its changes decide the scale window.

    The rule is :class:`mindformers_adaptive.rules.adaptive.AdaptiveRule`. Its state is in int32 scalar
    Parameters, which a checkpoint of the train-step cell contains:

    =============================== ========================= ===================================================
    Parameter in a checkpoint       attribute                 meaning
    =============================== ========================= ===================================================
    ``scale_window``                ``scale_window``          window in force, in steps
    ``list_index``                  ``window_index``          window's place on the ladder, -1 for the window 1
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
        scale_factor (float): as in :class:`~mindformers_adaptive.rules.adaptive.AdaptiveRule`, but required.
        scale_window (int): the window to start with, in steps. One that is not on the ladder gives a warning, and
            training starts at ``min_scale_window``.
        max_scale_window, min_scale_window, hysteresis (int): as in that rule, with its defaults.
        min_loss_scale, max_loss_scale, backoff_factor (float): as in that rule, with its defaults.
        shrink_from_min_window (bool): as in that rule. Default: False.
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

    rule_class = AdaptiveRule

    def __init__(
        self,
        loss_scale_value: Any,
        scale_factor: float,
        scale_window: int,
        max_scale_window: int = DEFAULT_MAX_SCALE_WINDOW,
        min_scale_window: int = DEFAULT_MIN_SCALE_WINDOW,
        *,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        hysteresis: int = 1,
        shrink_from_min_window: bool = False,
        backoff_factor: float | None = None,
        history_size: int = 0,
    ) -> None:
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
        warn_of_large_factor(type(self).__name__, rule.scale_factor, loss_scale_value, "loss_scale_value")
        super().__init__(rule, rule.start(_restored_scale(rule, loss_scale_value), scale_window), history_size)

    @classmethod
    def _for_rule(cls, rule: Any, state: Any) -> RuleUpdateCell:
        with warnings.catch_warnings():
            # The user gave these arguments to another class, which has warned already.
            warnings.filterwarnings("ignore", message="'scale_factor' of")
            window = rule.ladder[max(state.window_index, 0)]
            return cls(state.loss_scale, scale_window=window, **rule.arguments)


class GradientGuidedLossScaleUpdateCell(RuleUpdateCell):
    r"""Update cell of gradient-guided loss scaling, which sets the loss scale by the largest gradient of each step.

    The rule is :class:`mindformers_adaptive.rules.guided.GuidedRule`. It needs the largest absolute value of
    each step's gradients, which the train-step cells of :mod:`mindformers_adaptive.wrapper` assign to the Parameter
    ``largest_gradient``. Stock train-step cells do not, and are refused when training starts. Its state is in
    Parameters, which a checkpoint of the train-step cell contains:

    =============================== ========================= ===================================================
    Parameter in a checkpoint       attribute                 what it is
    =============================== ========================= ===================================================
    ``guided_low_and_margin``       ``low_and_margin``        int32 of shape (5,), the state of the rule
    ``largest_gradient``            ``largest_gradient``      float32 of shape (), in the last step
    ``current_iterator_step``       ``cur_iter``              int32 of shape (), number of the next step, from 1
    ``last_overflow_iterator_step`` ``last_overflow_iter``    int32 of shape (), step of the last overflow or raise
    ``skipped_steps``               ``skipped_steps``         int32 of shape (), overflowed steps so far
    ``consecutive_overflows``       ``consecutive_overflows`` int32 of shape (), overflowed steps in a row
    =============================== ========================= ===================================================

    Args:
        loss_scale_value (Union[float, Tensor, Parameter]): as in :class:`AdaptiveLossScaleUpdateCell`, of one element.
            One that is no power of two gives a warning, and the next power of two below is used.
        margin (int, optional): as in :class:`~mindformers_adaptive.rules.guided.GuidedRule`. Default: None.
        scale_factor, min_loss_scale, max_loss_scale (float): as in that rule, with its defaults.
        gradient_format (Union[str, Mapping, Format]): as in that rule. Default: "float16".
        history_size (int): as in :class:`AdaptiveLossScaleUpdateCell`. Default: 0.

    Inputs, outputs: as in :class:`AdaptiveLossScaleUpdateCell`.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import Parameter, Tensor, ops
        >>> from mindformers_adaptive import GradientGuidedLossScaleUpdateCell
        >>> cell = GradientGuidedLossScaleUpdateCell(loss_scale_value=2**11)
        >>> loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
        >>> for largest in (0.25, 4.0):  # the ceilings are 2^17 and 2^13
        ...     _ = ops.assign(cell.largest_gradient, Tensor(largest))  # a train-step cell does this
        ...     _ = cell(loss_scale, Tensor(False))
        >>> float(loss_scale) == 2.0**7, cell.state()["skipped_steps"]
        (True, 0)
    """

    rule_class = GuidedRule

    @refuses_exchange_rate
    def __init__(
        self,
        loss_scale_value: Any,
        scale_factor: float = 2,
        *,
        margin: int | None = None,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        gradient_format: str | Mapping[str, Any] | Format = "float16",
        history_size: int = 0,
    ) -> None:
        rule = GuidedRule(
            margin,
            scale_factor=scale_factor,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            gradient_format=gradient_format,
        )
        start = rule.start(_restored_scale(rule, loss_scale_value))
        super().__init__(rule, start, history_size)


class RuleLossScaleUpdateCell(RuleUpdateCell):
    """Update cell for any loss-scaling rule, such as your own.

    In a YAML file the rule is named by its module, which lies in the current folder or can be imported::

        scale_sense:
          type: RuleLossScaleUpdateCell
          rule: log_max.LogMaxRule
          loss_scale_value: 65536

    Args:
        rule (Union[str, type, Rule]): ``module.Class``, the class, or the rule itself.
        loss_scale_value (Union[float, Tensor, Parameter]): as in :class:`AdaptiveLossScaleUpdateCell`, of one element.
        history_size (int): as there. Default: 0.
        **arguments: arguments of the rule, by name; leave them out if ``rule`` is an instance.

    Inputs, outputs, platforms: as in :class:`AdaptiveLossScaleUpdateCell`.

    Raises:
        TypeError: if an argument is not of its type, the rule has no such argument, or is no rule.
        ValueError: if an argument is out of its range, or there is no such rule.

    Examples:
        >>> cell = RuleLossScaleUpdateCell("guided", 2**10, margin=5)
        >>> cell.rule.margin
        5
    """

    def __init__(
        self,
        rule: str | type[Rule] | Rule,
        loss_scale_value: Any,
        *,
        history_size: int = 0,
        **arguments: Any,
    ) -> None:
        rule = make_rule(rule, **arguments)
        start = rule.start(_restored_scale(rule, loss_scale_value))
        super().__init__(rule, start, history_size)

    @classmethod
    def _for_rule(cls, rule: Rule, state: Any) -> RuleUpdateCell:
        return cls(rule, state.loss_scale)


def _restored_scale(rule: Rule, loss_scale_value: Any) -> Any:
    """Convert a ``loss_scale_value`` that is a Tensor of one element to a float; return any other value unchanged.

    On resume, MindFormers passes a Parameter, which would become a trainable child of the cell.
    """
    if not isinstance(loss_scale_value, Tensor):
        return loss_scale_value
    if loss_scale_value.size != 1:
        raise ValueError(
            f"'loss_scale_value' must hold one number, but got a Tensor of shape {loss_scale_value.shape}. Give a "
            "number, or a Tensor of shape () or (1,)."
        )
    return repair_loss_scale(rule, float(loss_scale_value.asnumpy().item()), "loss_scale_value")


class NoLossScaleUpdateCell(nn.FixedLossScaleUpdateCell):
    """Update cell for training without loss scaling: no step is skipped, as in Megatron-LM without a gradient scaler.

    The train-step cells of MindSpore and MindFormers skip a step whose gradients are not finite, also at a fixed scale
    of 1, unless the update cell returns False. This cell always returns False, so inf and NaN reach the optimizer.

    Args:
        loss_scale_value (float): not used; MindFormers passes the restored loss scale when a training resumes. Default:
            1.0.

    Inputs:
        - **loss_scale** (Parameter) - not used.
        - **overflow** (Tensor) - not used.

    Outputs:
        Tensor, False, bool of shape ().

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from mindformers_adaptive.wrapper import NoLossScaleUpdateCell
        >>> bool(NoLossScaleUpdateCell()(Tensor(1.0), Tensor(True)))
        False
    """

    # The module from which users import the cell.
    __module__ = "mindformers_adaptive.wrapper"

    def __init__(self, loss_scale_value: float = 1.0) -> None:
        super().__init__(1.0)
        self.no_overflow = Tensor(False)

    def construct(self, loss_scale: Any, overflow: Any) -> Any:
        return self.no_overflow

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, 1.0."""
        return 1.0

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Warn and ignore the saved state of a gradient scaler, as Megatron-LM does when it runs without a scaler.

        Args:
            state_dict (dict): the state of a scaler or of the optimizer around it, as ``load_state_dict`` of
                :class:`AdaptiveLossScaleUpdateCell` takes it; any other is left to ``nn.Cell``.
            *args (Any): as in ``nn.Cell``.
            **kwargs (Any): as in ``nn.Cell``.

        Returns:
            None, or what ``nn.Cell`` returns.
        """
        keys = {"grad_scaler", "optimizer", "scale", "loss_scale"}
        if not isinstance(state_dict, dict) or keys.isdisjoint(state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        if state_dict.get("grad_scaler") is not None or not {"scale", "loss_scale"}.isdisjoint(state_dict):
            warnings.warn(
                f"The checkpoint has the state of a gradient scaler, but {type(self).__name__} does not scale "
                "the loss, so it ignores this state. To continue with the saved loss scale, use "
                "AdaptiveLossScaleUpdateCell.",
                stacklevel=2,
            )
        return None
