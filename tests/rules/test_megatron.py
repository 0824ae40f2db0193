"""This package's update cell takes Megatron-LM's arguments and scaler state, and then scales as Megatron-LM does."""

import contextlib
import re

import numpy as np
import pytest
import yaml
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper import build_wrapper
from mindspore import Parameter, Tensor, nn

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, register
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.rules.megatron import scale_sense_from_megatron
from mindformers_adaptive.wrapper import NoLossScaleUpdateCell

CLEAN, OVERFLOW = False, True

# These loss scales were computed by hand from the description of Megatron-LM's DynamicGradScaler. An overflow lowers
# the hysteresis tracker by one and sets the growth tracker to 0. If the hysteresis tracker is then 0 or below, the
# overflow halves the loss scale. A scale window full of clean steps doubles the loss scale and resets the hysteresis
# tracker.
BY_HAND = [
    # With the default hysteresis of 2, the first overflow does not change the loss scale. Every later overflow halves
    # the loss scale, until a raise.
    ("--hysteresis 2", 64, 3, [OVERFLOW, OVERFLOW, OVERFLOW], [64, 32, 16]),
    # Clean steps reset the hysteresis tracker only when they fill the scale window. So the second overflow halves the
    # loss scale, although there are clean steps before it.
    ("--hysteresis 2", 64, 3, [OVERFLOW, CLEAN, CLEAN, OVERFLOW, CLEAN, OVERFLOW], [64, 64, 64, 32, 32, 16]),
    # A raise of the loss scale resets the hysteresis tracker.
    ("--hysteresis 2", 64, 2, [OVERFLOW, OVERFLOW, CLEAN, CLEAN, OVERFLOW, OVERFLOW], [64, 32, 32, 64, 64, 32]),
    # An overflow restarts the scale window even if it does not lower the loss scale.
    ("--hysteresis 2", 64, 3, [CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN, CLEAN], [64, 64, 64, 64, 64, 128]),
    ("--hysteresis 3", 64, 9, [OVERFLOW] * 5, [64, 64, 32, 16, 8]),
    ("--hysteresis 1", 64, 1, [CLEAN, CLEAN, OVERFLOW, CLEAN], [128, 256, 128, 256]),
    ("--min-loss-scale 16", 64, 4, [OVERFLOW] * 5, [64, 32, 16, 16, 16]),
    # The backoff factor is not the reciprocal of the growth factor.
    ("--growth-factor 4 --backoff-factor 0.5 --hysteresis 1", 64, 1, [OVERFLOW, CLEAN, OVERFLOW], [32, 128, 64]),
    ("--growth-factor 2 --backoff-factor 0.25", 64, 2, [OVERFLOW, OVERFLOW, CLEAN, CLEAN], [64, 16, 16, 32]),
]


def cell_from(arguments):
    section = scale_sense_from_megatron(arguments)
    assert section.pop("type") == "AdaptiveLossScale"
    return AdaptiveLossScaleUpdateCell(**section)


def path_of(cell, overflows):
    """Return the loss scale after each step of the cell's rule, from the state of the cell."""
    state = cell.rule_state()
    return [(state := cell.rule.step(state, overflow)).loss_scale for overflow in overflows]


@pytest.mark.parametrize(("options", "initial", "window", "overflows", "expected"), BY_HAND)
def test_cell_takes_the_steps_of_the_description(options, initial, window, overflows, expected):
    arguments = f"--fp16 --initial-loss-scale {initial} --loss-scale-window {window} {options}"
    assert path_of(cell_from(arguments), overflows) == expected


# In Megatron-LM, a loss scale of 0 means dynamic loss scaling.
@pytest.mark.parametrize("arguments", ["--fp16", "--fp16 --loss-scale 0"])
def test_defaults_are_those_of_megatron(arguments):
    assert scale_sense_from_megatron(arguments) == {
        "type": "AdaptiveLossScale",
        "loss_scale_value": 2.0**32,
        "scale_factor": 2,
        "scale_window": 1000,
        "max_scale_window": 1000,
        "min_scale_window": 1000,
        "min_loss_scale": 1.0,
        "hysteresis": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "loss_scale"),
    [
        ("--fp16 --loss-scale 1024", 1024.0),
        ("--bf16 --loss-scale=4096 --hysteresis 3", 4096.0),
        ("--use-distributed-optimizer --loss-scale 2", 2.0),
    ],
)
def test_constant_scale_becomes_a_fixed_scale(arguments, loss_scale):
    # With a constant scale, Megatron-LM skips overflowed steps too, like a train-step cell with this update cell.
    section = scale_sense_from_megatron(arguments)
    assert section == {"type": "FixedLossScaleUpdateCell", "loss_scale_value": loss_scale}
    cell = build_wrapper(MindFormerConfig(**section))
    assert (type(cell), cell.get_loss_scale()) == (nn.FixedLossScaleUpdateCell, loss_scale)


