"""The lab's sweep over configurations of a rule gives the same results as stepping each configuration separately."""

import dataclasses
import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.gradient_ceilings import with_gradients
from mindformers_adaptive.lab.measures import measure, overflows
from mindformers_adaptive.lab.replay import replay_side_by_side, sweep
from mindformers_adaptive.lab.synthetic import synthetic_traces
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.ladder import window_ladder
from tests.shared.own_rules import Follow, Weigh

# The sweep and the replay sum these measures of a policy in different orders, so the last digits may differ.
INEXACT = {"headroom_lost", "headroom_regret", "seconds_lost"}
STEPS = 150


@st.composite
def configurations(draw):
    smallest = draw(st.sampled_from([1, 2, 3, 10, 20]))
    largest = smallest + draw(st.sampled_from([0, 1, 4, 100]))
    return Configuration(
        "adaptive",
        loss_scale_value=draw(st.sampled_from([2.0**15, 2.0**16, 50000.0])),
        scale_factor=draw(st.sampled_from([2, 3, 1.5, 10, 1.0001])),
        scale_window=draw(st.sampled_from([None, *window_ladder(largest, smallest)])),
        max_scale_window=largest,
        min_scale_window=smallest,
        min_loss_scale=draw(st.sampled_from([1.0, 0.3, 2.0**-126, 30000.0])),
        max_loss_scale=draw(st.sampled_from([None, 2.0**17, 100000.0])),
        hysteresis=draw(st.sampled_from([1, 2, 5])),
        shrink_from_min_window=draw(st.booleans()),
        backoff_factor=draw(st.sampled_from([None, 0.25, 0.9])),
    )


CEILINGS = st.one_of(st.sampled_from([0.0, math.inf, 1e39]), st.floats(-3.0, 24.0).map(lambda bits: 2.0**bits))


@st.composite
def traces(draw):
    """Generate random traces with stretches of equal ceilings, so that a loss scale has time to reach its bounds.

    The bounds of the ceilings are powers of two, as in the log of a run with a factor of 2. Half of the bounds are
    unknown.
    """
    runs = draw(st.lists(st.tuples(CEILINGS, st.sampled_from([1, 1, 2, 7, 60])), min_size=1, max_size=25))
    ceiling = np.repeat(*map(np.array, zip(*runs, strict=True)))
    exponent = np.floor(np.log2(np.clip(ceiling, 2.0**-4, 2.0**26)))
    random = np.random.default_rng(draw(st.integers(0, 9)))
    lower_bound = np.where(random.random(len(ceiling)) < 0.5, np.minimum(2.0**exponent, ceiling), 0.0)
    upper_bound = np.where((random.random(len(ceiling)) < 0.5) & (ceiling < 2.0**26), 2.0 ** (exponent + 1), np.inf)
    seconds = random.random(len(ceiling)) if draw(st.booleans()) else None
    return Trace("random", ceiling, lower_bound, upper_bound, seconds=seconds)


@settings(max_examples=80)
@given(tried=st.lists(configurations(), min_size=1, max_size=6), trace=traces(), small=st.booleans())
def test_sweep_equals_the_adaptive_rule(tried, trace, small):
    with pytest.MonkeyPatch.context() as patch:
        if small:  # The sweep must divide the trace into many stretches.
            patch.setattr(importlib.import_module("mindformers_adaptive.lab.replay"), "_SCALES_AT_ONCE", 40)
        assert_swept(tried, trace)


def assert_swept(tried, trace):
    """Assert that a sweep over configurations equals a replay of each one, and return the result of the sweep."""
    result = sweep(tried, trace)
    assert_same(tried, [trace] * len(tried), zip(result.measures, result.final_states, strict=True))
    return result


def assert_same(tried, traces, found_of_lanes):
    """Assert that the results of a sweep equal the measures and last state from stepping each rule on its trace."""
    for configuration, trace, (measures, final_state) in zip(tried, traces, found_of_lanes, strict=True):
        wanted_measures, wanted_state = stepped(configuration.rule, configuration.start, trace)
        values, wanted = dataclasses.asdict(measures), dataclasses.asdict(wanted_measures)
        exact = wanted.keys() - INEXACT
        assert {name: values[name] for name in exact} == {name: wanted[name] for name in exact}
        for name in INEXACT:
            close = wanted[name] and pytest.approx(wanted[name], rel=1e-9, abs=1e-9, nan_ok=True)
            assert values[name] == close, name
        assert final_state == wanted_state


