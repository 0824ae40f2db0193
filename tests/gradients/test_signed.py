"""Histograms that separate positive and negative values count each value once, also for several arrays together."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.gradients.signed import merge_signed, signed_histogram
from mindformers_adaptive.gradients.statistics import ArrayStatistics, array_statistics, merge_statistics

VALUES = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=40)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_every_value_is_counted_once_between_the_ends(arrays):
    histogram = merge_signed(map(signed_histogram, arrays))
    together = np.concatenate(arrays)
    assert sum(histogram.counts) == together.size
    assert min(histogram.counts) >= 0
    assert (histogram.lowest, histogram.highest) == (together.min(), together.max())


@given(VALUES)
def test_quantiles_are_those_of_the_values_to_within_a_bin(values):
    histogram = signed_histogram(values)
    width = np.diff(histogram.edges).max()
    low, high = (np.quantile(values, 0.5, method=method) for method in ("lower", "higher"))
    assert low - width <= histogram.quantiles([0.5])[0] <= high + width


@pytest.mark.parametrize("values", [[], [np.nan, np.inf]])
def test_of_no_finite_value_there_is_none(values):
    assert signed_histogram(values) is None
    assert array_statistics(values).signed is None


def test_statistics_survive_a_file_a_merge_and_a_division():
    first, second = array_statistics([-1.0, 0.5]), array_statistics([3.0, np.inf])
    together = merge_statistics([first, second])
    assert (together.signed.lowest, together.signed.highest, sum(together.signed.counts)) == (-1.0, 3.0, 3)
    read = ArrayStatistics.from_dict(json.loads(json.dumps(together.to_dict())))
    assert (read.signed, read.histogram) == (together.signed, together.histogram)
    assert together.divided_by(2.0).signed[:2] == (-0.5, 1.5)