@pytest.mark.parametrize("mode", ["", "--bf16", "--fp16 --loss-scale 8", "--fp16"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--initial-loss-scale nan", "must be finite and above 0 .* got nan"),
        ("--initial-loss-scale -1", "must be finite and above 0 .* got -1"),
        ("--min-loss-scale nan", "must be finite and above 0 .* got nan"),
        ("--loss-scale-window 0", "must be a whole number .* got 0.0"),
        ("--loss-scale-window 10.5", "must be a whole number .* got 10.5"),
        ("--loss-scale-window nan", "must be a whole number .* got nan"),
        ("--hysteresis 0", "must be at least 1, but got 0"),
        ("--growth-factor 1", "must be .*number above 1 .* got 1.0. Megatron-LM's is 2"),
        ("--growth-factor nan", "must be .*number above 1 .* got nan"),
        ("--backoff-factor 1", "must be a number between 0 and 1 .* got 1.0. Megatron-LM's is 0.5"),
    ],
)
def test_a_value_out_of_range_is_refused_in_every_mode(mode, option, message):
    with pytest.raises(ValueError, match=f"'{option.split()[0]}' {message}"):
        scale_sense_from_megatron(f"{mode} {option}")


@pytest.mark.parametrize("arguments", ["--fp16 --bf16", "--bf16 --loss-scale 1024 --fp16"])
def test_two_formats_at_once_are_refused(arguments, run_program):
    with pytest.raises(ValueError, match=r"'--fp16' and '--bf16' must not .* Leave one out"):
        scale_sense_from_megatron(arguments)
    code, printed, errors = run_program("megatron", *arguments.split())
    assert (code, printed, "'--fp16' and '--bf16'" in errors) == (2, "", True)


def test_bounds_of_a_scale_that_does_not_move_are_ignored():
    section = scale_sense_from_megatron("--fp16 --loss-scale 8 --min-loss-scale 64 --initial-loss-scale 16")
    assert section == {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 8.0}


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [
        *(("--loss-scale", value, near) for value, near in (("1000", 1024), ("1024.5", 1024), ("3", 4), ("0.5", 1))),
        ("--initial-loss-scale", "65535", 65536),
    ],
)
def test_a_scale_that_is_no_power_of_two_is_warned_of(option, value, near):
    with pytest.warns(UserWarning, match=f"'{option}' must be a power .* got {float(value)}: .* is {near}"):
        section = scale_sense_from_megatron(f"--fp16 {option} {value}")
    assert section["loss_scale_value"] == float(value)


def test_the_program_prints_the_warning_beside_the_section(run_program):
    code, printed, errors = run_program("megatron", "--fp16", "--loss-scale", "1000")
    assert (code, yaml.safe_load(printed)["runner_wrapper"]["scale_sense"]["loss_scale_value"]) == (0, 1000.0)
    assert re.match("warning: '--loss-scale' must be a power .* 1000", errors)


