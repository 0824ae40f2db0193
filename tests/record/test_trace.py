"""A trace has a lower and an upper bound of each step's ceiling, the largest loss scale without overflow.

A loss scale up to the lower bound never overflows, and a loss scale from the upper bound on always does.
"""

import numpy as np
import pytest

from mindformers_adaptive.record.trace import Trace


def test_an_exact_trace_knows_what_happens_at_every_scale():
    trace = Trace.exact("made", [8.0, 0.0, np.inf])
    assert len(trace) == 3
    for scale in (1.0, 8.0, np.nextafter(8.0, 9.0), 2.0**100):
        assert trace.known(scale).tolist() == [True, True, True]


def test_what_lies_between_the_bounds_is_assumed():
    trace = Trace("log", np.array([4.0]), np.array([2.0]), np.array([8.0]))
    assert [trace.known(scale).tolist() for scale in (1, 2, 3, 7, 8, 9)] == [[k] for k in (1, 1, 0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("ceiling", "lower_bound", "upper_bound"),
    [([1.0], [2.0], [4.0]), ([4.0], [2.0], [4.0]), ([np.nan], [2.0], [4.0])],
    ids=["under", "over", "nan"],
)
def test_a_ceiling_outside_its_bounds_is_refused(ceiling, lower_bound, upper_bound):
    with pytest.raises(ValueError, match=rf"ceiling .*bounds, .* trace 'log' step 0 .* ceiling {ceiling[0]}, "):
        Trace("log", np.array(ceiling), np.array(lower_bound), np.array(upper_bound))


@pytest.mark.parametrize("ceiling", [[8.0], 8.0, "8", True])
def test_what_is_no_array_is_refused(ceiling):
    of_type = type(ceiling).__name__
    with pytest.raises(TypeError, match=rf"trace 'log' must be NumPy arrays, .* of type {of_type}\. .*numpy\.array"):
        Trace("log", ceiling, np.ones(1), np.ones(1))


@pytest.mark.parametrize("other", [{"upper_bound": np.full(3, 2.0)}, {"largest_gradient": np.ones(3)}])
def test_arrays_of_different_lengths_are_refused(other):
    with pytest.raises(ValueError, match=r"arrays .* trace 'log' must have .* shapes \[\(2,\), \(3,\)\]"):
        Trace("log", **{"ceiling": np.ones(2), "lower_bound": np.ones(2), "upper_bound": np.full(2, 2.0), **other})
