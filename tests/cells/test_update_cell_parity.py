"""The adaptive update cell behaves like its rule in Python and, with suitable settings, like MindSpore's own cells."""

import numpy as np
import pytest
from mindformers.wrapper import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindspore import nn

from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import window_ladder
from mindformers_adaptive.rules.saved_state import to_values
from tests.shared.every_rule import Owned

pytestmark = pytest.mark.slow

INITIAL_SCALE = 2.0**16

# Short ladders of scale windows, so that a dozen steps are enough to climb to the top and fall back.
SMALL = (
    {"max_scale_window": 3, "min_scale_window": 1},
    {"max_scale_window": 2, "min_scale_window": 1, "scale_factor": 3, "hysteresis": 2},
    {"max_scale_window": 3, "min_scale_window": 1, "scale_factor": 1.5, "shrink_from_min_window": True},
    {"max_scale_window": 1, "min_scale_window": 1, "hysteresis": 3, "max_loss_scale": 2.0**18},
    {"max_scale_window": 2, "min_scale_window": 2, "scale_factor": 3, "min_loss_scale": 0.25},
)


@pytest.mark.parametrize("arguments", SMALL)
def test_every_sequence_of_length_12_in_graph_mode(graph_mode, arguments):
    """Try all sequences of overflows, but only one of those that lead to states with the same next step."""
    rule = AdaptiveRule(**arguments)

    def relevant(state):
        """Return a state without what a step does not read: the counters, and a loss scale far from its bounds."""
        lower, upper = state.loss_scale / rule.scale_factor, state.loss_scale * rule.scale_factor
        is_far = rule.min_loss_scale < lower and upper < rule.max_loss_scale
        scale = 0 if is_far else state.loss_scale
        return state._replace(loss_scale=scale, skipped_steps=0, consecutive_overflows=0)

    sequences, seen = {rule.start(INITIAL_SCALE)}, set()
    beside = {"scale_factor": 2, "scale_window": rule.ladder[0]}
    owned = Owned(AdaptiveLossScaleUpdateCell(INITIAL_SCALE, **{**beside, **arguments}))
    for steps in range(12):
        following = set()
        for state in sequences:
            seen.add(relevant(state))
            for overflow in (False, True):
                owned.update_cell.write_rule_state(state, steps)
                owned.step(overflow)
                next_state = rule.step(state, overflow)
                assert float(owned.scale_sense) == next_state.loss_scale
                values = {"loss_scale": next_state.loss_scale, **to_values(rule, next_state, steps + 1)}
                assert owned.update_cell.state().items() <= values.items()
                following.add(next_state)
        sequences = {relevant(state): state for state in following if relevant(state) not in seen}
        sequences = set(sequences.values())
    assert len(seen) >= 32


@pytest.mark.parametrize(("bounds", "factor", "steps"), [((1000, 20), 2, 1610), ((4, 2), 1.5, 150)])
def test_equals_mindformers_own_cell_where_its_ladder_is_right(graph_mode, bounds, factor, steps):
    largest, smallest = bounds
    theirs = MindFormersUpdateCell(INITIAL_SCALE, factor, smallest, largest, smallest)
    assert tuple(theirs.window_list_num) == window_ladder(largest, smallest)
    rule = AdaptiveRule(factor, largest, smallest)
    windows = {held[0] for held in steps_of_both(theirs, rule, ["scale_window"], steps)}
    # The steps used every scale window of the ladder except 1000. They also used the hidden window, which is 1 step
    # long and not on the ladder.
    assert windows >= {1, *window_ladder(largest, smallest)} - {1000}


def test_counters_of_mindformers_go_on_and_no_step_differs(graph_mode):
    theirs, ours = MindFormersUpdateCell(1.0, 2, 2, 3, 2), AdaptiveLossScaleUpdateCell(1.0, 2, 2, 3, 2)
    cells, counts = [Owned(theirs), Owned(ours)], {"up": [], "down": []}
    for overflow in [False] * 30 + [True] * 9:
        for cell in cells:
            cell.step(overflow)
        assert float(cells[0].scale_sense) == float(cells[1].scale_sense)
        state = ours.state()
        assert theirs.scale_window.asnumpy() == state["scale_window"]
        counts["up"].append((int(theirs.window_up_count.asnumpy()), state["growth_num"]))
        counts["down"].append((int(theirs.window_down_count.asnumpy()), state["down_num"]))
    for pairs in counts.values():
        apart = [pair for pair in pairs if pair[0] != pair[1]]
        assert {stays for _, stays in apart} == {3}
        assert {goes_on for goes_on, _ in apart} >= {0, 1, 2}


@pytest.mark.parametrize(("window", "taken"), [(20.0, 20), (0.5, 20), ("20", 20), (25, 20), (50.0, 50)])
def test_mindformers_takes_any_window_and_we_take_integers(window, taken):
    assert MindFormersUpdateCell(INITIAL_SCALE, 2, window).scale_window.asnumpy() == taken
    if isinstance(window, int):
        with pytest.warns(UserWarning, match=rf"'scale_window' .* of the ladder .* got {window}: .* {taken}\."):
            assert AdaptiveLossScaleUpdateCell(INITIAL_SCALE, 2, window).state()["scale_window"] == taken
    else:
        with pytest.raises(TypeError, match="'scale_window' must be an integer"):
            AdaptiveLossScaleUpdateCell(INITIAL_SCALE, 2, window)


@pytest.mark.parametrize(("window", "factor"), [(1, 2), (7, 3), (20, 1.5)])
def test_one_window_is_mindspores_dynamic_cell(graph_mode, window, factor):
    theirs = nn.DynamicLossScaleUpdateCell(INITIAL_SCALE, factor, window)
    rule = AdaptiveRule(factor, window, window)
    assert len(list(steps_of_both(theirs, rule, ["cur_iter", "last_overflow_iter"], steps=150))) == 150


def steps_of_both(theirs, rule, names, steps):
    """Step a cell and the rule under the same ceilings, assert that they agree, and yield the values in ``names``.

    The rule runs in NumPy; other tests show that its update cell takes the same steps.
    """
    cell, state = Owned(theirs), rule.start(INITIAL_SCALE)
    for number, ceiling in enumerate(random_ceilings(4000)[:steps], start=1):
        overflow = state.loss_scale > ceiling
        cell.step(overflow)
        state = rule.step(state, overflow)
        values, expected = [getattr(theirs, name).asnumpy().item() for name in names], to_values(rule, state, number)
        assert (values, float(cell.scale_sense)) == ([expected[name] for name in names], state.loss_scale)
        yield values


def random_ceilings(steps):
    """Return the largest loss scale without overflow (the ceiling) at each step: a random walk with sudden falls."""
    # With this seed, the walk leads to all windows in few steps.
    random = np.random.default_rng(10)
    exponents = 14 + np.cumsum(random.normal(0, 0.2, steps))
    exponents[random.random(steps) < 0.005] -= 8
    return np.exp2(np.clip(exponents, 2, 26)).astype(np.float32)
