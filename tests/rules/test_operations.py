"""NumPy, update cells and Python agree on each operation of a rule, at numbers where implementations often differ.

Each expression is computed with traced values, and with numbers of the class ``Plain``, which define what each
operation means. A result below 2^-126 is undefined, and is not compared.
"""

import ctypes
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_adaptive import RuleLossScaleUpdateCell, rules
from mindformers_adaptive.rules import Rule, float32, int32, operations
from mindformers_adaptive.rules.lanes import Lanes
from tests.shared.every_rule import Owned

LARGEST = float(np.finfo(np.float32).max)
FLOATS = (0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 2.0**31, -(2.0**31))
FLOATS += (2147483520.0, 16777217.0, 0.1, 3.3, -0.5)
INTEGERS = (0, 1, -1, 7, -7, 2**31 - 1, -(2**31), -(2**31) + 1, 2**24 + 1, 46341, 65536)


class Plain:
    """A number with a dtype, whose operations give the results that the documentation states."""

    def __init__(self, number, dtype):
        self.number, self.dtype = self.fitting(number, dtype), dtype

    @staticmethod
    def fitting(number, dtype):
        if dtype == "int32":
            return (int(number) + 2**31) % 2**32 - 2**31
        return ctypes.c_float(number).value if dtype == "float32" else bool(number)

    def beside(self, other):
        return other if isinstance(other, Plain) else Plain(other, self.dtype)

    def after(self, function, other, dtype=None):
        return Plain(function(self.number, self.beside(other).number), dtype or self.dtype)

    def __add__(self, other):
        return self.after(lambda x, y: x + y, other)

    def __sub__(self, other):
        return self.after(lambda x, y: x - y, other)

    def __mul__(self, other):
        return self.after(lambda x, y: x * y, other)

    def __truediv__(self, other):
        return self.after(lambda x, y: math.nan if y == 0 else x / y, other)

    def __floordiv__(self, other):
        return self.after(lambda x, y: 0 if y == 0 else x // y, other)

    def __rsub__(self, other):
        return self.beside(other) - self

    def __rtruediv__(self, other):
        return self.beside(other) / self

    def __rfloordiv__(self, other):
        return self.beside(other) // self

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self):
        return Plain(-self.number, self.dtype)

    def __abs__(self):
        return Plain(abs(self.number), self.dtype)

    def __lt__(self, other):
        return self.after(lambda x, y: x < y, other, "bool")

    def __le__(self, other):
        return self.after(lambda x, y: x <= y, other, "bool")

    def __gt__(self, other):
        return self.after(lambda x, y: x > y, other, "bool")

    def __ge__(self, other):
        return self.after(lambda x, y: x >= y, other, "bool")

    def __eq__(self, other):
        return self.after(lambda x, y: x == y, other, "bool")

    def __ne__(self, other):
        return self.after(lambda x, y: x != y, other, "bool")

    def __and__(self, other):
        return self.after(lambda x, y: x and y, other)

    def __or__(self, other):
        return self.after(lambda x, y: x or y, other)

    def __invert__(self):
        return Plain(not self.number, self.dtype)

    __hash__ = None


def plain_int32(x):
    if x.dtype == "float32":
        number = -(2.0**31) if math.isnan(x.number) else min(max(x.number, -(2.0**31)), 2147483520.0)
        return Plain(math.trunc(number), "int32")
    return Plain(x.number, "int32")


def rounded(function):
    def apply(x):
        number = x.number
        if not math.isfinite(number):
            return x
        # A result of 0 has the sign of the operation's input.
        return Plain(
            math.copysign(abs(function(number)), number) if function(number) == 0 else function(number), "float32"
        )

    return apply


def plain_where(condition, x, y):
    dtype = x.dtype if isinstance(x, Plain) else y.dtype
    picked = x if condition.number else y
    return picked if isinstance(picked, Plain) else Plain(picked, dtype)


def plain_minimum(x, y):
    return plain_where(x < y if isinstance(x, Plain) else y > x, x, y)


def plain_maximum(x, y):
    return plain_where(y < x if isinstance(y, Plain) else x > y, x, y)


