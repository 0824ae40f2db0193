"""Update cells correct invalid states only after loading a checkpoint, and load each number into its own field."""

import functools
import inspect
import json
import math
import random
import types
import warnings
from typing import ClassVar

import mindformers.wrapper
import mindspore
import pytest
from mindspore import Parameter, Tensor, nn

from mindformers_adaptive import RuleLossScaleUpdateCell
from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.mindformers.callbacks import restores_sidecar
from mindformers_adaptive.mindformers.checkpoint_formats import write_sidecar
from mindformers_adaptive.mindformers.checkpoint_reader import read_checkpoints
from mindformers_adaptive.rules import Rule, float32, int32
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.fields import fields_of
from mindformers_adaptive.rules.saved_state import own_keys
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from tests.conftest import mindspore_mode
from tests.shared.every_rule import KINDS, Owned, is_same
from tests.shared.networks import Dense
from tests.shared.own_rules import rule_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graph_mode")]


class Smallest(Rule):
    """A rule that keeps the smallest loss scale at which a step overflowed, or inf before the first overflow."""

    name = "smallest"
    state: ClassVar = {"smallest": float32}

    def first_state(self, loss_scale):
        return {"smallest": math.inf}

    def make_step(self, xp):
        half, growth = xp.floats(0.5, 1.25)

        def step(loss_scale, overflow, smallest):
            return {
                "loss_scale": loss_scale * xp.where(overflow, half, growth),
                "smallest": xp.where(overflow, xp.minimum(smallest, loss_scale), smallest),
            }

        return step


class Refusing(Rule):
    """A rule that rejects a restored state in which ``clean`` is not 0, although its steps reach such states."""

    name = "refusing"
    state: ClassVar = {"clean": int32}

    def make_step(self, xp):
        one = xp.ints(1)

        def step(loss_scale, clean):
            return {"loss_scale": loss_scale, "clean": clean + one}

        return step

    def find_state_problem(self, values):
        return "The checkpoint has counted" if values["clean"] else None


class MovedWindow(AdaptiveRule):
    """An adaptive rule whose scale windows are not on its ladder of windows."""

    name = "moved_window"

    def make_step(self, xp):
        adaptive, seven = super().make_step(xp), xp.ints(7)

        def step(*values):
            after = adaptive(*values)
            after["scale_window"] = after["scale_window"] + seven
            return after

        step.__signature__ = inspect.signature(adaptive)
        return step


RULES = [Smallest, Refusing, functools.partial(MovedWindow, max_scale_window=4, min_scale_window=1)]
CELLS = {make.name if isinstance(make, type) else make.func.name: make for make in RULES}
CELLS = {name: lambda make=make: RuleLossScaleUpdateCell(make(), 2.0**16) for name, make in CELLS.items()}
CELLS |= {name: kind.cell for name, kind in KINDS.items()}


@pytest.fixture(autouse=True)
def _rules_not_tried(monkeypatch):
    """Leave out the trial of a user's rule, which compiles a graph for each rule. Other tests show what it finds."""
    monkeypatch.setattr("mindformers_adaptive.cells.update_cell.try_rule", lambda rule: None)


@pytest.mark.parametrize(
    ("name", "owner"),
    [*((name, "another package's cell") for name in CELLS), *((name, "train step") for name in ("smallest", "guided"))],
)
def test_set_train_at_random_places_changes_nothing(name, owner):
    numbers, cell, dense = random.Random(name), CELLS[name](), Dense()
    train_step = dense.train_step(cell, TrainOneStepWithLossScaleCell) if owner == "train step" else Owned(cell)
    state = cell.rule_state()
    places = numbers.sample(range(40), 12)
    for number in range(40):
        if number in places:
            # Warnings are errors, so this also checks that set_train() gives no warning.
            train_step.set_train()
        overflow = numbers.random() < 0.25
        if owner == "train step":
            train_step(*dense.batch(overflow))
        else:
            train_step.step(overflow, 0.25)
        state = cell.rule.step(state, overflow, cell.state().get("largest_gradient"))
        assert is_same(cell.rule_state(), state)


def rule_with(state, name="reshaped", **first):
    """Return a rule with the given state fields; each step adds 1 to every number in these fields."""

    fields = fields_of(types.SimpleNamespace(name=name, state=state, parameter_names={}))
    shown = [(key, field.dtype) for field in fields for key in field.keys]
    after = "".join(f", {key!r}: {key} + {dtype}" for key, dtype in shown)
    return rule_of(
        f"""
def step(loss_scale, overflow, {", ".join(key for key, _ in shown)}):
    return {{"loss_scale": xp.where(overflow, loss_scale * half, loss_scale){after}}}
""",
        "int32, float32, half = xp.ints(1), xp.floats(1), xp.floats(0.5)",
        state=state,
        **first,
        name=name,
    )


