"""Thinned lines keep their extremes, thinned marks every column that has one."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.plots.thinning import gather, thin_line, thin_marks

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300)


@given(VALUES, st.integers(1, 20))
def test_thinned_line_keeps_ends_and_extremes_of_every_column(values, columns):
    kept = thin_line(values, columns)
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    if len(values) <= 4 * columns:
        assert len(kept) == len(values)
        return
    assert len(kept) <= 4 * columns
    given_values, drawn = np.array(values), np.full(len(values), np.nan)
    drawn[kept] = given_values[kept]
    edges = np.linspace(0, len(values), columns + 1).astype(int)
    for start, end in pairwise(edges):
        whole, part = given_values[start:end], drawn[start:end]
        assert np.nanmax(part, initial=-9e9) == np.nanmax(whole, initial=-9e9)
        assert np.nanmin(part, initial=9e9) == np.nanmin(whole, initial=9e9)


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(1, 30))
def test_every_mark_has_one_near_it_that_is_drawn(places, columns):
    x = np.array(sorted(places), float)
    y = x % 3
    kept = thin_marks(x, y, columns)
    assert len(kept) <= max(3 * (columns + 1), columns)
    width = max(x[-1] - x[0], 1.0) / columns
    for one, at in zip(x, y, strict=True):
        assert np.abs(x[kept][y[kept] == at] - one).min() <= width


@given(VALUES, st.data())
def test_blocks_are_those_of_numpy(values, data):
    blocks = data.draw(st.integers(1, len(values)))
    x = np.arange(len(values)) * 2.0
    found = gather(x, values, blocks)
    edges = np.linspace(0, len(values), blocks + 1).astype(int)
    for number, (start, end) in enumerate(pairwise(edges)):
        block = [value for value in values[start:end] if not math.isnan(value)] or [math.nan]
        shown = (found.lowest[number], found.median[number], found.highest[number])
        np.testing.assert_array_equal(shown, (min(block), np.median(block), max(block)))
        assert found.middle[number] == start + end - 1


def test_blocks_leave_out_infinities():
    assert gather([0, 1, 2], [math.inf, 1.0, -math.inf], 1).highest.tolist() == [1.0]


@pytest.mark.parametrize("function", [thin_line, lambda values: thin_marks(values, values)])
def test_nothing_to_thin(function):
    assert function([]).tolist() == []