def plain_take(vector, index):
    return vector[min(max(index.number, 0), len(vector) - 1)]


def plain_argmin(vector):
    numbers = [math.inf if math.isnan(x.number) else x.number for x in vector]
    return Plain(numbers.index(min(numbers)), "int32")


def test_a_table_has_a_row_for_each_number_that_int32_has():
    numbers = random.Random(5)
    for _ in range(300):
        sizes = [numbers.randint(1, 8) for _ in range(numbers.randint(1, 4))]
        lowest = [numbers.choice((1 - 2**31, -(2**30), 0, 2**31 - 8, numbers.randrange(2**31 - 8))) for _ in sizes]
        rows = np.arange(math.prod(sizes), dtype=np.int32).reshape(*sizes, 1)
        offset = tuple(numbers.randrange(size) for size in sizes)
        index = np.array([[low + at] for low, at in zip(lowest, offset, strict=True)], np.int32)
        assert operations.Table([(rows, np.array(lowest, np.int32))])(index) == rows[offset]


def plain_tabulate(function, **arguments):
    arguments_of_rule = {}
    for name, number in arguments.items():
        value, *bounds = number if isinstance(number, tuple) else (number,)
        arguments_of_rule[name] = min(max(value.number, bounds[0]), bounds[1]) if bounds else value.number
    return tuple(Plain(number, "int32") for number in function(**arguments_of_rule))


PLAIN = SimpleNamespace(
    **{"int32": plain_int32, "float32": lambda x: Plain(getattr(x, "number", x), "float32"), "where": plain_where},
    **{"minimum": plain_minimum, "maximum": plain_maximum, "floor": rounded(math.floor), "ceil": rounded(math.ceil)},
    **{"take": plain_take, "argmin": plain_argmin, "tabulate": plain_tabulate, "stack": list},
    count=lambda flags: Plain(sum(flag.number for flag in flags), "int32"),
)


