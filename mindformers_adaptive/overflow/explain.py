"""``explain_overflow`` watches passes of a train step, then repeats these passes with changes that could help."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import backward_pass, counts_for, to_numpy
from mindformers_adaptive.gradients.layers import named_cells
from mindformers_adaptive.gradients.ranges import batches_of
from mindformers_adaptive.gradients.reading import WeightsBeyond
from mindformers_adaptive.gradients.temporary_changes import in_float32, unchanged
from mindformers_adaptive.overflow.causes import Cause, growing_layers, large_weights, low_scale
from mindformers_adaptive.overflow.explanation import Explanation, Tried
from mindformers_adaptive.overflow.graph_watch import GraphWatch
from mindformers_adaptive.overflow.headroom import layer_ranges
from mindformers_adaptive.overflow.origin import operator_of
from mindformers_adaptive.overflow.passes import Pass
from mindformers_adaptive.overflow.scale_search import HIGHEST, PassesAtScales, Run, run_at_scales
from mindformers_adaptive.overflow.watch import Watch, read_tensor
from mindformers_adaptive.rules.checks import require_flag, require_positive
from mindformers_adaptive.text.table import as_power_of_two

# A pattern for error messages of operators about an index, such as a label or a token, that is out of range.
_OUT_OF_RANGE = r"out[ -]of[ -](range|bound)|does not index into|smaller than the value of shape"
_OUT_OF_RANGE += r"|(should|must) be (in|within) (the range )?[\[(] ?-?\d"

# From this number on, a cast to FP16 gives inf; smaller numbers are rounded to at most 65504.
_BEYOND_FP16 = 65520.0

# Lets the passes of a network be run, within a block, as watched_passes does.
_Watched = Callable[..., contextlib.AbstractContextManager[Run]]


class PyNativeError(RuntimeError):
    """Raised if a network cannot run in the mode, PyNative or graph, in which its values should be watched."""


def explain_overflow(
    network: Any,
    batches: Any,
    loss_scale: float | None = None,
    *,
    remedies: bool = True,
    settings: Mapping[str, Callable[[], Any]] | None = None,
    graph: bool | None = None,
    progress: Callable[[int], object] | None = None,
    micro_batches: int = 1,
) -> Explanation:
    """Find out why a network overflows, in which layer, and which changes help.

    Forward and backward passes are run in PyNative mode, in which each cell and each operator is seen: at most 3 of a
    batch, and at most 3 for each thing that is tried. The training's own train step makes the passes, without dropout.
    Weights, modes and random states are restored afterwards, as in
    :func:`mindformers_adaptive.gradients.ranges.gradient_ranges`.

    Args:
        network (Cell): a train-step cell, a subclass of ``nn.TrainOneStepCell``, or a network that returns its loss.
        batches (Union[Tensor, tuple, list, Iterable, str]): one batch, Tensors of the shapes that the network takes, or
            a few, as in :func:`mindformers_adaptive.gradients.ranges.gradient_ranges`; or the file of a batch that
            ``LossScaleMonitor(explain=True)`` saved.
        loss_scale (float, optional): the loss scale of the training. Default: None, the loss scale of the train-step
            cell, and without one 65536.
        remedies (bool): whether to try, after an overflow, a lower loss scale and the overflowing layer in float32.
            Default: True.
        settings (dict[str, Callable], optional): further changes to try: by name, a function that returns the changed
            network with the same weights. Default: None.
        graph (bool, optional): whether the passes are run in graph mode, in which cells are seen and operators are
            not, and of the things that can be changed only a lower loss scale is tried. Default: None, only if the
            network does not run in PyNative mode.
        progress (Callable, optional): called with the number of backward passes done. Default: None.
        micro_batches (int): by how many micro-batches the training divides the loss before the backward pass, as in
            :func:`mindformers_adaptive.gradients.ranges.gradient_ranges`. Default: 1.

    Returns:
        Explanation; ``str()`` of it is a text of at most 25 lines, and its ``details()`` has the rest.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if there is no batch or no Parameter to train, or the loss scale is not finite and above 0.
        PyNativeError: if the network cannot run in the requested mode or, if ``graph`` is None, in neither mode.

    Examples:
        >>> class Squares(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = nn.Dense(2, 1, "ones", has_bias=False).to_float(mstype.float16)
        ...     def construct(self, x):
        ...         return (self.dense(x) ** 2).mean()
        >>> explanation = explain_overflow(Squares(), Tensor(np.full((4, 2), 200, np.float32)), 1024)
        >>> print(explanation.origin.phase, explanation.origin.operator, explanation.origin.largest_input)
        forward Pow 400.0
    """
    require_flag("remedies", remedies)
    loss_scale = _scale_of(network) if loss_scale is None else require_positive("loss_scale", loss_scale)
    batches = list(batches_of(batches)) if isinstance(network, nn.Cell) else []
    done = counts_for(progress)

    def explain(graph: bool) -> Explanation:
        watched = functools.partial(watched_passes, done=done, graph=graph, micro_batches=micro_batches)
        return _explain(network, batches, loss_scale, remedies, settings or {}, watched)

    if graph is not None:
        return explain(require_flag("graph", graph))
    try:
        return explain(False)
    except PyNativeError as error:
        with contextlib.suppress(PyNativeError):
            return dataclasses.replace(explain(True), why_graph=_reason(error.__cause__))
        raise


def _explain(
    network: Any,
    batches: list[Any],
    loss_scale: float,
    remedies: bool,
    settings: Mapping[str, Callable[[], Any]],
    watched: _Watched,
) -> Explanation:
    with watched(network) as run:
        if not batches:
            raise ValueError("'batches' must hold at least one batch, but is empty. Give a tuple of Tensors.")
        seen = run_at_scales(run, batches, loss_scale)
        remedies = remedies and seen.overflow and not (seen.origin and seen.origin.mask)
        tried = _try_scale(seen) if remedies else []
    # In graph mode, each changed network would be compiled anew, so the only remedy to try is a lower loss scale.
    sees_operators = seen.closest[0].sees_operators
    if remedies and sees_operators:
        tried += _try_layer(network, seen, watched)
        tried += [_try_setting(name, build, seen, watched) for name, build in settings.items()]
    readings = (reading for seen_pass in seen.closest for call in seen_pass.calls for reading in call.outputs)
    return Explanation(
        loss_scale,
        len(batches),
        tuple(seen_pass.loss for seen_pass in seen.closest),
        seen.scales,
        seen.origin,
        layer_ranges(seen.closest),
        seen.closest_scale,
        _weights_beyond(_inner(network), any(reading.dtype == "float16" for reading in readings)),
        tuple(tried),
        overflow_mode=_overflow_mode(),
        graph=not sees_operators,
        causes=_causes(_inner(network), seen),
    )


def _causes(network: Any, seen: PassesAtScales) -> tuple[Cause, ...]:
    """Return what stands out in the layers, in the weights and in the loss scale, as a tuple of Causes."""
    # Measure at the largest loss scale without overflow, because small gradients may be 0 in FP16 at a lower one.
    passes = seen.passes_at(seen.safe) if seen.safe else seen.closest
    # Vectors that are not trained, such as the moving variances of a BatchNorm, may have any size.
    weights = [each for each in network.get_parameters() if each.is_floating_point()]
    weights = [each for each in weights if each.requires_grad or each.ndim > 1]
    sizes = {each.name: (each.ndim, read_tensor(each).largest) for each in weights}
    overflowing = min((scale for scale, bad in seen.scales.items() if bad), default=None)
    # NaN that a mask makes is no growth of values.
    growing = [] if seen.origin is not None and seen.origin.mask else growing_layers(passes)
    return (*growing, *large_weights(sizes), *low_scale(None if seen.forward else overflowing))


def _weights_beyond(network: Any, in_half: bool) -> WeightsBeyond | None:
    """Return the weights of a network that FP16 cannot hold, or None if FP16 holds all of them.

    If the network does not compute in FP16 (``in_half``), only weights that are inf or NaN count.
    """
    limit = _BEYOND_FP16 if in_half else np.inf
    beyond = []
    for weight in filter(Tensor.is_floating_point, network.get_parameters()):
        reading = read_tensor(weight)
        is_mask = reading.only_minus_inf and not weight.requires_grad
        # Count the elements that are not below the limit: this includes NaN, for which every comparison is false.
        count = reading.size - int(np.count_nonzero(np.abs(to_numpy(weight)) < limit))
        if count and not is_mask:
            beyond.append((weight.name, count, reading))
    if not beyond:
        return None
    names, counts, readings = zip(*sorted(beyond, key=lambda entry: -entry[2].largest), strict=True)
    infs_and_nans = sum(reading.infs_and_nans for reading in readings)
    return WeightsBeyond(sum(counts), names, readings[0].largest, infs_and_nans)


def _scale_of(network: Any) -> float:
    scale = getattr(network, "scale_sense", getattr(network, "sens", None))
    return float(scale.asnumpy().item()) if isinstance(scale, Tensor) else float(scale or 2.0**16)


def _overflow_mode() -> str:
    """Return what an overflow becomes on this device: "inf", or "saturation" (the largest finite number)."""
    on_ascend = mindspore.get_context("device_target") == "Ascend"
    asked = os.environ.get("MS_ASCEND_CHECK_OVERFLOW_MODE", "INFNAN_MODE").upper()
    return "saturation" if on_ascend and asked == "SATURATION_MODE" else "inf"


@contextlib.contextmanager
def watched_passes(
    network: Any,
    done: Callable[[], object] = lambda: None,
    graph: bool = False,
    micro_batches: int = 1,
    widened: tuple[str, str] | None = None,
) -> Iterator[Run]:
    """Yield a function that runs batches at a loss scale and returns the recorded passes.

    Weights, random states and MindSpore's mode are restored afterwards.

    Args:
        network (Cell): as in :func:`explain_overflow`.
        done (Callable): called after each backward pass.
        graph (bool): as in :func:`explain_overflow`.
        micro_batches (int): as in :func:`explain_overflow`.
        widened (tuple[str, str], optional): a cell and an operator that computes in float32 in this cell, in PyNative
            mode only. Default: None.

    Raises:
        PyNativeError: if the network cannot run in the requested mode.
    """
    inner = _inner(network)
    backward = backward_pass(network)
    names = [weight.name for weight in backward.weights]
    # In PyNative mode on a CPU, MindSpore's threads spin while they wait for each other, which makes a small pass many
    # times slower. Synchronous execution avoids this. It costs nothing here, because every value is read anyway.
    modes = {"mode": mindspore.GRAPH_MODE} if graph else {"mode": mindspore.PYNATIVE_MODE, "pynative_synchronize": True}
    before = {name: mindspore.get_context(name) for name in modes}
    with contextlib.ExitStack() as stack:
        restore_random_state = stack.enter_context(unchanged(network))
        stack.callback(mindspore.set_context, **before)
        mindspore.set_context(**modes)
        watch = GraphWatch(inner, named_cells(inner)) if graph else Watch(inner, named_cells(inner), widened)
        stack.enter_context(watch.watching(backward, network))

        def run(batch: Any, scale: float) -> Pass:
            restore_random_state()
            try:
                loss, gradients, _ = backward(Tensor(scale / micro_batches, mstype.float32), *batch)
                weights = dict(zip(names, map(read_tensor, gradients[: len(names)]), strict=True))
                calls, of_calls, source = watch.take(batch, loss, weights, gradients[len(names) :])
                loss = float(to_numpy(loss).astype(np.float64).mean())
                return Pass(scale, loss, calls, of_calls, weights, source, sees_operators=not graph)
            except Exception as error:
                raise PyNativeError(
                    "The layers of this network can be seen only if the network runs in "
                    f"{'graph' if graph else 'PyNative'} mode, but it fails in this mode: {_reason(error)}. "
                    f"{_what_to_check(error, batch)}"
                ) from error
            finally:
                done()

        yield lambda batches, scale: [run(batch, scale) for batch in batches]


def _inner(network: Any) -> Any:
    return network.network if isinstance(network, nn.TrainOneStepCell) else network


def _reason(error: BaseException | None) -> str:
    """Return the line of an error message that says what is wrong; skip MindSpore's titles, which begin with dashes."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line and not line.startswith("-")), "")
    return f"{type(error).__name__}: {said.rstrip('.')}"


def _what_to_check(error: Exception, batch: Any) -> str:
    """Return the sentences that say what to check after a pass failed."""
    if not re.search(_OUT_OF_RANGE, str(error), re.IGNORECASE):
        return "Check the shapes and types of the batch."
    columns = [(index, to_numpy(values)) for index, values in enumerate(batch)]
    # A column of integers may hold tokens, labels or positions.
    ranges = [f"column {index}: {v.min()} to {v.max()}" for index, v in columns if v.dtype.kind in "iu" and v.size]
    held = f" The integers in the batch are: {', '.join(ranges)}." if ranges else ""
    return (
        "An index is out of range. Check that each label is below the number of classes, and each token below the size "
        f"of the vocabulary.{held}"
    )


def _try_scale(seen: PassesAtScales) -> list[Tried]:
    """Try the largest lower loss scale that the recorded gradients allow. Return a list with one result."""
    if seen.forward:
        return [Tried("a lower loss_scale_value", None, None, note="it overflows before the loss is scaled")]
    if not seen.safe:
        lowest = as_power_of_two(min(seen.scales))
        return [Tried("a lower loss_scale_value", None, None, note=f"it overflows at {lowest} too")]
    seen.overflows_at(min(seen.limit, seen.loss_scale / 2))
    return [Tried(f"loss_scale_value: {seen.safe:.10g}", seen.safe, None, helps=True)]


def _try_layer(network: Any, seen: PassesAtScales, watched: _Watched) -> list[Tried]:
    """Try the overflowing layer or operator in float32. Return a list with the result; empty if there is neither."""
    origin = seen.origin
    layer = origin and origin.layer
    cell = named_cells(_inner(network)).get(layer or "")
    if cell is not None:
        with in_float32(cell) as changed:
            if changed:
                return [_outcome(f"{layer} in float32 ({changed})", network, seen, watched)]
    worst = seen.worst[0]
    call = operator_of(worst, origin) if origin else None
    if call is None:
        return []
    where = f"{call.kind} of {call.layer or 'the network'}"
    if worst.loss_source is not None and not any(not later.operator for later in worst.calls[call.index :]):
        # No layer follows the operator, so the operator is a part of the loss.
        where = f"the loss ({where})"
    widened = functools.partial(watched, widened=(call.layer, call.kind))
    return [_outcome(f"{where} in float32", network, seen, widened)]


def _try_setting(name: str, build: Callable[[], Any], seen: PassesAtScales, watched: _Watched) -> Tried:
    try:
        return _outcome(name, build(), seen, watched)
    except Exception as error:
        return Tried(name, None, None, note=f"could not be tried: {_reason(error)[:120]}")


def _outcome(name: str, network: Any, seen: PassesAtScales, watched: _Watched) -> Tried:
    """Run a changed network on the batch that overflowed: at loss scale 1, then at the largest scale that may fit."""
    with watched(network) as run:
        changed = PassesAtScales(run, [seen.worst[1]], 1.0, seen.forward_is_harmless)
        if changed.overflow:
            return Tried(name, None, changed.origin)
        changed.overflows_at(max(1.0, min(changed.limit, HIGHEST)))
    return Tried(name, changed.safe, helps=seen.forward or changed.safe >= 2 * seen.safe)
