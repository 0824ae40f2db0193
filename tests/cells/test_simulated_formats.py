"""Simulated formats: every number as ml_dtypes rounds it, and matrix products that see what the formats leave."""

import mindspore
import ml_dtypes
import numpy as np
import pytest
from conftest import mindspore_mode
from format_tables import OWN, numbers_of_hifloat8
from graph_checks import control_flow, forbidden_tensors, undocumented_on_ascend
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive import simulate_formats
from mindformers_adaptive.amp.simulated_formats import RoundToFormat, simulated_products
from scripts.benchmarks.exported_graph import export_graph

NUMBERS = np.random.default_rng(0)
# Of every size, and near the numbers of 8-bit formats, so that there are ties.
NEAR = (NUMBERS.integers(-64, 65, 2**19) / 4 * 2.0 ** NUMBERS.integers(-26, 18, 2**19)).astype(np.float32)
ANY = NUMBERS.integers(0, 2**32, 2**20, np.uint32).view(np.float32)
ANY[:2] = np.inf, -np.inf
# As bfloat16 near 0, with one bit more of mantissa.
FINE = {"name": "fine", "largest": 2.0, "smallest_normal": 2.0**-126, "smallest_subnormal": 2.0**-134}
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


ORACLES = dict.fromkeys(("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"), by_ml_dtypes)


@pytest.mark.parametrize("name", [*ORACLES, "hifloat8"])
@pytest.mark.parametrize("floats", FLOATS)
def test_every_number_is_rounded_as_the_format_has_it(mode, name, floats):
    x = FLOATS[floats]
    expected = by_ml_dtypes(x, name) if name in ORACLES else by_table(x)
    np.testing.assert_array_equal(RoundToFormat(name)(Tensor(x)).asnumpy(), expected)


@pytest.mark.parametrize("name", [*ORACLES, "hifloat8"])
def test_numbers_of_fp16_stay_in_fp16(graph_mode, name):
    x = FLOATS["all of FP16"]
    with np.errstate(over="ignore"):
        expected = (by_ml_dtypes(x, name) if name in ORACLES else by_table(x)).astype(np.float16)
    np.testing.assert_array_equal(RoundToFormat(name)(Tensor(x.astype(np.float16))).asnumpy(), expected)


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


@pytest.mark.parametrize(
    ("name", "operator", "dtypes"),
    [("float8_e5m2", "SearchSorted", set()), ("hifloat8", "SearchSorted", set()), ("bfloat16", "Cast", {"BFLOAT16"})],
)
def test_rounding_has_documented_operators_for_ascend_and_no_control_flow(graph_mode, name, operator, dtypes):
    graph = export_graph(RoundToFormat(name), Tensor(np.ones((2, 3), np.float32)))
    assert (undocumented_on_ascend(graph), control_flow(graph)) == (set(), set())
    assert {dtype for dtype, _ in forbidden_tensors(graph)} == dtypes
    assert operator in graph.primitives


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


@pytest.mark.parametrize("order", [("simulated", "in FP16"), ("in FP16", "simulated")])
def test_layers_that_compute_in_fp16_see_what_the_formats_leave(mode, order):
    steps = {
        "simulated": lambda network: simulate_formats(network, "float8_e4m3fn", "float8_e5m2"),
        "in FP16": lambda network: network.to_float(mstype.float16),
    }
    # In the middle between two numbers of the format once it is in FP16, and not before.
    simulated = nn.Dense(3, 4, weight_init=Tensor(np.full((4, 3), 0.13281262, np.float32)))
    for step in order:
        simulated = steps[step](simulated)
    x, sens = (NUMBERS.normal(0, 3, shape).astype(np.float16).astype(np.float32) for shape in ((5, 3), (5, 4)))
    weight = simulated.weight.asnumpy().astype(np.float16).astype(np.float32)
    output = simulated(Tensor(x))
    assert output.dtype == mstype.float16
    rounded = by_ml_dtypes(x, "float8_e4m3fn")
    expected = rounded @ by_ml_dtypes(weight, "float8_e4m3fn").T + simulated.bias.asnumpy()
    np.testing.assert_allclose(output.asnumpy(), expected, rtol=2e-3, atol=1e-2)
    gradient = ops.GradOperation(get_by_list=True, sens_param=True)(simulated, simulated.trainable_params()[:1])
    [found] = gradient(Tensor(x), Tensor(sens.astype(np.float16)))
    np.testing.assert_allclose(found.asnumpy(), by_ml_dtypes(sens, "float8_e5m2").T @ rounded, rtol=2e-3, atol=1e-2)


class Batched(nn.Cell):
    """A product of an operator for `mint` with a weight."""

    def __init__(self, operator):
        super().__init__()
        self.product, self.weight = operator(), Parameter(NUMBERS.normal(0, 1, (2, 2, 3)).astype(np.float32))

    def construct(self, x):
        return self.product(x, self.weight)


class Twice(nn.Cell):
    """Two products, both of this cell."""

    def __init__(self):
        super().__init__()
        self.one, self.other = ops.MatMul(), ops.MatMul()

    def construct(self, x):
        one = Tensor([[1.0]])
        return self.one(x, one), self.other(x, one)


def test_each_product_of_a_cell_computes_in_the_formats(graph_mode):
    network = simulate_formats(Twice(), "float8_e4m3fn")
    assert simulated_products(network) == {"Twice": 2}
    assert [float(product) for product in network(Tensor([[0.3]]))] == [0.3125, 0.3125]


