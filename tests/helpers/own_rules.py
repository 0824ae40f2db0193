"""Rules as a user would write them: one that follows the gradients, one with a vector, one that is no text."""

from typing import ClassVar, NamedTuple

from mindformers_adaptive.rules import Field, Rule, TextRule
from mindformers_adaptive.rules.backend import argmin, float32, int32, where

HALF = 0.5


def follow(exponent, shown, overflow, gradient_known, max_safe_exponent, margin):
    lowest = where(gradient_known, max_safe_exponent, shown)
    return {"exponent": where(overflow, exponent - int32(2), lowest - margin), "shown": lowest}


class Follow(TextRule):
    """The scale lies so many bits below what the last gradient showed."""

    name = "follow"
    fields = (Field("shown"),)
    signals = ("largest_gradient",)
    grid: ClassVar = {"margin": (1, 2, 4)}
    text = follow

    def __init__(self, margin=2, min_loss_scale=1.0, max_loss_scale=None):
        super().__init__(min_loss_scale, max_loss_scale)
        self.margin = margin
        self.constants = {"margin": margin}

    def start_values(self, loss_scale):
        return {"shown": 16}


def weigh(loss_scale, weights, overflow, places, growth):
    raised = where(argmin(weights) > int32(0), loss_scale * growth, loss_scale)
    changed = where(overflow, weights * HALF, weights + places)
    return {"loss_scale": float32(where(overflow, loss_scale * HALF, raised)), "weights": changed}


class Weigh(TextRule):
    """A vector whose length is an argument; its places are weighed against each other."""

    name = "weigh"
    fields = (Field("weights", "float32", (3,)),)
    text = weigh

    def __init__(self, length=3, growth=1.5):
        super().__init__()
        self.length, self.growth = length, growth
        self.fields = (Field("weights", "float32", (length,)),)
        self.constants = {"places": [float(length - place) for place in range(length)], "growth": growth}


class PlainState(NamedTuple):
    loss_scale: float
    clean_steps: int = 0


class Plain(Rule):
    """A rule in plain Python, with a window."""

    name = "plain"
    moves_by_one_factor = True

    def __init__(self, window=10, min_loss_scale=1.0, max_loss_scale=None):
        super().__init__(min_loss_scale, max_loss_scale)
        self.window = window

    def start(self, loss_scale_value, *, argument="loss_scale_value"):
        return PlainState(self.checked_start(loss_scale_value, argument))

    def step(self, state, overflow, largest_gradient=None):
        if overflow:
            return PlainState(max(state.loss_scale / 2, self.min_loss_scale))
        clean_steps = state.clean_steps + 1
        if clean_steps < self.window:
            return PlainState(state.loss_scale, clean_steps)
        return PlainState(min(state.loss_scale * 2, self.max_loss_scale))
