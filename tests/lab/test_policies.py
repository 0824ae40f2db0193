"""The policies' interface, defaults, off-by-ones, tolerances, limits, arithmetic, and bad input."""

import itertools
import math

import numpy as np
import pytest
from own_rules import Follow

from mindformers_adaptive.lab.policies import POLICY_NAMES, make_policy
from mindformers_adaptive.lab.presets import PRESETS
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule

# What each system calls its scale and its window, to start every policy alike.
NAMES = {
    name: [
        next(own for own, one in preset.parameters.items() if one.sets == what)
        for what in ("loss_scale", "scale_window")
    ]
    for name, preset in PRESETS.items()
    if name not in ("fixed", "metaseq")
}


def start(name, scale, window, **others):
    of_scale, of_window = NAMES[name]
    return make_policy(name, **{of_scale: scale, of_window: window, **others})


def replay(policy, steps):
    return [policy.step(step == "!") for step in steps]


@pytest.mark.parametrize(
    ("name", "scale", "window", "scale_after_a_drop"),
    [
        ("adaptive", 2.0**16, 20, 2.0**15),
        ("guided", 2.0**16, 500, 2.0**6),
        ("fixed", 128.0, None, 128.0),
        ("metaseq", 4.0, 256, 2.0),
        ("dynamic", 2.0**24, 2000, 2.0**23),
        ("dynamic_scaler", 2.0**24, 2000, 2.0**23),
        ("torch", 2.0**16, 2000, 2.0**15),
        ("megatron", 2.0**32, 1000, 2.0**32),
        ("deepspeed", 2.0**32, 1000, 2.0**31),
        ("deepspeed_fused", 2.0**32, 1000, 2.0**31),
        ("deepspeed_unfused", 2.0**16, 1000, 2.0**15),
        ("apex", 2.0**16, 2000, 2.0**15),
        ("apex_hysteresis", 2.0**16, 2000, 2.0**15),
        ("fairseq", 2.0**15, 2000, 2.0**14),
        ("tensorflow", 2.0**15, 2000, 2.0**14),
        ("tensorflow_contrib", 2.0**15, 2000, 2.0**15),
        ("keras", 2.0**15, 2000, 2.0**14),
        ("keras2", 2.0**15, 2000, 2.0**14),
        ("jmp", 2.0**15, 2000, 2.0**14),
        ("paddle", 2.0**16, 2000, 2.0**15),
    ],
)
def test_defaults_are_those_of_the_system(name, scale, window, scale_after_a_drop):
    policy = make_policy(name)
    assert (policy.loss_scale, policy.scale_window) == (scale, window)
    assert type(policy.loss_scale) is float
    assert policy.step(True) == scale_after_a_drop


@pytest.mark.parametrize("name", NAMES)
def test_clean_steps_before_the_first_raise_the_next_one_and_one_after_an_overflow(name):
    # The optimizers of DeepSpeed do not count the first clean step after the start and after an overflow.
    late = 1 if name in ("deepspeed_fused", "deepspeed_unfused") else 0
    policy = start(name, 1024.0, 3)
    assert replay(policy, "." * (5 + late)) == [1024.0] * (2 + late) + [2048.0] * 3
    policy.step(True)
    scale = policy.loss_scale
    assert replay(policy, "." * (6 + late)) == [scale] * (2 + late) + [2 * scale] * 3 + [4 * scale]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # A budget that only a raise refills: once it is spent, every overflow drops.
        ("megatron", {"hysteresis": 2}, ".!.vv.vvv.v"),
        ("megatron", {"hysteresis": 1}, ".v.vv.vvv.v"),
        ("deepspeed", {"delayed_shift": 2}, ".!.vv.vvv.v"),
        ("deepspeed", {"delayed_shift": 3}, ".!.!v.vvv.v"),
        # A budget that every clean step refills too.
        ("deepspeed", {"delayed_shift": 2, "consecutive_hysteresis": True}, ".!.!v.!vv.!"),
        ("apex_hysteresis", {"hysteresis": 2}, ".!.!v.!vv.!"),
        # A count that starts again after a drop, and that a clean step sets back or not.
        ("paddle", {"decr_every_n_nan_or_inf": 2}, ".!.!v.!v!.!"),
        ("tensorflow_contrib", {"decr_every_n_nan_or_inf": 2}, ".!.v!.v!v.!"),
        # A share of the steps since the last drop or raise.
        ("fairseq", {"tolerance": 0.0}, ".v.vv.vvv.v"),
        ("fairseq", {"tolerance": 0.5}, ".v.vv.vvv.v"),
        ("fairseq", {"tolerance": 0.51}, ".!.!v.!vv.!"),
    ],
)
def test_which_overflows_are_tolerated(name, params, expected):
    assert changes(start(name, 1024.0, 1000, **params), ".!.!!.!!!.!") == expected


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("megatron", {"hysteresis": 2}, "!.^!v"),
        ("deepspeed", {"delayed_shift": 2}, "!.^!v"),
        ("tensorflow_contrib", {"decr_every_n_nan_or_inf": 2}, "!.^!v"),
        # fairseq's does not: with the overflow tolerated before it, the next makes 2 in the one step since the raise.
        ("fairseq", {"tolerance": 1.5}, "!.^v!"),
    ],
)
def test_a_raise_sets_the_count_of_overflows_back(name, params, expected):
    assert changes(start(name, 1024.0, 2, **params), "!..!!") == expected