BEFORE = {"counts": {"bad": int32, "good": int32}, "level": float32, "window": int32[3]}
FORMS = {
    "a renamed part": {**BEFORE, "counts": {"evil": int32, "good": int32}},
    "exchanged names": {**BEFORE, "counts": {"good": int32, "well": int32}},
    "one part more": {**BEFORE, "counts": {"bad": int32, "good": int32, "more": int32}},
    "one part less": {**BEFORE, "counts": {"good": int32}},
    "a longer vector": {**BEFORE, "window": int32[5]},
    "a shorter vector": {**BEFORE, "window": int32[2]},
    "a vector for a number": {**BEFORE, "level": float32[2]},
    "a number for a vector": {**BEFORE, "window": int32},
    "another dtype": {**BEFORE, "level": int32},
    "another dtype of parts": {**BEFORE, "counts": {"bad": float32, "good": float32}},
    "a new field": {**BEFORE, "fresh": float32},
    "a field less": {"counts": BEFORE["counts"], "level": float32},
    "a renamed field": {"counts": BEFORE["counts"], "height": float32, "window": int32[3]},
}


@functools.cache
def rule_before():
    """Return the rule with the fields ``BEFORE``. A rule is tried once, so tests share the rules of equal fields."""
    return rule_with(BEFORE)


@functools.cache
def rule_of_form(change):
    return rule_with(FORMS[change])


@functools.cache
def rules_in_two_orders():
    first = {"bad": 10, "good": 20, "level": 0.5, "window": [7, 8, 9]}
    reordered = {"window": int32[3], "counts": {"good": int32, "bad": int32}, "level": float32}
    return rule_with(BEFORE, first=first), rule_with(reordered)


def saved(rule, tmp_path, form, steps=5):
    """Take steps and save the state. Return two things: a function that restores it in another cell, and the state."""
    owned, state = Owned(RuleLossScaleUpdateCell(rule, 2.0**16)), rule.start(2.0**16)
    for number in range(steps):
        state = rule.step(state, number == 1)
    owned.update_cell.write_rule_state(state, steps)
    state = owned.update_cell.state()
    if form == "state_dict":
        state_dict = json.loads(json.dumps(owned.update_cell.state_dict()))
        return lambda resumed: resumed.update_cell.load_state_dict(state_dict), state
    if form == "sidecar":
        cell = owned.update_cell
        write_sidecar(tmp_path, 1.0, {**state, "loss_scaling_form": cell.form})
        load = restores_sidecar(lambda checkpoint, network, optimizer: None)

        def restore(resumed):
            resumed.scale_sense.set_data(Tensor(state["loss_scale"], mindspore.float32))
            load(str(tmp_path), None, types.SimpleNamespace(loss_scaling_manager=resumed.update_cell))

        return restore, state
    file = str(tmp_path / "saved.ckpt")
    mindspore.save_checkpoint(owned, file)
    return lambda resumed: mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(file)), state


@pytest.fixture(scope="module")
def saved_before(tmp_path_factory):
    """Return a function that returns the same as ``saved`` for the fields ``BEFORE``, and saves once per format."""
    return functools.cache(lambda form: saved(rule_before(), tmp_path_factory.mktemp("saved"), form))


def restore_and_begin(restore, resumed):
    restore(resumed)
    resumed.set_train()


@pytest.mark.parametrize("form", ["ckpt", "ckpt after set_train", "state_dict", "sidecar"])
@pytest.mark.parametrize("change", FORMS)
def test_a_state_of_another_form_starts_afresh_with_a_warning(change, form, saved_before):
    restore, state = saved_before(form.removesuffix(" after set_train"))
    rule = rule_of_form(change)
    resumed = Owned(RuleLossScaleUpdateCell(rule, 2.0**10))
    if form.endswith("set_train"):
        resumed.set_train()
    with pytest.warns(UserWarning, match="starts afresh at loss scale 32768"):
        restore_and_begin(restore, resumed)
    after = resumed.update_cell.state()
    fresh = rule.start(state["loss_scale"])
    assert is_same({key: after[key] for key in own_keys(rule)}, {key: getattr(fresh, key) for key in own_keys(rule)})
    assert (after["loss_scale"], after["cur_iter"], after["skipped_steps"]) == (2.0**15, 6, 1)


@pytest.mark.parametrize("form", ["ckpt", "ckpt after set_train", "state_dict", "sidecar"])
def test_order_of_a_saved_state_makes_no_difference(form, tmp_path):
    rule, reordered = rules_in_two_orders()
    restore, state = saved(rule, tmp_path, form.removesuffix(" after set_train"))
    resumed = Owned(RuleLossScaleUpdateCell(reordered, 2.0**10))
    if form.endswith("set_train"):
        resumed.set_train()
    restore(resumed)
    resumed.set_train()
    assert is_same(resumed.update_cell.state(), {**resumed.update_cell.state(), **state})


@pytest.mark.parametrize(
    ("name", "field"),
    [("scale", "window"), ("list", "index"), ("step", "num"), ("epoch", "num"), ("learning", "rate")],
)
def test_no_rule_takes_a_number_of_something_else_for_its_own(name, field):
    adaptive = Owned(KINDS["adaptive"].cell())
    checkpoint = {parameter.name: parameter for parameter in adaptive.get_parameters()}
    checkpoint |= {other: Parameter(Tensor(9, mindspore.int32), name=other) for other in ("step_num", "epoch_num")}
    checkpoint["learning_rate"] = Parameter(Tensor(9, mindspore.int32), name="learning_rate")
    owned = Owned(RuleLossScaleUpdateCell(rule_with({field: int32}, name=name), 2.0**16))
    mindspore.load_param_into_net(owned, checkpoint)
    owned.set_train()
    assert owned.update_cell.state()[field] == 0


