"""The update cell equals the plain-Python rule bit for bit, and MindSpore's and MindFormers' own where it should."""

import collections

import numpy as np
import pytest
from mindformers.wrapper import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindspore import nn
from scale_cells import HeldCell, SideBySide, StepFromState

from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import window_ladder

INITIAL_SCALE = 2.0**16

# Small ladders, so that a dozen steps climb them and fall off them.
SMALL = (
    {"max_scale_window": 3, "min_scale_window": 1},
    {"max_scale_window": 2, "min_scale_window": 1, "scale_factor": 3, "hysteresis": 2},
    {"max_scale_window": 3, "min_scale_window": 1, "scale_factor": 1.5, "shrink_from_min_window": True},
    {"max_scale_window": 1, "min_scale_window": 1, "hysteresis": 3, "max_loss_scale": 2.0**18},
    {"max_scale_window": 2, "min_scale_window": 2, "scale_factor": 3, "min_loss_scale": 0.25},
)


@pytest.mark.parametrize("arguments", SMALL)
def test_every_sequence_of_length_12_in_graph_mode(graph_mode, arguments):
    assert walk_every_sequence(arguments, length=12) == 2**12


@pytest.mark.parametrize(
    ("bounds", "factor", "steps"),
    [
        ((1000, 20), 2, 2500),
        ((50, 10), 1.5, 2000),
        ((30, 4), 3, 2000),
        ((100, 20), 2, 2000),
        ((4, 2), 2, 1000),
        ((3, 2), 3, 1000),
    ],
)
def test_equals_mindformers_own_cell_where_its_ladder_is_well_formed(graph_mode, bounds, factor, steps):
    largest, smallest = bounds
    theirs = MindFormersUpdateCell(INITIAL_SCALE, factor, smallest, largest, smallest)
    assert tuple(theirs.window_list_num) == window_ladder(largest, smallest)
    ours = AdaptiveLossScaleUpdateCell(INITIAL_SCALE, factor, smallest, largest, smallest)
    windows = set()
    for scales, memory in side_by_side([theirs, ours], ["scale_window"], steps):
        assert scales[0] == scales[1]
        assert memory[0] == memory[1]
        windows.add(memory[0])
    # The comparison has seen the ladder climbed, to the top where it is near enough, and the hidden window.
    assert windows >= {1, *window_ladder(largest, smallest)} - {1000}


@pytest.mark.parametrize(("window", "factor"), [(1, 2), (20, 2), (7, 3), (100, 1.5)])
def test_one_window_is_mindspores_dynamic_cell(graph_mode, window, factor):
    theirs = nn.DynamicLossScaleUpdateCell(INITIAL_SCALE, factor, window)
    ours = AdaptiveLossScaleUpdateCell(INITIAL_SCALE, factor, window, max_scale_window=window, min_scale_window=window)
    for scales, memory in side_by_side([theirs, ours], ["cur_iter", "last_overflow_iter"], steps=1000):
        assert scales[0] == scales[1]
        cur_iter, last_overflow_iter, *ours_of_both = memory
        assert [cur_iter, last_overflow_iter] == ours_of_both


def build(arguments):
    arguments = {"scale_factor": 2, **arguments}
    return AdaptiveLossScaleUpdateCell(INITIAL_SCALE, scale_window=arguments["min_scale_window"], **arguments)


def expected_step(rule, state, steps):
    """The loss scale and what the Parameters of the cell hold after so many steps that led the rule to this state."""
    return state.loss_scale, [*rule.to_values(state, steps).values()]


def walk_every_sequence(arguments, length):
    """Take cell and rule through every overflow sequence of a length; return how many there were.

    The tree of sequences is walked level by level, so that they share their beginnings, and sequences that have led to
    the same state go on as one: every step starts from the very outputs of the cell in the step before.
    """
    one_step, rule = StepFromState(HeldCell(build(arguments))), AdaptiveRule(**arguments)
    sequences = {rule.start(INITIAL_SCALE): 1}
    for steps in range(length):
        following = collections.Counter()
        for state, count in sequences.items():
            for overflow in (False, True):
                next_state = rule.step(state, overflow)
                expected = expected_step(rule, next_state, steps + 1)
                assert one_step.step(*expected_step(rule, state, steps), overflow) == expected
                following[next_state] += count
        sequences = following
    return sequences.total()


def side_by_side(update_cells, names, steps):
    """Step two cells under the same ceilings; yield their loss scales and what the Parameters of these names hold."""
    cells = SideBySide(update_cells, names)
    loss_scale = INITIAL_SCALE
    for ceiling in random_ceilings(4000)[:steps]:
        scales, memory = cells.step([loss_scale > ceiling] * 2)
        loss_scale = scales[0]
        yield scales, memory


def random_ceilings(steps):
    """The largest scale that does not overflow, step by step: a random walk with sudden falls."""
    random = np.random.default_rng(2)
    exponents = 14 + np.cumsum(random.normal(0, 0.2, steps))
    exponents[random.random(steps) < 0.005] -= 8
    return np.exp2(np.clip(exponents, 2, 26)).astype(np.float32)
