"""Runs the backward pass of a train-step cell at any loss scale, without changing the weights or the training."""

import contextlib
import itertools
import sys

import mindspore
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.nn.cell import _pynative_executor

__all__ = ["backward_pass", "counts_for", "replaced_in", "to_numpy", "unchanged"]


def backward_pass(network):
    """Return a cell that takes the loss scale and a batch, and returns the loss, the gradients and a divisor.

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
            f"'network' must have a Parameter to train, but {type(network).__name__} has none with requires_grad. Give "
            "the network before it is frozen."
        )
    if not isinstance(network, nn.TrainOneStepCell):
        return _OfOneLoss(network, ParameterTuple(network.trainable_params()))
    if hasattr(network, "accu_grads") and not network.opt_shard:
        raise ValueError(
            f"'network' must return its gradients, but {type(network).__name__} adds them up in Parameters of its own. "
            "Set 'parallel.enable_parallel_optimizer' to True in the YAML file, or measure without pipeline stages."
        )
    # This package's train-step cells have a method grads_for_legacy even if MindFormers' cell, before 1.7, has no such
    # method. So look at stock_grads_for_legacy first.
    if getattr(network, "stock_grads_for_legacy", getattr(network, "grads_for_legacy", None)) is not None:
        return _OfMindFormers(network)
    if getattr(network, "calculate_per_token_loss", False):
        raise ValueError(
            "'calculate_per_token_loss' must be False here: before MindFormers 1.7, the loss per token cannot be "
            "measured. Set it to False, or install MindFormers 1.7."
        )
    return _OfOneLoss(network.network, network.weights)


class _OfMindFormers(nn.Cell):
    """Computes the gradients with the function that MindFormers' train-step cells call themselves."""

    def __init__(self, train_step):
        super().__init__(auto_prefix=False)
        self.train_step = train_step
        self.weights = train_step.weights

    def construct(self, loss_scale, *inputs):
        if self.train_step.use_legacy:
            return self.train_step.grads_for_legacy(loss_scale, *inputs)
        return self.train_step.grads_for_mcore(loss_scale, *inputs)


class _OfOneLoss(nn.Cell):
    """Computes the gradients of the loss as MindSpore's train-step cells do in ``construct``."""

    def __init__(self, network, weights):
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = weights
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.divisor = Tensor(1.0, mstype.float32)

    def construct(self, loss_scale, *inputs):
        loss = self.first_output(*inputs)
        # Cast the loss scale to the dtype of the loss, as in training: a loss scale beyond FP16 overflows if the loss
        # is in FP16.
        sens = ops.ones_like(loss) * ops.cast(loss_scale, ops.dtype(loss))
        return loss, self.grad(self.first_output, self.weights)(*inputs, sens), self.divisor

    def first_output(self, *inputs):
        outputs = self.network(*inputs)
        return outputs[0] if isinstance(outputs, tuple) else outputs


@contextlib.contextmanager
def unchanged(network):
    """Put a network into training mode without dropout for a ``with`` block, and undo all changes afterwards.

    If a pass raised an exception, in the ``with`` block or before it, MindSpore is made to forget that pass.

    Args:
        network (Cell): as in :func:`backward_pass`.

    Yields:
        Callable, restores MindSpore's random states as they were on entry.
    """
    values = []
    if isinstance(network, nn.TrainOneStepCell):
        # Restore the other Parameters of the train-step cell, such as the sums of losses in MindFormers' cell. The
        # backward pass does not write to the weights and to the accumulated gradients.
        not_written = {id(value) for value in (*network.weights, *getattr(network, "accu_grads", ()))}
        values = [value for value in network.get_parameters(expand=False) if id(value) not in not_written]
        network = network.network
    # A forward pass may write to Parameters that are not trained, as BatchNorm does to its moving averages. Restore
    # these Parameters too.
    values += [value for value in network.get_parameters() if not value.requires_grad]
    state = [(value, to_numpy(value).copy()) for value in values]
    cells = [cell for _, cell in network.cells_and_names()]
    modes = [(cell, cell.training, cell.phase) for cell in cells]
    generator = mindspore.get_rng_state()
    # Look the module mindspore.common.seed up by its name, because mindspore.common also has a function called seed.
    kernel_seeds = getattr(sys.modules["mindspore.common.seed"], "_KERNEL_SEED", {})
    seeds = dict(kernel_seeds)

    def restore_random_state():
        mindspore.set_rng_state(generator)
        kernel_seeds.clear()
        kernel_seeds.update(seeds)

    network.set_train(True)
    for cell in cells:
        # MindSpore and MindFormers have several classes with Dropout in their names. Such a cell with other cells
        # inside is a network, not a dropout layer.
        if "Dropout" in type(cell).__name__ and not cell.cells():
            cell.set_train(False)
    if _pynative_executor.grad_flag():
        _close_failed_pass()
    try:
        yield restore_random_state
    except BaseException:
        _close_failed_pass()
        raise
    finally:
        for cell, training, phase in modes:
            cell.add_flags(training=training)
            cell.phase = phase
        for value, before in state:
            if not np.array_equal(to_numpy(value), before, equal_nan=before.dtype.kind == "f"):
                value.set_data(Tensor(before, value.dtype))
        restore_random_state()


def counts_for(progress):
    """Return a function to call after each backward pass; it gives ``progress``, if not None, the number of passes."""
    passes = itertools.count(1)
    return lambda: progress is not None and progress(next(passes))


def _close_failed_pass():
    """Make MindSpore forget a PyNative pass that raised an exception, because MindSpore goes on recording such a pass.

    Otherwise the next backward pass would count as a part of the failed pass. It would be recorded, which not every
    operator supports, and cells would cast their inputs as the failed cell did. This also restarts dropout's numbers.
    """
    _pynative_executor.clear_res()


@contextlib.contextmanager
def replaced_in(values, name, value):
    """Replace a value of a dict within a ``with`` block, and keep the order of the keys."""
    before = {name: values[name]} if name in values else {}
    values[name] = value
    try:
        yield
    finally:
        if not before:
            del values[name]
        values.update(before)


def to_numpy(tensor):
    """Return a Tensor as a NumPy array of the same dtype, but a bfloat16 Tensor as float32."""
    # NumPy has no bfloat16, so cast to float32.
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()
