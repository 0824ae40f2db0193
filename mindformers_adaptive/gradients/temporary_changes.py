"""Changes of a network for the length of a ``with`` block, such as computing in float32 or training without dropout."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.nn.cell import _pynative_executor

from mindformers_adaptive.gradients.backward import to_numpy

# If the name of a cell's attribute contains one of these words, a dtype in this attribute is the dtype of weights, not
# of the computation.
_OF_WEIGHTS = ("param", "init", "weight")


@contextlib.contextmanager
def unchanged(network: Any) -> Iterator[Callable[[], None]]:
    """Put a network into training mode without dropout for a ``with`` block, and undo all changes afterwards.

    If a pass raised an exception, in the ``with`` block or before it, MindSpore is made to forget that pass.

    Args:
        network (Cell): as in :func:`backward_pass`.

    Yields:
        Callable, restores MindSpore's random states as they were on entry.
    """
    values = []
    if isinstance(network, nn.TrainOneStepCell):
        # The backward pass does not write to the weights or to the accumulated gradients. Restore all other Parameters
        # of the train-step cell, such as the sums of losses in MindFormers' cell.
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

    def restore_random_state() -> None:
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


@contextlib.contextmanager
def in_float32(cell: Any) -> Iterator[str]:
    """Let a cell and the cells inside it compute in float32 instead of float16 or bfloat16 within the block.

    MindFormers' cells hold the dtype of their computation in an attribute, such as ``dtype`` or ``compute_dtype``; for
    other cells of MindSpore, ``to_float()`` sets the dtype.

    Args:
        cell (Cell): the cell, which is changed in place and restored afterwards.

    Yields:
        str, the names of the changed attributes and "to_float" for a changed flag; "" if nothing was changed.

    Examples:
        >>> with in_float32(nn.Dense(2, 2).to_float(mstype.float16)) as changed:
        ...     changed
        'to_float'
    """
    changed = set()
    with contextlib.ExitStack() as stack:
        for _, each in cell.cells_and_names():
            for name, value in list(vars(each).items()):
                if value in (mstype.float16, mstype.bfloat16) and not any(word in name for word in _OF_WEIGHTS):
                    setattr(each, name, mstype.float32)
                    stack.callback(setattr, each, name, value)
                    changed.add(name)
            flags = {name: bool(getattr(each, name, False)) for name in ("fp16", "fp32", "bf16")}
            if flags["fp16"] or flags["bf16"]:
                each.add_flags(fp16=False, fp32=True, bf16=False)
                stack.callback(each.add_flags, **flags)
                changed.add("to_float")
        yield ", ".join(sorted(changed))


@contextlib.contextmanager
def without_recomputation(cells: Iterable[Any]) -> Iterator[None]:
    """Switch the recomputation of cells off within a ``with`` block.

    With recomputation, a cell calls the cells inside it again in the backward pass.
    """
    with contextlib.ExitStack() as stack:
        for cell in cells:
            if getattr(cell, "_recompute_cell", None) is not None:
                stack.enter_context(replaced_in(vars(cell), "_recompute_cell", None))
        yield


@contextlib.contextmanager
def replaced_in(values: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Replace a value of a dict within a ``with`` block, and keep the order of the keys."""
    before = {name: values[name]} if name in values else {}
    values[name] = value
    try:
        yield
    finally:
        if not before:
            del values[name]
        values.update(before)


def _close_failed_pass() -> None:
    """Make MindSpore forget a PyNative pass that raised an exception, because MindSpore goes on recording such a pass.

    Otherwise the next backward pass would count as a part of the failed pass. It would be recorded, which not every
    operator supports, and cells would cast their inputs as the failed cell did. This also restarts dropout's numbers.
    """
    _pynative_executor.clear_res()
