"""Test the numbers of each number format against ml_dtypes, and test that a format written to a file is read back."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from mindformers_adaptive.rules.formats import FLOAT16, FORMATS, Format, find_format
from tests.rules.format_tables import OWN, numbers_of_hifloat8


def numbers_of(number_format):
    """Return all numbers above 0 of a number format, computed from the step between neighbours at each exponent."""
    lowest, _, highest = map(math.floor, number_format.exponents)
    values = []
    for exponent in range(lowest, highest + 1):
        values += np.arange(2.0**exponent, 2.0 ** (exponent + 1), number_format.quantum(exponent)).tolist()
    return [number for number in values if number <= number_format.largest]


@pytest.mark.parametrize(
    ("name", "exponent", "mantissa", "overflow"),
    [
        ("float16", 5, 10, "inf"),
        ("bfloat16", 8, 7, "inf"),
        ("float32", 8, 23, "inf"),
        ("float8_e5m2", 5, 2, "inf"),
        ("float8_e4m3", 4, 3, "inf"),
        ("float8_e3m4", 3, 4, "inf"),
        ("float8_e4m3fn", 4, 3, "nan"),
        ("float6_e3m2fn", 3, 2, "saturate"),
        ("float6_e2m3fn", 2, 3, "saturate"),
        ("float4_e2m1fn", 2, 1, "saturate"),
    ],
)
def test_a_format_by_its_bits_has_the_numbers_of_ml_dtypes(name, exponent, mantissa, overflow):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    info, number_format = ml_dtypes.finfo(dtype), Format.from_bits(exponent, mantissa, overflow)
    assert (number_format.name, number_format.overflow) == (f"e{exponent}m{mantissa}", overflow)
    assert number_format.largest == float(info.max)
    assert number_format.smallest_normal == float(info.smallest_normal)
    assert number_format.smallest_subnormal == float(info.smallest_subnormal)
    if name == "float32":
        return
    with np.errstate(all="ignore"):
        codes = np.arange(2 ** (exponent + mantissa), dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float64)
        beyond = float(np.float64(2 * info.max).astype(dtype))
    assert numbers_of(number_format) == codes[np.isfinite(codes) & (codes > 0)].tolist()
    assert overflow == repr(beyond) or (overflow, beyond) == ("saturate", number_format.largest)
    if name in FORMATS:
        assert Format.from_bits(exponent, mantissa, overflow, name=name) == FORMATS[name]


@pytest.mark.parametrize(
    ("bits", "error", "message"),
    [
        ({"exponent": 1}, ValueError, "'exponent' must be at least 2, but got 1"),
        ({"exponent": 9}, ValueError, "'exponent' must be at most 8, but got 9"),
        ({"exponent": 8, "overflow": "nan"}, ValueError, "'exponent' must be at most 7, but got 8"),
        ({"exponent": 5.0}, TypeError, "'exponent' must be an integer"),
        ({"mantissa": 0}, ValueError, "'mantissa' must be at least 1, but got 0.* FP8 E5M2 has 5 and 2"),
        ({"mantissa": 24}, ValueError, "'mantissa' must be at most 23, but got 24"),
        ({"overflow": "wrap"}, ValueError, "'overflow' must be one of"),
        ({"name": 5}, TypeError, "'name' must be text, but got 5"),
    ],
)
def test_bits_that_are_none_of_a_format_are_refused(bits, error, message):
    with pytest.raises(error, match=message):
        Format.from_bits(**{"exponent": 5, "mantissa": 2, **bits})


def test_bits_and_numbers_give_the_same_format():
    assert Format.from_bits(exponent=3, mantissa=2, overflow="saturate", name="mine") == Format(**OWN)


def test_hifloat8_has_the_numbers_of_its_codes():
    assert len(set(numbers_of_hifloat8())) == 126
    assert numbers_of(FORMATS["hifloat8"]) == numbers_of_hifloat8()


@pytest.mark.parametrize("number_format", [*FORMATS.values(), Format(**OWN), Format(**{**OWN, "name": "float16"})])
def test_what_is_written_for_a_format_is_read_as_the_same(number_format):
    assert find_format(json.loads(json.dumps(number_format.to_config()))) == find_format(number_format) == number_format
    assert (number_format.to_config() == number_format.name) is (number_format in FORMATS.values())
    # The attribute ``given``, which version 1.0.0 had instead of to_config(), has the same value.
    assert number_format.given == number_format.to_config()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("fp8", ValueError, "'gradient_format' must be one of float16, .*hifloat8, but got 'fp8'"),
        (8, TypeError, "'gradient_format' must be .* a dict with .* got 8 of type int.* float16"),
        (
            {"name": "mine"},
            TypeError,
            "'gradient_format' must be a dict .*name, largest, .* 'largest' is missing, 'smallest_no",
        ),
        ({**OWN, "bits": 3}, TypeError, "'bits' is unknown"),
        ({**OWN, "name": [1]}, TypeError, r"'name' must be text, but got \[1\] of type list"),
        *(
            ({**OWN, "precision": value}, TypeError, "'precision' must be .*pairs of integers, but got")
            for value in (5, "ab", {1: 2}, [1], [[1, 2, 3]], None)
        ),
        *(
            ({**OWN, "precision": [[0, bits]]}, TypeError, "'precision' must be an integer")
            for bits in ("a", 1.5, None, True)
        ),
        ({**OWN, "precision": [[0, -1]]}, ValueError, "'precision' must be at least 0, but got -1"),
        ({**OWN, "precision": [[0, 1], [0, 2]]}, ValueError, "'precision' must have increasing exponents"),
        ({**OWN, "smallest_normal": 0.3}, ValueError, "'smallest_normal' must be .*power of two .* but got 0.3"),
        ({**OWN, "smallest_subnormal": 0.5}, ValueError, "'smallest_normal' must be .* of at least 0.5, but got 0.25"),
        (
            {**OWN, "largest": 27.5},
            ValueError,
            "'largest' must be .*format can represent.* got 27.5",
        ),
        ({**OWN, "largest": "28"}, TypeError, "'largest' must be a number above 0"),
        ({**OWN, "overflow": "wrap"}, ValueError, "'overflow' must be one of 'inf', 'nan', 'saturate', but got 'wrap'"),
    ],
)
def test_what_is_no_format_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        find_format(value)


def test_titles_are_for_texts():
    assert [number_format.title for number_format in (FLOAT16, Format(**OWN))] == ["FP16", "mine"]
