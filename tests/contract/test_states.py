"""The state of every rule is saved and loaded in every format, repaired if damaged, and shown by ``inspect``."""

import itertools
import json
import math
import re
import types
import warnings

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_adaptive.mindformers.callbacks import restores_sidecar
from mindformers_adaptive.mindformers.checkpoint_formats import FILE_NAME, read_sidecar, write_sidecar
from mindformers_adaptive.mindformers.checkpoint_reader import newest_state, read_checkpoints
from mindformers_adaptive.rules.fields import STEP_FIELDS
from mindformers_adaptive.rules.saved_state import all_fields, to_values
from mindformers_adaptive.text.files import json_text
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell
from tests.shared.every_rule import KINDS, RULES, Owned, adjust, is_same

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow]

OWNERS = ["cell", "manager", "scaler"]
FORMATS = ["ckpt", "safetensors", "sidecar"]
STEP_KEYS = [field.name for field in STEP_FIELDS]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def in_a_state(kind, steps=30, **options):
    """Return an update cell and its loss scale, set to the state after ``steps`` steps without running these steps."""
    owned = Owned(kind.cell(**options))
    write(owned, kind, kind.path(steps)[-1].state, steps)
    return owned


def write(owned, kind, state, steps):
    owned.update_cell.write_rule_state(state, steps)
    if kind.rule.needs_gradients:
        owned.update_cell.largest_gradient.set_data(Tensor(0.25))


def assert_takes_the_next_steps(owned, kind, taken=30):
    for step in kind.path(taken + 8)[taken:]:
        owned.step(step.overflow, step.largest_gradient)
        assert float(owned.scale_sense) == step.state.loss_scale
    state = owned.update_cell.state()
    assert is_same({name: state[name] for name in kind.own_keys()}, own_values(kind, step.state))
    assert (state["cur_iter"], state["skipped_steps"]) == (taken + 9, step.state.skipped_steps)


class Owner:
    """Gives update cell, manager and scaler a common method ``step``. A manager cannot step gradient-guided rules."""

    def __init__(self, kind, name):
        self.kind = kind
        self.stepped = Owned(kind.cell(loss_scale=8.0)) if name == "cell" else getattr(kind, name)(loss_scale=8.0)
        self.state_owner = self.stepped.update_cell if name == "cell" else self.stepped
        needs_gradients = kind.rule.needs_gradients
        self.step = {
            "cell": lambda step: self.stepped.step(*step[:2]),
            "manager": lambda step: None if needs_gradients else self.stepped.update_loss_scale(step.overflow),
            "scaler": lambda step: adjust(
                self.stepped, Tensor(not step.overflow), *([Tensor([step.largest_gradient])] if needs_gradients else [])
            ),
        }[name]
        self.can_step = name != "manager" or not needs_gradients

    def load(self, state):
        self.state_owner.load_state_dict(json.loads(json.dumps(state)))
        assert is_same(self.state_owner.state_dict(), state)


def test_each_goes_on_from_the_state_of_each(kind):
    path, state = kind.path(42), in_a_state(kind).update_cell.state_dict()
    following = iter(path[30:])
    for name in ("manager", "cell", "scaler"):
        owner = Owner(kind, name)
        owner.load(state)
        for step in itertools.islice(following, 4) if owner.can_step else ():
            owner.step(step)
            assert owner.state_owner.state_dict()["scale"] == step.state.loss_scale
        state = owner.state_owner.state_dict()
        assert all(type(number) in (int, float) for number in state.values())
        for target in OWNERS:
            resumed = Owner(kind, target)
            resumed.load(state)
            if target == "manager":
                assert is_same(resumed.stepped.get_update_cell().state_dict(), state)


