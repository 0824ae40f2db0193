"""Logs of which a line stands for several steps: the number of skipped steps lies within the stated bounds."""

import math

import numpy as np
import pytest

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.logs.intervals import intervals_of
from mindformers_adaptive.lab.logs.reader import LogEntry
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.record.run import RecordedRun
from tests.lab.sink_logs import run_of, write_sink_log

# What each rule calls the scale that it starts from.
START = {"dynamic": "init_loss_scale", "megatron": "initial_scale", "torch": "init_scale"}

RULES = [
    ("adaptive", {}),
    ("adaptive", {"min_scale_window": 5}),
    ("adaptive", {"min_scale_window": 1, "max_scale_window": 50, "shrink_from_min_window": True}),
    ("adaptive", {"hysteresis": 3, "min_scale_window": 10}),
    ("adaptive", {"min_loss_scale": 2.0**12, "max_loss_scale": 2.0**32, "min_scale_window": 7}),
    # A floor that is no power of two.
    ("adaptive", {"min_loss_scale": 5000.0, "min_scale_window": 3}),
    ("adaptive", {"scale_factor": 4, "min_scale_window": 5}),
    ("adaptive", {"scale_factor": 1.5, "min_scale_window": 2}),
    ("adaptive", {"scale_factor": 3, "min_scale_window": 2}),
    ("dynamic", {"scale_window": 20}),
    ("dynamic", {"scale_window": 1}),
    ("megatron", {"growth_interval": 15}),
]


# Those that do not move the scale by one factor.
OTHER_RULES = [
    ("guided", {}),
    ("guided", {"exchange_rate": 20.0}),
    ("tests.shared.own_rules.Follow", {}),
    ("tests.shared.own_rules.Weigh", {}),
    ("torch", {"growth_interval": 5, "growth_factor": 4.0, "backoff_factor": 0.1}),
    ("adaptive", {"min_scale_window": 5, "backoff_factor": 0.25}),
    ("torch", {"growth_interval": 10, "backoff_factor": 0.8}),
]


def policy_of(name, start, params=()):
    return make_policy(name, **{START.get(name, "loss_scale_value"): start, **dict(params)})


def ceilings_of(seed, steps):
    """Ceilings of some level and spread, at times so low that the scale stays at its floor."""
    random = np.random.default_rng(seed)
    level, spread = random.uniform(8, 24), random.choice([0.0, 0.3, 1.0, 3.0])
    ceilings = np.exp2(level + spread * random.standard_normal(steps))
    if random.random() < 0.3:
        first = random.integers(0, steps)
        ceilings[first : first + random.integers(1, 60)] = random.choice([0.0, 2.0**4])
    return ceilings


@pytest.mark.parametrize("sink", [2, 4, 10, 50])
def test_the_truth_lies_within_the_bounds(tmp_path, sink):
    widths = []
    for seed in range(80):
        random = np.random.default_rng([seed, sink])
        name, params = rule = RULES[seed % len(RULES)]
        start = 2.0 ** random.choice([13, 16, 24, 32])
        flags, scales = run_of(policy_of(name, start, params), ceilings_of(seed, 400))
        run = read_log(write_sink_log(tmp_path / "sink.log", flags, scales, sink))
        assert len(run) == 400
        for steps in [*range(sink, 401, sink), *random.integers(1, 400, 5)]:
            fewest, most = run.skipped_bounds(steps)
            assert fewest <= sum(flags[:steps]) <= most, (rule, start, seed, steps)
        known = run.position_known
        assert (run.overflow[known] == np.array(flags)[known]).all(), (rule, seed)
        trace = run.to_trace()
        used = np.array([start, *scales[:-1]])
        assert (trace.lower_bound <= np.where(flags, 0, used * (1 + 1e-6))).all(), (rule, seed)
        assert (trace.upper_bound >= np.where(flags, used * (1 - 1e-6), np.inf)).all(), (rule, seed)
        widths.append(np.subtract(*run.skipped_bounds()[::-1]))
    assert min(widths) < 400 * (sink - 1) / sink


