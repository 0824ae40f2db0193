"""The update cell, manager and scaler of every rule take exactly the rule's steps; the history records the steps."""

import contextlib
import dataclasses
import functools
import json
import math

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.train import LambdaCallback, Model

from mindformers_adaptive.rules.fields import STEP_LIMIT
from mindformers_adaptive.rules.saved_state import all_fields, own_keys, to_values
from mindformers_adaptive.rules.state_dict import FORM, RUN
from tests.conftest import mindspore_mode
from tests.shared.every_rule import KINDS, Kind, Owned, adjust, is_same
from tests.shared.networks import Dense, batches

pytestmark = pytest.mark.slow

HISTORY = 7


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@functools.cache
def compiled(name):
    """Return the update cell of a rule, with a history, whose graph is compiled once for all tests of this file."""
    return Owned(KINDS[name].cell(history_size=HISTORY))


def at_start(name):
    """Return the compiled update cell of a rule in the rule's first state."""
    compiled(name).update_cell.write_rule_state(KINDS[name].start(), 0)
    return compiled(name)


def assert_cell_takes(owned, path, rule, before):
    """Step an update cell along ``path``; assert that the cell's states and history equal the values from the rule."""
    cell, expected, last_event = owned.update_cell, [], 0
    for number, (overflow, gradient, state) in enumerate(path, start=1):
        flag = owned.step(overflow, gradient)
        assert (flag.dtype, bool(flag)) == (mindspore.bool_, overflow)
        assert float(owned.scale_sense) == state.loss_scale, number
        last_event = number if overflow or state.loss_scale > before.loss_scale else last_event
        values = {"loss_scale": state.loss_scale, **to_values(rule, state, number, last_event)}
        values |= {"largest_gradient": gradient} if rule.needs_gradients else {}
        assert is_same(cell.state(), {name: values[name] for name in cell.state()}), number
        row = {"step": number, "overflow": overflow, "loss_scale": before.loss_scale}
        row |= {"next_loss_scale": state.loss_scale, **{name: getattr(state, name) for name in rule.recorded}}
        row |= {"skipped_steps": state.skipped_steps, "consecutive_overflows": state.consecutive_overflows}
        expected.append(row | ({"largest_gradient": gradient} if rule.needs_gradients else {}))
        before = state
    assert cell.state()["cur_iter"] == len(path) + 1
    assert cell.state()["skipped_steps"] == sum(step.overflow for step in path) > 0
    assert is_same(cell.recent_steps(), expected[-HISTORY:])
    assert is_same(cell.recent_steps(since=len(path) - 2), expected[-2:])


@pytest.mark.parametrize(("mode", "steps"), [("graph", 200), ("asynchronous", 30)])
@pytest.mark.parametrize("name", KINDS)
def test_cell_equals_the_rule_in_every_step(name, mode, steps):
    kind = KINDS[name]
    with mindspore_mode(mode):
        path = kind.path(steps, seed=1)
        owned = at_start(name) if mode == "graph" else Owned(kind.cell(history_size=HISTORY))
        assert_cell_takes(owned, path, kind.rule, kind.start())
    # The adaptive rules reach the hidden window, which is not on the ladder.
    assert -1 in {getattr(step.state, "window_index", -1) for step in path}


def test_paths_move_all_that_the_rules_keep(kind):
    states = [to_values(kind.rule, step.state, 1) for step in kind.path(200)]
    for name in ("skipped_steps", "consecutive_overflows", *kind.own_keys()):
        assert len({state[name] for state in states}) > 1, f"{name} never moved"
    assert len({step.state.loss_scale for step in kind.path(200)}) > 10


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "graph") for name in KINDS), ("guided", "pynative")], indirect=["mode"]
)
def test_scaler_equals_the_rule(name, mode):
    kind, scaler = KINDS[name], KINDS[name].scaler()
    for number, (overflow, gradient, state) in enumerate(kind.path(40 if mode == "graph" else 10), start=1):
        measured = [Tensor([0.0, -gradient], mindspore.float32)] if kind.rule.needs_gradients else []
        assert adjust(scaler, Tensor(not overflow), *measured) is True
        assert scaler.state()["loss_scale"] == float(scaler.scale_value) == state.loss_scale, number
        assert scaler.inv_scale == np.float32(1 / np.float64(state.loss_scale))
        values, state = to_values(kind.rule, state, number), scaler.update_cell.state()
        assert all(is_same(state[name], values[name]) for name in kind.own_keys()), number


