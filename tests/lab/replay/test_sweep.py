"""A sweep equals stepping each rule by itself: on random traces, across its stretches, for rules of any kind."""

import dataclasses
import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_rules import Follow, Weigh
from scale_cells import SideBySide

from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay.configuration import Configuration, grid
from mindformers_adaptive.lab.replay.measures import overflows
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.replay.sweep import sweep
from mindformers_adaptive.lab.traces.gradients import INDEPENDENT_CEILINGS, independent_ceiling, with_gradients
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules.ladder import window_ladder

# Sums in another order: their last digits may differ.
INEXACT = {"headroom_lost", "headroom_regret", "seconds_lost"}
STEPS = 600


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
    )


CEILINGS = st.one_of(st.sampled_from([0.0, math.inf, 1e39]), st.floats(-3.0, 24.0).map(lambda bits: 2.0**bits))


@st.composite
def traces(draw):
    """Runs of equal ceilings, so that there is time to fall to the floor and to climb to the cap.

    The bounds are powers of two, as in the log of a run with a factor of 2, and half of them are unknown.
    """
    runs = draw(st.lists(st.tuples(CEILINGS, st.sampled_from([1, 1, 2, 7, 60])), min_size=1, max_size=25))
    ceiling = np.repeat(*map(np.array, zip(*runs, strict=True)))
    exponent = np.floor(np.log2(np.clip(ceiling, 2.0**-4, 2.0**26)))
    random = np.random.default_rng(draw(st.integers(0, 9)))
    lower_bound = np.where(random.random(len(ceiling)) < 0.5, np.minimum(2.0**exponent, ceiling), 0.0)
    upper_bound = np.where((random.random(len(ceiling)) < 0.5) & (ceiling < 2.0**26), 2.0 ** (exponent + 1), np.inf)
    seconds = random.random(len(ceiling)) if draw(st.booleans()) else None
    return Trace("random", ceiling, lower_bound, upper_bound, seconds=seconds)


@settings(max_examples=150)
@given(tried=st.lists(configurations(), min_size=1, max_size=6), trace=traces(), small=st.booleans())
def test_sweep_equals_the_adaptive_rule(tried, trace, small):
    with pytest.MonkeyPatch.context() as patch:
        if small:  # many stretches
            patch.setattr(importlib.import_module("mindformers_adaptive.lab.replay.sweep"), "_SCALES_AT_ONCE", 40)
        assert_same(sweep(tried, trace), [trace] * len(tried))


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.5, 0.99])
def test_sweep_of_a_grid_equals_the_rule_over_several_stretches(rate):
    random = np.random.default_rng(int(rate * 1000))
    low, high = 2.0 ** random.normal(4, 4, 3000), 2.0 ** random.normal(18, 0.5, 3000)
    trace = Trace.exact("random", np.where(random.random(3000) < rate, low, high))
    # Configurations that differ in one argument only share whatever the sweep thinks they can share.
    tried = grid(
        "adaptive",
        min_scale_window=[1, 20],
        max_scale_window=[20],
        scale_factor=[2, 3],
        hysteresis=[1, 2],
        shrink_from_min_window=[False, True],
        min_loss_scale=[1.0, 2.0**10],
        max_loss_scale=[None, 2.0**17],
    )
    assert_same(sweep(tried, trace), [trace] * len(tried))


def assert_same(result, traces):
    """Each configuration's measures and last state are those of its policy on its trace."""
    lanes = zip(result.configurations, traces, result.measures, result.final_states, strict=True)
    for configuration, trace, measures, final_state in lanes:
        expected = replay(make_policy(type(configuration.rule), **configuration.arguments), trace)
        found, wanted = dataclasses.asdict(measures), dataclasses.asdict(expected.measures)
        exact = wanted.keys() - INEXACT
        assert {name: found[name] for name in exact} == {name: wanted[name] for name in exact}
        for name in INEXACT:
            close = wanted[name] and pytest.approx(wanted[name], rel=1e-9, abs=1e-9, nan_ok=True)
            assert found[name] == close, name
        assert final_state._asdict() == {name: expected.final_state[name] for name in final_state._fields}


