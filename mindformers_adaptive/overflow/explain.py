"""``explain_overflow`` watches passes of a train step, then repeats these passes with changes that could help."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import backward_pass, counts_for, to_numpy, unchanged
from mindformers_adaptive.gradients.layers import named_cells
from mindformers_adaptive.gradients.ranges import batches_of
from mindformers_adaptive.overflow.batch_file import read_batch
from mindformers_adaptive.overflow.explanation import Explanation, Tried
from mindformers_adaptive.overflow.graph_watch import GraphWatch
from mindformers_adaptive.overflow.headroom import WeightsBeyond, layer_ranges
from mindformers_adaptive.overflow.origin import find_origin
from mindformers_adaptive.overflow.readings import Pass
from mindformers_adaptive.overflow.watch import Watch, read_tensor
from mindformers_adaptive.rules.checks import require_flag, require_positive
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["PyNativeError", "explain_overflow", "in_float32", "watched_passes"]

# Try no loss scale above this limit. Training usually starts at 2^32.
_HIGHEST = 2.0**40
# To find out whether the forward pass overflows, repeat a pass at a loss scale that is lower by this factor. If the
# pass still overflows, the cause is the forward pass, not the gradients.
_FAR_BELOW = 2.0**-20
# From this number on, a cast to FP16 gives inf; smaller numbers are rounded to at most 65504.
_BEYOND_FP16 = 65520.0
# A dtype in an attribute of a cell is the dtype of weights, not of the computation, if the name of the attribute has
# one of these words.
_OF_WEIGHTS = ("param", "init", "weight")


class PyNativeError(RuntimeError):
    """Raised if a network cannot run in the mode, PyNative or graph, in which its values should be watched."""


def explain_overflow(
    network,
    batches,
    loss_scale=None,
    *,
    remedies=True,
    settings: Mapping[str, Callable[[], nn.Cell]] | None = None,
    measured="",
    graph=None,
    progress=None,
    micro_batches=1,
):
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
        measured (str): a description of the weights, for the text. Default: "".
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
    if isinstance(batches, str | os.PathLike):
        batches = tuple(map(Tensor, read_batch(batches)))
    batches = list(batches_of(batches)) if isinstance(network, nn.Cell) else []
    done = counts_for(progress)

    def explain(graph):
        watched = functools.partial(watched_passes, done=done, graph=graph, micro_batches=micro_batches)
        return _explain(network, batches, loss_scale, remedies, settings or {}, measured, watched)

    if graph is not None:
        return explain(require_flag("graph", graph))
    try:
        return explain(False)
    except PyNativeError as error:
        with contextlib.suppress(PyNativeError):
            return dataclasses.replace(explain(True), why_graph=_reason(error.__cause__))
        raise


def _explain(network, batches, loss_scale, remedies, settings, measured, watched):
    with watched(network) as passes:
        if not batches:
            raise ValueError("'batches' must hold at least one batch, but is empty. Give a tuple of Tensors.")
        seen = _look(passes, batches, loss_scale)
        remedies = remedies and seen.overflow and not seen.origin.mask
        tried = _try_scale(passes, batches, seen) if remedies else []
    # In graph mode each trial would compile the network anew, so try only a lower loss scale.
    sees_operators = seen.closest[0].sees_operators
    if remedies and sees_operators:
        tried += _try_layer(network, batches, seen, watched)
        tried += [_try_setting(name, build, batches, seen, watched) for name, build in settings.items()]
    readings = (reading for seen_pass in seen.closest for call in seen_pass.calls for reading in call.outputs)
    return Explanation(
        loss_scale,
        len(batches),
        tuple(seen_pass.loss for seen_pass in seen.closest),
        seen.scales,
        seen.origin,
        layer_ranges(seen.closest),
        seen.closest[0].loss_scale,
        _weights_beyond(network, any(reading.dtype == "float16" for reading in readings)),
        tuple(tried),
        measured,
        _overflow_mode(),
        graph=not sees_operators,
    )


def _scale_of(network):
    scale = getattr(network, "scale_sense", getattr(network, "sens", None))
    return float(scale.asnumpy().item()) if isinstance(scale, Tensor) else float(scale or 2.0**16)


def _overflow_mode():
    """Return what an overflow becomes on this device: "inf", or "saturation" (the largest finite number)."""
    on_ascend = mindspore.get_context("device_target") == "Ascend"
    asked = os.environ.get("MS_ASCEND_CHECK_OVERFLOW_MODE", "INFNAN_MODE").upper()
    return "saturation" if on_ascend and asked == "SATURATION_MODE" else "inf"


@contextlib.contextmanager
def watched_passes(network, done=lambda: None, graph=False, micro_batches=1):
    """Yield a function that runs batches at a loss scale and returns the recorded passes.

    Weights, random states and MindSpore's mode are restored afterwards.

    Args:
        network (Cell): as in :func:`explain_overflow`.
        done (Callable): called after each backward pass.
        graph (bool): as in :func:`explain_overflow`.
        micro_batches (int): as in :func:`explain_overflow`.

    Raises:
        PyNativeError: if the network cannot run in the requested mode.
    """
    inner = _inner(network)
    backward = backward_pass(network)
    names = [weight.name for weight in backward.weights]
    # In PyNative mode on a CPU, MindSpore's threads spin while they wait for each other, which makes a small pass many
    # times slower. Synchronous execution avoids this. It costs nothing here, because every value is read anyway.
    modes = {"mode": mindspore.PYNATIVE_MODE, "pynative_synchronize": True}
    if graph:
        modes = {"mode": mindspore.GRAPH_MODE}
    before = {name: mindspore.get_context(name) for name in modes}
    with contextlib.ExitStack() as stack:
        restore_random_state = stack.enter_context(unchanged(network))
        stack.callback(mindspore.set_context, **before)
        mindspore.set_context(**modes)
        watch = (GraphWatch if graph else Watch)(inner, named_cells(inner))
        stack.enter_context(watch.watching(backward, network))

        def run(batch, scale):
            restore_random_state()
            try:
                loss, gradients, _ = backward(Tensor(scale / micro_batches, mstype.float32), *batch)
                gradients, of_sinks = gradients[: len(names)], gradients[len(names) :]
                weights = dict(zip(names, map(read_tensor, gradients), strict=True))
                calls, of_calls, source = watch.take(loss, weights, of_sinks)
                loss = float(to_numpy(loss).astype(np.float64).mean())
                return Pass(scale, loss, calls, of_calls, weights, source, sees_operators=not graph)
            except Exception as error:
                raise PyNativeError(
                    f"The layers of this network can be seen only if it runs in {'graph' if graph else 'PyNative'} "
                    f"mode, where it fails: {_reason(error)}. Check the shapes and types of the batch."
                ) from error
            finally:
                done()

        yield lambda batches, scale: [run(batch, scale) for batch in batches]


def _inner(network):
    return network.network if isinstance(network, nn.TrainOneStepCell) else network


def _reason(error):
    """Return the line of an error message that says what is wrong; skip MindSpore's titles, which begin with dashes."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line and not line.startswith("-")), "")
    return f"{type(error).__name__}: {said.rstrip('.')}"


