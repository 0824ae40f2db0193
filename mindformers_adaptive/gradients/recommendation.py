"""Judges whether a training needs loss scaling, and recommends an initial scale, some powers of two below overflow."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from mindformers_adaptive.gradients.report import NEW_WEIGHTS, GradientRanges, loss_division
from mindformers_adaptive.gradients.statistics import ArrayStatistics
from mindformers_adaptive.rules.checks import require_integer, require_positive
from mindformers_adaptive.rules.formats import FLOAT16, Format
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.pasting import arguments_of_rule, cell_call
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.table import align, as_power_of_two, counted

# The loss scales that a search tries: every power of two from 1 (no scaling) to 2^32, where the published FP16
# trainings of large models start.
EVERY_POWER = tuple(2.0**exponent for exponent in range(33))

# How many powers of two the recommended initial loss scale is below the ceiling, the largest loss scale without
# overflow. Measured on configs/tiny_llama_cpu_fp16.yaml, whose window of 20 steps raises the scale 16-fold within 100
# steps: a start at the ceiling itself skips 1 or 2 of the first 100 steps, a start one power of two below the ceiling
# skips 0 or 1, and a start two powers below skips 0.
DEFAULT_MARGIN = 2

# The margin below the ceiling, in powers of two, in formats whose numbers have at most three bits of mantissa. Measured
# in FP8 and HiF8 by scripts/studies/formats_training.py: from a start three powers of two below the ceiling, the loss
# scale reaches the ceiling after three windows of 20 steps. In the training on handwritten digits, the ceiling falls a
# little, so a start three powers of two below the ceiling skips 2 of 100 steps. A start four powers below skips at
# most 1.
COARSE_MARGIN = 4

# Powers of two to add to the margin below the ceiling if a Parameter has no gradient yet. One task in
# scripts/studies/worth_it.py, in which the last layer starts at 0, shows why: when the other layers begin to train, the
# ceiling falls. A start with the default margin alone then skips up to 2 of 100 steps.
UNKNOWN_MARGIN = 2

# The shares of a gradient that a training can lose without harm, of a group of Parameters and of a single Parameter.
# scripts/studies/micro_batches.py shows no harm where a Parameter loses 11 %, and some where one loses 65 % while all
# gradients together lose 2.5 %.
HARMLESS_SHARE = 0.2
HARMLESS_SHARE_OF_ONE = 0.5

# In a backward pass in FP16, a gradient that is summed in float32 can exceed the largest FP16 number by a factor of up
# to 2**2.8 before the rest of the pass overflows. If a gradient exceeds the largest FP16 number by a factor of more
# than 8, the pass does not compute in FP16.
_BEYOND = 8.0
# A backward pass that does not overflow even at a loss scale of 2^32 has very small gradients. In FP16, such a pass
# would lose more than this share of a Parameter's gradient at a loss scale of 1. If the pass loses less, it does not
# compute in FP16.
_NOTHING = 1e-4

_MOST_EVIDENCE = 3
_ASK_WHY = "'adaptive-loss-scale why', in Python explain_overflow(), names the layer, and what helps."

_WHICH_RULE = (
    "With a fixed ceiling any rule keeps this scale. Where the data or the loss changes in mid-run, gradient-guided "
    "scaling follows."
)


@dataclass(frozen=True)
class Verdict:
    """The share of the gradients that is lost at a loss scale, and whether this share is too large.

    A share is the norm of what is lost, by underflow and by the coarseness of subnormal numbers, divided by the norm
    of the gradient; see :attr:`mindformers_adaptive.gradients.statistics.ArrayStatistics.lost_share`.

    Attributes:
        loss_scale (float): the scale that is judged.
        groups (dict[str, float]): the share lost in each group of Parameters; without groups whose gradients are all 0.
        parameter (str, optional): the Parameter that loses the largest share; None if nothing is known.
        parameter_share (float, optional): the share that this Parameter loses.
        without_gradient (tuple[str, ...]): Parameters whose gradients are 0 at every scale, of which nothing is known.
        only_noise (tuple[str, ...]): Parameters whose gradients are mostly rounding error, which do not count here.
        gradient_format (Format): the format of the gradients. Default: float16.

    Examples:
        >>> verdict = Verdict(loss_scale=1.0, groups={"attention": 0.25}, parameter="weight", parameter_share=0.25)
        >>> verdict.is_harmful
        True
    """

    loss_scale: float
    groups: Mapping[str, float] = field(default_factory=dict)
    parameter: str | None = None
    parameter_share: float | None = None
    without_gradient: tuple[str, ...] = ()
    only_noise: tuple[str, ...] = ()
    gradient_format: Format = FLOAT16

    @property
    def is_harmful(self) -> bool | None:
        """bool, optional: whether a group of Parameters, or one Parameter, loses too much; None if not known.

        Too much is more than ``HARMLESS_SHARE`` of a group's gradient, or ``HARMLESS_SHARE_OF_ONE`` of one Parameter's.
        """
        if self.parameter_share is None:
            return None
        in_groups = max(self.groups.values(), default=0.0)
        return in_groups > HARMLESS_SHARE or self.parameter_share > HARMLESS_SHARE_OF_ONE

    def __str__(self) -> str:
        at = "Without scaling" if self.loss_scale == 1 else f"At {as_power_of_two(self.loss_scale)}"
        if self.parameter_share is None:
            return f"{at}, the loss of gradients is not known: the scale overflows, or all gradients are 0."
        return "\n".join([self._loss(at, self.parameter_share), *self._unjudged()])

    def _loss(self, at: str, worst: float) -> str:
        """Return a sentence on how much is lost, of a Parameter and, if it decides, of a group."""
        title = self.gradient_format.title
        if worst <= HARMLESS_SHARE:
            return f"{at}, {title} loses at most {worst:.2%} of a gradient ({self.parameter})."
        loses = f"{at}, {title} loses {worst:.2%} of the gradient of {self.parameter}"
        if self.is_harmful:
            return f"{loses}."
        group, share = max(self.groups.items(), key=lambda item: item[1])
        return f"{loses}, but of a group of Parameters at most {share:.2%} ({group})."

    def _unjudged(self) -> list[str]:
        """Return a sentence for each kind of Parameters that tell nothing about the loss."""
        lines = []
        if self.without_gradient:
            lines.append(
                f"{counted(len(self.without_gradient), 'Parameter')}, such as {self.without_gradient[0]}, had a "
                "gradient of 0 at every scale. To judge them, measure the weights of a few steps later."
            )
        if self.only_noise:
            lines.append(
                f"{counted(len(self.only_noise), 'Parameter')}, such as {self.only_noise[0]}, had a gradient that is "
                "mostly rounding error, at every scale. It decides nothing here."
            )
        return lines

    def to_dict(self) -> dict[str, object]:
        """Return the verdict on the loss scale as a dict of values that JSON can hold.

        Returns:
            dict[str, object], by the names of the attributes, with ``is_harmful``.
        """
        return {**vars(self), "gradient_format": self.gradient_format.to_config(), "is_harmful": self.is_harmful}


def judge(ranges: GradientRanges, loss_scale: float) -> Verdict:
    """Judge how much of the gradients is lost at a loss scale.

    Args:
        ranges (GradientRanges): a sweep with this scale, and with a higher scale that does not overflow.
        loss_scale (float): a scale of the sweep; 1, or the lowest, to judge a training without loss scaling.

    Raises:
        ValueError: if the sweep does not have the scale.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore import dtype as mstype
        >>> from mindformers_adaptive import gradient_ranges
        >>> net = nn.WithLossCell(nn.Dense(3, 1, "ones", has_bias=False).to_float(mstype.float16), nn.MSELoss())
        >>> batch = (Tensor(np.ones((4, 3), np.float32)), Tensor(np.ones((4, 1), np.float32)))
        >>> judge(gradient_ranges(net, [batch], [1, 64]), 1).is_harmful
        False
    """
    parameters = ranges.parameters(loss_scale)
    shares = _known_shares(parameters)
    if not shares:
        # This loss scale cannot be judged: gradients overflow at it, the sweep has no other loss scale, or all
        # gradients are 0.
        return Verdict(loss_scale, gradient_format=ranges.gradient_format)
    worst = max(shares, key=lambda name: shares[name])
    only_noise = tuple(name for name, each in parameters.items() if each.is_noise)
    return Verdict(
        loss_scale,
        _known_shares(ranges.groups(loss_scale)),
        worst,
        shares[worst],
        tuple(name for name in parameters if name not in (*shares, *only_noise)),
        only_noise,
        ranges.gradient_format,
    )


def _known_shares(statistics: Mapping[str, ArrayStatistics]) -> dict[str, float]:
    return {name: each.lost_share for name, each in statistics.items() if each.lost_share is not None}


def table_of_groups(verdicts: list[Verdict]) -> str:
    """Return a table to print: a row for each group of gradients, a column with the share lost at each loss scale."""
    lines = [["gradients of", *(f"lost at {as_power_of_two(verdict.loss_scale)}" for verdict in verdicts)]]
    for group in dict.fromkeys(group for verdict in verdicts for group in verdict.groups):
        shares = [verdict.groups.get(group) for verdict in verdicts]
        lines.append([group, *("-" if share is None else f"{share:.3%}" for share in shares)])
    return align(lines, to_the_left=[0])


@dataclass(frozen=True)
class LostUpdates:
    """How many float16 weights stay the same after an update as large as the learning rate, because of rounding.

    Updates of Adam are hardly ever larger than the learning rate.

    Attributes:
        learning_rate (float): the size of the updates.
        share (float): the share of all weights in float16 that such an update leaves as they are.
        parameter (str): the Parameter with the largest share.
        parameter_share (float): the share of that Parameter's weights.
    """

    learning_rate: float
    share: float
    parameter: str
    parameter_share: float

    def __str__(self) -> str:
        return (
            f"Weights are kept in FP16. An update as large as the learning rate, {self.learning_rate:g}, is lost in "
            f"{self.share:.1%} of them, and in {self.parameter_share:.1%} of {self.parameter}, at any loss scale. "
            "Smaller ones are lost in more. Keep the weights in float32 (in YAML, 'param_init_type: float32')."
        )


@dataclass(frozen=True)
class LossScaleRecommendation:
    """A recommended initial loss scale, and the reasons for it.

    Attributes:
        loss_scale_value (float, optional): the scale to start from; None if even the lowest scale overflows, or all
            gradients are 0.
        ceiling (float, optional): the largest scale up to which no batch overflows; None if even the lowest does.
        margin (int): how many powers of two ``loss_scale_value`` was to stay below the ceiling; it does if there is
            room, and stays 2 more below it where the gradient of a Parameter is 0 at every scale.
        ceiling_is_highest (bool): whether the ceiling is the highest scale of the sweep; the true one may be higher.
        needs_scaling (bool, optional): whether too much of the gradients is lost without loss scaling, see
            :class:`Verdict`; None if there is no ceiling, or no scale of 1 or less in the sweep that can be judged.
        loss_is_finite (bool): whether the loss itself is finite in every batch.
        ranges (GradientRanges): the sweep.
        verdicts (tuple[Verdict, ...]): on the lowest scale of the sweep and on ``loss_scale_value``, or the highest
            scale of the sweep below it; empty if there is no ceiling.
        lost_updates (LostUpdates, optional): what weights in float16 lose of their updates; None if no weight is in
            float16, or the learning rate is not known.
        is_in_format (bool): whether the backward pass can compute in the format of the sweep. False if its gradients
            exceed the format's largest number without overflow and lose nothing, as in float32. Default: True.
        scale_sense (Mapping, optional): the section ``scale_sense`` of the training's YAML file. ``yaml`` keeps its
            rule and its settings, and replaces only its loss scale. Default: None, gradient-guided scaling.
        rule (Rule, optional): the rule of the measured train-step cell, for ``update_cell``. Default: None, guided.
        in_python (bool): whether the text has the settings as Python, not as YAML. Default: False.

    Examples:
        >>> from mindformers_adaptive.gradients.report import ScaleRanges
        >>> from mindformers_adaptive.gradients.statistics import array_statistics
        >>> exact = [0.5, 0.25]
        >>> def at(scale):
        ...     scaled = [scale * gradient for gradient in exact]
        ...     return ScaleRanges(scale, loss=0.5, parameters={"weight": array_statistics(scaled, exact, scale)})
        >>> recommendation = recommend_loss_scale(GradientRanges(weights={}, batches=((at(1.0), at(8.0)),)))
        >>> recommendation.ceiling, recommendation.loss_scale_value, recommendation.needs_scaling
        (8.0, 2.0, False)
    """

    loss_scale_value: float | None
    ceiling: float | None
    margin: int
    ceiling_is_highest: bool
    needs_scaling: bool | None
    loss_is_finite: bool
    ranges: GradientRanges
    verdicts: tuple[Verdict, ...] = ()
    lost_updates: LostUpdates | None = None
    is_in_format: bool = True
    scale_sense: Mapping[str, object] | None = None
    rule: Rule | None = None
    in_python: bool = False

    @property
    def yaml(self) -> str:
        """str: the section of a MindFormers YAML file to paste, or "" if there is no recommendation."""
        if self.loss_scale_value is None:
            return ""
        if not self.is_in_format:
            return f"runner_wrapper:\n  type: MFTrainOneStepCell\n  scale_sense: {self.loss_scale_value}\n"
        usual: dict[str, object] = {"type": "GradientGuidedLossScale", "loss_scale_value": None}
        if self.ranges.gradient_format != FLOAT16:
            usual["gradient_format"] = self.ranges.gradient_format.to_config()
        section = {**(self.scale_sense or usual), "loss_scale_value": self.loss_scale_value}
        # MindFormers' YAML reader takes JSON values too.
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in section.items()}
        exact = f"{self.loss_scale_value:.17g}     # {as_power_of_two(self.loss_scale_value)}"
        lines = [f"    {key}: {value}\n" for key, value in {**values, "loss_scale_value": exact}.items()]
        return "".join(["runner_wrapper:\n  type: MFTrainOneStepCell\n  scale_sense:\n", *lines])

    @property
    def update_cell(self) -> str:
        """str: the call of the update cell's class to paste, in Python, or "" if there is no recommendation."""
        if self.loss_scale_value is None or not self.is_in_format:
            return "" if self.is_in_format else "NoLossScaleUpdateCell()\n"
        rule = self.rule or GuidedRule(gradient_format=self.ranges.gradient_format)
        return cell_call(type(rule), {"loss_scale_value": self.loss_scale_value, **arguments_of_rule(rule)})

    def __str__(self) -> str:
        """Return the recommendation as text: a verdict, the settings to paste, and up to 3 lines of evidence."""
        settings = self.update_cell if self.in_python else self.yaml
        rule = _WHICH_RULE if settings and self.is_in_format and self.loss_is_finite else ""
        parts = [self._verdict(), settings.rstrip(), "\n".join([rule, *self._evidence()[:_MOST_EVIDENCE]]).strip()]
        return "\n\n".join(filter(None, parts))

    def details(self) -> str:
        """Return more evidence for the recommended loss scale, and a table: by group, the share of its gradients lost.

        Returns:
            str, of several lines.
        """
        ends = list({verdict.loss_scale: verdict for verdict in self.verdicts}.values()) if self.is_in_format else []
        lines = self._evidence()[_MOST_EVIDENCE:]
        counts = {end.loss_scale: self.ranges.overall(end.loss_scale) for end in ends}
        if ends and all(each.underflowed is not None for each in counts.values()):
            shares = [f"{each.share(each.underflowed):.3%} at {as_power_of_two(at)}" for at, each in counts.items()]
            lines.append(f"Gradients that underflow: {', '.join(shares)}.")
        return "\n\n".join(filter(None, ["\n".join(lines), table_of_groups(ends) if ends and ends[0].groups else ""]))

    def _verdict(self) -> str:
        scales, title = [as_power_of_two(scale) for scale in self.ranges.loss_scales], self.ranges.gradient_format.title
        size = len(self.ranges.batches)
        measured = f"in {size} batch{'' if size == 1 else 'es'}"
        measured += f" with {self.ranges.measured}" if self.ranges.measured else ""
        if self.ceiling is None and not self.loss_is_finite:
            return (
                f"No loss scale can help: the loss itself is inf or NaN, {measured}. Check the data, the weights and "
                f"the forward operations in {title}. {_ASK_WHY}"
            )
        if self.ceiling is None:
            return (
                f"No loss scale from {scales[0]} can help: the gradients overflow even there, {measured}. Compute the "
                f"part of the backward pass that is too large for {title} in float32, or divide the loss. {_ASK_WHY}"
            )
        if self.loss_scale_value is None:
            return (
                f"No start can be recommended: all gradients are 0 at every loss scale up to {scales[-1]}, {measured}. "
                "Look for labels that are all masked, an output that is cut off from the weights, or a last layer of "
                "zeros."
            )
        if not self.is_in_format:
            return (
                f"No loss scaling is needed: at {scales[-1]} gradients exceed the largest number of {title} without "
                f"overflow, {measured}, so the backward pass does not compute in {title}."
            )
        ceiling = f"The largest loss scale without overflow was {as_power_of_two(self.ceiling)}, {measured}"
        if self.ceiling_is_highest:
            ceiling = f"No loss scale up to {scales[-1]}, the highest tried, overflows, {measured}"
        below = round(math.log2(self.ceiling / self.loss_scale_value))
        left = f"{counted(below, 'bit')} {'is' if below == 1 else 'are'} left as a margin"
        return f"Start at {as_power_of_two(self.loss_scale_value)}. {ceiling}; {left}."

    def _evidence(self) -> list[str]:
        division = loss_division(self.ranges.micro_batches)
        lines = [f"Each batch was measured {division}, as the training does it."] if division else []
        if self.ceiling is None or self.loss_scale_value is None:
            return lines
        if not self.loss_is_finite:
            lines.append(f"The loss is inf or NaN, although all gradients are finite. {_ASK_WHY}")
        lowest, start = self.verdicts[0], self.verdicts[-1]
        if start.is_harmful and start != lowest:
            lines.append(f"No scale holds all gradients. {str(start).splitlines()[0]}")
        if lowest.parameter_share is not None and self.is_in_format:
            judged, *unknown = str(lowest).splitlines()
            if self.needs_scaling is not None:
                needs = "This training needs" if self.needs_scaling else "These weights would also train without"
                judged = f"{judged} {needs} loss scaling."
            if self.ranges.measured == NEW_WEIGHTS:
                judged += " A trained checkpoint can differ: --checkpoint."
            lines += [judged, *unknown]
        return [*lines, str(self.lost_updates)] if self.lost_updates is not None else lines

    def to_dict(self) -> dict[str, object]:
        """Return the recommendation without its sweep as a dict of values that JSON can hold.

        Returns:
            dict[str, object], by the names of the attributes, with ``yaml``, ``update_cell``, ``gradient_format`` and
            ``measured``.
        """
        nested = ("ranges", "verdicts", "lost_updates", "rule", "in_python")
        plain = {name: value for name, value in vars(self).items() if name not in nested}
        plain |= {"yaml": self.yaml, "update_cell": self.update_cell, "measured": self.ranges.measured}
        plain["lost_updates"] = vars(self.lost_updates) if self.lost_updates else None
        plain["gradient_format"] = self.ranges.gradient_format.to_config()
        return plain | {"verdicts": [verdict.to_dict() for verdict in self.verdicts]}


