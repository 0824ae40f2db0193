"""Replay from event to event is that of step by step, to the last bit, whatever the trace and the arguments."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mindformers_adaptive.lab import events, overflow_places
from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.event_measures import pays_for, replay_by_events
from mindformers_adaptive.lab.events import clean_steps_counted, follow, follow_each
from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, overflow_flags, overflows
from mindformers_adaptive.lab.overflow_places import Overflows
from mindformers_adaptive.lab.policies import POLICY_NAMES, make_policy
from mindformers_adaptive.lab.presets import PRESETS
from mindformers_adaptive.lab.replay import replay, sweep
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.adaptive import AdaptiveRule

CEILINGS = st.one_of(
    st.sampled_from([0.0, 1e-46, 2.0**-130, 1.0, 2.0**16, 3.5e38, math.inf]),
    st.integers(-8, 40).map(lambda exponent: 2.0**exponent),
    st.floats(2.0**-20, 2.0**40),
)


@st.composite
def ceilings(draw):
    """Ceilings of any kind, or of rows of one height, so that full windows come too."""
    if draw(st.booleans()):
        return np.array(draw(st.lists(CEILINGS, min_size=1, max_size=80)))
    rows = draw(st.lists(st.tuples(CEILINGS, st.integers(1, 60)), min_size=1, max_size=8))
    return np.repeat([ceiling for ceiling, _ in rows], [length for _, length in rows])


@st.composite
def adaptive(draw):
    smallest = draw(st.integers(1, 30))
    return {
        "loss_scale_value": 2.0 ** draw(st.integers(0, 32)),
        "min_scale_window": smallest,
        "max_scale_window": draw(st.integers(smallest, 60)),
        "scale_factor": draw(st.sampled_from([2, 4, 3, 1.5, 1.01, 7.3])),
        "hysteresis": draw(st.integers(1, 4)),
        "shrink_from_min_window": draw(st.booleans()),
        "backoff_factor": draw(st.sampled_from([None, 0.5, 0.1, 0.9])),
        "min_loss_scale": draw(st.sampled_from([1.0, 2.0**-20, 0.7])),
        "max_loss_scale": draw(st.sampled_from([None, 2.0**33])),
    }


def by_steps(rule, state, trace):
    """The scales, windows, flags and states, one step after the other."""
    states, flags = [state], []
    for ceiling in trace.tolist():
        flags.append(overflows(float(state.loss_scale), ceiling))
        state = rule.step(state, flags[-1])
        states.append(state)
    return states, flags


def assert_is_by_steps(rule, start, trace):
    states, flags = by_steps(rule, start, trace)
    path = follow(rule, start, Overflows(trace))
    assert path is not None
    assert path.skipped.tolist() == np.flatnonzero(flags).tolist()
    assert path.each_step(path.loss_scale, len(trace)).tolist() == [float(state.loss_scale) for state in states]
    if path.scale_window is not None:
        assert path.each_step(path.scale_window, len(trace)).tolist() == [state.scale_window for state in states]
    assert (type(path.final_state), path.final_state) == (type(states[-1]), states[-1])


@settings(max_examples=300)
@given(adaptive(), ceilings(), st.integers(0, 5))
def test_the_adaptive_rule_is_followed_to_the_last_bit(arguments, trace, before):
    policy = make_policy("adaptive", **arguments)
    # From the midst of a run on too.
    state = policy.current
    for step in range(before):
        state = policy.rule.step(state, step % 3 == 1)
    assert_is_by_steps(policy.rule, state, trace)


@given(ceilings(), st.sampled_from([0.5, 2.0**16, 2.0**30]))
def test_the_next_overflow_is_found_in_each_way(trace, scale):
    flags = overflow_flags(np.asarray(scale), trace)
    expected = [step + int(np.append(flags[step:], True).argmax()) for step in range(len(trace) + 1)]
    for room in (10**6, 40, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overflow_places, "_MOST_BYTES", room)
            patch.setattr(overflow_places, "_BLOCK", 7)
            found = Overflows(trace).following(scale)
            assert [found[step] for step in range(len(trace) + 1)] == expected


@settings(max_examples=60)
@given(adaptive(), ceilings())
def test_what_does_not_fit_into_memory_is_searched_for(monkeypatch_module, arguments, trace):
    monkeypatch_module.setattr(overflow_places, "_MOST_BYTES", 0)
    monkeypatch_module.setattr(overflow_places, "_BLOCK", 7)
    monkeypatch_module.setattr(events, "_MOST_STATES", 3)
    policy = make_policy("adaptive", **arguments)
    assert_is_by_steps(policy.rule, policy.current, trace)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


# Of the rules that only count between two events, and of those that do more.
MADE = {name: make_policy(name) for name in (*PRESETS, "adaptive")}
COUNTING = [name for name, one in MADE.items() if clean_steps_counted(one.rule, one.current) is not None]


@pytest.mark.parametrize("name", COUNTING)
@settings(max_examples=40)
@given(trace=ceilings())
def test_the_policies_of_other_systems_are_followed_to_the_last_bit(name, trace):
    policy = make_policy(name)
    assert_is_by_steps(policy.rule, policy.current, trace)
    window = {"scale_window", "growth_interval", "loss_scale_window", "incr_every_n_steps", "dynamic_growth_steps"}
    for key in window.intersection(PRESETS[name].parameters if name in PRESETS else ()):
        small = make_policy(name, **{key: 3})
        assert_is_by_steps(small.rule, small.current, trace)


def test_most_policies_are_followed_and_those_that_look_at_more_are_not():
    assert {"adaptive", "dynamic", "megatron", "torch", "fixed"} <= set(COUNTING)
    for name in set(POLICY_NAMES) - set(COUNTING):
        policy = make_policy(name)
        assert follow(policy.rule, policy.current, Overflows(np.array([8.0]))) is None


class Restless(AdaptiveRule):
    """A user's own, which does more than the rule that it is made from."""

    def next_state(self, state, seen):
        return super().next_state(state, seen).replace(loss_scale=state.loss_scale * 1.5)