# Expressions of two numbers x and y. Boolean results are converted to 0 and 1.
FLOATS_OF_FLOATS = """
x + y; x - y; x * y; x / y; -x; abs(x); minimum(x, y); maximum(x, y); floor(x); ceil(x); where(x < y, x, y)
where(x == y, x, y); where(x == y, y, x); where(y < x, x, y); where(x < y, x, x); float32(int32(x)); float32(x < y)
x - x; x / x; x * x - y; -(-x); abs(-x); -x * -y; 0 - x; x - (-y); minimum(x, x); maximum(-x, abs(x)); floor(ceil(x))
x + 0; x + -0.0; -0.0 + x; x - 0.0; x - -0.0; -0.0 - x; x * 0.0; x * -0.0; x * 1; x * -1; x * 0 + 0; x * 2 / 2
x / 1; x / -1; 1 / x; 0 / x; x / 0; x / -0.0; x / INF; INF / x; x * INF; x + INF; x - INF; (x + 1) - 1
x * 0.1 * 0.3; 0.7 * (0.1 * x); x * 3 * 7 * 0.1; -(x * 0.1) * 0.3; x * 0.1 * y * 0.3; x / 3 / 7; x * 0.1 / 0.1
x / 0.1 * 0.1; x + 0.1 + 0.2; 0.1 - (x - 0.3); x * 0.1 + x * 0.2; x * 0.1 - x * 0.1; x * 1e30 * 1e30 * 1e-30
x * 16777217; x * 16777217 * 0.1; x * 3e38; minimum(x, LARGEST); minimum(LARGEST, x); maximum(x, -LARGEST)
maximum(-LARGEST, x); maximum(x, LARGEST); minimum(x, -LARGEST); minimum(x, 3e38); minimum(3e38, x); maximum(x, -3e38)
minimum(x, 2.0**127); minimum(x, 2.0**126); minimum(x, 1.7e38); minimum(x, 2.0**100); maximum(x, -2.0**127)
minimum(x, INF); minimum(INF, x); maximum(x, -INF); maximum(-INF, x); minimum(x, -INF); maximum(x, INF)
minimum(x, 0.0); maximum(x, 0.0); maximum(-0.0, x); minimum(minimum(x, 3), 7); maximum(0, minimum(x, 1))
minimum(x, 1) + minimum(x, 2); minimum(maximum(x, 8), 3e38); where(x == x, minimum(x, 2), y); x * 0.0 + y
x * (float32(INF) * 0); (float32(INF) - INF) * x; x * 0.1 * (float32(INF) * 0) * 0.3; x + float32(INF) * 0
"""
INTEGERS_OF_FLOATS = """
int32(x); int32(-x); int32(x * 1000); int32(x) + int32(y); x < y; x <= y; x > y; x >= y; x == y; x != y; ~(x < y)
~(x == y); (x < y) & (x == x); (x < y) | (x != x); (x < y) == (y < x); (x < y) != (y < x); x == x; x != x; x <= x
x < INF; x <= LARGEST; x >= 0; x < -0.0; x == 0; x > -INF; (x < y) & True; (x < y) & False; (x < y) | True
(x < y) | False; where(x < y, True, x == y); where(x < y, x == y, False); where(x < y, x < y, y < x); ~(~(x < y))
"""
INTEGERS_OF_INTEGERS = """
x + y; x - y; x * y; x // y; -x; abs(x); minimum(x, y); maximum(x, y); where(x < y, x, y); where(x == y, x, y); x - x
x // x; -(-x); 0 - x; x + 0; x - 0; x * 0; x * 1; x * -1; x // 1; x // -1; x // 0; 0 // x; 7 // x; x // 2; x // -7
x // 7 // 3; x + 1 + 2147483647; x - 1 - 2147483647; 3 - (x - 5); x * 65536 * 65536; x * 3 * 7; x * 3 // 3
x // 2 * 2; x - x // y * y; x - -2147483648; x + -2147483648; -2147483648 - x; minimum(x, 2147483647)
maximum(x, -2147483648); maximum(0, minimum(x, 3)); minimum(x, x); int32(float32(x)); x < y; x <= y; x == y; x != y
int32(float32(x) * float32(y)); x < 2147483647; where(x < 0, -x, x); abs(x) - x; -x - y; x * x; x * y + x
"""

# The tables of test expressions, by name: the dtype of the inputs x and y, the dtype of the results, the expressions.
TABLES = {
    "floats_of_floats": ("float32", "float32", FLOATS_OF_FLOATS),
    "integers_of_floats": ("float32", "int32", INTEGERS_OF_FLOATS),
    "integers_of_integers": ("int32", "int32", INTEGERS_OF_INTEGERS),
}


def results_of(table, x, y, of):
    """Return, for each expression of a table, its value for x and y; functions in expressions are taken from ``of``."""
    _, dtype, expressions = TABLES[table]
    results = {}
    for expression in expressions.strip().replace("\n", "; ").split("; "):
        value = eval(expression, {**vars(of), "LARGEST": LARGEST, "INF": math.inf, "x": x, "y": y})
        results[expression] = of.int32(value) if dtype == "int32" else value
    return results


def pairs_of(dtype):
    numbers = FLOATS if dtype == "float32" else INTEGERS
    return [(x, y) for x in numbers for y in numbers]


DTYPES = {"float32": float32, "int32": int32}