@pytest.mark.parametrize(
    ("name", "params", "smallest"),
    [
        ("adaptive", {"loss_scale_value": 4.0, "min_loss_scale": 0.5}, 0.5),
        ("dynamic", {}, 1.0),
        ("dynamic_scaler", {}, 1.0),
        ("torch", {}, 0.0),
        ("megatron", {"hysteresis": 1}, 1.0),
        ("megatron", {"hysteresis": 1, "min_scale": 0.1}, float(np.float32(0.1))),
        ("deepspeed", {}, 1.0),
        ("deepspeed_fused", {"min_scale": 0.0}, 0.0),
        ("deepspeed_unfused", {}, 0.25),
        ("apex", {}, 0.0),
        ("apex", {"min_loss_scale": 0.75}, 0.75),
        ("apex_hysteresis", {}, 0.0),
        ("fairseq", {}, 2.0**-13),
        ("fairseq", {"threshold": 0.5}, 0.5),
        ("tensorflow", {}, 1.0),
        ("tensorflow_contrib", {}, 1.0),
        ("keras", {}, 0.0),
        ("keras2", {}, 1.0),
        ("jmp", {"min_loss_scale": 0.37}, 0.37),
        ("paddle", {}, 1.0),
    ],
)
def test_many_overflows_end_at_the_floor(name, params, smallest):
    policy = make_policy(name, **params) if name == "adaptive" else start(name, 1024.0, 10, **params)
    assert replay(policy, "!" * 3000)[-1] == smallest


KEPT_FINITE = (
    "dynamic_scaler",
    "torch",
    "apex_hysteresis",
    "tensorflow",
    "tensorflow_contrib",
    "keras2",
    "jmp",
    "paddle",
)


@pytest.mark.parametrize("name", NAMES)
def test_many_clean_steps_end_at_the_cap_or_at_inf(name):
    policy = start(name, 1024.0, 1)
    replay(policy, "." * 1200)
    assert policy.loss_scale == (2.0**127 if name in KEPT_FINITE else 2.0**24 if name == "apex" else math.inf)


@pytest.mark.parametrize("name", ["dynamic", "megatron", "keras", "deepspeed", "fairseq"])
def test_a_scale_that_nothing_caps_is_inf_beyond_float32_but_as_a_python_number(name):
    python_number = name.startswith(("deepspeed", "fairseq"))
    assert replay(start(name, 2.0**125, 1), "...")[1:] == [2.0**127, 2.0**128 if python_number else math.inf]


def test_apex_cuts_the_start_and_the_raise_to_its_maximum():
    policy = make_policy("apex", init_scale=2.0**30, max_loss_scale=3000.0, scale_window=1)
    assert [policy.loss_scale, *replay(policy, "!..")] == [3000.0, 1500.0, 3000.0, 3000.0]


def test_apex_takes_a_scale_factor_and_does_not_use_it():
    with pytest.warns(UserWarning, match=r"'scale_factor' of the policy 'apex' has no effect: .* uses 2.0, and 4 came"):
        policy = make_policy("apex", init_scale=1024.0, scale_factor=4)
    assert policy.step(True) == 512.0


