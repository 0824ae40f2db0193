"""Randomly generated rules take the same steps, bit for bit, in NumPy (one run or many at once) and in update cells."""

import math

import pytest

from mindformers_adaptive.rules import operations
from scripts.random_rules.compare import compare, make_rule, numpy_runs, states_of_cells

pytestmark = pytest.mark.slow

# The seeds of the rules that share a graph, and how many steps they take.
TOGETHER, STEPS = (0, 1, 2, 7, 37), 20
# The number of rules that run in NumPy alone, and how many steps they take.
IN_NUMPY, STEPS_IN_NUMPY = 40, 40


def made(seeds, folder):
    return [make_rule(seed, folder) for seed in seeds]


@pytest.fixture(scope="module")
def states_of_correct_cells(tmp_path_factory):
    """Return the states of update cells of random rules, computed while all NumPy operations are correct."""
    return states_of_cells(made(TOGETHER, tmp_path_factory.mktemp("rules")), STEPS)


def test_all_ways_take_the_same_steps(states_of_correct_cells, tmp_path):
    outcomes = compare(made(TOGETHER, tmp_path), STEPS, states_of_correct_cells)
    assert set(outcomes) <= {"same", "noticed"}, "\n".join(outcomes)
    # The steps of a rule that warned of a subnormal number (outcome "noticed") are not compared with update cells. So
    # at most three rules may have this outcome.
    assert outcomes.count("same") >= len(TOGETHER) - 3


@pytest.mark.filterwarnings("ignore:The rule 'random_.*' computed a subnormal number")
def test_random_rules_reach_all_operations(tmp_path):
    reached, used = set(), set()
    for random_rule in made(range(IN_NUMPY), tmp_path):
        used |= {value.op for value in next(iter(random_rule.rules[0].traced.outputs.values())).trace.values}
        states = numpy_runs(random_rule, STEPS_IN_NUMPY, 0)[0].states
        parts = [
            part for state in states[1:] for whole in state for part in (whole if isinstance(whole, tuple) else [whole])
        ]
        floats = [number for number in parts if isinstance(number, float)]
        reached |= {"NaN" for number in floats if math.isnan(number)} | {
            "inf" for number in floats if math.isinf(number)
        }
        reached |= {"-0.0" for number in floats if number == 0 and math.copysign(1, number) < 0}
        reached |= {"large int32" for number in parts if isinstance(number, int) and abs(number) > 2**30}
        if len({state.loss_scale for state in states}) > 3:
            reached.add(f"{'exponent' if random_rule.rules[0].moves_by_bits else 'loss_scale'} moves")
    assert reached == {"NaN", "inf", "-0.0", "large int32", "exponent moves", "loss_scale moves"}
    of_tables = {name.split(" ")[0] for name in operations.OPERATIONS}
    assert of_tables - used == set()


# For each of these operations, a deliberately wrong NumPy implementation. It changes the states of at least one of the
# last two rules, so the comparison must report a difference.
PLANTED = {
    "div": "{0} / {1}",
    "less": "{0} <= {1}",
    "minimum float32": "np.minimum({0}, {1})",
    "int32 float32": "np.rint(np.fmin(np.fmax({0}, SMALLEST_AS_INT32), LARGEST_AS_INT32)).astype(np.int32)",
}


@pytest.mark.parametrize("operation", PLANTED)
def test_a_planted_difference_is_found(states_of_correct_cells, tmp_path, monkeypatch, operation):
    planted = operations.OPERATIONS[operation]._replace(numpy=PLANTED[operation])
    monkeypatch.setitem(operations.OPERATIONS, operation, planted)
    # This test has just replaced a NumPy operation by a wrong one. Generate the same random rules again, so that their
    # NumPy steps use the wrong operation.
    states = {mode: of_rules[-2:] for mode, of_rules in states_of_correct_cells.items()}
    outcomes = compare(made(TOGETHER[-2:], tmp_path), STEPS, states)
    assert any("graph, step" in outcome and "pynative, step" in outcome for outcome in outcomes), outcomes