class OfVectors(Rule):
    """A rule that computes all test expressions on vectors of numbers."""

    name = "of_vectors"

    def __init__(self):
        super().__init__()
        self.state = {}
        for name, dtype in DTYPES.items():
            self.state |= dict.fromkeys((f"x_{name}", f"y_{name}"), dtype[len(pairs_of(name))])
        for name, (taken, dtype, _) in TABLES.items():
            self.state |= dict.fromkeys(self.fields_of(name), DTYPES[dtype][len(pairs_of(taken))])

    def fields_of(self, table):
        """Return the names of the state fields that hold the results of a table, one field for each expression."""
        number = Plain(1, TABLES[table][0])
        return [f"{table}_{n}" for n in range(len(results_of(table, number, number, PLAIN)))]

    def next_state(self, state, seen):
        results = {}
        for name, (taken, _, _) in TABLES.items():
            values = results_of(name, getattr(state, f"x_{taken}"), getattr(state, f"y_{taken}"), rules)
            results |= dict(zip(self.fields_of(name), values.values(), strict=True))
        return state.replace(**results)

    def starts(self):
        """Return a list with one start state. Its vectors x and y hold all pairs of test numbers as x[i], y[i]."""
        columns = {dtype: list(zip(*pairs_of(dtype), strict=True)) for dtype in DTYPES}
        fields = {f"{side}_{dtype}": columns[dtype][n] for dtype in columns for n, side in enumerate("xy")}
        return [self.start(1.0)._replace(**fields)]

    def results(self, ends):
        """Return lists of the results of the test expressions, by table name, from the states after one step."""
        return {name: [getattr(ends[0], field) for field in self.fields_of(name)] for name in TABLES}


class OfNumbers(OfVectors):
    """A rule that computes all test expressions on one pair of numbers; its state has a vector of results per table."""

    name = "of_numbers"

    def __init__(self):
        super().__init__()
        self.state = {f"{side}_{name}": dtype for name, dtype in DTYPES.items() for side in "xy"}
        self.state |= {name: DTYPES[dtype][len(self.fields_of(name))] for name, (_, dtype, _) in TABLES.items()}

    def next_state(self, state, seen):
        results = {}
        for name, (taken, _, _) in TABLES.items():
            values = results_of(name, getattr(state, f"x_{taken}"), getattr(state, f"y_{taken}"), rules)
            results[name] = rules.stack(list(values.values()))
        return state.replace(**results)

    def starts(self):
        """Return a state for each pair of float32 numbers. It also has a pair of int32 numbers; int32 pairs repeat."""
        states, integers = [], pairs_of("int32")
        for n, (x, y) in enumerate(pairs_of("float32")):
            whole = dict(zip(("x_int32", "y_int32"), integers[n % len(integers)], strict=True))
            states.append(self.start(1.0)._replace(x_float32=x, y_float32=y, **whole))
        return states

    def results(self, ends):
        return {name: list(zip(*(getattr(end, name) for end in ends), strict=True)) for name in TABLES}


@pytest.fixture(scope="module")
def expected():
    """Return, for each table of test expressions, the expected results of each expression for all pairs of numbers."""
    by_name = {}
    for name, (taken, _, _) in TABLES.items():
        rows = [results_of(name, Plain(x, taken), Plain(y, taken), PLAIN) for x, y in pairs_of(taken)]
        by_name[name] = {expression: [row[expression].number for row in rows] for expression in rows[0]}
    return by_name


def assert_results(expected, results):
    """Assert that results are as expected bit for bit, and NaN where NaN is expected."""
    wrong = []
    for name, expressions in expected.items():
        pairs = pairs_of(TABLES[name][0])
        for (expression, numbers), ours in zip(expressions.items(), results[name], strict=True):
            for pair, number, our in zip(pairs, numbers, ours[: len(pairs)], strict=True):
                is_undefined = number == number and 0 < abs(number) < 2.0**-126
                if not is_undefined and not is_equal(number, our):
                    wrong.append(f"{expression} of {pair} is {our!r}, not {number!r}")
    assert not wrong, "\n".join([f"{len(wrong)} results differ:", *wrong[:40]])


def is_equal(number, ours):
    if number != number or ours != ours:
        return number != number and ours != ours
    return number == ours and math.copysign(1, number) == math.copysign(1, ours)


def in_lanes(rule, states):
    """Return the state after one step from each start state, computed in NumPy for all start states at once."""
    lanes = Lanes([rule] * len(states), states)
    lanes.step(np.zeros(len(states), bool), np.full(len(states), np.nan))
    return lanes.states()


def in_cell(rule, states):
    """Return the values of the rule's state fields after one step of an update cell from each start state."""
    owned, ends = Owned(RuleLossScaleUpdateCell(rule, 1.0)), []
    cell = owned.update_cell
    for state in states:
        for dtype in DTYPES:
            for name in (f"x_{dtype}", f"y_{dtype}"):
                getattr(cell, name).set_data(Tensor(np.array(getattr(state, name), dtype)))
        owned.step(False)
        ends.append(SimpleNamespace(**{name: getattr(cell, name).asnumpy().tolist() for name in rule.state}))
    return ends