def traces_with_gradients():
    """Gradients that show the ceiling, that hide it, and that are unknown at many steps or at all."""
    made = list(synthetic_traces(STEPS, seed=0).values())
    hidden = [with_gradients(trace, offset, 0.4, seed=1) for trace in made for offset in (3.0, -2.0)]
    own = [independent_ceiling(STEPS, 0, *numbers) for numbers in INDEPENDENT_CEILINGS]
    silent = dataclasses.replace(made[0], largest_gradient=None, seconds=np.ones(STEPS))
    now_and_then = np.where(np.arange(STEPS) % 3 == 0, made[3].largest_gradient, [np.nan, 0.0] * (STEPS // 2))
    return [*made, *hidden, *own, silent, dataclasses.replace(made[3], largest_gradient=now_and_then)]


@pytest.mark.parametrize(("rate", "scale"), [(1.0, 2.0**32), (50.0, 1.0), (1000.0, 2.0**20)])
def test_every_configuration_may_have_a_trace_of_its_own(rate, scale):
    lanes = traces_with_gradients()
    tried = [Configuration("guided", loss_scale_value=scale, exchange_rate=rate)] * len(lanes)
    assert_same(sweep(tried, lanes), lanes)


def test_rules_of_all_kinds_keep_their_order_and_do_not_disturb_each_other():
    tried = [
        Configuration("guided", exchange_rate=20, max_loss_scale=2.0**19),
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
    result = sweep(tried, trace)
    assert result.configurations == tuple(tried)
    assert_same(result, [trace] * len(tried))
    assert len({one.headroom_lost for one in result.measures}) == len(tried)


def test_reference_sweep_and_cell_agree_on_random_traces(graph_mode):
    from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell

    arguments = [
        {"max_scale_window": 4, "min_scale_window": 1},
        {"max_scale_window": 50, "min_scale_window": 2, "scale_factor": 3},
        {"max_scale_window": 5, "min_scale_window": 2, "scale_factor": 1.5, "hysteresis": 2},
        {"max_scale_window": 2, "min_scale_window": 2, "max_loss_scale": 2.0**18, "min_loss_scale": 2.0**12},
        {"max_scale_window": 4, "min_scale_window": 2, "shrink_from_min_window": True},
    ]
    tried = [Configuration("adaptive", **given) for given in arguments]
    cells = [
        AdaptiveLossScaleUpdateCell(2**16, one.rule.scale_factor, one.rule.min_scale_window, **without_factor(given))
        for one, given in zip(tried, arguments, strict=True)
    ]
    # A trace for each, from one that hardly overflows to one that does at every other step.
    random = np.random.default_rng(0)
    ceilings = 2.0 ** random.normal(16.0, [[0.2], [0.5], [1.0], [2.0], [4.0]], (len(cells), 200))
    ceilings[random.random(ceilings.shape) < 0.05] = 0.0
    side_by_side = SideBySide(cells)
    scales = [one.start.loss_scale for one in tried]
    for limits in ceilings.T.tolist():
        scales, _ = side_by_side.step(list(map(overflows, scales, limits)))
    for place, cell in enumerate(cells):
        trace = Trace.exact("random", ceilings[place])
        result = sweep([tried[place]], trace)
        assert_same(result, [trace])
        final_state, state = result.final_states[0]._asdict(), cell.state()
        assert scales[place] == final_state["loss_scale"]
        assert state["cur_iter"] - 1 - state["last_overflow_iter"] == final_state["clean_steps"]
        shared = final_state.keys() & state.keys()
        assert len(shared) >= 6
        assert {name: state[name] for name in shared} == {name: final_state[name] for name in shared}


def without_factor(arguments):
    return {name: value for name, value in arguments.items() if name != "scale_factor"}


def test_column_is_one_measure_of_all_configurations():
    result = sweep([Configuration.dynamic(1), Configuration.dynamic(5)], Trace.exact("made", [2.0**16] * 12))
    assert result.column("skipped").tolist() == [6, 2]
    assert np.isnan(result.column("seconds_lost")).all()


MADE = Trace.exact("made", [8.0] * 5)
NOT_ONE_EACH = r"'traces' must be one trace, or one for each configuration"


@pytest.mark.parametrize(
    ("tried", "on", "message"),
    [
        ([], MADE, r"'configurations' must have at least 1 configuration, but got none"),
        ([Configuration.dynamic(20)], Trace.exact("made", []), r"The trace 'made' must have at least 1 step, but got"),
        ([Configuration.dynamic(20)], [MADE, MADE], NOT_ONE_EACH),
        ([Configuration.dynamic(20)] * 2, [MADE, Trace.exact("longer", [8.0] * 6)], NOT_ONE_EACH),
        ([Configuration.dynamic(20)], [], NOT_ONE_EACH),
    ],
)
def test_nothing_to_sweep_and_traces_that_do_not_fit_are_refused(tried, on, message):
    with pytest.raises(ValueError, match=message):
        sweep(tried, on)
