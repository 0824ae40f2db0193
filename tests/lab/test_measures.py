"""The measures of a replayed rule, such as skipped and too low steps, in hand-made tables and edge cases."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.lab.measures import measure, overflows
from mindformers_adaptive.record.trace import Trace

INF = math.inf


@pytest.mark.parametrize(
    ("ceiling", "loss_scale", "expected"),
    [
        ([8, 8, 8], [8, 8, 8], {"skipped": 0, "headroom_lost": 0.0, "steps_to_first_applied": 0}),
        ([8, 8, 8], [4, 2, 1], {"too_low": 0, "headroom_lost": 2.0}),
        # Skipped steps lose no headroom; the mean headroom is taken over the applied steps only.
        ([8, 8, 8], [16, 4, 8], {"skipped": 1, "headroom_lost": 0.5, "steps_to_first_applied": 1}),
        ([8, 8, 8, 8], [32, 16, 8, 9], {"skipped": 3, "steps_to_first_applied": 2}),
        # A step with an infinite ceiling cannot overflow, so it has no headroom.
        ([INF, 8, INF], [1, 4, 1e30], {"headroom_lost": 1.0, "skipped": 0}),
        # A ceiling above the largest float32 counts as infinity.
        ([1e39, 8], [4, 4], {"headroom_lost": 1.0}),
        ([3e38, 8], [3e38, 4], {"headroom_lost": 0.5}),
        # Every loss scale overflows at a step whose ceiling is 0.
        ([0, 0, 4], [4, 2, 8], {"skipped": 3, "headroom_lost": math.nan}),
        ([1e-39, 2**-126], [1, 1], {"skipped": 2}),
        ([0, 0], [1, 1], {"steps_to_first_applied": 2}),
        # Gradients cannot be unscaled with a scale of inf or 0, so these steps are skipped.
        ([INF, INF, INF], [INF, 0, 1], {"skipped": 2, "steps_to_first_applied": 2}),
    ],
)
def test_measures_of_hand_made_replays(ceiling, loss_scale, expected):
    measures = dataclasses.asdict(measure(Trace.exact("made", ceiling), loss_scale))
    assert {name: measures[name] for name in expected} == pytest.approx(expected, nan_ok=True)


def test_known_share_counts_the_outcomes_that_the_bounds_decide():
    trace = Trace("log", np.full(4, 8.0), lower_bound=np.full(4, 4.0), upper_bound=np.full(4, 32.0))
    assert measure(trace, [4, 8, 16, 32]).known_share == 0.5


SCALES = st.one_of(st.sampled_from([0.0, 2.0**-140, 2.0**-126, 1.0, 2.0**16, 1e38, 1e39, INF]), st.floats(1e-3, 1e9))


@given(st.lists(st.tuples(SCALES, SCALES), min_size=1, max_size=30))
def test_steps_are_skipped_where_their_scale_overflows(pairs):
    ceiling, scales = np.array(pairs).T
    trace = Trace.exact("made", ceiling)
    measures = measure(trace, scales)
    assert measures.skipped == sum(overflows(scale, limit) for limit, scale in pairs)


def test_steps_far_below_the_ceiling_are_too_low():
    scales = 2.0 ** np.array([21, 20, 4, 3.9, -100])
    measures = measure(Trace.exact("made", [2.0**20] * 4 + [np.inf]), scales)
    assert (measures.skipped, measures.too_low) == (1, 1)


@pytest.mark.parametrize(
    ("ceiling", "loss_scale", "message"),
    [
        ([], [], r"The trace 'made' must have at least 1 step, but got none"),
        ([8, 8], [1.0], r"'loss_scale' must have one number for each of the 2 steps .* but got shape \(1,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(ceiling, loss_scale, message):
    with pytest.raises(ValueError, match=message):
        measure(Trace.exact("made", ceiling), loss_scale)