@pytest.mark.filterwarnings("ignore:The rule 'of_.*' computed a subnormal number")
@pytest.mark.parametrize("rule_class", [OfVectors, OfNumbers])
def test_numpy_gives_what_the_operations_mean(expected, rule_class):
    rule = rule_class()
    states = rule.starts()
    ends = in_lanes(rule, states)
    assert_results(expected, rule.results(ends))
    assert_results(expected, rule.results([rule.step(states[0], False), *ends[1:]]))


@pytest.mark.parametrize("rule_class", [OfVectors, OfNumbers])
def test_cell_gives_what_the_operations_mean(expected, graph_mode, rule_class):
    rule = rule_class()
    assert_results(expected, rule.results(in_cell(rule, rule.starts())))


@pytest.mark.filterwarnings("ignore:The rule 'of_.*' computed a subnormal number")
def test_a_planted_difference_is_found(expected, monkeypatch):
    planted = operations.OPERATIONS["floor"]._replace(numpy="np.trunc({0})")
    monkeypatch.setitem(operations.OPERATIONS, "floor", planted)
    rule = OfNumbers()
    with pytest.raises(AssertionError, match=r"floor\(x\) of \(-2.5"):
        assert_results(expected, rule.results(in_lanes(rule, rule.starts())))


# Test vectors for argmin(), which returns the index of the smallest element, and take(), which returns an element.
VECTORS = ((0.0, -0.0, 1.0, 0.0), (1.0, -0.0, 0.0, 2.0), (math.nan, 3.0, math.nan, 3.0), (math.nan,) * 4)
VECTORS += (
    (math.inf, math.nan, math.inf, 1e38),
    (math.nan, math.inf, math.inf, math.inf),
    (5.0, 4.0, -math.inf, -LARGEST),
)
VECTORS += ((2.5, -1.0, -2.5, -2.5), (LARGEST, math.inf, math.nan, LARGEST))
INDICES = (0, 1, 3, 4, -1, -4, 7, 2**31 - 1, -(2**31))


def table(flag, number):
    """Return two int32 numbers that depend on a flag and a number; the tests give this function to ``tabulate``."""
    if flag:
        return number * 3, -number
    return number // 2, 2**31 - 1 if number == 5 else 0


def of_vectors(vector, index, of):
    """Return the int32 results and the float32 results of argmin(), count(), take() and other vector functions."""
    first, second = of.tabulate(table, flag=vector[0] < vector[1], number=(index, -2, 5))
    again = of.stack([vector[3], vector[0] * 2, vector[1]])
    integers = [of.argmin(vector), of.argmin(again), of.count([x < 1 for x in vector] if of is PLAIN else vector < 1)]
    integers += [of.count([x == x for x in vector] if of is PLAIN else vector == vector), first, second]
    integers += [of.take(of.stack([index, first, second]), index), of.take(of.stack([index, index]), first)]
    floats = [of.take(vector, index), of.take(again, index), again[1], sum(vector), of.take(vector, of.argmin(vector))]
    return integers, floats


class OfPlaces(Rule):
    name = "of_places"
    state = {"vector": float32[4], "index": int32, **{f"i{n}": int32 for n in range(8)}}  # noqa: RUF012
    state |= {f"f{n}": float32 for n in range(5)}

    def next_state(self, state, seen):
        integers, floats = of_vectors(state.vector, state.index, rules)
        results = {f"i{n}": value for n, value in enumerate(integers)} | {
            f"f{n}": value for n, value in enumerate(floats)
        }
        return state.replace(**results)


class Nested(Rule):
    """A rule that copies a vector to two fields on overflow, and otherwise copies the first field to the second."""

    name = title = "nested"
    state = {"pair": int32[2], "first": int32, "second": int32}  # noqa: RUF012

    def first_state(self, loss_scale):
        return {"pair": (5, 7), "first": 1, "second": 2}

    def next_state(self, state, seen):
        first = rules.where(seen.overflow, state.pair[0], state.first)
        return state.replace(first=first, second=rules.where(seen.overflow, state.pair[1], first))


