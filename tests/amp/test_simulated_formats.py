"""Simulated formats: every number as ml_dtypes rounds it, and matrix products that see what the formats leave."""

import ml_dtypes
import numpy as np
import pytest
from exported_graph import export_graph
from format_tables import OWN, numbers_of_hifloat8
from graph_checks import control_flow, forbidden_tensors, undocumented_on_ascend
from mindspore import Tensor, nn, ops

from mindformers_adaptive import simulate_formats
from mindformers_adaptive.amp.simulated_formats import RoundToFormat

NUMBERS = np.random.default_rng(0)
# Of every size, and near the numbers of 8-bit formats, so that there are ties.
NEAR = (NUMBERS.integers(-64, 65, 2**19) / 4 * 2.0 ** NUMBERS.integers(-26, 18, 2**19)).astype(np.float32)
ANY = NUMBERS.integers(0, 2**32, 2**20, np.uint32).view(np.float32)
ANY[:2] = np.inf, -np.inf
FLOATS = {
    "all of FP16": np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32),
    # Devices flush numbers below the normal ones of float32 to 0.
    "float32": np.concatenate([NEAR, ANY[np.isnan(ANY) | (np.abs(ANY) >= 2.0**-126)]]),
}


def by_ml_dtypes(x, name):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(getattr(ml_dtypes, name, name)).astype(np.float32)


def by_table(x):
    """The nearest number of HiF8, and from the middle between two that away from 0."""
    numbers = np.array([0.0, *numbers_of_hifloat8(), 1.5 * 2.0**15])
    with np.errstate(invalid="ignore"):
        size = np.abs(x).astype(np.float64)
        found = numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, size, side="right")]
        rounded = np.where(np.isnan(x), np.nan, np.copysign(np.where(found > 2.0**15, np.inf, found), x))
    return rounded.astype(np.float32)


ORACLES = dict.fromkeys(("float16", "float8_e5m2", "float8_e4m3fn"), by_ml_dtypes)


@pytest.mark.parametrize("name", [*ORACLES, "hifloat8"])
@pytest.mark.parametrize("floats", FLOATS)
def test_every_number_is_rounded_as_the_format_has_it(mode, name, floats):
    x = FLOATS[floats]
    expected = by_ml_dtypes(x, name) if name in ORACLES else by_table(x)
    np.testing.assert_array_equal(RoundToFormat(name)(Tensor(x)).asnumpy(), expected)


def test_an_overflow_may_saturate(mode):
    rounded = RoundToFormat(OWN)(Tensor(np.array([30.0, -1e30, np.inf, 0.09, np.nan], np.float32))).asnumpy()
    np.testing.assert_array_equal(rounded, [28.0, -28.0, 28.0, 0.0625, np.nan])


def test_the_gradient_is_rounded_to_a_format_of_its_own(mode):
    cell = RoundToFormat("float8_e4m3fn", "float8_e5m2")
    gradient = np.array([0.3, 1e5, -(2.0**-17), 2.0**-30, 448.0], np.float32)
    grad = ops.GradOperation(sens_param=True)(cell)
    x = Tensor(np.full(5, 500.0, np.float32))
    np.testing.assert_array_equal(grad(x, Tensor(gradient)).asnumpy(), by_ml_dtypes(gradient, "float8_e5m2"))
    half = Tensor(x.asnumpy().astype(np.float16))
    assert RoundToFormat(gradients="float8_e5m2")(half).asnumpy().tobytes() == half.asnumpy().tobytes()


@pytest.mark.parametrize("name", ["float8_e5m2", "hifloat8"])
def test_rounding_has_documented_operators_for_ascend_and_no_control_flow(graph_mode, name):
    graph = export_graph(RoundToFormat(name), Tensor(np.ones((2, 3), np.float32)))
    assert (undocumented_on_ascend(graph), control_flow(graph), forbidden_tensors(graph)) == (set(), set(), set())
    assert "SearchSorted" in graph.primitives


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Dense(3, 4), nn.Dense(4, 2)

    def construct(self, x):
        return self.last(self.first(x))


def test_products_of_a_network_compute_in_the_formats(mode):
    network = simulate_formats(Network(), "float8_e4m3fn", "float8_e5m2", layers=["last"])
    assert [name for name, _ in network.parameters_and_names()] == [
        name for name, _ in Network().parameters_and_names()
    ]
    x, sens = (NUMBERS.normal(0, 3, shape).astype(np.float32) for shape in ((5, 3), (5, 2)))
    weights = network.trainable_params()
    found = ops.GradOperation(get_by_list=True, sens_param=True)(network, weights)(Tensor(x), Tensor(sens))
    first, bias, last, last_bias = (weight.asnumpy() for weight in weights)
    between = by_ml_dtypes(x @ first.T + bias, "float8_e4m3fn")
    output = between @ by_ml_dtypes(last, "float8_e4m3fn").T + last_bias
    np.testing.assert_allclose(network(Tensor(x)).asnumpy(), output, rtol=1e-5)
    rounded = by_ml_dtypes(sens, "float8_e5m2")
    into = rounded @ by_ml_dtypes(last, "float8_e4m3fn")
    expected = (into.T @ x, into.sum(0), rounded.T @ between, sens.sum(0))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other, rtol=1e-4, atol=1e-6)


def test_convolutions_compute_in_the_formats(graph_mode):
    convolution = nn.Conv2d(2, 3, 3)
    x, sens = (NUMBERS.normal(0, 3, shape).astype(np.float32) for shape in ((1, 2, 5, 5), (1, 3, 5, 5)))
    weight = convolution.weight.asnumpy().copy()
    convolution.weight.set_data(Tensor(by_ml_dtypes(weight, "float8_e4m3fn")))
    inputs = [Tensor(by_ml_dtypes(x, "float8_e4m3fn")), Tensor(by_ml_dtypes(sens, "float8_e5m2"))]
    gradient = ops.GradOperation(get_by_list=True, sens_param=True)
    expected = convolution(inputs[0]), gradient(convolution, convolution.trainable_params())(*inputs)[0]
    convolution.weight.set_data(Tensor(weight))
    simulate_formats(convolution, "float8_e4m3fn", "float8_e5m2")
    found = convolution(Tensor(x)), gradient(convolution, convolution.trainable_params())(Tensor(x), Tensor(sens))[0]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.ReLU(), "float16"), ValueError, "must have a cell with ops.MatMul"),
        ((nn.Dense(1, 1), "fp8"), ValueError, "'forward' must be one of float16"),
        ((nn.Dense(1, 1), None, "bfloat16"), ValueError, "must be coarser than float32, but bfloat16 has"),
        ((Network(), None, None, ["lost"]), ValueError, "but got 'lost'. The nearest names are last"),
        ((Network(), None, None, "last"), TypeError, "'layers' a list of names, but got Network and 'last'"),
        ((lambda x: x,), TypeError, "'network' must be a Cell"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        simulate_formats(*arguments)