def test_manager_follows_the_model_and_the_record_has_its_steps(graph_mode, scaling_on_cpu, kind, tmp_path):
    from mindformers_adaptive import LossScaleMonitor
    from mindformers_adaptive.record.writer import read_record

    manager, dense, record = kind.manager(), Dense(), tmp_path / "record.jsonl"
    states, expected = [kind.start()], []

    def compare(run_context):
        _, overflow, loss_scale = run_context.original_args().net_outputs
        state_of_cell = manager.update_cell.state()
        states.append(kind.rule.step(states[-1], bool(overflow), state_of_cell.get("largest_gradient")))
        assert manager.get_loss_scale() == float(loss_scale) == states[-1].loss_scale
        assert manager.inv_scale == np.float32(1 / states[-1].loss_scale)
        entry = {"step": len(expected) + 1, "next_loss_scale": states[-1].loss_scale, "overflow": bool(overflow)}
        names = ["skipped_steps", *kind.rule.recorded] + ["largest_gradient"] * kind.rule.needs_gradients
        expected.append(entry | {name: state_of_cell[name] for name in names})

    model = Model(dense.layer, dense.loss_fn, dense.optimizer(), amp_level="O2", loss_scale_manager=manager)
    callbacks = [LambdaCallback(on_train_step_end=compare), LossScaleMonitor(str(record))]
    model.train(1, batches(16, overflows=(8, 9)), callbacks=callbacks, dataset_sink_mode=False)
    assert [entry["overflow"] for entry in expected[8:10]] == [True, True]
    assert not all(entry["overflow"] for entry in expected)
    assert is_same([{name: entry[name] for name in expected[0]} for entry in read_record(record)], expected)

    # A manager's get_update_cell() makes a new update cell, which continues from the manager's state. The old update
    # cell no longer belongs to the manager.
    state, old = manager.state_dict(), manager.update_cell
    cell = manager.get_update_cell()
    assert is_same(cell.state_dict(), state)
    assert cell is manager.update_cell is not old
    resumed = kind.manager(loss_scale=8.0)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert is_same(resumed.get_update_cell().state_dict(), state)


def test_operators_are_not_started_from_python_again():
    """In PyNative mode too, an update of the loss scale runs as one compiled graph."""
    kind, taken = KINDS["guided"], []

    class Notes(type(kind.cell())):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name in ("assigned", "inputs"):
                taken.append(name)
            return value

    with mindspore_mode("asynchronous"):
        cell = dataclasses.replace(kind, cell_class=Notes).cell()
        loss_scale = Parameter(Tensor(cell.get_loss_scale(), mindspore.float32), name="loss_scale")
        cell(loss_scale, Tensor(True))
        assert {*taken} == {"assigned", "inputs"}
        taken.clear()
        cell(loss_scale, Tensor(True))
        assert taken == []
    assert (cell.state()["skipped_steps"], cell.state()["cur_iter"]) == (2, 3)


@pytest.mark.parametrize(("name", "mode"), [("adaptive", "graph"), ("guided", "pynative")], indirect=["mode"])
def test_a_subclass_that_adds_to_construct_updates_once(name, mode):
    kind = KINDS[name]

    class CountsCalls(type(kind.cell())):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.calls = Parameter(Tensor(0, mindspore.int32), name="calls", requires_grad=False)

        def construct(self, loss_scale, overflow):
            self.calls += 1
            return super().construct(loss_scale, overflow)

    owned = Owned(dataclasses.replace(kind, cell_class=CountsCalls).cell())
    for step in (path := kind.path(3, seed=2)):
        owned.step(step.overflow, step.largest_gradient)
    assert (int(owned.update_cell.calls), owned.update_cell.state()["cur_iter"]) == (3, 4)
    assert float(owned.scale_sense) == path[-1].state.loss_scale


