"""Rules as a user would write them: one follows the gradients, one has a vector as state, some extend other rules."""

import importlib.util
import itertools
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from mindformers_adaptive.rules import Rule, float32, int32

# The rule has no method first_state().
_NO_STATE = object()

# MindSpore compiles a function from its source file. The folder is removed when the process ends.
_FOLDER, _numbers = tempfile.TemporaryDirectory(), itertools.count()


def make_step_of(text):
    """Return the method ``make_step`` from its source code, which is written to a module and imported."""
    name = f"rule_{next(_numbers)}"
    file = Path(_FOLDER.name, f"{name}.py")
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_step


def rule_of(step, constants="", *, state=None, first=_NO_STATE, needs_gradients=False, name="own", **arguments):
    """Return a rule with the given code as its step, which may use ``self``, ``xp`` and the constants.

    Args:
        step (str): statements of the step, with the line of ``def``.
        constants (str): statements before the step.
    """
    lines = ["def make_step(self, xp):", *(f"    {line}" for line in constants.splitlines())]
    lines += [*(f"    {line}" for line in step.strip().splitlines()), "    return step", ""]
    names = {"name": name, "state": state or {}, "needs_gradients": needs_gradients}
    if first is not _NO_STATE:
        names["first_state"] = lambda self, loss_scale: first
    return type("Own", (Rule,), {**names, "make_step": make_step_of("\n".join(lines))})(**arguments)


_EVERY_OPERATION = """
def step(loss_scale, overflow, gradient_known, largest_gradient, max_safe_exponent, i, j, x, y, v, w, n):
    flag = xp.logical_or(xp.logical_and(~overflow, x >= y), i == j)
    other = xp.logical_or(x < y, xp.logical_and(i != j, x != y), x <= half, i > j)
    row, column = table(i, n)
    first, second, third = xp.unstack(v)
    return {
        "loss_scale": loss_scale * xp.where(flag, half, two),
        "i": xp.where(flag, xp.minimum(i, j) - i * three, xp.maximum(i, j) + abs(-j)),
        "j": xp.int32(x) // three + xp.int32(other) + max_safe_exponent + row,
        "x": xp.minimum(x, y) * half + xp.maximum(y, third_of_one) + xp.floor(x / xp.maximum(y, half)) - xp.float32(i),
        "y": xp.where(gradient_known, largest_gradient, xp.take(v, i)) + xp.take(places, j),
        "v": xp.stack((second, xp.maximum(third, y), xp.where(flag, first, x))) * places,
        "w": w + xp.stack((xp.argmin(v), xp.count(v > y), column)),
        "n": n + one,
    }
"""
_CONSTANTS = """
half, two, third_of_one, places = xp.floats(0.5, 2, 1 / 3, [1, 2, 4])
one, three = xp.ints(1, 3)
table = xp.tabulate(lambda i, n: (i * n, i - n), (-2, 3), (0, 4))
"""
_STATE = {**dict.fromkeys("ij", int32), **dict.fromkeys("xy", float32), "v": float32[3], "w": int32[3], "n": int32}


def with_every_operation():
    """Return a rule whose step uses every operator and every operation of the namespace."""
    return rule_of(_EVERY_OPERATION, _CONSTANTS, state=_STATE, needs_gradients=True)


class Follow(Rule):
    """A rule that keeps the loss scale ``margin`` bits below the largest scale safe for the last known gradient."""

    name = "follow"
    state: ClassVar = {"shown": int32}
    needs_gradients = True

    def __init__(self, margin=2, min_loss_scale=1.0, max_loss_scale=None):
        super().__init__(min_loss_scale, max_loss_scale)
        self.margin = margin

    def first_state(self, loss_scale):
        return {"shown": 16}

    def make_step(self, xp):
        two, margin = xp.ints(2, self.margin)

        def step(exponent, overflow, gradient_known, max_safe_exponent, shown):
            lowest = xp.where(gradient_known, max_safe_exponent, shown)
            return {"exponent": xp.where(overflow, exponent - two, lowest - margin), "shown": lowest}

        return step


class Weigh(Rule):
    """A rule with a vector as state, which raises the loss scale if the vector's first element is not the smallest."""

    name = "weigh"

    def __init__(self, length=3, growth=1.5):
        super().__init__()
        self.length, self.growth = length, growth
        self.state = {"weights": float32[length]}

    def make_step(self, xp):
        zero = xp.ints(0)
        half, growth = xp.floats(0.5, self.growth)
        places = xp.floats([float(self.length - number) for number in range(self.length)])

        def step(loss_scale, overflow, weights):
            raised = xp.where(xp.argmin(weights) > zero, loss_scale * growth, loss_scale)
            return {
                "loss_scale": xp.where(overflow, loss_scale * half, raised),
                "weights": xp.where(overflow, weights * half, weights + places),
            }

        return step


class Windows(Rule):
    """A rule whose state is a vector named ``scale_window``, which in other rules is the name of a single number."""

    name = "windows"
    state: ClassVar = {"scale_window": int32[3]}

    def make_step(self, xp):
        one = xp.ints(1)

        def step(loss_scale, scale_window):
            return {"loss_scale": loss_scale, "scale_window": scale_window + one}

        return step


class NoRule:
    """A class that is not a loss-scaling rule."""