class _Seen:
    """The results of the first passes: which loss scales overflow, in which layer, and how close layers are."""

    def __init__(self, loss_scale, passes):
        self.loss_scale, self.scales, self._first_overflow = loss_scale, {}, None
        self.closest = passes
        self.worst = 0
        # Whether the gradients of the same batches are finite at some loss scale, so that an inf in the forward pass
        # does no harm.
        self.forward_is_harmless = False
        self.note(passes)

    def note(self, passes):
        scale = passes[0].loss_scale
        bad = [index for index, seen_pass in enumerate(passes) if seen_pass.overflow or find_origin(seen_pass)]
        self.scales[scale] = bool(bad)
        self.forward_is_harmless |= not bad
        if bad and scale == min(scale for scale, overflow in self.scales.items() if overflow):
            self.worst, self._first_overflow = bad[0], passes[bad[0]]
        return bool(bad)

    @property
    def origin(self):
        return self._first_overflow and find_origin(self._first_overflow, self.forward_is_harmless)

    @property
    def overflow(self):
        return self.scales[self.loss_scale]

    @property
    def safe(self):
        return max((scale for scale, overflow in self.scales.items() if not overflow), default=0.0)

    @property
    def forward(self):
        return self.origin is not None and self.origin.phase == "forward"


def _look(passes, batches, loss_scale):
    """Run at most 3 passes of each batch, at different loss scales, and return their results."""
    seen = _Seen(loss_scale, passes(batches, loss_scale))
    if seen.forward and not seen.origin.hidden:
        return seen
    if seen.overflow:
        lowest = seen.closest
        if loss_scale > 1.0:
            lowest = passes(batches, 1.0)
            seen.closest = lowest
            seen.note(lowest)
        if seen.forward:
            # An inf in the forward pass may be intended. It does no harm if nothing overflows at a much lower loss
            # scale.
            seen.forward_is_harmless = not _overflows(passes(batches, min(loss_scale, 1.0) * _FAR_BELOW))
            return seen
        if seen.scales[lowest[0].loss_scale]:
            return seen
    limit = _limit(seen.closest)
    above = 2 * limit
    if above not in seen.scales and 1.0 <= above <= _HIGHEST and not (seen.overflow and above > loss_scale):
        # Try the lowest loss scale that should overflow: a higher loss scale could let several layers overflow, and
        # hide the layer that overflows first.
        if not seen.note(passes(batches, above)):
            return seen
        if not seen.overflow and limit > loss_scale:
            seen.note(passes(batches, limit))
    return seen


