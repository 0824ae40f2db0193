"""Simulated formats round as ml_dtypes does, and a network's matrix products get rounded inputs and gradients."""

import ml_dtypes
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from scripts.studies.simulated_formats import RoundToFormat, simulate_formats
from tests.rules.format_tables import numbers_of_hifloat8

NUMBERS = np.random.default_rng(0)
ANY = NUMBERS.integers(0, 2**32, 2**18, np.uint32).view(np.float32)
FLOATS = np.concatenate(
    [
        np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32),
        # Values near the numbers of the 8-bit formats, some halfway between two of them, so that rounding ties occur.
        (NUMBERS.integers(-64, 65, 2**17) / 4 * 2.0 ** NUMBERS.integers(-26, 18, 2**17)).astype(np.float32),
        # Leave out subnormal numbers of float32, which devices flush to 0.
        ANY[np.isnan(ANY) | (np.abs(ANY) >= 2.0**-126)],
        np.float32([np.inf, -np.inf]),
    ]
)


def rounded_to(name, x):
    with np.errstate(over="ignore", invalid="ignore"):
        if name != "hifloat8":
            return x.astype(getattr(ml_dtypes, name, name)).astype(np.float32)
        numbers = np.array([0.0, *numbers_of_hifloat8(), 1.5 * 2.0**15])
        size = np.abs(x).astype(np.float64)
        # HiF8 rounds ties away from 0.
        nearest = numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, size, side="right")]
        nearest = np.copysign(np.where(nearest > 2.0**15, np.inf, nearest), x)
        return np.where(np.isnan(x), np.nan, nearest).astype(np.float32)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "hifloat8"])
def test_numbers_are_rounded_as_the_format_has_them(mode, name):
    np.testing.assert_array_equal(RoundToFormat(name)(Tensor(FLOATS)).asnumpy(), rounded_to(name, FLOATS))


@pytest.mark.parametrize("in_fp16", [False, True])
def test_products_see_rounded_inputs_and_gradients(mode, in_fp16):
    dtype = np.float16 if in_fp16 else np.float32
    # In FP16, this weight is halfway between two numbers of the simulated format; in float32 it is not.
    layer = nn.Dense(3, 4, weight_init=Tensor(np.full((4, 3), 0.13281262, np.float32)))
    assert simulate_formats(layer, "float8_e4m3fn", "float8_e5m2") == 1
    if in_fp16:
        layer.to_float(mstype.float16)
    x, sens = (NUMBERS.normal(0, 3, shape).astype(dtype) for shape in ((5, 3), (5, 4)))
    weight = rounded_to("float8_e4m3fn", layer.weight.asnumpy().astype(dtype).astype(np.float32))
    rounded = rounded_to("float8_e4m3fn", x.astype(np.float32))
    tolerance = {"rtol": 2e-3, "atol": 1e-2} if in_fp16 else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(layer(Tensor(x)).asnumpy(), rounded @ weight.T + layer.bias.asnumpy(), **tolerance)
    gradient = ops.GradOperation(get_by_list=True, sens_param=True)(layer, layer.trainable_params()[:1])
    of_weight = gradient(Tensor(x), Tensor(sens))[0].asnumpy()
    expected = rounded_to("float8_e5m2", sens.astype(np.float32)).T @ rounded
    np.testing.assert_allclose(of_weight, expected, **tolerance)