@pytest.mark.parametrize(
    ("name", "params", "drop", "growth"),
    [
        ("adaptive", {"scale_factor": 3}, lambda s: s * (np.float32(1) / np.float32(3)), 3),
        ("dynamic", {"scale_factor": 3}, lambda s: s * (np.float32(1) / np.float32(3)), 3),
        ("dynamic_scaler", {"scale_factor": 3}, lambda s: s / np.float32(3), 3),
        ("tensorflow", {"multiplier": 3}, lambda s: s / np.float32(3), 3),
        ("tensorflow_contrib", {"decr_every_n_nan_or_inf": 1}, lambda s: s * np.float32(0.8), 2),
        ("paddle", {"decr_ratio": 0.8}, lambda s: s * np.float32(0.8), 2),
        ("megatron", {"hysteresis": 1, "backoff_factor": 0.8}, lambda s: s * np.float32(0.8), 2),
        ("torch", {"backoff_factor": 0.8}, lambda s: np.float32(float(s) * 0.8), 2),
        ("apex_hysteresis", {"backoff_factor": 0.8}, lambda s: np.float32(float(s) * 0.8), 2),
    ],
)
def test_arithmetic_is_float32_in_the_order_of_the_system(name, params, drop, growth):
    # 0.8 as a double, which the kernels take, and as a float32 give other products.
    window = {"max_scale_window": 1, "min_scale_window": 1, "loss_scale_value": 2.0**60}
    policy = make_policy(name, **window, **params) if name == "adaptive" else start(name, 2.0**60, 1, **params)
    expected = np.float32(2.0**60)
    for step in "!" * 20 + "." * 5 + "!" * 20:
        expected = drop(expected) if step == "!" else expected * np.float32(growth)
        assert policy.step(step == "!") == float(expected)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_fused", "fairseq"])
def test_arithmetic_is_that_of_python_numbers(name):
    policy, expected = start(name, 2.0**60, 1000, scale_factor=3), 2.0**60
    for _ in range(20):
        expected /= 3.0
        assert policy.step(True) == expected


def test_deepspeed_would_stop_at_its_smallest_scale_and_the_replay_goes_on():
    policy = make_policy("deepspeed", init_scale=2.0, scale_window=2)
    seen = [(policy.step(overflow), policy.stopped) for overflow in (True, True, False, False)]
    assert seen == [(1.0, False), (1.0, True), (1.0, True), (2.0, True)]
    policy = make_policy("deepspeed", init_scale=2.0, raise_error_at_min_scale=False)
    assert (replay(policy, "!!!"), policy.stopped) == ([1.0] * 3, False)
    # A tolerated overflow at the smallest scale is no reason to stop.
    policy = make_policy("deepspeed", init_scale=1.0, delayed_shift=2)
    assert [(policy.step(True), policy.stopped) for _ in "!!"] == [(1.0, False), (1.0, True)]


def test_fairseq_would_stop_at_its_smallest_scale_which_it_does_not_take():
    policy = make_policy("fairseq", init_scale=4.0, min_loss_scale=1.0, scale_window=2)
    seen = [(policy.step(step == "!"), policy.stopped) for step in "!!.."]
    assert seen == [(2.0, False), (2.0, True), (2.0, True), (4.0, True)]
    # The threshold keeps the scale above the smallest.
    policy = make_policy("fairseq", init_scale=4.0, min_loss_scale=1.0, threshold=1.5)
    assert (replay(policy, "!!!"), policy.stopped) == ([2.0, 1.5, 1.5], False)


def test_counters_can_be_preset():
    params = {"init_loss_scaling": 1024.0, "incr_every_n_steps": 5, "decr_every_n_nan_or_inf": 3}
    assert replay(make_policy("paddle", **params, initial_good_steps=3), "..") == [1024.0, 2048.0]
    assert replay(make_policy("paddle", **params, initial_bad_steps=1), "!!") == [1024.0, 512.0]
    assert replay(make_policy("jmp", loss_scale=1024.0, period=5, counter=3), "..") == [1024.0, 2048.0]
    assert replay(start("dynamic_scaler", 1024.0, 5, initial_counter=4), "..") == [2048.0, 2048.0]


