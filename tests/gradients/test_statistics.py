"""An array's statistics equal a slow count of its elements, also if merged from several arrays or read from JSON."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mindformers_adaptive.gradients import statistics
from mindformers_adaptive.gradients.statistics import array_statistics, merge_statistics

ARRAYS = st.sampled_from(["float16", "float32"]).flatmap(
    lambda dtype: arrays(dtype, st.integers(0, 30), elements=st.floats(width=int(dtype[-2:])))
)


@given(array=ARRAYS)
def test_numbers_are_those_of_a_count_one_by_one(array):
    values = [abs(float(value)) for value in array]
    finite = [value for value in values if math.isfinite(value)]
    nonzero = [value for value in finite if value > 0]
    exponents = [math.frexp(value)[1] - 1 for value in nonzero]
    statistics = array_statistics(array)
    assert statistics.size == len(values)
    assert statistics.zeros == finite.count(0.0)
    assert statistics.infs_and_nans == len(values) - len(finite)
    assert statistics.largest == max(nonzero, default=0.0)
    assert statistics.smallest == min(nonzero, default=None)
    assert statistics.norm == pytest.approx(math.hypot(*nonzero), rel=1e-12)
    assert statistics.histogram == {exponent: exponents.count(exponent) for exponent in sorted(set(exponents))}


@given(first=ARRAYS, second=ARRAYS)
def test_merged_statistics_are_those_of_one_array(first, second):
    both = [first.astype(np.float64), second.astype(np.float64)]
    together = array_statistics(np.concatenate(both), np.ones(first.size + second.size), 0.5)
    merged = merge_statistics(array_statistics(array, np.ones(array.size), 0.5) for array in both)
    # A merged histogram assumes that values are spread evenly over their bins, see test_signed.py.
    merged = dataclasses.replace(merged, signed=together.signed)
    assert vars(merged) == {
        name: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        for name, value in vars(together).items()
    }


def test_an_array_longer_than_a_piece_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(statistics, "_PIECE", 4)
    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    measured = array_statistics(array, reference=array + 1)
    assert measured.histogram == {0: 1, 1: 2, 2: 4, 3: 2}
    assert (measured.norm, measured.underflowed) == (pytest.approx(math.sqrt(285)), 1)
    assert (measured.lost, measured.reference_norm) == pytest.approx((math.sqrt(10), math.sqrt(385)))


def test_underflows_are_zeros_that_the_reference_has_not():
    assert array_statistics([0.0, 0.0, 2.0, -0.0], reference=[0.0, 1.0, 2.0, 3.0]).underflowed == 2


def test_lost_is_the_norm_of_the_difference():
    random = np.random.default_rng(0)
    array, reference = random.normal(size=(3, 5)), random.normal(size=(3, 5))
    statistics = array_statistics(array, reference, ratio=0.25, unit=8.0)
    assert statistics.lost == pytest.approx(np.linalg.norm(array - 0.25 * reference) / 8)
    assert statistics.lost_share == 1.0
    close = array_statistics(0.25 * reference + 0.01, reference, ratio=0.25, unit=8.0)
    assert close.lost_share == pytest.approx(close.lost * 32 / np.linalg.norm(reference))
    assert array_statistics([0.0], [0.0]).lost_share is None
    overflowed = array_statistics([np.inf, 0.0], [1.0, 1.0])
    assert (overflowed.underflowed, overflowed.lost, overflowed.lost_share) == (1, None, None)


def test_what_is_unknown_of_one_array_is_unknown_of_all():
    known, unknown = array_statistics([0.0], [1.0]), array_statistics([0.0])
    both = merge_statistics([known, known])
    assert (both.underflowed, both.lost_share) == (2, 1.0)
    either = merge_statistics([known, unknown])
    assert (either.underflowed, either.lost, either.lost_share) == (None, None, None)


def test_shares_are_of_all_elements_and_json_holds_them():
    statistics = json.loads(
        json.dumps(array_statistics([0.0, 0.0, 1.0, np.nan], [0.0, 1.0, 1.0, 1.0]).to_dict(), allow_nan=False)
    )
    assert (statistics["zeros_share"], statistics["underflowed_share"], statistics["infs_and_nans_share"]) == (
        0.5,
        0.25,
        0.25,
    )
    assert statistics["histogram"] == {"0": 1}
    assert array_statistics([]).to_dict()["zeros_share"] == 0.0
    assert array_statistics([]).to_dict()["underflowed_share"] is None
