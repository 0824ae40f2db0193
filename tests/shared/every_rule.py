"""All rules for the tests (a user's rule too), with their update cells, managers, scalers, and random steps."""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mindspore
import numpy as np
from log_max import LogMaxRule
from mindspore import Parameter, Tensor, nn, ops

from mindformers_adaptive import (
    AdaptiveLossScaleManager,
    AdaptiveLossScaler,
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleManager,
    GradientGuidedLossScaler,
    GradientGuidedLossScaleUpdateCell,
    RuleLossScaleManager,
    RuleLossScaler,
    RuleLossScaleUpdateCell,
)
from mindformers_adaptive.cells.update_cell import RuleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.saved_state import own_keys, to_values

RULES = (AdaptiveRule, GuidedRule, LogMaxRule)

# If the largest gradient of a step has one of these values, a loss-scaling rule learns nothing or hardly anything from
# this gradient.
SILENT = (0.0, np.inf, np.nan, 1e-39, 2.0**-126, float(np.finfo(np.float32).max))


def is_same(ours, theirs):
    """Return whether two nested values are equal; NaN counts as equal to NaN."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(is_same(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    return ours == theirs or (ours != ours and theirs != theirs)


class Owned(nn.Cell):
    """Holds any update cell and a loss scale. The Parameters have the same names as in a train-step cell."""

    def __init__(self, update_cell):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        scale = Tensor(update_cell.get_loss_scale(), mindspore.float32)
        self.scale_sense = Parameter(scale, name="scale_sense", requires_grad=False)
        if isinstance(update_cell, RuleUpdateCell):
            update_cell.bind_loss_scale(self.scale_sense)
        self.hands_gradient = getattr(update_cell, "needs_gradients", False)
        if self.hands_gradient:
            update_cell.declare_signal()
        self.assign = ops.Assign()

    def construct(self, overflow, largest_gradient):
        if self.hands_gradient:
            self.assign(self.update_cell.largest_gradient, largest_gradient)
        return self.update_cell(self.scale_sense, overflow)

    def step(self, overflow, largest_gradient=np.nan):
        """Step the update cell with the given overflow flag and largest gradient."""
        return self(Tensor(bool(overflow)), Tensor(largest_gradient, mindspore.float32))


class Step(NamedTuple):
    """One step of a randomly generated run of a loss-scaling rule, and the rule's state after this step."""

    overflow: bool
    largest_gradient: float
    state: Any


@dataclass(frozen=True)
class Kind:
    """A loss-scaling rule with its arguments, and the update cell, manager and scaler that apply the rule."""

    rule_class: type
    cell_class: Callable
    manager_class: Callable
    scaler_class: Callable
    arguments: Mapping = field(default_factory=dict)
    loss_scale: float = 2.0**20
    # Arguments of the update cell that are no arguments of the rule.
    beside: Mapping = field(default_factory=dict)

    @functools.cached_property
    def rule(self):
        return self.rule_class(**self.arguments)

    def own_keys(self):
        """Return the keys of the rule's own state, as spelled in the update cell's state."""
        return [key for key in own_keys(self.rule) if key in to_values(self.rule, self.start(), 0)]

    def start(self):
        """Return the state of the rule before the first step."""
        return self.rule.start(self.loss_scale)

    def cell(self, loss_scale=None, **options):
        scale = self.loss_scale if loss_scale is None else loss_scale
        return self.cell_class(loss_scale_value=scale, **{**self.arguments, **self.beside, **options})

    def manager(self, loss_scale=None):
        return self.manager_class(init_loss_scale=loss_scale or self.loss_scale, **self.arguments)

    def scaler(self, loss_scale=None):
        return self.scaler_class(scale_value=loss_scale or self.loss_scale, **self.arguments)

    def path(self, steps, seed=0):
        """Return ``steps`` random steps of a training, in which the ceiling moves and some gradients are unknown."""
        numbers, state, path, level = random.Random(seed), self.start(), [], 18.0
        for _ in range(steps):
            level = min(max(level + numbers.gauss(0, 0.4), -3.0), 60.0)
            if numbers.random() < 0.02:
                level += numbers.choice([-9, 9])
            gradient = 65504 / 2.0**level * 2.0 ** numbers.choice([0, 0, -3, 1.5, numbers.gauss(0, 1)])
            if numbers.random() < 0.1:
                gradient = numbers.choice(SILENT)
            gradient = float(np.float32(gradient))
            overflow = numbers.random() < 0.03 or state.loss_scale > 2.0**level
            state = self.rule.step(state, overflow, gradient)
            path.append(Step(overflow, gradient, state))
        return path


_ADAPTIVE = (AdaptiveRule, AdaptiveLossScaleUpdateCell, AdaptiveLossScaleManager, AdaptiveLossScaler)

KINDS = {
    "adaptive": Kind(
        *_ADAPTIVE,
        {"max_scale_window": 4, "min_scale_window": 1},
        beside={"scale_factor": 2, "scale_window": 1},
    ),
    "adaptive with hysteresis": Kind(
        *_ADAPTIVE,
        {"scale_factor": 1.5, "max_scale_window": 3, "min_scale_window": 1, "hysteresis": 2}
        | {"min_loss_scale": 0.5, "max_loss_scale": 2.0**24, "shrink_from_min_window": True}
        | {"backoff_factor": 0.3},
        beside={"scale_window": 1},
    ),
    "guided": Kind(
        GuidedRule,
        GradientGuidedLossScaleUpdateCell,
        GradientGuidedLossScaleManager,
        GradientGuidedLossScaler,
        {"margin": 2, "max_loss_scale": 2.0**40},
    ),
    "log_max": Kind(
        LogMaxRule,
        functools.partial(RuleLossScaleUpdateCell, rule="log_max.LogMaxRule"),
        functools.partial(RuleLossScaleManager, "log_max.LogMaxRule"),
        functools.partial(RuleLossScaler, "log_max.LogMaxRule"),
        {"margin": 2.0, "min_loss_scale": 2.0**-4},
    ),
}


def adjust(scaler, *arguments):
    """Let a scaler of this package take a step, after an ``unscale`` that divides nothing of interest."""
    scaler.unscale(Tensor(1.0))
    return scaler.adjust(*arguments)