def _overflows(passes):
    return any(seen_pass.overflow or find_origin(seen_pass) for seen_pass in passes)


def _limit(passes):
    """Return the largest power of two that, as the loss scale, should not let the recorded gradients overflow."""
    ranges = [layer.backward.headroom for layer in layer_ranges(passes) if layer.backward is not None]
    ranges += [reading.headroom for seen_pass in passes for reading in seen_pass.weights.values()]
    bits = min(ranges, default=math.inf)
    exponent = math.floor(math.log2(passes[0].loss_scale) + bits) if math.isfinite(bits) else math.inf
    return 2.0 ** min(exponent, 120)


def _try_scale(passes, batches, seen):
    """Try the largest lower loss scale that the recorded gradients allow. Return a list with one result."""
    if seen.forward:
        return [Tried("a lower loss_scale_value", None, None, note="it overflows before the loss is scaled")]
    if not seen.safe:
        lowest = as_power_of_two(min(seen.scales))
        return [Tried("a lower loss_scale_value", None, None, note=f"it overflows at {lowest} too")]
    limit = min(_limit(seen.closest), seen.loss_scale / 2)
    if limit not in seen.scales:
        seen.note(passes(batches, limit))
    return [Tried(f"loss_scale_value: {seen.safe:.10g}", seen.safe, None, helps=True)]


def _try_layer(network, batches, seen, watched):
    """Try the overflowing layer in float32. Return a list with the result; an empty list if nothing can be changed."""
    layer = seen.origin.layer
    cell = named_cells(_inner(network)).get(layer or "")
    if cell is None:
        return []
    with in_float32(cell) as changed:
        return [_outcome(f"{layer} in float32 ({changed})", network, batches, seen, watched)] if changed else []


@contextlib.contextmanager
def in_float32(cell):
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


def _try_setting(name, build, batches, seen, watched):
    try:
        return _outcome(name, build(), batches, seen, watched)
    except Exception as error:
        return Tried(name, None, None, note=f"could not be tried: {_reason(error)[:120]}")


def _outcome(name, network, batches, seen, watched):
    """Run a changed network on the overflowing batch, at loss scale 1, then at the largest one expected to be safe."""
    batch = [batches[seen.worst]]
    with watched(network) as passes:
        changed = _Seen(1.0, passes(batch, 1.0))
        changed.forward_is_harmless |= seen.forward_is_harmless
        if changed.overflow:
            return Tried(name, None, changed.origin)
        limit = min(_limit(changed.closest), _HIGHEST)
        if limit not in changed.scales and limit > 1.0:
            changed.note(passes(batch, limit))
    return Tried(name, changed.safe, helps=seen.forward or changed.safe >= 2 * seen.safe)


def _weights_beyond(network, in_half):
    """Return the weights too large for FP16 or, without ``in_half``, the weights with inf or NaN; None if all fit."""
    limit = _BEYOND_FP16 if in_half else np.inf
    beyond = []
    for weight in filter(Tensor.is_floating_point, _inner(network).get_parameters()):
        reading, array = read_tensor(weight), to_numpy(weight)
        is_mask = reading.only_minus_inf and not weight.requires_grad
        # Count the elements that are not below the limit: this includes NaN, for which every comparison is false.
        if not is_mask and (count := int(array.size - np.count_nonzero(np.abs(array) < limit))):
            beyond.append((weight.name, count, reading))
    if not beyond:
        return None
    names, counts, readings = zip(*sorted(beyond, key=lambda entry: -entry[2].largest), strict=True)
    infs_and_nans = sum(reading.infs_and_nans for reading in readings)
    return WeightsBeyond(sum(counts), names, readings[0].largest, infs_and_nans)
