"""Tests of the lab's rules: their interface, defaults, scale windows, tolerated overflows, bounds, and bad input."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from mindformers_adaptive.lab.running_rule import PRESETS, REMOVED_PRESETS, RULE_NAMES, start_rule
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from tests.shared.own_rules import Follow

# Where tests keep rules of their own.
OWN = "tests.shared.own_rules"
# Each system's argument names for the initial loss scale and the scale window. start() uses them to give every rule
# the same initial values.
NAMES = {
    name: [
        next(name_here for name_here, parameter in preset.parameters.items() if parameter.sets == what)
        for what in ("loss_scale", "scale_window")
    ]
    for name, preset in PRESETS.items()
    if name != "fixed"
}


def start(name, scale, window, **arguments):
    of_scale, of_window = NAMES[name]
    return start_rule(name, **{of_scale: scale, of_window: window, **arguments})


def replay(running, steps):
    return [running.step(step == "!") for step in steps]


@pytest.mark.parametrize(
    ("name", "scale", "window", "scale_after_a_drop"),
    [
        ("adaptive", 2.0**16, 20, 2.0**15),
        ("guided", 2.0**16, None, 2.0**6),
        ("fixed", 128.0, None, 128.0),
        ("dynamic", 2.0**24, 2000, 2.0**23),
        ("torch", 2.0**16, 2000, 2.0**15),
        ("megatron", 2.0**32, 1000, 2.0**32),
        ("deepspeed", 2.0**32, 1000, 2.0**31),
    ],
)
def test_defaults_are_those_of_the_system(name, scale, window, scale_after_a_drop):
    running = start_rule(name)
    assert (running.loss_scale, running.scale_window) == (scale, window)
    assert type(running.loss_scale) is float
    assert running.step(True) == scale_after_a_drop


@pytest.mark.parametrize("name", NAMES)
def test_clean_steps_before_raises(name):
    running = start(name, 1024.0, 3)
    assert replay(running, "." * 5) == [1024.0] * 2 + [2048.0] * 3
    running.step(True)
    scale = running.loss_scale
    assert replay(running, "." * 6) == [scale] * 2 + [2 * scale] * 3 + [4 * scale]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # In these cases, only a raise of the loss scale refills the budget of tolerated overflows. With an empty
        # budget, every overflow lowers the loss scale.
        ("megatron", {"hysteresis": 2}, ".!.vv.vvv.v..^!v"),
        ("megatron", {"hysteresis": 1}, ".v.vv.vvv.v..^vv"),
        ("deepspeed", {"delayed_shift": 2}, ".!.vv.vvv.v..^!v"),
        ("deepspeed", {"delayed_shift": 3}, ".!.!v.vvv.v..^!!"),
        # With consecutive_hysteresis, each step without overflow refills the budget of tolerated overflows.
        ("deepspeed", {"delayed_shift": 2, "consecutive_hysteresis": True}, ".!.!v.!vv.!..^!v"),
    ],
)
def test_which_overflows_are_tolerated(name, params, expected):
    assert changes(start(name, 1024.0, 3, **params), ".!.!!.!!!.!...!!") == expected


@pytest.mark.parametrize(
    ("name", "params", "smallest"),
    [
        ("adaptive", {"loss_scale_value": 4.0, "min_loss_scale": 0.5}, 0.5),
        ("dynamic", {}, 1.0),
        ("torch", {}, 0.0),
        ("megatron", {"hysteresis": 1}, 1.0),
        ("megatron", {"hysteresis": 1, "min_scale": 0.1}, float(np.float32(0.1))),
        ("deepspeed", {}, 1.0),
    ],
)
def test_many_overflows_end_at_the_floor(name, params, smallest):
    running = start_rule(name, **params) if name == "adaptive" else start(name, 1024.0, 10, **params)
    assert replay(running, "!" * 3000)[-1] == smallest


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_beyond_float32_is_inf_or_is_not_taken(name):
    running = start(name, 2.0**125, 1)
    # DeepSpeed's scale is a Python number.
    beyond = {"torch": 2.0**127, "deepspeed": 2.0**128}.get(name, math.inf)
    assert replay(running, "...")[1:] == [2.0**127, beyond]
    assert replay(running, "." * 1000)[-1] == (beyond if name == "torch" else math.inf)


@pytest.mark.parametrize(
    ("name", "params", "drop", "growth"),
    [
        ("adaptive", {"scale_factor": 3}, lambda s: s * (np.float32(1) / np.float32(3)), 3),
        ("dynamic", {"scale_factor": 3}, lambda s: s * (np.float32(1) / np.float32(3)), 3),
        ("megatron", {"hysteresis": 1, "backoff_factor": 0.8}, lambda s: s * np.float32(0.8), 2),
        # PyTorch's kernel multiplies by 0.8 as a double. With 0.8 as a float32, the products would differ.
        ("torch", {"backoff_factor": 0.8}, lambda s: np.float32(float(s) * 0.8), 2),
        # DeepSpeed computes with Python numbers.
        ("deepspeed", {"scale_factor": 3}, lambda s: s / 3.0, 3),
    ],
)
def test_arithmetic_is_that_of_the_system_in_its_order(name, params, drop, growth):
    window = {"max_scale_window": 1, "min_scale_window": 1, "loss_scale_value": 2.0**60}
    running = start_rule(name, **window, **params) if name == "adaptive" else start(name, 2.0**60, 1, **params)
    number = float if name == "deepspeed" else np.float32
    expected = number(2.0**60)
    for step in "!" * 20 + "." * 5 + "!" * 20:
        expected = drop(expected) if step == "!" else expected * number(growth)
        assert running.step(step == "!") == float(expected)


def test_replay_goes_on_where_deepspeed_would_stop():
    running = start_rule("deepspeed", init_scale=2.0, scale_window=2)
    seen = [(running.step(overflow), running.stopped) for overflow in (True, True, False, False)]
    assert seen == [(1.0, False), (1.0, True), (1.0, True), (2.0, True)]
    running = start_rule("deepspeed", init_scale=2.0, raise_error_at_min_scale=False)
    assert (replay(running, "!!!"), running.stopped) == ([1.0] * 3, False)
    # delayed_shift=2 tolerates the first overflow, so only the second one at the smallest loss scale stops training.
    running = start_rule("deepspeed", init_scale=1.0, delayed_shift=2)
    assert [(running.step(True), running.stopped) for _ in "!!"] == [(1.0, False), (1.0, True)]


ADAPTIVE = AdaptiveRule(max_scale_window=4, min_scale_window=2, hysteresis=2, min_loss_scale=0.5)


@pytest.mark.parametrize(
    ("named", "rule", "start"),
    [
        ("adaptive", ADAPTIVE, {"scale_window": 3}),
        ("guided", GuidedRule(5, max_loss_scale=2.0**30), {}),
        (f"{OWN}.Follow", Follow(margin=3, max_loss_scale=2.0**30), {}),
        (Follow, Follow(margin=3), {}),
    ],
)
def test_a_rule_is_started_by_its_name_or_its_class(named, rule, start):
    name = named if isinstance(named, str) else "follow"
    running, state = start_rule(named, loss_scale_value=64.0, **rule.arguments, **start), rule.start(64.0, **start)
    assert running.name == name
    for step, mark in enumerate(("!!!" + "." * 40 + "!!!!.!!" + "." * 10) * 5):
        gradient = None if mark == "!" else 0.3 + 0.01 * (step % 7)
        state = rule.step(state, mark == "!", gradient)
        assert running.step(mark == "!", gradient) == state.loss_scale
        assert running.scale_window == getattr(state, "scale_window", None)
        assert running.state() == state._asdict()


# Windows and tolerances are small, so that short sequences of overflows reach every branch.
SMALL = {
    "adaptive": {"max_scale_window": 2, "min_scale_window": 1, "hysteresis": 2},
    "guided": {"loss_scale_value": 4.0, "margin": 1},
    "fixed": {},
    "deepspeed": {"init_scale": 4.0, "scale_window": 2, "delayed_shift": 2},
    "megatron": {"initial_scale": 4.0, "growth_interval": 2, "hysteresis": 2},
}


@pytest.mark.parametrize("name", RULE_NAMES)
def test_state_is_all_that_a_rule_remembers(name):
    after = {}
    for steps in itertools.product(".!", repeat=7):
        running = start_rule(name, **SMALL[name]) if name in SMALL else start(name, 4.0, 2)
        for step in steps:
            before = tuple(running.state().items())
            running.step(step == "!")
            assert all(type(value) in (int, float, bool, tuple, type(None)) for value in running.state().values())
            assert after.setdefault((before, step), running.state()) == running.state()
    assert running.state()["loss_scale"] == running.loss_scale


@pytest.mark.parametrize(
    ("name", "params", "error", "message"),
    [
        (f"{OWN}.Nothing", {}, ValueError, r"'tests.shared.own_rules.Nothing' cannot be imported"),
        (f"{OWN}.NoRule", {}, TypeError, r"'rule' must be .* such a class, but got '.*NoRule'"),
        (f"{OWN}.Follow", {"margins": 1}, TypeError, r"own_rules.Follow' has no parameter 'margins'.* 'margin'\?"),
        ("adaptiv", {}, ValueError, r"'name' must be .* adaptive, guided, .* 'adaptiv'\. .* 'adaptive'\?"),
        ("torch", {"init_scal": 2}, TypeError, r"no parameter 'init_scal'. .*'init_scale'\? .* init_scale, "),
        ("adaptive", {"hysteresis": 0}, ValueError, r"'hysteresis' must be at least 1, but got 0"),
        ("fixed", {"loss_scale": 2, "loss_scale_value": 2}, TypeError, r"'loss_scale_value' and 'loss_scale' .* one"),
        ("dynamic", {"loss_scale_value": 0}, ValueError, r"'loss_scale_value' must be .* above 0 .* but got 0"),
        ("torch", {"init_scale": 1e39}, ValueError, r"'init_scale' must be a finite .* in float32, but got 1e\+39"),
        ("torch", {"init_scale": "2e16"}, TypeError, r"'init_scale' must be .* but got '2e16' of type str"),
        ("torch", {"growth_factor": 1}, ValueError, r"'growth_factor' must be .* above 1 .* got 1\. .* 2\."),
        ("torch", {"backoff_factor": 1.0}, ValueError, r"'backoff_factor' must be .* between 0 and 1 .* got 1\.0\."),
        ("torch", {"growth_interval": 0}, ValueError, r"'growth_interval' must be at least 1, but got 0"),
        ("megatron", {"min_scale": 0}, ValueError, r"'min_scale' must be .* above 0 .* got 0\. .* 2\^32"),
        ("megatron", {"initial_scale": 1, "min_scale": 2}, ValueError, r"'initial_scale' must be .* 'min_scale' \(2.0"),
        ("deepspeed", {"min_scale": -1}, ValueError, r"'min_scale' must be .* at least 0 .* got -1\."),
        ("deepspeed", {"consecutive_hysteresis": 1}, TypeError, r"'consecutive_hysteresis' must be True or False"),
    ],
)
def test_bad_arguments_are_refused(name, params, error, message):
    with pytest.raises(error, match=message):
        start_rule(name, **params)


@pytest.mark.parametrize("name", REMOVED_PRESETS)
def test_a_rule_that_is_gone_names_the_nearest_one(name):
    with pytest.raises(ValueError, match=rf"'{name}' was removed\.") as refusal:
        start_rule(name, init_scale=4.0)
    nearest = str(refusal.value).rpartition(" ")[2].removesuffix(".")
    assert nearest in PRESETS


def changes(running, steps):
    """Return a character for each step: "v" if an overflow lowered the loss scale, "^" if a clean step raised it."""
    marks = ""
    for step in steps:
        before = running.loss_scale
        after = running.step(step == "!")
        marks += "v" if after < before else "^" if after > before else step
    return marks


# In the events of a case, "." is a step without overflow and "!" an overflow. Each expected scale is the loss scale
# after a step.
PEER_CASES = json.loads(Path(__file__).with_name("peer_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", PEER_CASES, ids=lambda case: f"{case['rule']}-{case['path'].rpartition('::')[2]}")
def test_case_comes_out_exactly(case):
    running = start_rule(case["rule"], **case["params"])
    assert [running.step(step == "!") for step in case["steps"]] == case["expected_scale"]


def test_every_rule_of_another_system_has_a_case_of_its_suite():
    # DeepSpeed's tests never test ZeRO's loss scaler class alone, so the rule "deepspeed" has no case from them.
    covered = {case["rule"] for case in PEER_CASES}
    assert set(RULE_NAMES) - covered == {"adaptive", "guided", "fixed", "deepspeed"}
