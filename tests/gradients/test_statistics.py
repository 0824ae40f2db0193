"""The statistics of an array: against a slow count of every element, merged, and as JSON."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mindformers_adaptive.gradients import statistics
from mindformers_adaptive.gradients.statistics import array_statistics, count_underflows, merge_statistics

ARRAYS = st.sampled_from(["float16", "float32"]).flatmap(
    lambda dtype: arrays(dtype, st.integers(0, 30), elements=st.floats(width=int(dtype[-2:])))
)


@given(array=ARRAYS)
def test_numbers_are_those_of_a_count_one_by_one(array):
    values = [abs(float(value)) for value in array]
    finite = [value for value in values if math.isfinite(value)]
    nonzero = [value for value in finite if value > 0]
    exponents = [math.frexp(value)[1] - 1 for value in nonzero]
    found = array_statistics(array)
    assert found.size == len(values)
    assert found.zeros == finite.count(0.0)
    assert found.infs_and_nans == len(values) - len(finite)
    assert found.largest == max(nonzero, default=0.0)
    assert found.smallest == min(nonzero, default=None)
    assert found.norm == pytest.approx(math.hypot(*nonzero), rel=1e-12)
    assert found.histogram == {exponent: exponents.count(exponent) for exponent in sorted(set(exponents))}


@given(first=ARRAYS, second=ARRAYS)
def test_merged_statistics_are_those_of_one_array(first, second):
    together = array_statistics(np.concatenate([first.astype(np.float64), second.astype(np.float64)]), underflowed=7)
    merged = merge_statistics([array_statistics(first, underflowed=3), array_statistics(second, underflowed=4)])
    assert merged.norm == pytest.approx(together.norm, rel=1e-12)
    assert {**vars(merged), "norm": 0.0} == {**vars(together), "norm": 0.0}


def test_an_array_longer_than_a_piece_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(statistics, "_PIECE", 4)
    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    assert array_statistics(array).histogram == {0: 1, 1: 2, 2: 4, 3: 2}
    assert array_statistics(array).norm == pytest.approx(math.sqrt(285))


def test_the_ends_of_fp16_lie_in_the_histogram_at_minus_24_and_15():
    ends = np.array([2.0**-24, 65504.0], np.float16)
    assert array_statistics(ends).histogram == {-24: 1, 15: 1}


def test_underflows_are_zeros_that_were_not_zero_at_the_reference():
    reference = np.array([0.0, 1.0, 2.0, 3.0])
    assert count_underflows([0.0, 0.0, 2.0, -0.0], reference == 0) == 2


def test_underflows_are_unknown_together_where_one_is_unknown():
    known, unknown = array_statistics([0.0], underflowed=1), array_statistics([0.0])
    assert merge_statistics([known, known]).underflowed == 2
    assert merge_statistics([known, unknown]).underflowed is None


def test_shares_are_of_all_elements_and_json_holds_them():
    found = json.loads(json.dumps(array_statistics([0.0, 0.0, 1.0, np.nan], underflowed=1).to_dict(), allow_nan=False))
    assert (found["zeros_share"], found["underflowed_share"], found["infs_and_nans_share"]) == (0.5, 0.25, 0.25)
    assert found["histogram"] == {"0": 1}
    assert array_statistics([]).to_dict()["zeros_share"] == 0.0
    assert array_statistics([]).to_dict()["underflowed_share"] is None