@pytest.mark.parametrize("name", ["adaptive", "guided"])
def test_no_counter_wraps_after_the_most_steps(graph_mode, name):
    kind = KINDS[name]
    owned, path = at_start(name), kind.path(40)
    owned.update_cell.write_rule_state(kind.start(), STEP_LIMIT)
    assert owned.update_cell.state()["cur_iter"] == STEP_LIMIT
    for number, (overflow, gradient, state) in enumerate(path):
        owned.step(overflow, gradient)
        assert float(owned.scale_sense) == state.loss_scale, number
    counted = owned.update_cell.state()
    assert counted["cur_iter"] == STEP_LIMIT + 40
    assert counted["skipped_steps"] == path[-1].state.skipped_steps > 0


@pytest.mark.parametrize("name", ["adaptive", "guided", "log_max"])
def test_scale_stays_within_its_bounds(graph_mode, name):
    kind = KINDS[name]
    arguments = {**kind.arguments, "min_loss_scale": 2.0**-20, "max_loss_scale": None}
    kind = Kind(kind.rule_class, kind.cell_class, None, None, arguments, 2.0**10, kind.beside)
    owned, scales = Owned(kind.cell()), set()
    for overflow, gradient in [(False, 2.0**-100)] * 50 + [(False, 2.0**60)] * 3 + [(True, 0.0)] * 80:
        owned.step(overflow, gradient)
        scales.add(float(owned.scale_sense))
    assert min(scales) == kind.rule.min_loss_scale
    assert 2.0**10 < max(scales) <= kind.rule.max_loss_scale < math.inf


def test_steps_that_were_undone_are_not_told(graph_mode):
    kind = KINDS["guided"]
    owned, path = at_start("guided"), kind.path(9)
    cell = owned.update_cell
    for step in path[:3]:
        owned.step(step.overflow, step.largest_gradient)
    state = cell.state_dict()
    owned.step(True)
    owned.step(True)
    with pytest.warns(UserWarning, match="taken steps"):
        cell.load_state_dict(state)
    assert cell.recent_steps() == []
    owned.step(*path[3][:2])
    assert [step["step"] for step in cell.recent_steps()] == [4]
    owned.step(*path[4][:2])
    [_, last] = cell.recent_steps()
    assert last["next_loss_scale"] == path[4].state.loss_scale
    assert kind.cell().recent_steps() == []


def test_steps_before_a_leap_are_not_told(graph_mode):
    owned = at_start("adaptive")
    cell = owned.update_cell
    # The update cell takes steps 3 to 6, goes back and takes steps 3 and 4 again, and then leaps to step 9. The history
    # still holds rows of the earlier steps, such as step 6. recent_steps() must not return these rows.
    for steps, first in ((4, 3), (2, 3), (1, 9)):
        with pytest.warns(UserWarning, match="taken steps") if cell.recent_steps() else contextlib.nullcontext():
            cell.load_state_dict({**cell.state_dict(), "cur_iter": first, "last_overflow_iter": 0})
        for _ in range(steps):
            owned.step(False, 1.0)
    assert [step["step"] for step in cell.recent_steps()] == [9]


def test_is_a_cell_of_mindspore_without_anything_to_train(kind):
    cell = kind.cell(history_size=3)
    assert isinstance(cell, nn.DynamicLossScaleUpdateCell)
    assert cell.trainable_params() == []
    expected = {field.parameter: (field.shape, field.dtype) for field in all_fields(kind.rule)}
    expected |= dict.fromkeys((RUN, FORM), ((), "int32"))
    values = {
        name: (parameter.shape, str(parameter.dtype).lower()) for name, parameter in cell.parameters_dict().items()
    }
    assert values == {name: expected[name] for name in values}
    assert expected.keys() - values.keys() <= {"hysteresis_budget"}
    assert cell.state().keys() >= {*own_keys(kind.rule)} - {"hysteresis_budget"}
    assert {type(value) for value in cell.state().values()} <= {int, float, tuple}