def test_inspect_shows_no_number_under_another_name(tmp_path):
    saved(rule_before(), tmp_path, "ckpt")
    renamed = type(rule_of_form("a renamed part"))
    [shown] = read_checkpoints(tmp_path, rules=[renamed])
    assert (shown.values["evil"], shown.values["level"]) == (None, 5.0)
    assert any("layout of the rule reshaped" in problem for problem in shown.problems)
    [shown] = read_checkpoints(tmp_path, rules=[type(rule_before())])
    assert (shown.values["bad"], shown.problems) == (5, [])


LADDER = {"max_scale_window": 100, "min_scale_window": 20}


@pytest.fixture(scope="module", params=["constant", "schedule"])
def stock(request, tmp_path_factory):
    """Train with MindFormers' own cells; return the checkpoint and the counters of MindFormers' update cell."""
    with mindspore_mode("graph"):
        dense, rate = Dense(), 0.01 if request.param == "constant" else nn.ExponentialDecayLR(0.01, 0.9, 4)
        cell = mindformers.wrapper.AdaptiveLossScaleUpdateCell(2.0**16, 2, 20, **LADDER)
        optimizer = nn.Adam(dense.layer.trainable_params(), learning_rate=rate)
        step = mindformers.wrapper.MFTrainOneStepCell(dense.network, optimizer, scale_sense=cell)
        step.ascend_910b_target, step.enable_allfinite = True, False
        step.set_train()
        for number in range(60):
            step(*dense.batch(number in (3, 9)))
    file = str(tmp_path_factory.mktemp("stock") / "stock.ckpt")
    mindspore.save_checkpoint(step, file)
    checkpoint = mindspore.load_checkpoint(file)
    assert ("loss_scaling_manager.cur_iter" in checkpoint) == (request.param == "constant")
    attributes = ("scale_window", "list_index", "window_up_count", "window_down_count", "cur_iter")
    return checkpoint, [int(getattr(cell, name).asnumpy()) for name in (*attributes, "last_overflow_iter")]


@pytest.mark.parametrize("loads_into", ["train step", "optimizer"])
def test_mindformers_own_state_goes_on_on_its_ladder(stock, loads_into):
    checkpoint, counters = stock
    cell = AdaptiveLossScaleUpdateCell(2.0**16, 2, 20, **LADDER)
    dense = Dense()
    optimizer = nn.Adam(dense.layer.trainable_params(), learning_rate=0.01)
    step = MFTrainOneStepCell(dense.network, optimizer, scale_sense=cell)
    mindspore.load_param_into_net(step if loads_into == "train step" else optimizer, checkpoint)
    if loads_into == "optimizer":
        # The loss scale is not part of the optimizer, so MindFormers restores it separately. Do the same here.
        step.scale_sense.set_data(checkpoint["scale_sense"])
    # Warnings are errors, so this also checks that set_train() gives no warning.
    step.set_train()
    names = ("scale_window", "window_index", "growth_num", "down_num", "cur_iter", "last_overflow_iter")
    assert [cell.state()[name] for name in names] == counters
    assert float(step.scale_sense) == cell.state()["loss_scale"] == float(checkpoint["scale_sense"])
    assert counters[4] == 61
    assert not {"cur_iter", "window_up_count"} & set(step.parameters_dict())


def test_checkpoint_without_windows_starts_the_ladder_afresh():
    for last_event, is_afresh in ((480, False), (300, True)):
        owned = Owned(AdaptiveLossScaleUpdateCell(2.0**16, 2, 100, min_scale_window=100))
        counters = {"current_iterator_step": 501, "last_overflow_iterator_step": last_event}
        assert counters.keys() <= nn.DynamicLossScaleUpdateCell(2, 2, 3).parameters_dict().keys()
        checkpoint = {name: Parameter(Tensor(number, mindspore.int32), name=name) for name, number in counters.items()}
        mindspore.load_param_into_net(owned, checkpoint)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            owned.set_train()
        assert ["no window" in str(warning.message) for warning in caught] == [True] * is_afresh
        state = owned.update_cell.state()
        assert (state["scale_window"], state["last_overflow_iter"]) == (100, 500 if is_afresh else last_event)


def test_dynamic_checkpoint_starts_another_rules_state_afresh():
    step = Dense().train_step(CELLS["guided"]())
    counters = {"current_iterator_step": 501, "last_overflow_iterator_step": 300}
    checkpoint = {name: Parameter(Tensor(number, mindspore.int32), name=name) for name, number in counters.items()}
    checkpoint["scale_sense"] = Parameter(Tensor(2.0**8, mindspore.float32), name="scale_sense")
    mindspore.load_param_into_net(step, checkpoint)
    with pytest.warns(UserWarning, match="has 500 steps .*no state of .* afresh at loss scale 256"):
        step.set_train()
