"""Rules as a user would write them: one follows the gradients, one has a vector as state, some extend other rules."""

from typing import ClassVar

from mindformers_adaptive.rules import Rule, argmin, float32, int32, minimum, where
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule


class Follow(Rule):
    """A rule that keeps the loss scale ``margin`` bits below the largest scale safe for the last known gradient."""

    name = "follow"
    state: ClassVar = {"shown": int32}
    needs_gradients = True
    tried: ClassVar = {"margin": (1, 2, 4)}

    def __init__(self, margin=2, min_loss_scale=1.0, max_loss_scale=None):
        super().__init__(min_loss_scale, max_loss_scale)
        self.margin = margin

    def first_state(self, loss_scale):
        return {"shown": 16}

    def next_state(self, state, seen):
        lowest = where(seen.gradient_known, seen.max_safe_exponent, state.shown)
        return state.replace(
            exponent=where(seen.overflow, state.exponent - 2, lowest - self.margin),
            shown=lowest,
        )


class Weigh(Rule):
    """A rule with a vector as state, which raises the loss scale if the vector's first element is not the smallest."""

    name = "weigh"

    def __init__(self, length=3, growth=1.5):
        super().__init__()
        self.length, self.growth = length, growth
        self.state = {"weights": float32[length]}

    def next_state(self, state, seen):
        places = [float(self.length - number) for number in range(self.length)]
        raised = where(argmin(state.weights) > 0, state.loss_scale * self.growth, state.loss_scale)
        return where(
            seen.overflow,
            state.replace(loss_scale=state.loss_scale * 0.5, weights=state.weights * 0.5),
            state.replace(loss_scale=raised, weights=state.weights + places),
        )


class Plain(Rule):
    """A rule of dynamic loss scaling with a fixed scale window."""

    name = "plain"
    state: ClassVar = {"clean_steps": int32}

    def __init__(self, window=10, **bounds):
        super().__init__(**bounds)
        self.window = window

    def next_state(self, state, seen):
        clean_steps = state.clean_steps + 1
        raised = state.replace(loss_scale=state.loss_scale * 2, clean_steps=0)
        clean = where(clean_steps >= self.window, raised, state.replace(clean_steps=clean_steps))
        return where(seen.overflow, state.replace(loss_scale=state.loss_scale / 2, clean_steps=0), clean)


class CappedGuided(GuidedRule):
    """Extends the guided rule, with its default arguments, by an upper limit on the exponent of the loss scale."""

    name = "capped_guided"

    def __init__(self, cap=15):
        super().__init__()
        self.cap = cap

    def next_state(self, state, seen):
        after = super().next_state(state, seen)
        return after.replace(exponent=minimum(after.exponent, self.cap))


class CappedAdaptive(AdaptiveRule):
    """Extends the adaptive rule by an upper limit on the loss scale."""

    name = "capped_adaptive"

    def __init__(self, cap=2.0**20):
        super().__init__(max_scale_window=100)
        self.cap = cap

    def next_state(self, state, seen):
        after = super().next_state(state, seen)
        return after.replace(loss_scale=minimum(after.loss_scale, self.cap))


class Windows(Rule):
    """A rule whose state is a vector named ``scale_window``, which in other rules is the name of a single number."""

    name = "windows"
    state: ClassVar = {"scale_window": int32[3]}

    def next_state(self, state, seen):
        return state.replace(scale_window=state.scale_window + 1)


class NoRule:
    """A class that is not a loss-scaling rule."""