def recommend_loss_scale(
    ranges: GradientRanges, margin: int | None = None, learning_rate: float | None = None
) -> LossScaleRecommendation:
    """Recommend an initial loss scale from a sweep over loss scales.

    Args:
        ranges (GradientRanges): a sweep over powers of two, with several batches.
        margin (int, optional): how many powers of two to stay below the ceiling, but never below the lowest scale of
            the sweep. Where the gradient of a Parameter is 0 at every scale, 2 more are left. Default: None, 2, and 4
            in a format whose mantissa has at most 3 bits.
        learning_rate (float, optional): the learning rate of the training, to count the updates that weights in
            float16 lose. Default: None.

    Raises:
        TypeError: if ``margin`` is not an integer, or ``learning_rate`` not a number.
        ValueError: if ``margin`` is below 0, or ``learning_rate`` not above 0.
    """
    check_margin(margin)
    if margin is None:
        margin = COARSE_MARGIN if ranges.gradient_format.quantum(0) >= 2.0**-3 else DEFAULT_MARGIN
    lost = None
    if learning_rate is not None:
        in_float16 = {name: ranges.weights[name] for name in ranges.float16_weights}
        lost = lost_updates(in_float16, require_positive("learning_rate", learning_rate))
    scales = ranges.loss_scales
    safe = list(takewhile(lambda scale: not ranges.overflowed_batches(scale), scales))
    loss_is_finite = all(math.isfinite(at_scale.loss) for batch in ranges.batches for at_scale in batch)
    unknown = LossScaleRecommendation(None, None, margin, False, None, loss_is_finite, ranges, lost_updates=lost)
    if not safe:
        return unknown
    ceiling, is_highest, at_ceiling = safe[-1], safe == [*scales], ranges.overall(safe[-1])
    if at_ceiling.zeros == at_ceiling.size:
        return replace(unknown, ceiling=ceiling, ceiling_is_highest=is_highest)
    lowest = judge(ranges, scales[0])
    more = UNKNOWN_MARGIN if lowest.without_gradient else 0
    start = max(ceiling / 2.0 ** (margin + more), scales[0])
    # A backward pass may compute in float32, although the gradients should have a narrower format. This shows only if
    # the gradients at the highest loss scale exceed the largest number of the narrower format.
    exceeds = is_highest and at_ceiling.largest > _BEYOND * ranges.gradient_format.largest
    is_in_format = not (exceeds and scales[0] <= 1 and (lowest.parameter_share or 0.0) <= _NOTHING)
    if not is_in_format:
        start = scales[0]
    return LossScaleRecommendation(
        loss_scale_value=start,
        ceiling=ceiling,
        margin=margin,
        ceiling_is_highest=is_highest,
        needs_scaling=lowest.is_harmful if scales[0] <= 1 else None,
        loss_is_finite=loss_is_finite,
        ranges=ranges,
        verdicts=(lowest, judge(ranges, max(scale for scale in scales if scale <= start))),
        lost_updates=lost,
        is_in_format=is_in_format,
    )


