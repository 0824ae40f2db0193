"""Thinned marks keep one in every column, and blocks keep the extremes and medians of their points."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.plots.thinning import gather, one_per_column

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300)


@given(st.sets(st.integers(0, 10**6), max_size=200), st.integers(1, 30))
def test_every_mark_has_one_near_it_that_is_drawn(places, columns):
    x = np.array(sorted(places), float)
    kept = one_per_column(x, columns)
    assert (np.diff(kept) > 0).all()
    if len(x) <= columns:
        assert kept.tolist() == list(range(len(x)))
        return
    assert len(kept) <= columns + 1
    width = (x[-1] - x[0]) / columns
    assert all(np.abs(x[kept] - one).min() <= width for one in x)


@given(VALUES, st.data())
def test_blocks_have_the_extremes_and_medians_of_their_points(values, data):
    blocks = data.draw(st.integers(1, len(values)))
    gathered = gather(np.arange(len(values)) * 2.0, values, blocks)
    start, sizes = 0, []
    for middle, *extremes in zip(*gathered, strict=True):
        # Points are 2 apart, so the middle of a block tells where it ends.
        end = round(middle) - start + 1
        block = [value for value in values[start:end] if not math.isnan(value)] or [math.nan]
        np.testing.assert_array_equal(extremes, (min(block), np.median(block), max(block)))
        sizes.append(end - start)
        start = end
    assert start == len(values)
    assert len(sizes) == blocks
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_do_not_count(value):
    *_, highest = gather([0, 1, 2], [value, 1.0, value], 1)
    assert highest.tolist() == [1.0]
