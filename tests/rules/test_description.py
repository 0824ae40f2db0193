"""A rule whose class, state or arguments are described wrongly is refused when it is made."""

import inspect
import re

import numpy as np
import pytest

from mindformers_adaptive import RuleLossScaleUpdateCell
from mindformers_adaptive.rules import Rule, float32, int32
from mindformers_adaptive.rules.description import RESERVED
from mindformers_adaptive.rules.fields import fields_of


def unchanged(self, xp):
    """Return a step that changes nothing. Its arguments are the names of the state."""

    def step(*values):
        return dict(zip(names, values, strict=True))

    names = ["loss_scale", *(key for field in fields_of(self) for key in field.keys)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    step.__signature__ = inspect.Signature(parameters)
    return step


def described(**names):
    """Return a rule whose class has the given attributes."""
    return type("Own", (Rule,), {"name": "own", "make_step": unchanged, **names})()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(({"name": name}, r"must have a name .*letters.* name = 'halve'") for name in ("", "a b", "a.b", "../x", 7)),
        ({"name": None}, "must have a name .*letters"),
        *(
            ({"state": {"x": kind}}, "declares the field 'x' as .* Write int32 or float32, .* or a dict such as")
            for kind in (int, bool, "int32", np.int32, 0, None, [], {}, {"a": int32, "b": float32}, {"a": {"b": int32}})
        ),
        ({"state": {"x": {"a": int32[2]}}}, "declares the field 'x' as .* Write int32 or float32"),
        *(({"state": state}, "must have 'state' as a dict") for state in (["x"], None, int32, 7)),
        *(
            ({"state": {key: int32}}, "in its state, .*name of letters, digits")
            for key in ("a b", "_a", "lambda", 7, "")
        ),
        *(
            ({"state": {key: int32}}, f"has '{key}' in its state, .*this package uses.*Choose another")
            for key in sorted(RESERVED)
        ),
        ({"state": {"vector": float32[2], "vector_0": float32}}, "has 'vector_0' in its state, .*another field"),
        ({"state": {"x": {"cur_iter": int32}}}, "has 'cur_iter' in its state, .*this package uses"),
        ({"state": {"x": {"a": int32}, "y": {"a": int32}}}, "has 'a' in its state, .*another field"),
        ({"state": {"x": {"a": int32}, "a": int32}}, "has 'a' in its state, .*another field"),
        ({"state": {"x": {"y": int32}, "y": {"z": int32}}}, "has 'y' in its state, .*another field"),
        *(
            ({"needs_gradients": value}, "must have needs_gradients = True or False")
            for value in (("largest_gradient",), None, 1, "True")
        ),
        ({"recorded": ("x",)}, "has 'x' in 'recorded', .*no number of that name"),
        ({"recorded": ("x",), "state": {"x": {"a": int32}}}, "has 'x' in 'recorded', .*no number of that name"),
        ({"recorded": None}, "must have 'recorded' as a tuple of names"),
        ({"recorded": ([],)}, "must have 'recorded' as a tuple of names"),
        ({"make_step": Rule.make_step}, r"Define .*make_step\(self, xp\)"),
        ({"make_step": None}, r"make_step\(\) .* raises TypeError"),
        ({"make_step": lambda self: None}, r"make_step\(\) .* raises TypeError"),
        (
            {"make_step": Rule.make_step, "next_state": lambda self, state, seen: state},
            r"next_state\(\), which is no longer called. Define make_step\(self, xp\).* checkpoints .* go on",
        ),
        (
            {"__init__": lambda self, window=2: Rule.__init__(self)},
            "must keep its argument 'window' .*self.window = window",
        ),
        ({"__init__": lambda self: None}, r"super\(\).__init__\("),
        ({"__init__": lambda self, **bounds: None}, r"super\(\).__init__\("),
    ],
)
def test_wrong_description_is_refused_when_the_rule_is_made(names, message):
    with pytest.raises(ValueError, match=message) as refused:
        described(**names)
    assert f"rule {names.get('name', 'own')!r}" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["loss_scale_value", "init_loss_scale", "scale_value", "rule", "type", "needs_gradients"]
)
def test_argument_named_like_a_cells_or_a_sections_is_refused(name):
    of_constructor = {}
    exec(f"def __init__(self, {name}=3):\n    Rule.__init__(self)\n", {"Rule": Rule}, of_constructor)
    with pytest.raises(ValueError, match=f"has an argument '{name}', .* already uses this name. Rename"):
        described(**of_constructor)


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "2", None, (2, 3), 10**12])
def test_a_vector_has_a_length(length):
    with pytest.raises(
        ValueError, match=rf"float32\[...\] must have one length, .* 65536, but got {re.escape(repr(length))}\. "
    ):
        _ = float32[length]


@pytest.mark.parametrize("name", ["select", "phase", "scale_factor", "inputs", "step_function", "rule", "training"])
def test_field_named_like_the_cells_attribute_is_refused(name):
    rule = described(state={name: float32})
    assert rule.step(rule.start(2.0), False)[1] == 0.0
    with pytest.raises(ValueError, match=f"rule 'own' must not be called '{name}'.*Choose another name"):
        RuleLossScaleUpdateCell(rule, 2.0)
