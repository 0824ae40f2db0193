"""``explain_overflow`` watches passes of a train step, then repeats these passes with changes that could help."""

import contextlib
import dataclasses
import functools
import math
import os
import re

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import backward_pass, counts_for, to_numpy
from mindformers_adaptive.gradients.layers import named_cells
from mindformers_adaptive.gradients.ranges import batches_of
from mindformers_adaptive.gradients.temporary_changes import in_float32, unchanged
from mindformers_adaptive.gradients.weights import weights_beyond
from mindformers_adaptive.overflow.causes import growing_layers, large_weights, low_scale
from mindformers_adaptive.overflow.explanation import Explanation, Tried
from mindformers_adaptive.overflow.graph_watch import GraphWatch
from mindformers_adaptive.overflow.headroom import layer_ranges
from mindformers_adaptive.overflow.origin import find_origin, operator_of
from mindformers_adaptive.overflow.passes import Pass
from mindformers_adaptive.overflow.watch import Watch, read_tensor
from mindformers_adaptive.rules.checks import require_flag, require_positive
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["PyNativeError", "explain_overflow", "watched_passes"]

# Try no loss scale above this limit. Training usually starts at 2^32.
_HIGHEST = 2.0**40
# To find out whether the forward pass overflows, repeat a pass at a loss scale that is lower by this factor. If the
# pass still overflows, the cause is the forward pass, not the gradients.
_FAR_BELOW = 2.0**-20
# A pattern for error messages of operators about an index, such as a label or a token, that is out of range.
_OUT_OF_RANGE = r"out[ -]of[ -](range|bound)|does not index into|smaller than the value of shape"
_OUT_OF_RANGE += r"|(should|must) be (in|within) (the range )?[\[(] ?-?\d"


class PyNativeError(RuntimeError):
    """Raised if a network cannot run in the mode, PyNative or graph, in which its values should be watched."""


def explain_overflow(
    network, batches, loss_scale=None, *, remedies=True, settings=None, graph=None, progress=None, micro_batches=1
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

    def explain(graph):
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


def _explain(network, batches, loss_scale, remedies, settings, watched):
    with watched(network) as run:
        if not batches:
            raise ValueError("'batches' must hold at least one batch, but is empty. Give a tuple of Tensors.")
        seen = _look(run, batches, loss_scale)
        remedies = remedies and seen.overflow and not seen.origin.mask
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
        weights_beyond(_inner(network), any(reading.dtype == "float16" for reading in readings)),
        tuple(tried),
        overflow_mode=_overflow_mode(),
        graph=not sees_operators,
        causes=_causes(_inner(network), seen),
    )


def _causes(network, seen):
    """Return what stands out in the layers, in the weights and in the loss scale, as a tuple of Causes."""
    # Measure at the largest loss scale without overflow, because small gradients may be 0 in FP16 at a lower one.
    passes = seen.passes_at(seen.safe) if seen.safe else seen.closest
    # Vectors that are not trained, such as the moving variances of a BatchNorm, may have any size.
    weights = [each for each in network.get_parameters() if each.is_floating_point()]
    weights = [each for each in weights if each.requires_grad or each.ndim > 1]
    sizes = {each.name: (each.ndim, read_tensor(each).largest) for each in weights}
    overflowing = min((scale for scale, bad in seen.scales.items() if bad), default=None)
    return (*growing_layers(passes), *large_weights(sizes), *low_scale(None if seen.forward else overflowing))


def _scale_of(network):
    scale = getattr(network, "scale_sense", getattr(network, "sens", None))
    return float(scale.asnumpy().item()) if isinstance(scale, Tensor) else float(scale or 2.0**16)


def _overflow_mode():
    """Return what an overflow becomes on this device: "inf", or "saturation" (the largest finite number)."""
    on_ascend = mindspore.get_context("device_target") == "Ascend"
    asked = os.environ.get("MS_ASCEND_CHECK_OVERFLOW_MODE", "INFNAN_MODE").upper()
    return "saturation" if on_ascend and asked == "SATURATION_MODE" else "inf"


