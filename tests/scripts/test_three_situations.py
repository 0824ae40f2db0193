"""The studies behind README's table: a loss scale that is far too low, and a ceiling that moves."""

from scripts.studies import low_start, three_rules
from tests.shared.pages import figure


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
