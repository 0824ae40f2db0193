"""Whether a training needs loss scaling, by what FP16 loses of its gradients without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindformers_adaptive.gradients.parameter_groups import group_parameters
from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.text.table import align, as_power_of_two

__all__ = ["HARMLESS_SHARE", "Verdict", "judge", "table_of_groups"]

# Measured on the tasks of scripts/worth_it.py: of a loss of 3 % nothing is seen in the result, one of 20 % costs
# little, and with 100 % nothing is learned. No Parameter of the demo's Llama loses more than some 5 % at a scale of 1.
HARMLESS_SHARE = 0.2


@dataclass(frozen=True)
class Verdict:
    """What a loss scale loses of the gradients, and whether that is too much.

    A share is the norm of what is lost, by underflow and by the coarseness of subnormal numbers, divided by the norm
    of the gradient; see :meth:`mindformers_adaptive.gradients.report.GradientRanges.lost_share`.

    Attributes:
        loss_scale (float): the scale that is judged.
        groups (dict[str, float]): the share by group of Parameters; without groups whose gradients are all 0.
        parameter (str, optional): the Parameter that loses the largest share; None if nothing is known.
        parameter_share (float, optional): its share.
        without_gradient (tuple[str, ...]): Parameters whose gradients are 0 at every scale, of which nothing is known.
    """

    loss_scale: float
    groups: Mapping[str, float] = field(default_factory=dict)
    parameter: str | None = None
    parameter_share: float | None = None
    without_gradient: tuple[str, ...] = ()

    @property
    def is_harmful(self) -> bool | None:
        """Whether a Parameter loses more than ``HARMLESS_SHARE``; None if nothing is known."""
        return None if self.parameter_share is None else self.parameter_share > HARMLESS_SHARE

    def __str__(self) -> str:
        scale = as_power_of_two(self.loss_scale)
        if self.parameter_share is None:
            return f"What is lost at {scale} is not known: it overflows, or all gradients are 0 at every scale."
        lost = f"At {scale} FP16 loses {self.parameter_share:.2%} of the gradient of {self.parameter}, by its norm"
        if self.is_harmful:
            text = f"{lost}. More than {HARMLESS_SHARE:.0%} does harm."
        else:
            text = f"{lost}, and of no other more. Up to {HARMLESS_SHARE:.0%} does no harm."
        if self.without_gradient:
            number, first = len(self.without_gradient), self.without_gradient[0]
            text += (
                f"\nNothing can be said of {number} Parameter{'' if number == 1 else 's'}, such as {first}, with a "
                "gradient of 0 at every scale. If they are to be trained, measure again with the weights of a few "
                "steps later."
            )
        return text

    def to_dict(self) -> dict[str, object]:
        """Return everything as JSON can hold it."""
        return {
            **vars(self),
            "groups": dict(self.groups),
            "without_gradient": list(self.without_gradient),
            "is_harmful": self.is_harmful,
        }


def judge(ranges: GradientRanges, loss_scale: float) -> Verdict:
    """Judge what a loss scale loses of the gradients.

    Args:
        ranges (GradientRanges): a sweep that has the scale, and a higher one that does not overflow.
        loss_scale (float): one of the sweep's; 1, or the lowest, to judge a training without loss scaling.

    Raises:
        KeyError: if the sweep does not have the scale.

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
    counts = ranges.parameters(loss_scale)
    shares = {name: ranges.lost_share(loss_scale, [name]) for name in counts}
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return Verdict(loss_scale)
    worst = max(known, key=lambda name: known[name])
    groups = {
        group: ranges.lost_share(loss_scale, names)
        for group, names in group_parameters({name: one.size for name, one in counts.items()}).items()
    }
    return Verdict(
        loss_scale,
        {group: share for group, share in groups.items() if share is not None},
        worst,
        known[worst],
        tuple(name for name in shares if name not in known),
    )


def table_of_groups(verdicts: list[Verdict]) -> str:
    """Return a table of what several scales lose of each group, to print."""
    groups = list(dict.fromkeys(group for verdict in verdicts for group in verdict.groups))
    columns = [f"lost at {as_power_of_two(verdict.loss_scale)}" for verdict in verdicts]
    rows = [
        [group, *(f"{verdict.groups[group]:.3%}" if group in verdict.groups else "-" for verdict in verdicts)]
        for group in groups
    ]
    return align([["gradients of", *columns], *rows], to_the_left=[0])
