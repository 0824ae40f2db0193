"""Loss scalers for functional training: one for any rule, and one for each rule of this package."""

from typing import Any

from mindspore import Parameter, Tensor, amp, jit, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells import update_cells
from mindformers_adaptive.cells.detection import LargestGradient
from mindformers_adaptive.cells.loads import keeps_compiled_graphs
from mindformers_adaptive.cells.refusals import warn_of_large_factor
from mindformers_adaptive.cells.unscaling import multiply_in_float32
from mindformers_adaptive.cells.update_cell import RuleUpdateCell, StateOfUpdateCell
from mindformers_adaptive.rules import Rule, make_rule
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule

_map = ops.HyperMap()


class _CallOrder(nn.Cell):
    """Refuses ``adjust`` without an ``unscale`` before it. In a graph this cell does nothing: it has no operator."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self._is_unscaled = self._is_compiled = False

    def construct(self, method: str) -> bool:
        return True

    def get_scope(self) -> Any:
        # MindSpore calls this method when it compiles the cell. From then on, Python does not see every call.
        self._is_compiled = True
        return super().get_scope()

    def __call__(self, method: str) -> bool:
        if method == "adjust" and not (self._is_unscaled or self._is_compiled or keeps_compiled_graphs()):
            raise RuntimeError(
                "adjust() must be called once per training step, after unscale(), but unscale() was not called since "
                "the last adjust(). First divide the gradients: grads = scaler.unscale(grads). With two optimizers, "
                "unscale both, and combine the flags: scaler.adjust(ops.logical_and(first_finite, second_finite))."
            )
        self._is_unscaled = method == "unscale"
        return True


class RuleLossScaler(StateOfUpdateCell, amp.LossScaler):
    """Loss scaler for your own loss-scaling rule, for training with ``mindspore.value_and_grad``.

    It works within ``@mindspore.jit`` and without. Its state is kept in Parameters: the loss scale ``scale_value``, and
    the Parameters of ``update_cell``, which applies the rule. In data parallel, reduce the gradients first, so that
    every process sees the same ones.

    Args:
        rule (Union[str, type, Rule]): ``module.Class``, the class, or the rule itself.
        scale_value (float): the initial loss scale. Named as in ``amp.DynamicLossScaler``.
        **arguments: arguments of the rule, by name; leave them out if ``rule`` is an instance.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> scaler = RuleLossScaler("guided", scale_value=2**10)
        >>> float(scaler.scale(Tensor(2.0)))
        2048.0
    """

    cell_class: type[RuleUpdateCell] = update_cells.RuleLossScaleUpdateCell

    def __init__(self, rule: str | type[Rule] | Rule, scale_value: float, **arguments: Any) -> None:
        rule = make_rule(rule, **arguments)
        self._follow(rule, rule.start(scale_value, argument="scale_value"))

    def _follow(self, rule: Rule, start: Any) -> None:
        self.rule = rule
        self._note_call = _CallOrder()
        self.update_cell = self.cell_class._for_rule(rule, start)
        self.scale_value = Parameter(Tensor(start.loss_scale, mstype.float32), name="scale_value", requires_grad=False)
        self.update_cell.bind_loss_scale(self.scale_value)
        # The compiled update uses the Parameters, and so may a compiled function of the user.
        self.update_cell.loads_in_place = True
        self._measure_and_update: Any = None
        if rule.needs_gradients:
            self.update_cell.declare_signal()
            measure, update_cell = LargestGradient(self.update_cell), self.update_cell

            # Compile this function: launched one by one, its small operations can take longer than a training step. Do
            # not pass the gradients in a tuple: MindSpore would treat each tuple as a constant, and compile the
            # function again.
            @jit
            def measure_and_update(loss_scale: Any, overflow: Any, *gradients: Any) -> Any:
                measure(gradients)
                return update_cell(loss_scale, overflow)

            self._measure_and_update = measure_and_update

    def scale(self, inputs: Any) -> Any:
        """Multiply a loss, or gradients, by the loss scale.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): of any shapes and floating-point dtypes.

        Returns:
            Union[Tensor, tuple[Tensor]], shapes and dtypes of `inputs`. A float16 loss can be scaled to 65504 only.

        Raises:
            TypeError: if an element of ``inputs`` is None.
        """
        _refuse_none(inputs)
        return _map(ops.partial(multiply_in_float32, self.scale_value), inputs)

    def unscale(self, inputs: Any) -> Any:
        """Divide gradients, or a loss, by the loss scale.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): of any shapes and floating-point dtypes.

        Returns:
            Union[Tensor, tuple[Tensor]], shapes and dtypes of `inputs`.

        Raises:
            TypeError: if an element of ``inputs`` is None.
        """
        self._note_call("unscale")
        _refuse_none(inputs)
        return _map(ops.partial(multiply_in_float32, ops.reciprocal(self.scale_value)), inputs)

    def adjust(self, grads_finite: Any, grads: Any = ()) -> bool:
        """Update the loss scale and the state of the rule for the next training step. Call it once per step.

        Args:
            grads_finite (Tensor): bool of shape (), False where the step overflowed.
            grads (Union[Tensor, tuple[Tensor]]): for a rule that needs the largest gradient, the gradients as
                :meth:`unscale` returned them, before any clipping; of any shapes and floating-point dtypes. Default:
                (), for other rules.

        Returns:
            bool, True: the scale is not fixed.

        Raises:
            TypeError: if ``grads_finite`` is not a Tensor, or the rule needs the largest gradient and ``grads`` are not
                Tensors.
            RuntimeError: if :meth:`unscale` was not called since the last call. In a function under
                ``mindspore.jit`` this is not checked.
        """
        if not isinstance(grads_finite, Tensor):
            raise TypeError("'grads_finite' must be a Tensor of one flag, as mindspore.amp.all_finite() returns it.")
        self.update_cell.try_own_rule()
        overflow = ops.logical_not(grads_finite)
        if self._measure_and_update is None:
            self._note_call("adjust")
            self.update_cell(self.scale_value, overflow)
            return True
        grads = (grads,) if grads is None or isinstance(grads, Tensor) else grads
        tensors = [gradient for gradient in grads if isinstance(gradient, Tensor)]
        if len(tensors) == 0 or len(tensors) < len(grads):
            raise TypeError(
                "'grads' must be a tuple of Tensors, because the rule of this scaler needs the largest gradient. "
                "Give the unscaled gradients in one flat tuple, without None."
            )
        self._note_call("adjust")
        self._measure_and_update(self.scale_value, overflow, *grads)
        return True

    def state(self) -> dict[str, Any]:
        """Return the state of the loss scaling. Reading the state waits for the device.

        Returns:
            dict[str, Union[int, float, tuple[float, ...]]], as ``state()`` of the update cell returns it.
        """
        return self.update_cell.state()

    @property
    def _present_cell(self) -> RuleUpdateCell:
        return self.update_cell


def _refuse_none(inputs: Any) -> None:
    if isinstance(inputs, (tuple, list)):
        empty = [position for position, tensor in enumerate(inputs) if tensor is None]
        if len(empty) > 0:
            raise TypeError(
                f"'inputs' must be a Tensor or a tuple of Tensors, but inputs{empty} is None: a Parameter has no "
                "gradient. Leave this Parameter out of the Parameters that are differentiated and optimized."
            )


class AdaptiveLossScaler(RuleLossScaler):
    """Loss scaler of adaptive loss scaling, for training with ``mindspore.value_and_grad``.

    It works within ``@mindspore.jit`` and without. Its state is kept in Parameters: the loss scale ``scale_value``, and
    the Parameters of ``update_cell``, which applies the rule. In data parallel, reduce the gradients before
    ``amp.all_finite``, so that every process sees an inf or NaN of any.

    Args:
        scale_value (float): the initial loss scale. Named as in ``amp.DynamicLossScaler``.
        scale_factor (float): as in :class:`~mindformers_adaptive.rules.adaptive.AdaptiveRule`. Default: 2.
        scale_window (int, optional): the window to start with, in steps. Default: None, ``min_scale_window``.
        *windows: ``max_scale_window`` and ``min_scale_window`` of that rule.
        **arguments: its other arguments, by name.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import mindspore
        >>> import numpy as np
        >>> from mindspore import Tensor, amp, nn, ops
        >>> from mindformers_adaptive import AdaptiveLossScaler
        >>> net, loss_fn = nn.Dense(3, 2), nn.MSELoss()
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> scaler = AdaptiveLossScaler(scale_value=2**16)
        >>> def scaled_loss(x, y):
        ...     return scaler.scale(loss_fn(net(x), y))
        >>> value_and_grad = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)
        >>> def train_step(x, y):  # in a program of your own: with @mindspore.jit
        ...     loss, grads = value_and_grad(x, y)
        ...     loss, grads = scaler.unscale(loss), scaler.unscale(grads)
        ...     grads_finite = amp.all_finite(grads)
        ...     if grads_finite:
        ...         optimizer(grads)
        ...     scaler.adjust(grads_finite)
        ...     return loss, grads_finite
        >>> loss, grads_finite = train_step(Tensor(np.full((4, 3), np.inf, np.float32)), ops.zeros((4, 2)))
        >>> bool(grads_finite), scaler.state()["loss_scale"]
        (False, 32768.0)
    """

    cell_class = update_cells.AdaptiveLossScaleUpdateCell

    def __init__(
        self,
        scale_value: float,
        scale_factor: float = 2,
        scale_window: int | None = None,
        *windows: int,
        **arguments: Any,
    ) -> None:
        rule = AdaptiveRule(scale_factor, *windows, **arguments)
        warn_of_large_factor(type(self).__name__, rule.scale_factor, scale_value, "scale_value")
        self._follow(rule, rule.start(scale_value, scale_window, argument="scale_value"))


class GradientGuidedLossScaler(RuleLossScaler):
    """Loss scaler of gradient-guided loss scaling, for training with ``mindspore.value_and_grad``.

    It is used as :class:`AdaptiveLossScaler`, except that :meth:`adjust` needs the gradients, as :meth:`unscale`
    returned them: ``scaler.adjust(grads_finite, grads)``.

    Args:
        scale_value (float): the initial loss scale. Named as in ``amp.DynamicLossScaler``.
        scale_factor (float): 2, and nothing else. Default: 2.
        **arguments: the other arguments of :class:`~mindformers_adaptive.rules.guided.GuidedRule`, by name.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from mindformers_adaptive import GradientGuidedLossScaler
        >>> scaler = GradientGuidedLossScaler(scale_value=2**16)
        >>> grads = scaler.unscale((Tensor([float("inf")]),))
        >>> scaler.adjust(Tensor(False), grads), scaler.state()["skipped_steps"]
        (True, 1)
    """

    cell_class = update_cells.GradientGuidedLossScaleUpdateCell

    def __init__(self, scale_value: float, scale_factor: float = 2, **arguments: Any) -> None:
        super().__init__(GuidedRule(scale_factor=scale_factor, **arguments), scale_value)
