"""Explains why a training overflows: as a short text of verdict, remedies and evidence, as details, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from mindformers_adaptive.gradients.reading import WeightsBeyond, as_plain
from mindformers_adaptive.overflow.causes import Cause
from mindformers_adaptive.overflow.headroom import LayerRange
from mindformers_adaptive.overflow.origin import Origin
from mindformers_adaptive.record.symptom import Finding
from mindformers_adaptive.text.table import align, as_power_of_two

# How many layers and how many tried settings a text shows at most, so that the text fits on a screen.
_MOST_LAYERS, _MOST_LISTED = 5, 9
# Begin the explanation with this many findings on the steps of the training.
_MOST_FINDINGS = 1
_HIDES = "What lets these weights pass, but does not undo an update that was too large"
_WHAT_TO_GIVE = (
    "Give the weights of that step, --checkpoint (save_checkpoint_steps saves more of them), and its batch, --batch "
    "(LossScaleMonitor with explain: True saves it)."
)


@dataclass(frozen=True)
class Tried:
    """The result of trying one setting, such as float32 in one layer, as a remedy for an overflow.

    Attributes:
        setting (str): the setting as it is written, for example ``softmax_compute_type: float32``.
        safe_scale (float, optional): the largest loss scale that was tried without an overflow; None if there was none.
        origin (Origin, optional): where the pass overflows even at a loss scale of 1; None if it does not.
        helps (bool): whether the setting removes an overflow that occurs at every loss scale, or allows a larger loss
            scale.
        note (str): why the setting could not be tried, or another remark. Default: "".
    """

    setting: str
    safe_scale: float | None
    origin: Origin | None = None
    helps: bool = False
    note: str = ""

    def __str__(self) -> str:
        if self.safe_scale is not None:
            until = f"no overflow up to {as_power_of_two(self.safe_scale)}"
            return f"{self.setting} -> {until if self.helps else f'{until} only, as without it'}"
        if self.origin is None:
            return f"{self.setting} -> {self.note}"
        at = "" if self.origin.phase == "forward" else " at every scale"
        return f"{self.setting} -> the {self.origin.phase} pass still overflows{at}, {_place(self.origin)}"


@dataclass(frozen=True)
class Explanation:
    """The findings of ``explain_overflow``: where forward and backward passes overflow, and which changes help.

    Attributes:
        loss_scale (float): the loss scale of the training.
        batches (int): number of batches.
        losses (tuple[float, ...]): the loss of each batch.
        scales (dict[float, bool]): for each loss scale tried, whether a batch overflowed.
        origin (Origin, optional): the first place that overflows, at the lowest scale tried that overflows. None if
            nothing overflowed.
        layers (tuple[LayerRange, ...]): the largest values of each layer, in the order of execution.
        layers_scale (float): the loss scale at which ``layers`` were measured: the training's or 1. Default: 1.
        weights (WeightsBeyond, optional): weights that FP16 cannot hold. None if all fit.
        tried (tuple[Tried, ...]): the results of trying other settings.
        measured (str): which weights were measured. Default: "", those that the network has.
        overflow_mode (str): what the device makes of an overflow: "inf", or "saturation" (the largest finite number,
            so that the overflow is not seen). Default: "inf".
        graph (bool): whether the passes were run in graph mode, which shows layers and no operators. Default: False.
        why_graph (str): why the network does not run in PyNative mode. Default: "", not tried.
        failure (str): which steps of the training had a loss that is inf or NaN, in words. Default: "", not known.
        causes (tuple[Cause, ...]): what stands out in the layers, the weights and the loss scale. Default: nothing.
        training (tuple[str, ...]): what the steps of the training show, the likeliest cause first. Default: nothing.
        update_too_large (bool): whether the steps show an update that was too large, as a loss that jumped. Default:
            False.

    Examples:
        >>> print(Explanation(65536.0, 2, (1.5, 1.4), {65536.0: False}).headline)
        No overflow at a loss scale of 2^16
    """

    loss_scale: float
    batches: int
    losses: tuple[float, ...]
    scales: Mapping[float, bool]
    origin: Origin | None = None
    layers: tuple[LayerRange, ...] = ()
    layers_scale: float = 1.0
    weights: WeightsBeyond | None = None
    tried: tuple[Tried, ...] = ()
    measured: str = ""
    overflow_mode: str = "inf"
    graph: bool = False
    why_graph: str = ""
    failure: str = ""
    causes: tuple[Cause, ...] = ()
    training: tuple[str, ...] = ()
    update_too_large: bool = False

    @property
    def safe_scale(self) -> float | None:
        """float: the largest tried loss scale below all tried scales that overflowed; None if there is none."""
        bad = self.overflowing_scale or math.inf
        return max((scale for scale, overflow in self.scales.items() if not overflow and scale < bad), default=None)

    @property
    def overflowing_scale(self) -> float | None:
        """float: the lowest loss scale tried at which a batch overflowed; None if there is none."""
        return min((scale for scale, overflow in self.scales.items() if overflow), default=None)

    @property
    def overflow(self) -> bool:
        """bool: whether a batch overflowed at the loss scale of the training."""
        return bool(self.scales.get(self.loss_scale))

    @property
    def swallowed(self) -> str:
        """str: the first layer with inf or NaN if the loss and its gradients are finite nevertheless; "" otherwise."""
        layer = next((each for each in self.layers if each.forward is not None and not each.forward.finite), None)
        if layer is None or (self.origin is not None and self.origin.phase == "forward"):
            return ""
        return f"{layer.layer or 'the network'} ({layer.layer_class}) computes inf or NaN, which the loss does not show"

    @property
    def explains_failure(self) -> bool:
        """bool: False if a training loss was inf or NaN, but the losses of all measured batches are finite."""
        return not self.failure or not all(map(math.isfinite, self.losses))

    @property
    def hides_update(self) -> bool:
        """bool: whether what helps in these passes only hides that an update of the training was too large."""
        is_elsewhere = self.origin is not None and (self.origin.because or self.origin.what in ("batch", "buffer"))
        return self.update_too_large and not is_elsewhere

    @property
    def headline(self) -> str:
        """str: the first line of the explanation, which says whether and where the network overflows."""
        if not self.explains_failure:
            return f"This is not the cause: {self.failure}, but it is finite in these passes"
        safe, bad = self.safe_scale, self.overflowing_scale
        swallowed = f"; but {self.swallowed}" if self.swallowed else ""
        none = f"No overflow at a loss scale of {as_power_of_two(self.loss_scale)}"
        if safe is not None and safe > self.loss_scale:
            none += f", nor up to {as_power_of_two(safe)}"
        if bad is None or self.origin is None:
            return none + swallowed
        where, at = _place(self.origin), as_power_of_two(bad)
        because = f". There, {self.origin.because}" if self.origin.because else ""
        if self.origin.mask:
            what = "A mask leaves nothing of a row" if self.origin.empties_row else "The -inf of a mask is multiplied"
            return f"{what}, of which NaN is made: {where}{because}"
        if self.origin.phase == "forward":
            hidden = ", though the loss is finite" if self.origin.hidden else ""
            whatever = ", whatever the loss scale" if safe is None else ""
            return f"The forward pass overflows{hidden}{whatever}: {where}{because}"
        if safe is None:
            return f"The backward pass overflows, even at a loss scale of {at}: {where}"
        if not self.overflow:
            return f"{none}; at {at} the backward pass overflows, {where}{swallowed}"
        return f"The backward pass overflows at a loss scale of {at}, but not at {as_power_of_two(safe)}: {where}"

    def __str__(self) -> str:
        lines = [*(f"The training: {text}" for text in self.training), self.headline]
        if not self.explains_failure:
            lines.append(_WHAT_TO_GIVE)
        for title, entries in self._found():
            lines += [f"{title}:", *_indented(entries[:_MOST_LISTED])]
        weights = [] if self.weights is None else [str(self.weights)]
        return "\n".join([*lines, "Evidence:", *_indented([*self._origin_lines(), *weights, self._how()])])

    def summary(self) -> str:
        """Return at most three lines: where it overflows, what stands out, and what helps.

        Returns:
            str, of one to three lines.
        """
        return "\n".join([self.headline, *(f"{title}: {'; '.join(entries)}" for title, entries in self._found())])

    def _found(self) -> Iterator[tuple[str, list[str]]]:
        """Yield what stands out, and what helps or was tried in vain: a title and its entries."""
        if self.causes:
            yield "What stands out, and may be the cause", [str(each) for each in self.causes]
        if helping := [str(each) for each in self.tried if each.helps]:
            yield _HIDES if self.hides_update else "What helps, tried in the same passes", helping
        elif self.tried:
            yield "Nothing that was tried helps", [str(each) for each in self.tried]

    def after(self, findings: Sequence[Finding]) -> Explanation:
        """Return the explanation together with what the steps of the training show.

        Args:
            findings (Sequence[Finding]): what :func:`mindformers_adaptive.record.diagnosis.diagnose` returned.

        Returns:
            Explanation, which begins with the findings.
        """
        training = tuple(f"{finding.text} {finding.remedy}" for finding in findings[:_MOST_FINDINGS])
        is_too_large = any(finding.kind == "loss jump" for finding in findings[:_MOST_FINDINGS])
        bad = next((finding.step for finding in findings if finding.kind == "bad loss"), None)
        failure = "" if bad is None else f"the loss of step {bad} was inf or NaN in the training"
        return replace(self, training=training, update_too_large=is_too_large, failure=failure)

    def details(self) -> str:
        """Return what the short text omits: the layers closest to overflow, and the changes that did not help.

        Returns:
            str, of several lines.
        """
        lines = self._headroom_lines()
        if failing := [str(each) for each in self.tried if not each.helps]:
            lines += ["No help, tried in the same passes:", *_indented(failing[:_MOST_LISTED])]
        return "\n".join(lines)

    def _how(self) -> str:
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses[:3])
        parts = [f"{self.batches} batch{'es' * (self.batches > 1)} without dropout, loss {losses}", self.measured]
        if self.overflow_mode == "saturation":
            parts.append("saturation mode: numbers too large become the largest, see the docs")
        if self.graph:
            because = f", because PyNative mode fails: {self.why_graph[:200]}" if self.why_graph else ""
            parts.append(f"in graph mode, which shows layers and no operators{because}")
        return "; ".join(filter(None, parts))

    def _origin_lines(self) -> list[str]:
        if (origin := self.origin) is None:
            return []
        if origin.layer is None:
            return ["no layer or operator was seen to make the first inf or NaN, so none is named"]
        lines = []
        if (reading := origin.reading) is not None:
            what = ", ".join(filter(None, (origin.what, origin.weight)))
            finite = f", the others up to {reading.largest:.5g}" if reading.infs_and_nans < reading.size else ""
            lines.append(
                f"{what}: {reading.infs_and_nans:,} of {reading.size:,} elements are inf or NaN{finite}; the largest "
                f"number of {reading.dtype} is {reading.limit:.5g}"
            )
        source = f" from {origin.source}" if origin.source else ""
        # In the backward pass, an operator's input comes from the forward pass, and the gradients that it is given
        # from the layer after it.
        is_forward = origin.phase == "forward"
        sizes = {
            "smallest input" if is_forward else "smallest input of the forward pass": origin.smallest_input,
            f"largest input{source}" if is_forward else "largest incoming gradient": origin.largest_input,
            "largest weight": origin.largest_weight,
        }
        known = [f"{name} {size:.5g}" for name, size in sizes.items() if size is not None]
        return [*lines, ", ".join(known)] if known else lines

    def _headroom_lines(self) -> list[str]:
        forward_overflows = self.origin is not None and self.origin.phase == "forward"
        lines = []
        # After a forward overflow, all later layers and the whole backward pass have inf and NaN too: leave them out.
        for phase in ("forward",) if forward_overflows else ("forward", "backward"):
            at = "" if phase == "forward" else f" at {as_power_of_two(self.layers_scale)}"
            readings = [(getattr(layer, phase), layer.layer or "(the network)") for layer in self.layers]
            known = [pair for pair in readings if pair[0] is not None and math.isfinite(pair[0].headroom)]
            known = [pair for pair in known if pair[0].finite or not forward_overflows]
            known.sort(key=lambda pair: pair[0].headroom)
            # Round down the number of bits left before overflow, so that no layer seems further from overflow than it
            # is.
            rows = [
                [f"  {name}", f"{math.floor(10 * reading.headroom) / 10:.1f}" if reading.finite else "overflow"]
                for reading, name in known[:_MOST_LAYERS]
            ]
            lines += [f"bits left {phase}{at}", *align(rows, to_the_left=[0]).splitlines()] if rows else []
        return lines

    def to_dict(self) -> dict[str, object]:
        """Return the explanation of the overflow as a dict of numbers, texts, lists and further dicts.

        Returns:
            dict[str, object], by the names of the attributes, with ``headline``, ``summary`` (a list of lines),
            ``overflow``, ``safe_scale`` and ``overflowing_scale``.
        """
        names = ("headline", "overflow", "safe_scale", "overflowing_scale", *(each.name for each in fields(self)))
        content = {name: as_plain(getattr(self, name)) for name in names}
        content["summary"] = self.summary().splitlines()
        content["scales"] = [{"loss_scale": scale, "overflow": bad} for scale, bad in sorted(self.scales.items())]
        return content


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _place(origin: Origin) -> str:
    """Return a phrase that names the origin of an overflow, for use within a sentence."""
    if origin.layer is None:
        return "where no layer was seen to do it"
    if origin.what == "batch":
        return "the batch itself has inf or NaN"
    if origin.what == "weight":
        return f"the weight {origin.weight} has inf or NaN"
    if origin.what == "buffer":
        return f"the Tensor {origin.weight}, which the layer holds, has inf or NaN"
    operator = f", {origin.operator}" if origin.operator else ""
    return f"in {origin.layer or 'the network itself'} ({origin.layer_class}{operator})"
