"""The mixin with the behaviour that all train-step cells of this package share."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from mindformers.core.clip_grad import ClipGradNorm, get_square_sum
from mindformers.tools.logger import logger
from mindspore import Parameter, Tensor, context, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.detection import (
    LargestGradient,
    MeasuredClipping,
    has_inf_or_nan,
    refuse_sparse_gradients,
)
from mindformers_adaptive.cells.loads import GivesMemoryBack, write
from mindformers_adaptive.cells.refusals import refuse_dividing_optimizer, require_update_cell
from mindformers_adaptive.cells.unscaling import HALF_PRECISION, GradientReducer, MapInFloat32
from mindformers_adaptive.cells.update_cell import RuleUpdateCell
from mindformers_adaptive.cells.update_cells import NoLossScaleUpdateCell
from mindformers_adaptive.rules.saved_state import describe_fresh_start

# If the largest gradient is still 0 after this many steps, warn that it is not measured: measured values exceed 0.
_STEPS_BEFORE_CHECK = 5


class LossScaleTrainStep(GivesMemoryBack):
    """Mixin for a subclass of ``nn.TrainOneStepWithLossScaleCell``; list the mixin first among the base classes.

    It must come before the stock cell, because it overrides the stock cell's ``__init__``, ``__call__``,
    ``get_overflow_status``, ``set_sense_scale`` and ``add_flags_recursive``. ``construct`` stays the stock cell's.

    - On CPU, where the stock cell cannot detect overflow, the gradients are checked for inf and NaN, and an overflow in
      one process counts as an overflow in all processes. On other devices the stock detection stays. A subclass that
      overrides ``get_overflow_status`` keeps its own detection.
    - Gradients in FP16 and BF16 are divided by the loss scale in float32, and then cast back. If the
      ``construct`` of a subclass calls ``self.hyper_map`` itself, the division stays as the subclass does it.
    - If the update cell needs the largest gradient, ``get_overflow_status`` measures it. A warning is given if the
      largest gradient is still 0 after five steps, because then ``construct`` does not call that method; and if a
      ``construct`` of your own calls it, but the cell does not say by :meth:`declare_divided_gradients` that the
      gradients are divided by the loss scale before.
    - The state of loss scaling survives every kind of checkpoint. MindFormers restores only network and optimizer from
      most checkpoint formats, so the update cell becomes a child of the optimizer; its Parameters keep their names.
    - A fixed loss scale stays as you set it. If a checkpoint has another loss scale, a warning says so.
    - When training starts, the restored loss scale is checked. The log names the cell that scales the loss, the package
      of the cell, and the state from which loss scaling continues.
    - Construction raises TypeError if ``scale_sense`` is a loss-scale manager, a loss scaler, a class, a dict, a str, a
      bool or None, and ValueError if the optimizer divides the gradients too, or if steps are to be skipped by the
      gradient norm while ``use_clip_grad`` is False, so that no norm is calculated.

    Examples:
        >>> class TrainStep(LossScaleTrainStep, nn.TrainOneStepWithLossScaleCell):
        ...     pass
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=20)
        >>> train_step = TrainStep(nn.WithLossCell(net, nn.MSELoss()), optimizer, update_cell)
        >>> "list_index" in optimizer.parameters_dict()
        True
    """

    # Call MindSpore's method by this second name: in a graph, super() would call the overriding method itself again.
    stock_overflow_status = nn.TrainOneStepWithLossScaleCell.get_overflow_status
    # Whether overflows are detected in gradients that have already been clipped.
    clips_before_detection = False
    _divides_gradients = False
    clip_grad_norm: Any
    grad_reducer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_arguments(super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)
        self._refuse_skipping_without_norm()
        if any(weight.dtype in HALF_PRECISION for weight in self.weights):
            self._unscale_in_float32()
        self.on_cpu = context.get_context("device_target") == "CPU"
        self.measures_at_detection = self.keeps_divisor = False
        if getattr(self.loss_scaling_manager, "needs_gradients", False):
            self._measure_largest_gradient()
        self._prepare_checks()
        if _follows_a_rule(self):
            self._bind_update_cell()
        self._rename_returned_learning_rate()
        self._observe_loads()

    def _refuse_arguments(self, stock_init: Any, args: Any, kwargs: Any) -> None:
        """Raise an error for arguments that the stock cell would accept, or refuse in words that do not help."""
        try:
            arguments = inspect.signature(stock_init).bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            names = ", ".join(inspect.signature(stock_init).parameters)
            raise TypeError(
                f"{type(self).__name__} {error}. The arguments of this cell are {names}. In a MindFormers YAML file, "
                "use the type MFTrainOneStepCell under 'runner_wrapper': it takes the arguments of MindFormers' cell."
            ) from error
        if "scale_sense" in arguments:
            require_update_cell(arguments["scale_sense"])
        refuse_dividing_optimizer(arguments.get("optimizer"))

    def _refuse_skipping_without_norm(self) -> None:
        if getattr(self, "use_skip_data_by_global_norm", False) and not self.use_clip_grad:
            raise ValueError(
                "'use_clip_grad' must be True with 'use_skip_data_by_global_norm', but is False: only clipping "
                "computes the gradient norm. Set it to True. To avoid clipping, also set a very large 'max_grad_norm'."
            )

    def _prepare_checks(self) -> None:
        """Set what the checks at the start of training, after a load and in the first steps need."""
        self._is_running, self._reported_start = False, None
        self._steps_before_check = _STEPS_BEFORE_CHECK if hasattr(self, "measure_largest_gradient") else 0
        self._fixed_scale = self.scale_sense.asnumpy().item() if _has_fixed_scale(self) else None

    def _bind_update_cell(self) -> None:
        """Let the update cell know its loss scale, and put its state into the checkpoints of the optimizer."""
        self.loss_scaling_manager.bind_loss_scale(self.scale_sense)
        self.loss_scaling_manager.is_in_observed_step = True
        if isinstance(self, PerTokenTrainStep):
            self.loss_scaling_manager.accept_former_names()
        if isinstance(self.optimizer, nn.Cell):
            self.optimizer.loss_scaling_manager = self.loss_scaling_manager

    def _rename_returned_learning_rate(self) -> None:
        # MindFormers' train-step cell returns a copy of a constant learning rate. Rename the copy: when two Parameters
        # share a name, MindSpore renames all Parameters, and then a checkpoint does not fit the next run.
        if isinstance(learning_rate := getattr(self, "learning_rate", None), Parameter):
            learning_rate.name = "returned_learning_rate"

    def _unscale_in_float32(self) -> None:
        """Divide FP16 and BF16 gradients in float32, unless a user's ``construct`` calls ``hyper_map`` itself."""
        construct = type(self).construct
        is_stock = construct is nn.TrainOneStepWithLossScaleCell.construct
        # Do not replace hyper_map if a user's construct() calls it: a call may average weights, not divide gradients.
        if is_stock or "hyper_map" not in construct.__code__.co_names:
            self.hyper_map = MapInFloat32()
            self.grad_reducer = GradientReducer(self.grad_reducer, [weight.dtype for weight in self.weights])

    def _measure_largest_gradient(self) -> None:
        update_cell = self.loss_scaling_manager
        update_cell.declare_signal()
        self.keeps_divisor = self._tells_divisor()
        measure = LargestGradient(update_cell, self.is_distributed, self.keeps_divisor, self._sum_of_squares())
        self.measure_largest_gradient = measure
        if self.clips_before_detection and self.use_clip_grad:
            self.clip_grad_norm = MeasuredClipping(measure, self.clip_grad_norm)
        elif type(self).get_overflow_status is LossScaleTrainStep.get_overflow_status:
            self.measures_at_detection = True
        else:
            # In a graph, the user's get_overflow_status() cannot measure the largest gradient. So measure it first.
            self.own_overflow_status = self.get_overflow_status
            self.get_overflow_status = self.get_own_overflow_status  # type: ignore[method-assign]

    def declare_divided_gradients(self) -> None:
        """Declare that ``construct`` divides the gradients by the loss scale before ``get_overflow_status``.

        Call it in ``__init__``, after ``super().__init__()``, if your own ``construct`` calls ``get_overflow_status``.
        It matters to update cells that need the largest gradient.
        """
        self._divides_gradients = True

    def _sum_of_squares(self) -> Any:
        """Return the function by which MindFormers' clipping computes norms, if the same gradients are clipped so."""
        # Where MindSpore cuts the weights, it looks for these sums in the graph, to add them up over the devices.
        cuts_weights = context.get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel")
        is_shared = type(getattr(self, "clip_grad_norm", None)) is ClipGradNorm and not cuts_weights
        return get_square_sum if is_shared and self.use_clip_grad else None

    def _tells_divisor(self) -> bool:
        """Return whether each step also divides the gradients by the number of tokens, and reports this number."""
        if getattr(self, "calculate_per_token_loss", False):
            raise TypeError(
                f"{type(self).__name__} must be a subclass of PerTokenTrainStep, because 'calculate_per_token_loss' is "
                "set and the update cell needs the largest gradient. Use PerTokenTrainStep, not LossScaleTrainStep."
            )
        return False

    def get_overflow_status(self, status: Any, compute_output: tuple[Any, ...]) -> Any:
        """Return whether the gradients contain an inf or a NaN.

        Args:
            status (Tensor): what the stock detection needs, of any shape; not used on CPU.
            compute_output (tuple[Tensor]): the gradients, of any shapes and floating-point dtypes.

        Returns:
            Tensor, bool of shape ().
        """
        if self.on_cpu and self.measures_at_detection:
            return self.measure_largest_gradient(compute_output)
        if self.on_cpu:
            return self.get_overflow_status_on_cpu(status, compute_output)
        if self.measures_at_detection:
            # Do not assign the result of this call to a name: a graph drops a call whose result is named but unused.
            self.measure_largest_gradient(compute_output)
        return self.stock_overflow_status(status, compute_output)

    def get_own_overflow_status(self, status: Any, compute_output: tuple[Any, ...]) -> Any:
        """Return the result of a user subclass's own overflow detection, and also measure the largest gradient.

        Args:
            status (Tensor): what the stock detection needs, of any shape; not used on CPU.
            compute_output (tuple[Tensor]): the gradients, of any shapes and floating-point dtypes.

        Returns:
            Tensor, bool of shape ().
        """
        self.measure_largest_gradient(compute_output)
        return self.own_overflow_status(status, compute_output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)
        if self._steps_before_check > 0:
            self._steps_before_check -= 1
            if self._steps_before_check == 0:
                _warn_if_not_measured(self)
        return outputs

    def _check_loads(self) -> bool:
        # Check a restored state before the next step too: set_train() may have run before the restore, or not at all.
        was_loaded = not self._is_running or self._was_loaded()
        if was_loaded:
            _check_and_report(self)
        self._is_running = True
        return was_loaded

    def _was_loaded(self) -> bool:
        """Return whether a loss scale or a state of loss scaling was loaded since the last check."""
        if _follows_a_rule(self):
            return bool(self.loss_scaling_manager.loaded)
        return self.scale_sense.name in self.loaded

    def set_sense_scale(self, sens: Any) -> None:
        """Set a new fixed loss scale, as MindSpore's own train-step cell does.

        Args:
            sens (Tensor): the new loss scale, float32 of the same shape as the old one.
        """
        super().set_sense_scale(sens)
        if self._fixed_scale is not None:
            self._fixed_scale = self.scale_sense.asnumpy().item()
            self.loaded.discard(self.scale_sense.name)

    def add_flags_recursive(self, **flags: bool) -> Any:
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self._is_running = False
            _check_and_report(self)
        return self

    def get_overflow_status_on_cpu(self, status: Any, compute_output: tuple[Any, ...]) -> Any:
        """Return whether the gradients contain an inf or a NaN.

        Args:
            status (Tensor): not used; the stock detection needs it, of any shape.
            compute_output (tuple[Tensor]): the gradients, of any shapes and floating-point dtypes.

        Returns:
            Tensor, bool of shape ().
        """
        overflow = has_inf_or_nan(compute_output)
        if self.is_distributed:
            # Cast the overflow flag to float32, because AllReduce on CPU supports neither bool nor integers.
            overflow = self.less_equal(self.base, self.allreduce(ops.cast(overflow, mstype.float32)))
        return overflow


