"""A user's rule is tried where it trains: random steps of its compiled form must equal the rule in NumPy."""

import random
import warnings

import pytest
from mindspore import Tensor

from mindformers_adaptive import RuleLossScaler, RuleLossScaleUpdateCell
from mindformers_adaptive.cells import graph_form
from mindformers_adaptive.cells.graph_form import try_rule
from mindformers_adaptive.rules import float32, int32
from tests.shared.own_rules import Follow, Weigh, rule_of, with_every_operation


def test_every_operation_gives_the_same_in_every_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try_rule(with_every_operation())


@pytest.mark.parametrize("rule", [Follow(), Weigh()])
def test_rules_as_users_write_them_pass(graph_mode, rule):
    try_rule(rule)


def random_expression(numbers, depth, dtype):
    """Return a random expression of a rule's step, of the given dtype."""
    leaves = {"float32": ("x", "y", "half", "xp.float32(i)"), "int32": ("i", "j", "three", "xp.int32(overflow)")}
    if depth == 0:
        return numbers.choice(leaves[dtype])
    a, b, c, d = (random_expression(numbers, depth - 1, dtype) for _ in range(4))
    forms = [f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"abs({a})", f"xp.minimum({a}, {b})"]
    forms += [
        f"xp.maximum({a}, {b})",
        f"xp.where({a} < {b}, {c}, {d})",
        f"xp.where(xp.logical_and(overflow, {a} == {b}), {c}, {d})",
    ]
    return numbers.choice([*forms, f"({a} // three)"] if dtype == "int32" else [*forms, f"xp.floor({a})"])


@pytest.mark.parametrize("seed", [1, 2])
def test_random_rules_give_the_same(graph_mode, seed):
    numbers = random.Random(seed)
    state = {**dict.fromkeys("ij", int32), **dict.fromkeys("xy", float32)}
    results = {name: random_expression(numbers, 3, dtype.name) for name, dtype in state.items()}
    returned = ", ".join(f"{name!r}: {text}" for name, text in results.items())
    step = f"def step(loss_scale, overflow, i, j, x, y):\n    return {{'loss_scale': loss_scale, {returned}}}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* rounds a float")
        try_rule(rule_of(step, "half, three = xp.floats(0.5), xp.ints(3)", state=state))


DIFFERS = ("def step(loss_scale, a, b):\n    return {'loss_scale': loss_scale, 'a': a // b, 'b': b}", "")
STATE_OF_DIFFERS = {"a": int32, "b": int32}


def test_a_difference_stops_the_training_with_the_values(mode):
    cell = RuleLossScaleUpdateCell(rule_of(*DIFFERS, state=STATE_OF_DIFFERS), 8.0)
    said = r"'own' computes 'a' differently in MindSpore and in NumPy: -?\d+ and 0, in a step from .* a=-?\d+, b=0\. "
    with pytest.raises(ValueError, match=said):
        cell.set_train()
    scaler = RuleLossScaler(rule_of(*DIFFERS, state=STATE_OF_DIFFERS), 8.0)
    with pytest.raises(ValueError, match=said):
        scaler.adjust(Tensor(True))


def test_a_float_that_is_rounded_otherwise_is_told_once(graph_mode):
    # MindSpore's compiler multiplies the two constants first.
    step = "def step(loss_scale, x):\n    return {'loss_scale': loss_scale, 'x': xp.minimum(x, most) * third * tenth}"
    rule = rule_of(step, "third, tenth, most = xp.floats(1 / 3, 0.1, 1e30)", state={"x": float32})
    with pytest.warns(UserWarning, match="'own' rounds a float") as caught:
        RuleLossScaleUpdateCell(rule, 8.0).set_train()
    assert len(caught) == 1


def test_a_rule_is_tried_once_in_no_dry_run_and_after_init(monkeypatch):
    class Own(Follow):
        name = "own"

    tried = []
    monkeypatch.setattr("mindformers_adaptive.cells.update_cell.try_rule", tried.append)
    cell = RuleLossScaleUpdateCell(Own(), 8.0)
    cell.declare_signal()
    assert tried == []
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    cell.set_train()
    monkeypatch.delenv("MS_SIMULATION_LEVEL")
    monkeypatch.setattr(graph_form.context, "get_auto_parallel_context", lambda _: "data_parallel")
    cell.set_train()
    assert tried == []
    monkeypatch.undo()
    monkeypatch.setattr("mindformers_adaptive.cells.update_cell.try_rule", tried.append)
    equal, other = RuleLossScaleUpdateCell(Own(), 8.0), RuleLossScaleUpdateCell(Own(margin=3), 8.0)
    for each in (cell, cell, equal, other):
        each.declare_signal()
        each.set_train()
    assert tried == [cell.rule, other.rule]
    guided = RuleLossScaleUpdateCell("guided", 8.0)
    guided.declare_signal()
    guided.set_train()
    assert len(tried) == 2


def test_operators_run_one_by_one_where_graphs_are_distributed(graph_mode, monkeypatch):
    monkeypatch.setattr(graph_form, "jit", None)
    monkeypatch.setattr(graph_form.context, "get_auto_parallel_context", lambda _: "semi_auto_parallel")
    try_rule(Follow())