ADAPTIVE = AdaptiveRule(max_scale_window=4, min_scale_window=2, hysteresis=2, min_loss_scale=0.5)


@pytest.mark.parametrize(
    ("policy", "rule", "start"),
    [
        ("adaptive", ADAPTIVE, {"scale_window": 3}),
        ("guided", GuidedRule(5.0, max_loss_scale=2.0**30), {}),
        ("own_rules.Follow", Follow(margin=3, max_loss_scale=2.0**30), {}),
        (Follow, Follow(margin=3), {}),
    ],
)
def test_a_rule_is_a_policy_by_its_name_or_its_class(policy, rule, start):
    name = policy if isinstance(policy, str) else "follow"
    policy, state = make_policy(policy, loss_scale_value=64.0, **rule.arguments, **start), rule.start(64.0, **start)
    assert policy.name == name
    for step, mark in enumerate(("!!!" + "." * 40 + "!!!!.!!" + "." * 10) * 5):
        gradient = None if mark == "!" else 0.3 + 0.01 * (step % 7)
        state = rule.step(state, mark == "!", gradient)
        assert policy.step(mark == "!", gradient) == state.loss_scale
        assert policy.scale_window == getattr(state, "scale_window", None)
        assert policy.state() == state._asdict()


# Small settings, so that short sequences reach every branch.
SMALL = {
    "adaptive": {"max_scale_window": 2, "min_scale_window": 1, "hysteresis": 2},
    "guided": {"loss_scale_value": 4.0, "exchange_rate": 300},
    "fixed": {},
    "metaseq": {"scale_window": 2},
    "deepspeed": {"init_scale": 4.0, "scale_window": 2, "delayed_shift": 2},
    "fairseq": {"init_scale": 4.0, "scale_window": 2, "tolerance": 0.6, "min_loss_scale": 1.0},
    "megatron": {"initial_scale": 4.0, "growth_interval": 2, "hysteresis": 2},
    "paddle": {"incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 2},
    "tensorflow_contrib": {"incr_every_n_steps": 2},
}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_state_is_all_that_a_policy_remembers(name):
    after = {}
    for steps in itertools.product(".!", repeat=9):
        policy = make_policy(name, **SMALL[name]) if name in SMALL else start(name, 4.0, 2)
        for step in steps:
            before = tuple(policy.state().items())
            policy.step(step == "!")
            assert all(type(value) in (int, float, bool, tuple, type(None)) for value in policy.state().values())
            assert after.setdefault((before, step), policy.state()) == policy.state()
    assert policy.state()["loss_scale"] == policy.loss_scale


@pytest.mark.parametrize(
    ("name", "by_one_factor"),
    [
        *(("adaptive", True), ("guided", False), ("torch", True), ("own_rules.Follow", False)),
        *(("own_rules.Plain", True), ("own_rules.CappedAdaptive", False)),
    ],
)
def test_whether_the_scale_alone_tells_which_steps_were_skipped(name, by_one_factor):
    assert make_policy(name).moves_by_one_factor is by_one_factor


# From 4 with a window of 4; a step is "." or "!", and each list has the scale and the window after it.
@pytest.mark.parametrize(
    ("steps", "params", "expected"),
    [
        # A raise doubles both, and does not start the count again: the next is due at step 8, not 12.
        ("." * 4, {}, (8, 8)),
        ("." * 7, {}, (8, 8)),
        ("." * 8, {}, (16, 16)),
        ("." * 16, {}, (32, 32)),
        ("!", {}, (2, 2)),
        ("!..", {}, (4, 4)),
        ("!!!!", {}, (0.25, 1)),
        ("!!!!.", {}, (0.5, 2)),
        ("." * 8 + "!", {}, (8, 8)),
        # A drop below the smallest scale is taken back, that of the window is not.
        ("!!", {"min_loss_scale": 2.0}, (2, 1)),
        ("!!!", {"threshold": 1.5}, (1.5, 1)),
        # One overflow in two steps is tolerated at 0.6, two in three are not.
        (".!", {"tolerance": 0.6}, (4, 4)),
        (".!!", {"tolerance": 0.6}, (2, 2)),
        ("...", {"scale_factor": 1.5, "scale_window": 3}, (6, 4.5)),
        ("." * 9, {"scale_factor": 1.5, "scale_window": 3}, (9, 6.75)),
        ("!", {"scale_factor": 1.5, "scale_window": 4}, (4 / 1.5, 2)),
    ],
)
def test_window_of_metaseq_follows_its_scale(steps, params, expected):
    policy = make_policy("metaseq", **{"scale_window": 4, **params})
    replay(policy, steps)
    assert (policy.loss_scale, policy.scale_window) == expected


@pytest.mark.parametrize(
    ("name", "params", "error", "message"),
    [
        ("own_rules.Nothing", {}, ValueError, r"'own_rules.Nothing' cannot be imported"),
        ("own_rules.NoRule", {}, TypeError, r"'rule' must be .* such a class, but got 'own_rules.NoRule'"),
        ("own_rules.Follow", {"margins": 1}, TypeError, r"'own_rules.Follow' has no parameter 'margins'.* 'margin'\?"),
        ("adaptiv", {}, ValueError, r"'name' must be one of adaptive, guided, .*, but got 'adaptiv'. .* 'adaptive'\?"),
        (
            "torch",
            {"init_scal": 2},
            TypeError,
            r"'torch' has no parameter 'init_scal'. .* init_scale, .* 'init_scale'\?",
        ),
        ("adaptive", {"hysteresis": 0}, ValueError, r"'hysteresis' must be at least 1, but got 0"),
        ("fixed", {"loss_scale": 2, "loss_scale_value": 2}, TypeError, r"'loss_scale_value' and 'loss_scale' .* once"),
        ("dynamic", {"loss_scale_value": 0}, ValueError, r"'loss_scale_value' must be .* above 0 .* but got 0"),
        ("torch", {"init_scale": 1e39}, ValueError, r"'init_scale' must be a finite .* in float32, but got 1e\+39"),
        ("torch", {"init_scale": "2e16"}, TypeError, r"'init_scale' must be .* but got '2e16' of type str"),
        ("torch", {"growth_factor": 1}, ValueError, r"'growth_factor' must be a finite number above 1 .* but got 1"),
        ("torch", {"backoff_factor": 1.0}, ValueError, r"'backoff_factor' must be a number between 0 and 1"),
        ("torch", {"growth_interval": 0}, ValueError, r"'growth_interval' must be at least 1, but got 0"),
        ("apex_hysteresis", {"growth_factor": 0.5}, ValueError, r"'growth_factor' must be .* at least 1 .* got 0.5"),
        ("apex_hysteresis", {"backoff_factor": 1.5}, ValueError, r"'backoff_factor' must be .* at most 1 .* got 1.5"),
        ("megatron", {"min_scale": 0}, ValueError, r"'min_scale' must be a finite number above 0"),
        ("megatron", {"initial_scale": 1, "min_scale": 2}, ValueError, r"'initial_scale' must be .* 'min_scale' \(2.0"),
        ("metaseq", {"threshold": 8.0}, ValueError, r"'init_scale' must be at least 'threshold' \(8.0\), but got 4.0"),
        ("apex", {"min_loss_scale": 2.0**25}, ValueError, r"'max_loss_scale' must be at least 'min_loss_scale'"),
        ("deepspeed", {"min_scale": -1}, ValueError, r"'min_scale' must be a finite number of at least 0 .* got -1"),
        ("deepspeed", {"consecutive_hysteresis": 1}, TypeError, r"'consecutive_hysteresis' must be True or False"),
        ("paddle", {"initial_good_steps": -1}, ValueError, r"'initial_good_steps' must be at least 0, but got -1"),
        ("paddle", {"initial_good_steps": 2000}, ValueError, r"_good_steps' must be below 'incr_every_n_steps'"),
        ("paddle", {"initial_bad_steps": 1}, ValueError, r"_bad_steps' must be below 'decr_every_n_nan_or_inf'"),
    ],
)
def test_bad_arguments_are_refused(name, params, error, message):
    with pytest.raises(error, match=message):
        make_policy(name, **params)


def changes(policy, steps):
    """The steps, with "v" for an overflow that dropped the scale and "^" for a clean step that raised it."""
    marks = ""
    for step in steps:
        before = policy.loss_scale
        after = policy.step(step == "!")
        marks += "v" if after < before else "^" if after > before else step
    return marks