class Crossed(Nested):
    """A rule that, on overflow, copies the two elements of a vector to two fields in reversed order."""

    name = title = "crossed"

    def next_state(self, state, seen):
        first, second = rules.where(seen.overflow, state.pair[1], state.first), state.second
        return state.replace(first=first, second=rules.where(seen.overflow, state.pair[0], second))


@pytest.mark.parametrize("rule", [Nested(), Crossed()], ids=["falls back to another", "in another order"])
def test_elements_are_picked_by_one_flag_each(graph_mode, rule):
    owned, state = Owned(RuleLossScaleUpdateCell(rule, 1.0)), rule.start(1.0)
    for overflow in (False, True, False):
        owned.step(overflow)
        state = rule.step(state, overflow)
        assert owned.update_cell.rule_state() == state


def test_vectors_are_reduced_and_taken_from_in_one_way(graph_mode):
    rule = OfPlaces()
    cases = [(vector, index) for vector in VECTORS for index in INDICES]
    states = [rule.start(1.0)._replace(vector=vector, index=index) for vector, index in cases]
    owned = Owned(RuleLossScaleUpdateCell(rule, 1.0))
    for (vector, index), state, in_lane in zip(cases, states, in_lanes(rule, states), strict=True):
        plain = [Plain(number, "float32") for number in vector]
        integers, floats = of_vectors(plain, Plain(index, "int32"), PLAIN)
        wanted = [value.number for value in (*integers, *floats)]
        states = {"lanes": in_lane, "one run": rule.step(state, False)}
        owned.update_cell.vector.set_data(Tensor(np.float32(vector)))
        owned.update_cell.index.set_data(Tensor(np.int32(index)))
        owned.step(False)
        states["cell"] = rule.State(**{**state._asdict(), **owned.update_cell.rule_state()._asdict()})
        for way, after in states.items():
            ours = [getattr(after, f"i{n}") for n in range(8)] + [getattr(after, f"f{n}") for n in range(5)]
            assert all(map(is_equal, wanted, ours)), (way, vector, index, ours, wanted)


class OfGradients(Rule):
    name = "of_gradients"
    state = {"known": int32, "largest": float32, "safe": int32}  # noqa: RUF012
    needs_gradients = True

    def next_state(self, state, seen):
        return state.replace(
            known=int32(seen.gradient_known), largest=seen.largest_gradient, safe=seen.max_safe_exponent
        )


@pytest.mark.parametrize("gradient_format", ["float16", "bfloat16", "float8_e4m3fn"])
def test_a_gradient_shows_the_largest_exponent_at_which_it_fits(graph_mode, gradient_format):
    rule = OfGradients(gradient_format=gradient_format)
    largest = rule.gradient_format.largest
    gradients = [0.0, math.inf, math.nan, 1e-40, 2.0**-127, 2.0**-126, 1.0, 3.25, 2.0**-10, LARGEST, -1.0, 2.0**100]
    # Also test, for some n, the largest gradient that does not overflow the format at the loss scale 2^n, and the
    # float32 numbers just below and just above this gradient.
    for fits in (np.float32(largest * 2.0**-n) for n in (1, 5, 30, 100)):
        gradients += [float(np.nextafter(fits, np.float32(toward))) for toward in (0, fits, LARGEST)]
    owned = Owned(RuleLossScaleUpdateCell(rule, 1024.0))
    for overflow in (False, True):
        for gradient in gradients:
            known = not overflow and 2.0**-126 <= gradient <= LARGEST
            safe = max(n for n in range(-260, 280) if gradient * 2.0**n <= largest) if known else -1024
            owned.step(overflow, gradient)
            for state in (rule.step(rule.start(1024.0), overflow, gradient), owned.update_cell.rule_state()):
                assert (state.known, state.largest, state.safe) == (known, gradient if known else 0.0, safe), gradient