@pytest.mark.parametrize(
    ("make_layer", "shape"),
    [
        (lambda: mint.nn.Linear(2, 3), (5, 2)),
        (lambda: Batched(ops.auto_generate.MatMulExt), (2, 5, 2)),
        (lambda: Batched(ops.auto_generate.BatchMatMulExt), (2, 5, 2)),
        (lambda: nn.Conv1d(2, 3, 3), (1, 2, 5)),
        (lambda: nn.Conv2d(2, 3, 3), (1, 2, 5, 5)),
        (lambda: nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5)),
        (lambda: nn.Conv1dTranspose(2, 3, 3), (1, 2, 5)),
        (lambda: nn.Conv2dTranspose(2, 3, 3), (1, 2, 5, 5)),
        (lambda: nn.Conv3dTranspose(2, 3, 3), (1, 2, 5, 5, 5)),
    ],
)
def test_products_of_other_layers_compute_in_the_formats(graph_mode, make_layer, shape):
    simulated, plain = simulate_formats(make_layer(), "float8_e4m3fn", "float8_e5m2"), make_layer()
    for one, other in zip(plain.get_parameters(), simulated.get_parameters(), strict=True):
        # A bias is added in float32.
        one.set_data(Tensor(by_ml_dtypes(other.asnumpy(), "float8_e4m3fn")) if other.ndim > 1 else other)
    x = NUMBERS.normal(0, 3, shape).astype(np.float32)
    rounded = Tensor(by_ml_dtypes(x, "float8_e4m3fn"))
    expected = plain(rounded)
    sens = NUMBERS.normal(0, 3, expected.shape).astype(np.float32)
    gradient = ops.GradOperation(get_by_list=True, sens_param=True)
    found = gradient(simulated, simulated.trainable_params()[:1])(Tensor(x), Tensor(sens))
    sens = Tensor(by_ml_dtypes(sens, "float8_e5m2"))
    by_plain = gradient(plain, plain.trainable_params()[:1])(rounded, sens)
    for one, other in ((simulated(Tensor(x)), expected), (found[0], by_plain[0])):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.ReLU(), "float16"), ValueError, "must have a cell with one of .*MatMul.*, such as nn.Dense"),
        ((nn.Dense(1, 1), "fp8"), ValueError, "'forward' must be one of float16"),
        ((nn.Dense(1, 1), None, FINE), ValueError, "must be coarser than float32, but fine has .* Make 'smallest_sub"),
        ((Network(), None, None, ["lost"]), ValueError, "but got 'lost'. The nearest names are last"),
        ((Network(), None, None, "last"), TypeError, "'layers' must be a list of names, but got 'last'"),
        ((lambda x: x,), TypeError, "'network' must be a Cell"),
        ((Network(), "float16", None, []), ValueError, "'layers' must name at least 1 layer, but got none"),
        ((Network(), "float16", None, [5]), TypeError, r"'layers' must be a list of names, but got \[5\]"),
        ((Network(), "float16", None, 5), TypeError, "'layers' must be a list of names, but got 5"),
        ((Network(), None, None, ["Dens"]), ValueError, "but got 'Dens'. The nearest names are Dense, "),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        simulate_formats(*arguments)


def test_layers_may_come_from_a_generator():
    network = simulate_formats(Network(), "float8_e4m3fn", layers=(name for name in ["last"]))
    assert simulated_products(network) == {"Dense": 1}
    # Another call takes those that are left, each of them once.
    simulate_formats(network, "float8_e4m3fn", layers=["first"])
    assert simulated_products(network) == {"Dense": 2}


@pytest.mark.parametrize("layers", [None, ["last"], ["Dense"]])
def test_what_is_simulated_is_not_simulated_again(layers):
    network = simulate_formats(Network(), "float8_e4m3fn", layers=["last"])
    with pytest.raises(ValueError, match="must have products that are not simulated yet, but those of 'last' are"):
        simulate_formats(network, "bfloat16", layers=layers)


RUNS = {
    "alone": lambda network: network(Tensor(np.ones((1, 3), np.float32))),
    "in another cell": lambda network: nn.SequentialCell(network)(Tensor(np.ones((1, 3), np.float32))),
    "for its gradient": lambda network: ops.GradOperation()(network)(Tensor(np.ones((1, 3), np.float32))),
    "in a function": lambda network: in_a_function(network, Tensor(np.ones((1, 3), np.float32))),
}


def in_a_function(network, x):
    @mindspore.jit
    def forward(x):
        return network(x)

    return forward(x)


@pytest.mark.parametrize("run", RUNS)
def test_a_network_that_was_compiled_is_refused(graph_mode, run):
    network = Network()
    RUNS[run](network)
    with pytest.raises(ValueError, match=r"'network' must not have run in graph mode yet, but .* has been compiled"):
        simulate_formats(network, "float8_e4m3fn")


def test_a_network_that_ran_in_pynative_mode_is_simulated_from_then_on():
    with mindspore_mode("pynative"):
        x = Tensor(np.full((1, 3), 0.3, np.float32))
        network = nn.Dense(3, 2)
        before = network(x).asnumpy()
        assert not np.array_equal(simulate_formats(network, "float8_e4m3fn")(x).asnumpy(), before)


def test_products_of_what_is_no_network_cannot_be_counted():
    with pytest.raises(TypeError, match="'network' must be a Cell, but got list"):
        simulated_products([Network()])
