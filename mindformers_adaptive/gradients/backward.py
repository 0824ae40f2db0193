"""Runs the backward pass of a train-step cell at any loss scale, without changing the weights or the training."""

import itertools
from collections.abc import Callable
from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype


def backward_pass(network: Any) -> Any:
    """Return a cell that maps a loss scale and a batch to the loss, the gradients and the divisor of the gradients.

    The gradients are as the train-step cell computes them: multiplied by the loss scale, and not yet divided by the
    scale or the divisor. The divisor is the number of tokens if the cell calculates a loss for each token, else 1.

    Args:
        network (Cell): a train-step cell, a subclass of ``nn.TrainOneStepCell``, or a network that returns its loss, a
            Tensor or a tuple whose first element is the loss.

    Raises:
        TypeError: if ``network`` is not a Cell.
        ValueError: if ``network`` has no Parameter to train, or one pass does not return all its gradients.
    """
    if not isinstance(network, nn.Cell):
        raise TypeError(
            f"'network' must be a Cell that returns the loss, but got {network!r} of type {type(network).__name__}. "
            "Give nn.WithLossCell(network, loss_fn), a model that has its loss inside, or a train-step cell."
        )
    if not network.trainable_params():
        raise ValueError(
            f"'network' must have a Parameter to train, but {type(network).__name__} has only frozen "
            "Parameters or no Parameters. Set requires_grad=True for at least one Parameter."
        )
    if not isinstance(network, nn.TrainOneStepCell):
        return _OfOneLoss(network, ParameterTuple(network.trainable_params()))
    if hasattr(network, "accu_grads") and not network.opt_shard:
        raise ValueError(
            f"'network' must return its gradients, but {type(network).__name__} only adds them to its Parameters. "
            "Set 'parallel.enable_parallel_optimizer' to True in the YAML file, or measure without pipeline stages."
        )
    # Before version 1.7, MindFormers' train-step cell has no method grads_for_legacy. This package's train-step cells
    # always have this method. So, in a cell of this package, look at the attribute stock_grads_for_legacy instead. This
    # attribute holds None before version 1.7.
    if getattr(network, "stock_grads_for_legacy", getattr(network, "grads_for_legacy", None)) is not None:
        return _OfMindFormers(network)
    if getattr(network, "calculate_per_token_loss", False):
        raise ValueError(
            "'calculate_per_token_loss' must be False here: before MindFormers 1.7, the loss per token cannot be "
            "measured. Set it to False, or install MindFormers 1.7."
        )
    return _OfOneLoss(network.network, network.weights)


class _OfMindFormers(nn.Cell):
    """Computes the gradients with the same function that MindFormers' train-step cells use in a training."""

    def __init__(self, train_step: Any) -> None:
        super().__init__(auto_prefix=False)
        self.train_step = train_step
        self.weights = train_step.weights

    def construct(self, loss_scale: Any, *inputs: Any) -> Any:
        if self.train_step.use_legacy:
            return self.train_step.grads_for_legacy(loss_scale, *inputs)
        return self.train_step.grads_for_mcore(loss_scale, *inputs)


class _OfOneLoss(nn.Cell):
    """Computes the gradients of the loss as MindSpore's train-step cells do in ``construct``."""

    def __init__(self, network: Any, weights: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = weights
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.divisor = Tensor(1.0, mstype.float32)

    def construct(self, loss_scale: Any, *inputs: Any) -> Any:
        loss = self.first_output(*inputs)
        # Cast the loss scale to the dtype of the loss, as in training: a loss scale beyond FP16 overflows if the loss
        # is in FP16.
        sens = ops.ones_like(loss) * ops.cast(loss_scale, ops.dtype(loss))
        return loss, self.grad(self.first_output, self.weights)(*inputs, sens), self.divisor

    def first_output(self, *inputs: Any) -> Any:
        outputs = self.network(*inputs)
        return outputs[0] if isinstance(outputs, tuple) else outputs


def counts_for(progress: Callable[[int], object] | None) -> Callable[[], object]:
    """Return a function to call after each backward pass. It calls ``progress``, if any, with the number of passes."""
    passes = itertools.count(1)
    return lambda: progress is not None and progress(next(passes))


def to_numpy(tensor: Any) -> Any:
    """Return a Tensor as a NumPy array of the same dtype, but a bfloat16 Tensor as float32."""
    # NumPy has no bfloat16, so cast to float32.
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()