def test_a_rule_made_from_another_is_taken_step_by_step():
    rule = Restless()
    assert follow(rule, rule.start(8.0), Overflows(np.full(50, 2.0**20))) is None


@settings(max_examples=60)
@given(adaptive(), ceilings(), st.lists(st.integers(0, 32), min_size=1, max_size=5))
def test_starts_that_come_together_are_those_of_each_alone(arguments, trace, exponents):
    rule = make_policy("adaptive", **arguments).rule
    starts = [rule.start(2.0**exponent) for exponent in exponents]
    paths = {place: path for _, place, path in follow_each([rule], [starts], Overflows(trace))}
    for place, start in enumerate(starts):
        path = paths[place]
        states, flags = by_steps(rule, start, trace)
        assert path.skipped.tolist() == np.flatnonzero(flags).tolist()
        assert path.each_step(path.loss_scale, len(trace)).tolist() == [float(state.loss_scale) for state in states]
        assert path.final_state == states[-1]


@st.composite
def traces(draw):
    """Ceilings with any bounds around them."""
    ceiling = draw(ceilings())
    ceiling = np.where(np.isfinite(ceiling), ceiling, 2.0**30)
    below, above = draw(arrays.arrays(np.int8, (2, len(ceiling)), elements=st.integers(0, 3)))
    lower, upper = ceiling * np.array([0.0, 0.25, 0.5, 1.0])[below], np.nextafter(ceiling, np.inf)
    upper = np.where(ceiling > 0, np.maximum(upper, ceiling * np.array([1.0, 2.0, 4.0, 2.0**800])[above]), upper)
    seconds = draw(st.sampled_from([None, np.arange(len(ceiling)) / 8.0]))
    return Trace("made", ceiling, lower, upper, seconds)


@settings(max_examples=100)
@given(traces(), st.lists(adaptive(), min_size=1, max_size=4))
def test_measures_of_events_are_those_of_steps(trace, arguments):
    configurations = [Configuration("adaptive", **one) for one in arguments]
    configurations.append(configurations[0].replace(loss_scale_value=2.0**31))
    with np.errstate(all="ignore"):
        expected = sweep(configurations, trace)
    found = replay_by_events(configurations, trace)
    assert tuple(state for _, state in found) == expected.final_states
    for (measures, _), of_steps in zip(found, expected.measures, strict=True):
        one, other = dataclasses.asdict(measures), dataclasses.asdict(of_steps)
        for name in ("headroom_lost", "headroom_regret", "seconds_lost"):
            assert one.pop(name) == pytest.approx(other.pop(name), rel=1e-9, abs=1e-9, nan_ok=True)
        assert one == other


def test_a_step_that_bears_the_largest_scale_and_no_more_has_headroom():
    trace = Trace.exact("made", [LARGEST_LOSS_SCALE, math.inf])
    configuration = Configuration("adaptive", loss_scale_value=2.0**100)
    [(measures, _)] = replay_by_events([configuration], trace)
    [expected] = sweep([configuration], trace).measures
    assert measures.headroom_lost == pytest.approx(expected.headroom_lost)
    assert expected.headroom_lost == pytest.approx(28)


def test_equal_paths_cost_the_same_however_they_are_divided():
    # Windows that are never full make no difference, but to when they would be.
    trace = Trace.exact("calm", np.exp2(np.random.default_rng(0).normal(20, 0.3, 3000)))
    found = replay_by_events([Configuration.dynamic(window, max_loss_scale=2.0**16) for window in (7, 50, 999)], trace)
    assert len({measures.headroom_lost for measures, _ in found}) == 1


def test_a_replay_is_the_same_in_both_ways():
    trace = Trace.exact("made", np.exp2(np.random.default_rng(1).normal(16, 2, 4000)))
    one, other = (make_policy("adaptive", min_scale_window=5) for _ in range(2))
    quick = replay(one, trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindformers_adaptive.lab.replay.follow", lambda *_: None)
        slow = replay(other, trace)
    assert one.current == other.current
    for field in dataclasses.fields(quick):
        first, second = getattr(quick, field.name), getattr(slow, field.name)
        if isinstance(first, np.ndarray):
            assert (first.dtype, first.tobytes()) == (second.dtype, second.tobytes())
        else:
            assert first == second


def test_it_pays_for_long_traces_of_the_adaptive_rule_only():
    configurations = [Configuration.dynamic(20)] * 10
    assert [pays_for(configurations, Trace.exact("made", np.ones(steps))) for steps in (100, 1000)] == [False, True]
    assert not pays_for([*configurations, Configuration("guided")], Trace.exact("made", np.ones(1000)))
