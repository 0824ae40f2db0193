"""The studies behind README's table: batches in turn, a loss scale that is far too low, and a ceiling that moves."""

import mindspore
import pytest

from scripts.studies import batches_in_turn, low_start, three_rules
from tests.conftest import mindspore_mode
from tests.shared.pages import figure

# A run of this many steps shows whether the rule has learned that every third batch has a lower ceiling.
STEPS = 150


@pytest.mark.slow
def test_every_third_batch_with_a_larger_loss_is_trained():
    with mindspore_mode("graph"):
        [run] = batches_in_turn.train("guided", [(3, 14)], STEPS)
    large = [step for step in range(STEPS) if batches_in_turn.is_large(step, 3)]
    assert 0 < len(set(run["skipped"]) & set(large)) <= 6
    assert max(run["skipped"]) < STEPS / 2
    if not mindspore.__version__.startswith("2.7"):
        [shown] = [
            row for row in figure("batches_in_turn")["rules"]["guided"] if (row["period"], row["depth"]) == (3, 14)
        ]
        assert run["skipped"] == [step for step in shown["skipped"] if step < STEPS]


def test_guided_scaling_leaves_no_batch_untrained():
    shares = {rule: batches_in_turn.untrained(figure("batches_in_turn"), rule) for rule in batches_in_turn.RULES}
    assert max(shares["guided"]) == 0
    assert max(shares["dynamic"]) > 0.5
    assert max(shares["adaptive"]) == 1


def test_from_a_low_scale_guided_scaling_is_back_first():
    data = figure("low_start")
    assert [low_start.back(data, rule) for rule in low_start.RUNS] == ["over 400", "over 400", "1", "0"]
    losses = {rule: low_start.qualities(data, rule) for rule in low_start.RUNS}
    assert (losses["guided"] < losses["adaptive"]).all()
    assert (losses["adaptive"] < losses[low_start.DYNAMIC]).all()


def test_the_moving_ceiling_is_learned_as_the_page_says():
    moves = figure("three_rules")["moves"]
    skipped = {rule: sum(run["skipped"] for run in runs) for rule, runs in moves.items()}
    assert skipped["guided"] < skipped["dynamic"] < skipped["adaptive"]
    quality = {rule: sum(run["quality"] for run in runs) / len(runs) for rule, runs in moves.items()}
    assert quality["dynamic"] < quality["adaptive"] - 0.006 < quality["guided"]
    assert set(moves) == set(three_rules.RULES)
