"""What is said of a log of which a line stands for several steps: bounds, no invented events, and the start."""

import json

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.policies import make_policy
from tests.lab.sink_logs import run_of, write_sink_log


def analysis_of(tmp_path, ceilings, sink, start=2.0**32, **rule):
    flags, scales = run_of(make_policy("adaptive", loss_scale_value=start, **rule), ceilings)
    return analyze(read_log(write_sink_log(tmp_path / "sink.log", flags, scales, sink))), flags


@pytest.mark.parametrize(("sink", "ceiling"), [(4, 24), (4, 16), (10, 16), (50, 16)])
def test_a_start_of_lost_steps_is_bounded_and_gets_advice(tmp_path, sink, ceiling):
    found, flags = analysis_of(tmp_path, [2.0**ceiling] * 200, sink)
    told = found.to_dict()
    skipped, start = told["skipped"], told["start_up"]
    assert skipped["at_least"] <= sum(flags) <= skipped["at_most"]
    assert start["before_first_applied_at_least"] <= 32 - ceiling <= start["before_first_applied_at_most"]
    assert start["before_first_applied"] is None
    in_first = sum(flags[:100])
    assert start["skipped_in_first_steps_at_least"] <= in_first <= start["skipped_in_first_steps_at_most"]
    assert told["loss_scale"]["first"] is None
    # A start is advised where more than two skipped steps are sure.
    starts = [advice.figures["scale"] for advice in found.advice if advice.rule == "start lower"]
    assert all(scale <= 2.0 ** (ceiling + 1) for scale in starts)
    assert (len(starts), found.settings) == (int((sink, ceiling) in ((4, 24), (4, 16), (10, 16))), None)


def test_skips_between_lines_are_stated_as_bounds(tmp_path):
    found, flags = analysis_of(tmp_path, np.exp2(16 + 0.5 * np.random.default_rng(1).standard_normal(1000)), 10)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["skipped"]["at_least"] <= sum(flags) <= told["skipped"]["at_most"]
    assert told["skipped"]["count"] is None
    row = told["outcomes"][0]
    assert (row["policy"], row["skipped"], row["headroom_lost"]) == ("as recorded", None, None)
    assert (row["fewest_skipped"], row["most_skipped"]) == (told["skipped"]["at_least"], told["skipped"]["at_most"])
    assert f"At least {row['fewest_skipped']} and at most {row['most_skipped']} of 1000 steps" in found.text()
    # Only the last step of each line is known.
    assert all(first == last and last % 10 == 0 and flags[last - 1] for first, last in told["skipped"]["ranges"])


def test_a_change_between_lines_is_no_event_of_a_step(tmp_path):
    # One drop at step 7, in the second line; the scale is raised 20 steps later.
    ceilings = np.full(40, 2.0**20)
    ceilings[6] = 2.0**10
    found, flags = analysis_of(tmp_path, ceilings, 4, start=2.0**16)
    assert np.flatnonzero(flags).tolist() == [6]
    # The first line bounds the drop before it, the raise of step 27 is in the seventh.
    assert [(one.kind, one.changes, one.first_step, one.last_step) for one in found.phases] == [
        ("fall", 1, 5, 8),
        ("rise", 1, 25, 28),
    ]
    assert "5-8        fell over 1 line             2^16 -> 2^15" in found.text(details=True)


def test_a_line_whose_steps_must_all_have_been_skipped_shows_each(tmp_path):
    found, _ = analysis_of(tmp_path, [2.0**16] * 100, 4)
    assert (found.phases[0].kind, found.phases[0].first_step, found.phases[0].last_step) == ("drop", 5, 16)
    assert found.to_dict()["skipped"]["ranges"] == [(4, 16)]


def test_windows_are_not_judged_by_a_log_that_does_not_show_them(tmp_path):
    found, _ = analysis_of(tmp_path, [2.0**16] * 2000, 2, start=2.0**16, max_scale_window=20)
    assert [advice.rule for advice in found.advice] == []
    assert "The log does not show every step, so windows could not be judged." in found.text()


def test_the_rule_of_the_run_says_where_it_started(tmp_path):
    flags, scales = run_of(make_policy("adaptive", loss_scale_value=2.0**32), [2.0**16] * 60)
    log = write_sink_log(tmp_path / "sink.log", flags, scales, 20)
    found = analyze(read_log(log, rule=make_policy("adaptive", loss_scale_value=2.0**32)))
    assert found.to_dict()["loss_scale"]["first"] == 2.0**32
    assert found.advice[0].change == "Start at 2^16 (loss_scale_value: 65536) instead of 2^32."
    assert found.advice[0].figures["saves_skipped_steps"] == 16


def test_a_collapse_is_seen_by_the_last_step_of_each_line(tmp_path):
    found, _ = analysis_of(tmp_path, [2.0**16] * 40 + [0.0] * 200, 4, start=2.0**16)
    assert [advice.rule for advice in found.advice] == ["collapse"]
    assert found.advice[0].figures["last_step"] == 240
    assert "steps that the log shows were skipped" in found.advice[0].reason


def test_what_the_counts_rest_on_is_said(tmp_path, run_program):
    found, _ = analysis_of(tmp_path, [2.0**16] * 40, 4)
    assert found.run.holds_if
    assert f"These counts hold if {found.run.holds_if}" in " ".join(found.text(details=True).split())
    assert found.to_dict()["skipped"]["holds_if"] == found.run.holds_if
    _, printed, _ = run_program("compare", "--details", tmp_path / "sink.log")
    assert f"Skipped steps and ceilings hold if {found.run.holds_if}" in printed
    every_step, _ = analysis_of(tmp_path, [2.0**16] * 40, 1)
    assert (every_step.run.holds_if, every_step.to_dict()["skipped"]["holds_if"]) == ("", None)
    assert "hold if" not in every_step.text(details=True)


def test_a_rule_that_is_named_makes_no_jumps(tmp_path):
    rule = {"loss_scale_value": 2.0**20}
    flags, scales = run_of(make_policy("guided", **rule), [2.0**16] * 60)
    log = write_sink_log(tmp_path / "run.log", flags, scales, 1)
    guessed, known = analyze(read_log(log)), analyze(read_log(log, rule=make_policy("guided", **rule)))
    assert "jump" in {phase.kind for phase in guessed.phases}
    assert "if the run followed another rule, name it" in " ".join(guessed.text(details=True).split())
    assert {phase.kind for phase in known.phases} in ({"drop", "raise"}, {"drop", "applied fall", "raise"})
    assert known.run.loss_scale.tolist() == [2.0**20, *scales[:-1]]
    assert not [note for note in known.run.notes if "does not follow" in note]