def check_margin(margin: object) -> None:
    """Raise an error unless ``margin`` is a non-negative integer or None."""
    if margin is not None:
        require_integer("margin", margin, 0, f"The default is {DEFAULT_MARGIN}.", unit="number of powers of two")


def lost_updates(weights: Mapping[str, ArrayStatistics], learning_rate: float) -> LostUpdates | None:
    """Count the weights in float16 that an update as large as the learning rate leaves unchanged.

    Args:
        weights (Mapping[str, ArrayStatistics]): the statistics of the weights in float16, by Parameter name.
        learning_rate (float): above 0.

    Returns:
        LostUpdates, or None without weights.

    Examples:
        >>> from mindformers_adaptive.gradients.statistics import array_statistics
        >>> lost_updates({"norm": array_statistics([1.0, 0.5, 0.25])}, learning_rate=2.0**-12).share
        0.3333333333333333
    """
    counts = {name: _lost(each, learning_rate) for name, each in weights.items()}
    if not counts:
        return None
    shares = {name: count / max(weights[name].size, 1) for name, count in counts.items()}
    worst = max(shares, key=lambda name: shares[name])
    size = sum(each.size for each in weights.values())
    return LostUpdates(learning_rate, sum(counts.values()) / max(size, 1), worst, shares[worst])


def _lost(weights: ArrayStatistics, update: float) -> int:
    # Do not count an update of exactly half the distance to the next float16 number: the new weight is rounded to the
    # even one of the two neighbouring numbers, so some weights change and some do not.
    lowest = int(math.log2(FLOAT16.smallest_normal))
    quanta = {exponent: FLOAT16.quantum(max(exponent, lowest)) for exponent in weights.histogram}
    of_zeros = weights.zeros if update < FLOAT16.smallest_subnormal / 2 else 0
    return of_zeros + sum(count for exponent, count in weights.histogram.items() if update < quanta[exponent] / 2)