@pytest.mark.parametrize(
    "arguments", ["--bf16", "--tensor-model-parallel-size 2", "--loss-scale 1024", "--bf16 --loss-scale 0"]
)
def test_without_a_gradient_scaler_nothing_is_scaled(arguments):
    section = scale_sense_from_megatron(arguments)
    assert section == {"type": "NoLossScaleUpdateCell"}
    register()
    assert type(build_wrapper(MindFormerConfig(**section))) is NoLossScaleUpdateCell


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fp16 --initial-loss-scale 1 --min-loss-scale 2", "'--min-loss-scale' must not be above"),
        ("--fp16 --hysteresis two", "Megatron-LM would refuse these arguments: .*--hysteresis"),
        ("--loss-scale", "Megatron-LM would refuse these arguments: .*--loss-scale"),
        ("--loss-scale -2", "'--loss-scale' must be finite and above 0"),
    ],
)
def test_bad_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        scale_sense_from_megatron(arguments)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_cell_goes_on_from_megatron_and_back(graph_mode, hysteresis):
    overflows = np.random.default_rng(3).random(100) < 0.25
    cell = cell_from(f"--fp16 --loss-scale-window 4 --hysteresis {hysteresis}")
    loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
    cell.bind_loss_scale(loss_scale)
    for steps in (0, 7, 23, 60):
        running = start_rule("megatron", initial_scale=2.0**20, growth_interval=4, hysteresis=hysteresis)
        for overflow in overflows[:steps]:
            running.step(bool(overflow))
        state = running.state()
        trackers = {"growth_tracker": state["clean_steps"], "hysteresis_tracker": hysteresis - state["overflows"]}
        with pytest.warns(UserWarning, match="taken steps") if steps else contextlib.nullcontext():
            cell.load_state_dict({"scale": np.array([state["loss_scale"]]), **trackers})
        assert cell.get_loss_scale() == float(loss_scale) == state["loss_scale"]
        for overflow in overflows[steps : steps + 30]:
            cell(loss_scale, Tensor(bool(overflow)))
            left = cell.state_dict()
            assert float(loss_scale) == left["scale"] == running.step(bool(overflow)), steps
            assert left["growth_tracker"] == running.state()["clean_steps"]
            # Once the hysteresis tracker is 1 or less, every overflow lowers the loss scale. Megatron-LM goes on
            # counting down, even below 0. So this test treats all values of the tracker up to 1 as equal.
            assert max(left["hysteresis_tracker"], 1) == max(hysteresis - running.state()["overflows"], 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale": float("inf")}, ValueError, "'scale' inf; .*must be finite .*set 'scale'"),
        ({"growth_tracker": -1}, ValueError, "'growth_tracker' must be at least 0"),
        ({"hysteresis_tracker": 3}, ValueError, "Give the 'hysteresis' with which Megatron-LM was started"),
    ],
)
def test_bad_state_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        cell_from("--fp16").load_state_dict({"scale": 64.0, "growth_tracker": 1, "hysteresis_tracker": 1, **changes})


def test_a_tracker_below_zero_is_a_spent_budget():
    # After its budget of tolerated overflows is spent, Megatron-LM's hysteresis tracker falls below 0.
    cell = AdaptiveLossScaleUpdateCell(2.0**20, 2, 1, max_scale_window=4, min_scale_window=1, hysteresis=2)
    cell.load_state_dict({"scale": 64.0, "growth_tracker": 0, "hysteresis_tracker": -3})
    assert cell.state()["hysteresis_budget"] == 0
    assert path_of(cell, [OVERFLOW, CLEAN, OVERFLOW, OVERFLOW]) == [32.0, 64.0, 64.0, 32.0]


def test_megatrons_optimizer_state_is_taken_too():
    state = {"scale": 256.0, "growth_tracker": 12, "hysteresis_tracker": 1}
    cell = cell_from("--fp16")
    with pytest.warns(UserWarning, match="has no 'grad_scaler': .*loss scaling stays"):
        cell.load_state_dict({"optimizer": {}})
    assert cell.state()["loss_scale"] == 2.0**32
    cell.load_state_dict({"optimizer": {}, "grad_scaler": state})
    assert (cell.state()["loss_scale"], cell.state()["hysteresis_budget"]) == (256.0, 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "'state_dict' must be a dict, .*got None"),
        ("checkpoint", "'state_dict' must be a dict, .*got 'checkpoint'"),
        ({"optimizer": {}, "grad_scaler": 3}, "'grad_scaler' must be a dict, .*got 3"),
        ({"scale": None, "growth_tracker": 1, "hysteresis_tracker": 1}, "'scale' must be a number, .*got None"),
        ({"scale": 64.0, "growth_tracker": None, "hysteresis_tracker": 1}, "'growth_tracker' must be an integer"),
    ],
)
def test_what_is_no_state_is_refused(state, message):
    with pytest.raises(TypeError, match=f"{message}.* Give the (value|dict) that state_dict"):
        cell_from("--fp16").load_state_dict(state)