@pytest.mark.parametrize(
    ("rule", "params", "sink"),
    [
        ("adaptive", {}, 4),
        ("adaptive", {}, 10),
        ("adaptive", {"hysteresis": 2, "min_loss_scale": 2.0**14, "min_scale_window": 5}, 10),
        ("dynamic", {"scale_window": 20}, 50),
        ("megatron", {"growth_interval": 15}, 10),
        ("tests.shared.own_rules.Plain", {"window": 15}, 10),
    ],
)
def test_bounds_of_the_rule_of_the_run_hold_and_are_narrower(tmp_path, rule, params, sink):
    for seed in range(10):
        flags, scales = run_of(policy_of(rule, 2.0**32, params), ceilings_of(seed, 300))
        log = write_sink_log(tmp_path / "sink.log", flags, scales, sink)
        loose, narrow = read_log(log), read_log(log, rule=policy_of(rule, 2.0**32, params))
        for steps in range(sink, 301, sink):
            assert narrow.skipped_bounds(steps)[0] <= sum(flags[:steps]) <= narrow.skipped_bounds(steps)[1]
        assert narrow.skipped_bounds()[0] >= loose.skipped_bounds()[0]
        assert narrow.skipped_bounds()[1] < loose.skipped_bounds()[1] or sum(flags) > 250
        assert narrow.loss_scale[0] == 2.0**32
        assert np.isnan(loose.loss_scale[0])


def test_a_log_that_does_not_follow_the_rule_is_refused(tmp_path):
    flags, scales = run_of(policy_of("adaptive", 2.0**24), [2.0**16] * 40)
    log = write_sink_log(tmp_path / "sink.log", flags, scales, 4)
    assert read_log(log, rule=policy_of("adaptive", 2.0**24)).skipped_bounds()[0] == sum(flags)
    with pytest.raises(
        ValueError, match=r"sink.log:1: no sequence of overflows leads the rule 'adaptive' to loss scale"
    ):
        read_log(log, rule=policy_of("adaptive", 2.0**32))
    later = tmp_path / "later.log"
    later.write_text("".join(log.read_text().splitlines(keepends=True)[3:]))
    with pytest.raises(ValueError, match=r"'rule' needs a log that begins at step 1, but .*later.log:1 is at step 16"):
        read_log(later, rule=policy_of("adaptive", 2.0**24))


def test_a_rule_is_followed_up_to_a_gap(tmp_path):
    flags, scales = run_of(policy_of("adaptive", 2.0**24), [2.0**16] * 80)
    log = write_sink_log(tmp_path / "sink.log", flags, scales, 4)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:10] + lines[11:]))
    run = read_log(log, rule=policy_of("adaptive", 2.0**24))
    assert [note for note in run.notes if "sink.log:11: the rule is not followed from here on, after a gap" in note]
    assert run.skipped_bounds(40) == read_log(log, rule=policy_of("adaptive", 2.0**24)).skipped_bounds(40)
    assert run.skipped_bounds()[0] <= sum(flags[:40] + flags[44:]) <= run.skipped_bounds()[1]


def test_of_a_guided_run_only_the_flags_count(tmp_path):
    # The scale falls by four factors without an overflow.
    flags, scales = [False] * 8, [2.0**20] * 4 + [2.0**16] * 4
    log = write_sink_log(tmp_path / "sink.log", flags, scales, 4)
    assert read_log(log).skipped_bounds() == (1, 6)
    run = read_log(log, rule=make_policy("guided", loss_scale_value=2.0**20))
    assert run.skipped_bounds() == (0, 6)
    assert run.to_trace().lower_bound.max() == 0


def test_a_prefix_that_ends_within_a_line_has_bounds_too():
    arrays = np.arange(1, 9), np.full(8, 4.0), np.full(8, False), np.full(8, False)
    run = RecordedRun("run", (), "mindformers", *arrays, lines=np.array([[4, 2, 3], [8, 2, 7]]))
    bounds = [run.skipped_bounds(steps) for steps in (0, 1, 3, 4, 5, 8)]
    assert bounds == [(0, 0), (0, 1), (1, 3), (2, 3), (2, 4), (2, 7)]


def assert_within(run, flags):
    """The truth lies within the bounds of each prefix, and steps whose place is known have their flags."""
    for steps in run.line_ends().tolist():
        assert run.skipped_bounds(steps)[0] <= sum(flags[:steps]) <= run.skipped_bounds(steps)[1]
    known = run.position_known
    assert (run.overflow[known] == np.array(flags)[known]).all()