class PerTokenTrainStep(LossScaleTrainStep):
    """Mixin for subclasses of those train-step cells of MindFormers that can divide the loss by the number of tokens.

    In that case the gradient of the sum over the tokens can overflow; it is divided by the number of tokens afterwards.
    If the rule needs the largest gradient, this number is kept, and a subclass that overrides ``grads_for_legacy`` or
    ``grads_for_mcore`` must call ``measure_largest_gradient.keep_divisor(divisor)``.
    """

    # A subclass sets these attributes to methods of MindFormers' cell, or to None if MindFormers' version lacks them.
    stock_grads_for_legacy: Any = None
    stock_grads_for_mcore: Any = None

    def _unscale_in_float32(self) -> None:
        # MindFormers' cells divide gradients in float32 themselves, except where the optimizer state is sharded.
        if getattr(self, "opt_shard", False):
            self.hyper_map = MapInFloat32()

    def _tells_divisor(self) -> bool:
        stock = self.stock_grads_for_legacy if getattr(self, "use_legacy", True) else self.stock_grads_for_mcore
        return stock is not None and getattr(self, "calculate_per_token_loss", False)

    def grads_for_legacy(self, scaling_sens: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        """Call ``grads_for_legacy`` of MindFormers' own train-step cell, and store the divisor of the gradients.

        Args:
            scaling_sens (Tensor): the loss scale, float32 of shape ().
            *inputs (Tensor): inputs of the network, of any shapes.

        Returns:
            tuple[Tensor, tuple[Tensor], Tensor], as of the stock cell, the loss, the gradients, of the shapes of the
            weights, and their divisor beside the loss scale, of one element.
        """
        return self._keep_divisor(*self.stock_grads_for_legacy(scaling_sens, *inputs))

    def grads_for_mcore(self, scaling_sens: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        """Do the same as :meth:`grads_for_legacy`, for the mcore models of MindFormers.

        Args:
            scaling_sens (Tensor): the loss scale, float32 of shape ().
            *inputs (Tensor): inputs of the network, of any shapes.

        Returns:
            tuple[Tensor, tuple[Tensor], Tensor], as of the stock cell, the loss, the gradients, of the shapes of the
            weights, and their divisor beside the loss scale, of one element.
        """
        return self._keep_divisor(*self.stock_grads_for_mcore(scaling_sens, *inputs))

    def _keep_divisor(self, loss: Any, grads: Any, divisor: Any) -> tuple[Any, Any, Any]:
        if self.keeps_divisor:
            self.measure_largest_gradient.keep_divisor(divisor)
        return loss, grads, divisor


def _follows_a_rule(train_step: Any) -> bool:
    return isinstance(train_step.loss_scaling_manager, RuleUpdateCell)


def _has_fixed_scale(train_step: Any) -> bool:
    # A user's subclass of these cells may change the loss scale, so accept only the classes themselves.
    fixed = (type(None), nn.FixedLossScaleUpdateCell, NoLossScaleUpdateCell)
    return type(train_step.loss_scaling_manager) in fixed


def _check_and_report(train_step: Any) -> None:
    """Check the restored state, and log once which update cell scales the loss and from which state it continues."""
    refuse_sparse_gradients(train_step)
    update_cell, follows_a_rule = train_step.loss_scaling_manager, _follows_a_rule(train_step)
    if follows_a_rule:
        # The update cell of a copied train step does not know yet that it is in one.
        update_cell.is_in_observed_step = True
        update_cell.check_state()
    _keep_fixed_scale(train_step)
    train_step.loaded.clear()
    loss_scale, state = train_step.scale_sense.asnumpy().item(), update_cell.state() if follows_a_rule else {}
    if train_step._reported_start == (loss_scale, state):
        return
    if train_step._reported_start is None:
        _warn_if_division_is_unknown(train_step)
    train_step._reported_start = (loss_scale, state)
    _report_cell(update_cell, loss_scale, state)
    if not follows_a_rule:
        return
    rule = update_cell.rule
    global_step = getattr(train_step.optimizer, "global_step", None)
    applied_steps = 0 if global_step is None else int(global_step.asnumpy().max())
    if state["cur_iter"] > 1:
        counters = ", ".join(f"{name} {value}" for name, value in state.items() if not isinstance(value, tuple))
        logger.info(f"Loss scaling goes on from: {counters}")
    elif applied_steps > 0:
        warnings.warn(
            f"The checkpoint has {applied_steps} applied steps but no state of {rule.title}: training goes on at loss "
            f"scale {loss_scale} {describe_fresh_start(rule, state)}.",
            stacklevel=3,
        )


def _warn_if_division_is_unknown(train_step: Any) -> None:
    construct, name = type(train_step).construct, type(train_step).__name__
    # MindSpore's and MindFormers' own construct() divides the gradients first, and so does one that calls it.
    is_stock = construct.__module__.startswith(("mindspore.", "mindformers."))
    measures = hasattr(train_step, "measure_largest_gradient") and "get_overflow_status" in construct.__code__.co_names
    if measures and not is_stock and not train_step._divides_gradients:
        warnings.warn(
            f"{type(train_step.loss_scaling_manager).__name__} needs gradients that are divided by the loss scale, "
            f"because it keeps the loss scale too low otherwise. In 'construct' of {name}, divide the gradients before "
            "self.get_overflow_status(status, gradients). Then say so: call self.declare_divided_gradients() in "
            "'__init__', after super().__init__().",
            stacklevel=4,
        )


def _warn_if_not_measured(train_step: Any) -> None:
    update_cell, name = train_step.loss_scaling_manager, type(train_step).__name__
    if float(update_cell.largest_gradient.asnumpy()) == 0:
        warnings.warn(
            f"The largest gradient is still 0 after {_STEPS_BEFORE_CHECK} steps, so {type(update_cell).__name__} does "
            f"not know how large the gradients are. In 'construct' of {name}, first divide the gradients by the loss "
            "scale, then call self.get_overflow_status(status, gradients), which measures them, and clip them only "
            "after that. Or use AdaptiveLossScaleUpdateCell, which needs no measurement.",
            stacklevel=3,
        )


def _keep_fixed_scale(train_step: Any) -> None:
    """Set the loss scale back to its fixed value if a checkpoint has replaced it."""
    scale_sense, wanted = train_step.scale_sense, train_step._fixed_scale
    restored = scale_sense.asnumpy().item()
    if wanted in (None, restored):
        return
    warnings.warn(
        f"The checkpoint has loss scale {restored}, but 'scale_sense' is fixed at {wanted}: training goes on at "
        f"{wanted}. To go on at {restored}, give {restored} as 'scale_sense', or call set_sense_scale().",
        stacklevel=4,
    )
    write(scale_sense, Tensor(np.full(scale_sense.shape, wanted), mstype.float32))


def _report_cell(update_cell: Any, loss_scale: float, state: Mapping[str, Any]) -> None:
    """Log the update cell and its package, because MindFormers has an update cell of the same name."""
    cls = type(update_cell)
    name = "a fixed scale" if update_cell is None else f"{cls.__name__} of {cls.__module__.partition('.')[0]}"
    if cls.__name__ == "RuleLossScaleUpdateCell":
        rule = type(update_cell.rule)
        name += f" by the rule {rule.__module__}.{rule.__qualname__}"
    # The update cells of MindSpore and MindFormers hold the scale window, if they have one, as a Tensor.
    window = state.get("scale_window") if state else getattr(update_cell, "scale_window", None)
    window = f", scale_window {int(window)}" if window else ""
    logger.info(f"Loss scaling by {name}: loss_scale {loss_scale}{window}")