def test_cell_goes_on_from_loaded_parameters(kind, tmp_path):
    owned, file, resumed = in_a_state(kind), str(tmp_path / "all.ckpt"), kind.cell(loss_scale=8.0)
    # A Parameter of the network may have the same name as a field of the rule's state.
    network = {name: Tensor(np.ones((2, 3), np.float32)) for name in kind.own_keys() if name not in named(owned)}
    mindspore.save_checkpoint(owned, file, append_dict=network)
    resumed.load_state_dict(mindspore.load_checkpoint(file))
    assert is_same(resumed.state(), owned.update_cell.state())


def named(owned):
    return {parameter.name for parameter in owned.get_parameters()}


def test_a_manager_hands_on_a_state_that_counts_no_step_yet():
    manager = KINDS["adaptive with hysteresis"].manager()
    # Megatron-LM's scaler saves these values after one overflow. It saves no count of steps.
    manager.load_state_dict({"scale": 2.0**16, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert manager.get_update_cell().state()["hysteresis_budget"] == 1


def save(owned, folder, form):
    """Save a checkpoint in the format ``form``; return a function that restores it as MindFormers would."""
    if form != "sidecar":
        file = str(folder / f"saved.{form}")
        mindspore.save_checkpoint(owned, file, format=form)
        return lambda resumed: mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(file, format=form))
    write_sidecar(folder, float(owned.scale_sense), {**owned.update_cell.state(), "from_a_later_version": 1})

    def restore(resumed):
        resumed.scale_sense.set_data(Tensor(read_sidecar(folder)[0], mindspore.float32))
        optimizer = types.SimpleNamespace(loss_scaling_manager=resumed.update_cell)
        restores_sidecar(lambda checkpoint, network, optimizer: None)(str(folder), None, optimizer)

    return restore


@pytest.mark.parametrize("form", FORMATS)
def test_a_saved_state_goes_on_and_inspect_shows_each_value(kind, form, tmp_path):
    owned = in_a_state(kind, history_size=4)
    resumed = Owned(kind.cell(loss_scale=8.0))
    restore = save(owned, tmp_path, form)
    restore(resumed)
    resumed.set_train()
    assert is_same(resumed.update_cell.state_dict(), owned.update_cell.state_dict())
    if form == "ckpt":
        assert_takes_the_next_steps(resumed, kind)
    # A checkpoint does not depend on history_size, and does not restore the recorded steps.
    other = Owned(kind.cell(history_size=9))
    assert restore(other) in (None, ([], []))
    assert other.update_cell.recent_steps() == []
    shown, state = newest_state(tmp_path, rules=[RULES[-1]]), json.loads(json.dumps(owned.update_cell.state()))
    assert (shown["kind"], shown["loss_scale"], shown["notes"]) == (kind.rule.name, float(owned.scale_sense), [])
    assert is_same({name: shown[name] for name in state}, state)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("overflow", [False, True], ids=["nothing is shown", "the lowest scale overflows"])
def test_a_state_that_looks_like_a_start_is_none(kind, overflow, form, tmp_path):
    state = kind.rule.start(kind.rule.min_loss_scale if overflow else kind.loss_scale)
    for steps in range(1, 25):
        state = kind.rule.step(state, overflow, 0.0)
        if steps not in (1, 2, 3, 4, 5, 8, 13, 24):
            continue
        owned, resumed = Owned(kind.cell(loss_scale=state.loss_scale)), Owned(kind.cell())
        owned.update_cell.write_rule_state(state, steps)
        save(owned, tmp_path, form)(resumed)
        # Warnings are errors, so this also checks that restoring the state gives no warning.
        resumed.set_train()
        assert is_same(resumed.update_cell.state_dict(), owned.update_cell.state_dict()), steps


@pytest.mark.parametrize("form", ["ckpt", "sidecar"])
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(RULES, 2)))
def test_each_rule_goes_on_from_a_checkpoint_of_each_other(source, target, form, tmp_path):
    kind, other = (next(kind for kind in KINDS.values() if kind.rule_class is each) for each in (target, source))
    saved = in_a_state(other)
    scale = min(max(float(saved.scale_sense), kind.rule.min_loss_scale), kind.rule.max_loss_scale)
    saved.scale_sense.set_data(Tensor(scale, mindspore.float32))
    saved.update_cell.last_overflow_iter.set_data(Tensor(25, mindspore.int32))
    owned = Owned(kind.cell(loss_scale=8.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(saved, tmp_path, form)(owned)
        owned.set_train()
    [warned] = [str(each.message) for each in caught]
    assert re.search(r"no state of .* starts afresh|steps but no window, .* starts afresh", warned)
    state, counted = owned.update_cell.state(), saved.update_cell.state()
    assert float(owned.scale_sense) == scale
    assert state["last_overflow_iter"] == 30
    names = [name for name in STEP_KEYS if name != "last_overflow_iter"]
    assert [state[name] for name in names] == [counted[name] for name in names]
    fresh = kind.rule.start(scale)._replace(
        skipped_steps=counted["skipped_steps"], consecutive_overflows=counted["consecutive_overflows"]
    )
    assert is_same({name: state[name] for name in kind.own_keys()}, own_values(kind, fresh))


def own_values(kind, state):
    values = to_values(kind.rule, state, 0)
    return {name: values[name] for name in kind.own_keys()}


def damages(kind):
    """Yield (field, index, value) for each element of each state field, with values that no run can reach there."""
    for field in all_fields(kind.rule_class):
        if field.name == "largest_gradient" or (field.name == "hysteresis_budget" and kind.rule.hysteresis == 1):
            continue
        values = (-(2**31), 2**30 + 1, 2**31 - 1) if field.dtype == "int32" else (math.nan, math.inf, -math.inf)
        for value in (*values, -5) if field.name in STEP_KEYS else values:
            for index in range(field.shape[0]) if field.shape else [()]:
                yield field, index, value


def test_damaged_state_is_repaired_with_a_warning(kind):
    owned, good = in_a_state(kind), kind.path(30)[-1].state
    cell = owned.update_cell
    for field, index, value in damages(kind):
        write(owned, kind, good, 30)
        parameter = getattr(cell, field.name)
        array = parameter.asnumpy().copy()
        array[index] = value
        parameter.set_data(Tensor(array))
        with pytest.warns(UserWarning, match="The checkpoint has") as caught:
            cell.set_train()
        assert len(caught) <= 3
        before = cell.state()
        assert all(np.isfinite(np.float64(before[name])).all() for name in kind.own_keys()), (field.name, index, value)
        assert not np.any(np.asarray(getattr(cell, field.name).asnumpy() == value)), (field.name, index, value)
        # Another repair changes nothing, and the rule goes on.
        cell.set_train()
        assert is_same(cell.state(), before)
        after = kind.rule.step(kind.rule.step(cell.rule_state(), True, 0.25), False, 0.25)
        assert after.skipped_steps == before["skipped_steps"] + 1
        assert all(np.isfinite(np.float64(value)).all() for value in own_values(kind, after).values())
        assert kind.rule.min_loss_scale <= after.loss_scale <= kind.rule.max_loss_scale


def test_a_sidecar_that_holds_something_else_ends_no_training(kind, tmp_path):
    good = json.loads(json.dumps(in_a_state(kind).update_cell.state()))
    del good["loss_scale"]
    for name, value in good.items():
        not_the_value = [[], [1], [[1]], 2**40, 2.5, -(2**31), math.inf, "x", None]
        not_the_value += [value[:-1], [*value, 0.5], [*value[:-1], [1]], 5] if isinstance(value, list) else []
        for other in not_the_value:
            resumed = Owned(kind.cell(loss_scale=8.0))
            content = {"format": 1, "loss_scale": 8.0, "state": {**good, name: other}}
            (tmp_path / FILE_NAME).write_text(json_text(content))
            optimizer = types.SimpleNamespace(loss_scaling_manager=resumed.update_cell)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                restores_sidecar(lambda checkpoint, network, optimizer: None)(str(tmp_path), None, optimizer)
                resumed.set_train()
            is_such_a_number = isinstance(value, float) and isinstance(other, int | float)
            assert is_such_a_number or caught, (name, other)
            assert all(re.search("cannot be used|The checkpoint has", str(warning.message)) for warning in caught)
            assert len(read_checkpoints(tmp_path, rules=[RULES[-1]])) == 1


def test_run_without_state_is_warned_of_in_its_rules_words(kind):
    network = nn.Dense(3, 2)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)
    optimizer.global_step.set_data(Tensor([1], mindspore.int32))
    step = TrainOneStepWithLossScaleCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, kind.cell())
    with pytest.warns(UserWarning, match=f" 1 applied steps .*no state of {kind.rule.title}: .*loss scale") as caught:
        step.set_train()
    [message] = [str(warning.message) for warning in caught]
    assert not any(rule.title in message for rule in RULES if rule.title != kind.rule.title)
    assert ("fresh ladder" in message) == (kind.rule.name == "adaptive")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_damaged_loss_scale_is_an_error_that_names_it(kind, scale):
    owned = in_a_state(kind)
    owned.scale_sense.set_data(Tensor(scale, mindspore.float32))
    owned.update_cell.cur_iter.set_data(Tensor(77, mindspore.int32))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"'scale_sense' {scale}; .* above 0.* set 'scale_sense'"):
            owned.set_train()