@pytest.mark.parametrize("sink", [2, 10, 50])
def test_a_single_line_stands_for_all_steps_up_to_it(tmp_path, sink):
    for seed, (name, params) in enumerate(RULES + OTHER_RULES):
        flags, scales = run_of(policy_of(name, 2.0**16, params), ceilings_of(seed, sink))
        run = read_log(write_sink_log(tmp_path / "sink.log", flags, scales, sink))
        assert run.step.tolist() == list(range(1, sink + 1))
        assert_within(run, flags)
        assert f"the only line, taken to stand for all steps up to {sink}" in run.notes[0]


@pytest.mark.parametrize("rule", OTHER_RULES, ids=str)
def test_a_rule_that_moves_otherwise_is_asked_for_and_its_bounds_hold(tmp_path, rule):
    for seed in range(12):
        sink = (2, 4, 10)[seed % 3]
        flags, scales = run_of(policy_of(rule[0], 2.0**20, rule[1]), ceilings_of(seed, 200 // sink * sink))
        log = write_sink_log(tmp_path / "sink.log", flags, scales, sink)
        assert "name it ('analyze --policy', or read_log(rule=...))" in read_log(log).holds_if
        named = policy_of(rule[0], 2.0**20, rule[1])
        assert not named.moves_by_one_factor
        run = read_log(log, rule=named)
        assert_within(run, flags)
        # Presets of other systems are followed. Of other rules only flags count, whatever is true of the run.
        assert run.holds_if.startswith(f"the run followed {rule[0]!r}") == (rule[0] in START) == bool(run.holds_if)
        assert (run.to_trace().lower_bound <= np.where(flags, 0, np.append(2.0**20, scales[:-1]) * (1 + 1e-6))).all()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        # Another factor; and the scale that the run once started from.
        ({"scale_factor": 4}, {"scale_factor": 2}),
        ({}, {"loss_scale_value": 2.0**30}),
    ],
)
def test_what_bounds_take_of_a_resumed_run_is_said(tmp_path, before, after):
    for seed in range(6):
        ceilings, first = ceilings_of(seed, 120), policy_of("adaptive", 2.0**24, {"min_scale_window": 5, **before})
        flags, scales = run_of(first, ceilings[:60])
        second = first
        if after:
            second = policy_of("adaptive", scales[-1], {"min_scale_window": 5, **after})
        later = run_of(second, ceilings[60:])
        flags, scales = flags + later[0], scales + later[1]
        run = read_log(write_sink_log(tmp_path / "sink.log", flags, scales, 4))
        assert "one factor, the same all through the log" in run.holds_if
        assert "and each resume went on with its scale" in run.holds_if
        if not after:
            assert_within(run, flags)


@pytest.mark.parametrize(
    ("before", "after", "flag", "bounds"),
    [
        (2.0**12, 2.0**12, None, (0, 4)),
        (2.0**12, 2.0**10, None, (2, 4)),
        (2.0**12, 2.0**10, False, (2, 3)),
        (2.0**12, 2.0**12, True, (1, 4)),
        # Each raise is a clean step.
        (2.0**12, 2.0**13, None, (0, 3)),
        (2.0**12, 2.0**14, False, (0, 2)),
        # By way of a floor a fall of little more than one factor is two drops, and what was rounded is none.
        (8192.0, 8192.0 / 2**1.1, None, (2, 4)),
        (8192.0, 4095.9998, None, (1, 4)),
    ],
)
def test_the_bounds_of_a_line_are_those_of_its_change(before, after, flag, bounds):
    lines = [LogEntry(4, "1", before), LogEntry(8, "2", after, overflow=flag)]
    found = intervals_of(lines, 2.0, 2.0, math.nan, [])[1]
    assert (found.fewest, found.most) == bounds


def test_steps_that_cannot_move_the_scale_so_far_began_at_another(tmp_path):
    # Restarted at 2^20: with the scale of the line before, no step of the last line could have been skipped.
    scales = np.repeat([2.0**10, 2.0**11, 2.0**12, 2.0**20], 4)
    run = read_log(write_sink_log(tmp_path / "sink.log", [False] * 16, scales, 4))
    assert run.lines.tolist() == [[4, 0, 3], [8, 0, 6], [12, 0, 9], [16, 0, 12]]
    assert [note for note in run.notes if "4 steps cannot move the scale from 4096 to 1.04858e+06" in note]