def stepped(rule, state, trace):
    """Step a rule through a trace. Return its measures, such as the number of skipped steps, and its last state."""
    gradients = [math.nan] * len(trace) if trace.largest_gradient is None else trace.largest_gradient.tolist()
    scales, windows = [state.loss_scale], [getattr(state, "scale_window", None)]
    for ceiling, gradient in zip(trace.ceiling.tolist(), gradients, strict=True):
        overflow = overflows(float(scales[-1]), ceiling)
        state = rule.step(state, overflow, None if overflow or math.isnan(gradient) else gradient)
        scales.append(state.loss_scale)
        windows.append(getattr(state, "scale_window", None))
    return measure(trace, scales, None if windows[0] is None else windows), state


def traces_with_gradients():
    """Return traces whose gradients imply the right ceiling or a wrong one, or are unknown at many or all steps."""
    synthetic = list(synthetic_traces(STEPS, seed=0).values())
    hidden = [with_gradients(trace, offset, 0.4, seed=1) for trace in synthetic for offset in (3.0, -2.0)]
    # A nearly constant ceiling, as where activation gradients overflow first.
    constant = Trace.exact("constant", np.exp2(19.1 + 0.05 * np.random.default_rng(0).standard_normal(STEPS)))
    independent = [with_gradients(constant, offset, 0.7, seed=2) for offset in (1.4, 5.4, 14.4)]
    silent = dataclasses.replace(synthetic[0], largest_gradient=None, seconds=np.ones(STEPS))
    now_and_then = np.where(np.arange(STEPS) % 3 == 0, synthetic[3].largest_gradient, [np.nan, 0.0] * (STEPS // 2))
    return [*synthetic, *hidden, *independent, silent, dataclasses.replace(synthetic[3], largest_gradient=now_and_then)]


@pytest.mark.parametrize(("margin", "scale"), [(6, 2.0**32), (0, 1.0)])
def test_every_lane_may_have_a_trace_of_its_own(margin, scale):
    lanes = traces_with_gradients()
    tried = [Configuration("guided", loss_scale_value=scale, margin=margin)] * len(lanes)
    rules, states = [configuration.rule for configuration in tried], [configuration.start for configuration in tried]
    assert_same(tried, lanes, replay_side_by_side(rules, states, lanes))


def test_rules_of_all_kinds_do_not_disturb_each_other():
    tried = [
        Configuration("guided", margin=3, max_loss_scale=2.0**19),
        Configuration.dynamic(20),
        Configuration(Follow, margin=1),
        Configuration(Weigh, length=2),
        Configuration("guided", min_loss_scale=2.0**12),
        Configuration(Weigh, length=5, growth=1.25),
        Configuration(Follow, margin=4, max_loss_scale=2.0**18),
        Configuration("adaptive", hysteresis=2),
        Configuration(Weigh, length=2, growth=2.0),
    ]
    trace = with_gradients(synthetic_traces(STEPS, seed=1)["random walk"], 1.0, 0.5, seed=2)
    result = assert_swept(tried, trace)
    assert len({measured.headroom_lost for measured in result.measures}) == len(tried)


def test_column_is_one_measure_of_all_configurations():
    result = sweep([Configuration.dynamic(1), Configuration.dynamic(5)], Trace.exact("made", [2.0**16] * 12))
    assert result.column("skipped").tolist() == [6, 2]
    assert np.isnan(result.column("seconds_lost")).all()


MADE = Trace.exact("made", [8.0] * 5)


@pytest.mark.parametrize(
    ("tried", "on", "message"),
    [
        ([], MADE, r"'configurations' must have at least 1 configuration, but got none"),
        ([Configuration.dynamic(20)], Trace.exact("made", []), r"The trace 'made' must have at least 1 step, but got"),
    ],
)
def test_nothing_to_sweep_is_refused(tried, on, message):
    with pytest.raises(ValueError, match=message):
        sweep(tried, on)