@pytest.mark.parametrize("owner", OWNERS)
def test_a_state_dict_that_cannot_be_used_changes_nothing(kind, owner):
    state_owner = Owner(kind, owner).state_owner
    before = state_owner.state_dict()
    refused = [
        ({"scale": 0.0}, ValueError, r"'scale' 0\.0; .* above 0.* set 'scale'"),
        ({"scale": math.nan}, ValueError, "'scale' nan; .* above 0.* set 'scale'"),
        ({"scale": 10**400}, ValueError, r"'scale' must be .*float32 can hold.* state_dict\(\)"),
        ({"scale": np.array([1.0, 2.0])}, TypeError, r"'scale' must be a number.* got array\(\[1., 2.\]\)"),
    ]
    counts = [key for field in (*kind.rule.fields, *STEP_FIELDS) if field.dtype == "int32" for key in field.keys]
    for name in counts:
        if name in before:
            refused += [
                ({name: 2.5}, TypeError, f"'{name}' must be an integer.* got 2.5"),
                ({name: True}, TypeError, f"'{name}' must be an integer.* got True"),
                ({name: Tensor([1, 2])}, TypeError, f"'{name}' must be an integer.* got Tensor"),
                ({name: 2**31}, ValueError, f"'{name}' must fit into 32 bits, but got 2147483648"),
                ({name: 2**40}, ValueError, f"'{name}' must fit into 32 bits, but got 1099511627776"),
                ({name: -(2**31) - 1}, ValueError, f"'{name}' must fit into 32 bits"),
            ]
    for changes, error, message in refused:
        with pytest.raises(error, match=message):
            state_owner.load_state_dict({**before, **changes})
    with pytest.raises(KeyError, match="has no 'scale'"):
        state_owner.load_state_dict({name: value for name, value in before.items() if name != "scale"})
    with pytest.raises(KeyError, match="It lacks 'growth_tracker', 'hysteresis_tracker'"):
        state_owner.load_state_dict({"scale": 8.0})
    assert is_same(state_owner.state_dict(), before)


def test_missing_parts_of_a_state_warn_once(kind):
    cell, saved = kind.cell(), in_a_state(kind).update_cell.state_dict()
    before = cell.state()
    for name in kind.own_keys():
        some = {key: value for key, value in saved.items() if not key.startswith(name)}
        present = cell.state()[name]
        with pytest.warns(UserWarning, match=f"has no .*{name}|older form|steps but no|'list_index'") as caught:
            cell.load_state_dict(some)
        assert len(caught) == 1
        if "stays as it is" in str(caught[0].message):
            assert is_same(cell.state()[name], present)
    assert cell.state()["cur_iter"] == saved["cur_iter"] > before["cur_iter"]