@contextlib.contextmanager
def watched_passes(network, done=lambda: None, graph=False, micro_batches=1, widened=None):
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

        def run(batch, scale):
            restore_random_state()
            try:
                loss, gradients, _ = backward(Tensor(scale / micro_batches, mstype.float32), *batch)
                weights = dict(zip(names, map(read_tensor, gradients[: len(names)]), strict=True))
                calls, of_calls, source = watch.take(loss, weights, gradients[len(names) :])
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


def _inner(network):
    return network.network if isinstance(network, nn.TrainOneStepCell) else network


def _reason(error):
    """Return the line of an error message that says what is wrong; skip MindSpore's titles, which begin with dashes."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line and not line.startswith("-")), "")
    return f"{type(error).__name__}: {said.rstrip('.')}"


def _what_to_check(error, batch):
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


class _Passes:
    """The passes of a network on the same batches at several loss scales, and where they overflow.

    Args:
        run (Callable): runs batches at a loss scale, as :func:`watched_passes` yields it.
        batches (list): the batches.
        loss_scale (float): the first loss scale to run.
        forward_is_harmless (bool): whether inf in the forward pass is known to do no harm. Default: False.
    """

    def __init__(self, run, batches, loss_scale, forward_is_harmless=False):
        self._run, self._batches, self._by_scale = run, batches, {}
        # For each loss scale that was run: the first pass that overflows and its batch, or None.
        self._first_bad = {}
        # inf in the forward pass does no harm if the gradients of the same batches are finite at some loss scale.
        self.forward_is_harmless = forward_is_harmless
        self.loss_scale = self.closest_scale = loss_scale
        self.overflow = self.overflows_at(loss_scale)

    def overflows_at(self, scale):
        """Run the batches at a loss scale, if that was not done before, and return whether a batch overflows."""
        if scale not in self._by_scale:
            self._by_scale[scale] = passes = self._run(self._batches, scale)
            pairs = zip(passes, self._batches, strict=True)
            self._first_bad[scale] = next((pair for pair in pairs if _overflows(pair[0])), None)
            self.forward_is_harmless |= self._first_bad[scale] is None
        return self._first_bad[scale] is not None

    @property
    def closest(self):
        """list[Pass]: the passes in which the distance of layers from overflow is measured, at ``closest_scale``."""
        return self._by_scale[self.closest_scale]

    def passes_at(self, scale):
        return self._by_scale[scale]

    @property
    def scales(self):
        return {scale: pair is not None for scale, pair in self._first_bad.items()}

    @property
    def worst(self):
        """tuple[Pass, tuple], optional: the first pass and batch that overflow, at the lowest scale that overflows."""
        bad = {scale: pair for scale, pair in self._first_bad.items() if pair is not None}
        return bad[min(bad)] if bad else None

    @property
    def origin(self):
        return self.worst and find_origin(self.worst[0], self.forward_is_harmless)

    @property
    def safe(self):
        return max((scale for scale, overflow in self.scales.items() if not overflow), default=0.0)

    @property
    def forward(self):
        return self.origin is not None and self.origin.phase == "forward"

    @property
    def limit(self):
        """float: the largest loss scale, a power of two, at which the recorded gradients should not overflow."""
        # An operator without a gradient, such as Sign, hides an overflow in the gradient of its output from the
        # weights. So leave out the gradients that overflowed in a pass without an overflow.
        harmless = [each for scale, passes in self._by_scale.items() if not self.scales[scale] for each in passes]
        hidden = {_position(*pair) for each in harmless for pair in each.backward if not pair[1].reading.finite}
        recorded = [pair for each in self.closest for pair in each.backward if _position(*pair) not in hidden]
        readings = [gradient.reading for _, gradient in recorded]
        readings += [reading for each in self.closest for reading in each.weights.values()]
        bits = min((reading.headroom for reading in readings), default=math.inf)
        return 2.0 ** math.floor(min(math.log2(self.closest_scale) + bits, 120))


def _position(index, gradient):
    """Return the call, and the input or output of the call, to which a recorded gradient belongs."""
    return index, gradient.of_output, gradient.index


def _overflows(seen_pass):
    return seen_pass.overflow or find_origin(seen_pass) is not None


def _look(run, batches, loss_scale):
    """Run at most 3 passes of each batch, at different loss scales, and return their results."""
    seen = _Passes(run, batches, loss_scale)
    if seen.forward and not seen.origin.hidden:
        return seen
    if seen.overflow:
        seen.closest_scale = min(loss_scale, 1.0)
        overflows_at_lowest = seen.overflows_at(seen.closest_scale)
        if seen.forward:
            # An inf in the forward pass may be intended. It does no harm if nothing overflows at a much lower loss
            # scale.
            seen.forward_is_harmless = not any(map(_overflows, run(batches, seen.closest_scale * _FAR_BELOW)))
        if seen.forward or overflows_at_lowest:
            return seen
    limit = seen.limit
    # Try the lowest loss scale that should overflow: a higher loss scale could let several layers overflow, and hide
    # the layer that overflows first.
    above = 2 * limit
    highest = min(loss_scale, _HIGHEST) if seen.overflow else _HIGHEST
    if not 1.0 <= above <= highest:
        return seen
    if not seen.overflows_at(above):
        # The gradients that should have overflowed do not reach a weight. Try the limit of the other gradients.
        if (above := min(2 * seen.limit, highest)) not in seen.scales:
            seen.overflows_at(above)
    elif loss_scale < limit:
        seen.overflows_at(limit)
    return seen


def _try_scale(seen):
    """Try the largest lower loss scale that the recorded gradients allow. Return a list with one result."""
    if seen.forward:
        return [Tried("a lower loss_scale_value", None, None, note="it overflows before the loss is scaled")]
    if not seen.safe:
        lowest = as_power_of_two(min(seen.scales))
        return [Tried("a lower loss_scale_value", None, None, note=f"it overflows at {lowest} too")]
    seen.overflows_at(min(seen.limit, seen.loss_scale / 2))
    return [Tried(f"loss_scale_value: {seen.safe:.10g}", seen.safe, None, helps=True)]


def _try_layer(network, seen, watched):
    """Try the overflowing layer or operator in float32. Return a list with the result; empty if there is neither."""
    layer = seen.origin.layer
    cell = named_cells(_inner(network)).get(layer or "")
    if cell is not None:
        with in_float32(cell) as changed:
            if changed:
                return [_outcome(f"{layer} in float32 ({changed})", network, seen, watched)]
    worst = seen.worst[0]
    call = operator_of(worst, seen.origin)
    if call is None:
        return []
    where = f"{call.kind} of {call.layer or 'the network'}"
    if worst.loss_source is not None and not any(not later.operator for later in worst.calls[call.index :]):
        # No layer follows the operator, so the operator is a part of the loss.
        where = f"the loss ({where})"
    widened = functools.partial(watched, widened=(call.layer, call.kind))
    return [_outcome(f"{where} in float32", network, seen, widened)]


def _try_setting(name, build, seen, watched):
    try:
        return _outcome(name, build(), seen, watched)
    except Exception as error:
        return Tried(name, None, None, note=f"could not be tried: {_reason(error)[:120]}")


def _outcome(name, network, seen, watched):
    """Run a changed network on the batch that overflowed: at loss scale 1, then at the largest scale that may fit."""
    with watched(network) as run:
        changed = _Passes(run, [seen.worst[1]], 1.0, seen.forward_is_harmless)
        if changed.overflow:
            return Tried(name, None, changed.origin)
        changed.overflows_at(max(1.0, min(changed.limit, _HIGHEST)))
    return Tried(name, changed.safe, helps=seen.forward or changed.safe >= 2 * seen.safe)
