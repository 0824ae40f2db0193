"""What a recorded run is told to have done, and what to change: hand-made runs, one a rule, and the sample logs."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze, raise_ceilings
from mindformers_adaptive.lab.gradient_ceilings import with_gradients
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.scale_path import changes_of
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.formats import FORMATS
from tests.conftest import ROOT
from tests.shared.records import run_of

LOGS = ROOT / "tests" / "record" / "samples"


def recorded(ceilings, name="dynamic", **params):
    """The run that a policy makes of ceilings."""
    found = replay(make_policy(name, **params), Trace.exact("made", ceilings))
    return run_of(found.loss_scale, found.overflow)


def policy_of(configuration):
    return make_policy("adaptive", **configuration.arguments)


def rules(run):
    return [advice.rule for advice in analyze(run).advice]


def test_everything_of_a_small_run_is_told():
    run = run_of([8, 4, 2, 2, 4, 2], [1, 1, 0, 0, 1, 0], seconds=np.array([5.0, 1.0, 1.0, 1.0, np.nan, 1.0]))
    found = analyze(run).to_dict()
    assert found["steps"] == {"count": 6, "first": 1, "last": 6}
    assert found["skipped"] == {
        "count": 3,
        "at_least": 3,
        "at_most": 3,
        "holds_if": None,
        "known": 3,
        "inferred": 0,
        "ranges": [(1, 2), (5, 5)],
        "longest_run": 2,
        "longest_run_steps": (1, 2),
        "seconds_lost": 6.0,
        "steps_with_seconds": 2,
    }
    start_up = {"before_first_applied": 2, "first_steps": 6, "skipped_in_first_steps": 3}
    assert found["start_up"].items() >= start_up.items()
    phases_found = found["loss_scale"].pop("phases")
    assert found["loss_scale"] == {"first": 8.0, "final": 2.0, "smallest": 2.0, "largest": 8.0}
    assert [(row["kind"], row["first_step"], row["last_step"], row["windows"]) for row in phases_found] == [
        ("drop", 1, 2, ()),
        ("raise", 4, 4, ()),
        ("drop", 5, 5, ()),
    ]


def test_skipped_steps_in_the_first_hundred_are_counted():
    overflow = [True] * 3 + [False] * 90 + [True] * 20
    found = analyze(run_of([4.0] * 113, overflow)).to_dict()["start_up"]
    expected = {"before_first_applied": 3, "skipped_in_first_steps": 10}
    bounds = {f"{name}_at_{end}": count for name, count in expected.items() for end in ("least", "most")}
    assert found == {"first_steps": 100, **expected, **bounds}


def test_before_the_first_applied_step_no_more_are_skipped_than_the_line_has():
    # The first line stands for four steps, of which two at most were skipped, and surely the last.
    run = run_of([8.0] * 5, [0, 0, 0, 1, 0], known=np.arange(5) >= 3, lines=np.array([[4, 1, 2], [5, 1, 2]]))
    found = analyze(run).to_dict()["start_up"]
    assert (found["before_first_applied_at_least"], found["before_first_applied_at_most"]) == (0, 2)


@pytest.mark.parametrize(("lines", "lost"), [(None, 7.0), ([[1, 1, 1], [4, 1, 3]], 5.0)], ids=["all", "of the known"])
def test_time_is_lost_by_all_skipped_steps_where_their_number_is_known(lines, lost):
    lines = None if lines is None else np.array(lines)
    seconds = np.array([5.0, 2.0, 1.0, 1.0])
    run = run_of([8, 4, 2, 2], [1, 1, 0, 0], known=[True, False, False, True], seconds=seconds, lines=lines)
    assert analyze(run).to_dict()["skipped"]["seconds_lost"] == lost


def test_a_scale_that_jumps_is_neither_dropped_nor_raised():
    scale, step = np.array([4.0, 64.0, 32.0, 64.0, 128.0, 16.0]), np.array([1, 2, 3, 4, 9, 10])
    overflow = np.array([False, True, False, False, True, False])
    run = RecordedRun("made", (), "jsonl", step, scale, overflow, np.full(6, True))
    assert [change.kind for change in changes_of(run)] == ["jump", "drop", "raise", "jump", "jump"]


def test_scales_that_a_log_has_rounded_do_not_jump():
    changes = changes_of(run_of([131100, 65540, 65540, 131100], [1, 0, 0, 0]))
    assert [change.kind for change in changes] == ["drop", "raise"]


def path_of(tmp_path, rows):
    """The path of a record, as text: the step, its flag, its scale, the one after and the window after."""
    fields = ("step", "overflow", "loss_scale", "next_loss_scale", "scale_window")
    lines = [json.dumps(dict(zip(fields, row, strict=False))) for row in rows]
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    found = analyze(read_log(tmp_path / "run.jsonl")).text().split("\n\n")[2].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in found]


def test_the_path_of_a_record_has_its_windows(tmp_path):
    rows = [(1, True, 1024, 512, 20), (2, False, 512, 1024, 20), (3, False, 1024, 2048, 30), (4, False, 2048, 2048, 30)]
    rows.append((5, True, 2048, 1024, 1))
    assert path_of(tmp_path, rows) == [
        ["steps", "what the loss scale did", "loss scale", "window"],
        ["1", "1 drop", "2^10 -> 2^9", "20"],
        ["2-3", "2 raises", "2^9 -> 2^11", "20 -> 30"],
        ["5", "1 drop", "2^11 -> 2^10", "30 -> 1"],
    ]


def test_what_the_steps_of_a_record_did_is_no_jump_whatever_the_rule(tmp_path):
    rows = [(1, True, 1024, 4), (2, False, 4, 64), (3, False, 64, 32), (4, True, 32, 64), (5, True, 64, 64)]
    # Restarted at another scale, and once more after steps that are not in the record.
    rows += [(6, False, 256, 256), (9, False, 256, 512), (10, False, 1024, 1024)]
    heading, *path = path_of(tmp_path, rows)
    assert heading == ["steps", "what the loss scale did", "loss scale"]
    assert path[:6] == [
        ["1", "1 drop", "2^10 -> 2^2"],
        ["2", "1 raise", "2^2 -> 2^6"],
        ["3", "fell at 1 applied step", "2^6 -> 2^5"],
        ["4", "rose at 1 overflow", "2^5 -> 2^6"],
        ["5", "1 jump", "2^6 -> 2^8"],
        ["9", "1 raise", "2^8 -> 2^9"],
    ]
    assert path[6] == ["9", "1 jump", "2^9 -> 2^10"]
    assert path[7][0].startswith("A jump is a change of the scale that no step explains")


def test_the_window_of_a_raise_is_unknown_where_a_place_is_inferred_or_the_log_began_later():
    scale, overflow = [4, 4, 8, 8, 8, 16], [0] * 6
    assert [change.clean_steps for change in changes_of(run_of(scale, overflow))] == [2, 3]
    assert [change.clean_steps for change in changes_of(run_of(scale, overflow, first_step=7))] == [None, 3]
    assert [change.clean_steps for change in changes_of(run_of(scale, overflow, known=False))] == [None, None]


def test_the_window_of_a_raise_is_unknown_after_a_gap_or_a_jump():
    gap = RecordedRun(
        "made", (), "jsonl", np.array([1, 2, 6, 7]), np.array([4.0, 4, 4, 8]), np.full(4, False), np.full(4, True)
    )
    assert [change.clean_steps for change in changes_of(gap)] == [None]
    assert [change.clean_steps for change in changes_of(run_of([2, 8, 8, 16, 16, 32], [0] * 6))] == [None, None, 2]


def test_the_window_of_a_raise_is_unknown_after_a_rise_at_an_unknown_step():
    # The first line of the log stands for four steps.
    known, lines = np.arange(8) >= 3, np.array([[step, 0, 0] for step in (4, 5, 6, 7, 8)])
    changes = changes_of(run_of([4, 4, 4, 4, 8, 8, 8, 16], [0] * 8, known=known, lines=lines))
    assert [(change.kind, change.clean_steps) for change in changes] == [("rise", None), ("raise", None)]


def test_start_is_lowered_to_the_first_scale_that_held():
    found = analyze(recorded([2.0**16] * 2000, init_loss_scale=2.0**32))
    (advice,) = found.advice
    assert (advice.rule, advice.figures["scale"], advice.figures["saves_skipped_steps"]) == ("start lower", 65536, 16)
    assert advice.change == "Start at 2^16 (loss_scale_value: 65536) instead of 2^32."
    assert "  loss_scale_value: 65536\n" in found.to_dict()["scale_sense"]
    rows = {row["policy"]: row for row in found.outcomes}
    assert rows["as recorded"]["skipped"] == 16
    assert rows["as advised"]["skipped"] == 0


def test_windows_are_left_to_the_defaults_where_the_run_is_too_short_to_choose_by():
    ladders = [
        analyze(recorded([2.0**16] * steps, init_loss_scale=2.0**20)).tuning.recommended.rule.ladder
        for steps in (999, 1000)
    ]
    assert ladders[0][0] == 20
    assert ladders[1][0] > 20


def test_scales_below_float32_are_no_place_to_start():
    found = analyze(run_of(2.0 ** np.maximum(-np.arange(200.0), -140), np.arange(200) < 140))
    assert [advice.rule for advice in found.advice] == ["collapse"]


@pytest.mark.parametrize(
    ("ceilings", "start", "window", "expected"),
    [
        # A start that costs two steps is left alone.
        ([2.0**16] * 500, 2.0**18, 2000, []),
        ([2.0**16] * 500, 2.0**19, 2000, ["start lower"]),
        # Neither the first climb nor a short one is a reason for a smaller window.
        ([2.0**20] * 14000, 2.0**8, 1000, ["start higher"]),
        ([2.0**16] * 500 + [2.0**13] * 20 + [2.0**16] * 12000, 2.0**16, 1000, []),
        # Six of 6006 steps is what usual settings pay.
        ([2.0**16] * 6000, 2.0**16, 900, []),
    ],
)
def test_what_costs_little_is_left_alone(ceilings, start, window, expected):
    assert rules(recorded(ceilings, init_loss_scale=start, scale_window=window)) == expected


def test_start_of_a_log_that_begins_later_is_said_to_be_a_resumed_one():
    run = run_of(2.0 ** np.maximum(32 - np.arange(200), 16), np.arange(200) < 16, first_step=501)
    assert "begins at step 501" in analyze(run).advice[0].reason


def test_start_is_raised_to_what_was_climbed_to():
    found = analyze(recorded([2.0**20] * 4000, init_loss_scale=2.0**12, scale_window=200))
    assert found.advice[0].rule == "start higher"
    assert (found.advice[0].figures["scale"], found.advice[0].figures["reached_at"]) == (2.0**20, 1601)
    # 200 steps each of 8 bits, 7 bits, ... 1 bit.
    assert found.advice[0].figures["headroom_lost"] == 200 * 36


def test_window_after_which_every_raise_fails_is_too_small():
    ceilings = [2.0**16] * 3000
    found = analyze(recorded(ceilings, init_loss_scale=2.0**16, scale_window=50))
    (advice,) = found.advice
    assert (advice.rule, advice.figures["largest_window"], advice.figures["skipped"]) == ("larger window", 50, 58)
    assert 0 < advice.figures["skipped_instead"] + advice.figures["saves"] <= 58
    assert found.tuning.recommended.rule.min_scale_window > 50


@pytest.mark.parametrize("last_raise_holds", [False, True])
def test_a_window_of_which_every_second_raise_fails_is_too_small_where_a_larger_one_follows_as_well(last_raise_holds):
    # A ceiling that rises half as fast as the scale.
    ceilings = np.exp2(16.5 + np.arange(3000) // 100)
    if last_raise_holds:
        ceilings[2900:] = 2.0**60
    run = recorded(ceilings, init_loss_scale=2.0**16, scale_window=50)
    found = analyze(run)
    assert [advice.rule for advice in found.advice] == ["larger window"]
    # On the ceilings themselves, and not only on what the log shows of them.
    instead = replay(policy_of(found.tuning.recommended), Trace.exact("made", ceilings)).measures
    assert instead.skipped < run.skipped_steps / 4
    assert instead.headroom_lost < 1


def test_window_after_which_the_scale_stays_low_for_long_is_too_large():
    ceilings = [2.0**16] * 500 + [2.0**4] * 20 + [2.0**16] * 12000
    found = analyze(recorded(ceilings, init_loss_scale=2.0**16, scale_window=1000))
    (advice,) = found.advice
    assert (advice.rule, advice.figures["largest_window"]) == ("smaller window", 1000)
    assert found.tuning.recommended.rule.min_scale_window < 1000 >= found.tuning.recommended.rule.max_scale_window
    assert advice.figures["saves"] > 40
    rows = {row["policy"]: row for row in found.outcomes}
    assert rows["as advised"]["headroom_lost"] < rows["as recorded"]["headroom_lost"]


def test_window_that_is_too_small_and_too_large_has_to_move():
    # Sixteen raises at the window 400 after a fall, and then raises that fail.
    ceilings = [2.0**16] * 100 + [2.0**0.5] * 18 + [2.0**16] * 8400
    found = analyze(recorded(ceilings, init_loss_scale=2.0**16, scale_window=400))
    assert [advice.rule for advice in found.advice] == ["moving window"]
    assert found.tuning.recommended.rule.min_scale_window < 400 < found.tuning.recommended.rule.max_scale_window


def test_larger_windows_that_would_cost_more_are_not_advised():
    # A window of 20 followed for 2000 steps; only its last raises fail.
    ceilings = np.exp2(10.5 + np.minimum(np.arange(2100), 2000) / 25)
    run = recorded(ceilings, init_loss_scale=2.0**10, scale_window=20)
    assert run.overflow[-100:].sum() == 4
    assert "larger window" not in rules(run)


def test_single_overflows_below_a_cap_are_worth_tolerating():
    def analyzed(ceilings):
        params = {"init_scale": 2.0**16, "max_loss_scale": 2.0**16, "scale_window": 500}
        return analyze(recorded(ceilings, "apex", **params)).advice

    ceilings = np.full(15000, 2.0**30)
    ceilings[1500::3000] = 2.0**10
    (advice,) = analyzed(ceilings)
    assert (advice.rule, advice.settings) == ("more hysteresis", {"hysteresis": 2})
    # 500 steps at half the scale, five times.
    assert (advice.figures["single"], advice.figures["saves"]) == (5, pytest.approx(2.5, abs=0.01))
    ceilings[1501::3000] = 2.0**10
    assert analyzed(ceilings) == ()


def test_single_overflows_are_not_worth_a_step_more_for_each_raise_that_fails():
    ceilings = np.full(9000, 2.0**16)
    ceilings[250::300] = 2.0**10
    assert "more hysteresis" not in rules(recorded(ceilings, init_loss_scale=2.0**16, scale_window=200))


def test_overflows_at_the_floor_lead_to_the_model_and_to_no_settings():
    found = analyze(recorded([2.0**16] * 100 + [0.0] * 40, init_loss_scale=2.0**16))
    assert [advice.rule for advice in found.advice] == ["collapse"]
    assert found.advice[0].figures == {"steps": 40, "first_step": 101, "last_step": 140}
    assert found.advice[0].reason.endswith(
        "with the scale at 2^0 to the last. A step that overflows at all of these would at others too."
    )
    assert found.advice[0].change.startswith("Look at the model and the data, not at the loss scaling: ")
    assert found.to_dict()["scale_sense"] is None


def test_a_scale_that_is_held_above_1_is_to_fall_first():
    [advice] = analyze(run_of([2.0**38] * 60, [True] * 60)).advice
    assert (advice.rule, advice.change.partition(",")[0]) == ("collapse", "Lower what holds the scale")
    assert advice.reason.endswith("with the scale at 2^38 to the last. A lower one may fit.")


@pytest.mark.parametrize(("steps", "factor", "is_one"), [(10, 1, True), (9, 1, False), (50, 2, True), (49, 2, False)])
def test_a_collapse_is_10_overflows_at_one_scale_or_50_at_any(steps, factor, is_one):
    scale = [2.0**60] * 20 + [2.0**60 / factor**step for step in range(steps)]
    assert ("collapse" in rules(run_of(scale, [False] * 20 + [True] * steps))) is is_one


def test_overflows_at_the_smallest_scale_are_not_tolerated_ones():
    # Every 50 steps two in a row, both at the floor of the run.
    ceilings = np.full(1000, 2.0**10)
    ceilings[50::50] = ceilings[51::50] = 2.0**9
    run = recorded(ceilings, "adaptive", loss_scale_value=2.0**10, min_loss_scale=2.0**10, max_loss_scale=2.0**10)
    assert run.overflow.sum() == 38
    assert "less hysteresis" not in rules(run)


def test_a_steep_fall_that_ends_is_no_collapse():
    assert "collapse" not in rules(recorded([2.0**16] * 100 + [2.0**-10] * 100, "torch"))


def test_a_run_without_trouble_has_nothing_to_change():
    found = analyze(recorded([2.0**16] * 900, init_loss_scale=2.0**16, scale_window=1000))
    assert (found.advice, found.settings) == ((), None)
    assert "Nothing to change" in found.text()
    assert "The loss scale did not change." in found.text()
    assert "Overflow " not in found.text()


def test_windows_are_not_judged_where_places_are_inferred():
    run = recorded([2.0**16] * 3000, init_loss_scale=2.0**16, scale_window=50)
    inferred = run_of(run.loss_scale, run.overflow, known=False)
    assert analyze(inferred).advice == ()
    assert analyze(inferred).to_dict()["skipped"]["inferred"] == run.skipped_steps > 50


def test_outcomes_equal_replays_under_each_assumption():
    run = read_log(LOGS / "mindformers_1_9_cpu.log")
    row = {row["policy"]: row for row in analyze(run).outcomes}["dynamic 20 from 2^24"]
    traces = [run.to_trace(assume) for assume in ("interpolated", "lower_bound", "upper_bound")]
    measures = [
        replay(make_policy("dynamic", init_loss_scale=2.0**24, scale_window=20), trace).measures
        for trace in [raise_ceilings(traces[0], run), *traces]
    ]
    assert (row["skipped"], row["headroom_lost"]) == (measures[0].skipped, measures[0].headroom_lost)
    assert row["known_share"] == measures[0].known_share < 1
    assert (row["fewest_skipped"], row["most_skipped"]) == (
        min(one.skipped for one in measures),
        max(one.skipped for one in measures),
    )


@pytest.mark.parametrize(
    ("name", "scale", "saved", "known", "inferred"),
    [
        ("mindformers_1_9_cpu.log", 2.0**19, 5, 11, 0),
        ("megatron_gpt2_n4.log", 2.0**14, 19, 10, 9),
        ("deepspeed_overflow.log", 2.0**11, 6, 0, 6),
    ],
)
def test_sample_logs_are_told_where_to_start(name, scale, saved, known, inferred):
    found = analyze(read_log(LOGS / name))
    assert found.advice[0].figures.items() >= {"scale": scale, "saves_skipped_steps": saved}.items()
    shown = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (shown["skipped"]["known"], shown["skipped"]["inferred"]) == (known, inferred)
    assert shown["outcomes"][0]["skipped"] == known + inferred
    assert f"{known} known at their position, {inferred} inferred" in found.text()


def test_problems_of_a_log_are_shown_with_their_line(tmp_path):
    log = tmp_path / "run.jsonl"
    log.write_text('{"step": 1, "overflow": false, "loss_scale": 8}\n{"step": 2, "overflow": fal\n')
    found = analyze(read_log(log))
    assert f"{log}:2: looks like a step's line" in found.text()
    assert (found.to_dict()["log"]["lines_used"], found.to_dict()["log"]["lines_ignored"]) == (1, 1)


def test_long_lists_are_cut_in_the_text_only():
    overflow = np.arange(400) % 4 == 3
    found = analyze(run_of(np.where(overflow, 8.0, 4.0), overflow))
    assert "and 80 more" in found.text()
    assert len(found.text().splitlines()) < 70
    assert "... 169 rows ..." in found.text()
    assert len(found.to_dict()["skipped"]["ranges"]) == 100
    assert len(found.to_dict()["loss_scale"]["phases"]) == 199


@pytest.mark.parametrize("scale", [[np.inf] * 40, [np.nan, 4.0] * 20, [2.0**-149] * 40])
def test_scales_that_are_no_usual_numbers_are_analyzed(scale):
    found = analyze(run_of(scale, [True] * 20 + [False] * 20))
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.text()


def test_a_change_by_more_than_float32_is_analyzed(tmp_path):
    lines = [
        {"step": step, "overflow": step % 3 == 0, "loss_scale": used, "next_loss_scale": after}
        for step, (used, after) in enumerate(itertools.pairwise([2.0**14, 2.0**14, 1e-44] * 20), start=1)
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = analyze(read_log(tmp_path / "run.jsonl"))
    assert (found.run.scale_factor > 2.0**128, found.to_dict()["skipped"]["count"]) == (True, 19)


def test_a_run_without_steps_or_scales_is_refused():
    with pytest.raises(ValueError, match="at least 1 step"):
        analyze(run_of([], []))
    with pytest.raises(ValueError, match="known loss scale"):
        analyze(run_of([np.nan], [False]))


def guided_run(gradient_format="float16", **others):
    """What the guided rule makes of a ceiling of 2^16 that its gradients show, from 2^18."""
    trace = with_gradients(Trace.exact("made", [2.0**16] * 300), gradient_format=FORMATS[gradient_format])
    found = replay(make_policy("guided", loss_scale_value=2.0**18, gradient_format=gradient_format), trace)
    assert 0 < found.measures.skipped < 6
    gradients = np.where(found.overflow, np.inf, trace.largest_gradient)
    others["gradient_format"] = gradient_format
    return trace, run_of(found.loss_scale, found.overflow, largest_gradient=gradients, **others)


@pytest.mark.parametrize("gradient_format", ["float16", "float8_e4m3fn"])
def test_a_run_with_gradients_is_judged_by_the_ceilings_that_they_show(gradient_format):
    trace, run = guided_run(gradient_format)
    outcomes = {row["policy"]: row for row in analyze(run).outcomes}
    applied = ~run.overflow
    expected = np.log2(trace.ceiling[applied] / run.loss_scale[applied]).mean()
    assert outcomes["as recorded"]["headroom_lost"] == pytest.approx(expected)
    assert outcomes["guided from 2^18"]["skipped"] == run.skipped_steps
    # Without gradients nobody knows that there was room above.
    without = {row["policy"]: row for row in analyze(dataclasses.replace(run, largest_gradient=None)).outcomes}
    assert without["as recorded"]["headroom_lost"] < expected - 0.5
    assert not any(name.startswith("guided") for name in without)


@pytest.mark.parametrize(("known", "is_replayed"), [(2, False), (3, True)])
def test_a_rule_that_follows_gradients_is_replayed_where_a_step_in_a_hundred_has_them(known, is_replayed):
    _, run = guided_run()
    gradients = np.where(np.arange(len(run)) < len(run) - known, np.nan, run.largest_gradient)
    outcomes = analyze(dataclasses.replace(run, largest_gradient=gradients)).outcomes
    assert any(row["policy"].startswith("guided") for row in outcomes) == is_replayed


def test_the_start_that_is_advised_is_what_the_first_gradients_allow():
    run = run_of([2.0**32] * 5 + [2.0**9] * 95, [1] * 5 + [0] * 95)
    assert analyze(run).advice[0].settings["loss_scale_value"] == 2.0**9
    gradients = np.append(np.full(5, np.inf), 65504 / 2.0 ** (16.5 + np.arange(95) % 3))
    advice = analyze(dataclasses.replace(run, largest_gradient=gradients)).advice[0]
    assert (advice.rule, advice.settings["loss_scale_value"]) == ("start lower", 2.0**16)
    # Settings of the adaptive cell are nothing for a rule that follows gradients.
    assert analyze(run).tuning is not None
    assert analyze(dataclasses.replace(run, largest_gradient=gradients)).tuning is None
    assert "5 steps were skipped before gradients allowed 2^16, from step 6 on." in advice.reason


def short_run(steps, window, first_step=1, scales=None):
    scales = [65536.0] * steps if scales is None else scales
    windows = None if window is None else np.full(steps, float(window))
    return run_of(scales, [False] * steps, first_step=first_step, scale_window=windows)


def test_a_run_shorter_than_its_window_is_told_so():
    [advice] = analyze(short_run(25, 1000)).advice
    assert (advice.rule, advice.figures) == ("short run", {"steps": 25, "window": 1000})
    assert "a window below 25 steps" in advice.change
    assert "The run (25 steps) is shorter than the window (1000)" in advice.reason


@pytest.mark.parametrize(
    "run",
    [
        short_run(25, 25),
        short_run(25, None),
        short_run(25, 1000, first_step=2),
        short_run(25, 1000, scales=[65536.0] * 20 + [131072.0] * 5),
        dataclasses.replace(short_run(25, 1000), largest_gradient=np.full(25, 1.0)),
    ],
)
def test_others_are_not(run):
    assert "short run" not in rules(run)


def test_the_window_of_a_record_is_read(tmp_path):
    log = tmp_path / "run.jsonl"
    line = '{"step": %d, "overflow": false, "loss_scale": 65536.0, "next_loss_scale": 65536.0, "scale_window": %s}\n'
    log.write_text("".join(line % (step, "null" if step < 3 else 1000) for step in range(1, 26)))
    run = read_log(log)
    assert np.isnan(run.scale_window).tolist() == [True] * 2 + [False] * 23
    assert run.scale_window[-1] == 1000
    assert rules(run) == ["short run"]


def test_a_run_that_never_rose_is_told_what_its_gradients_show():
    flags = np.full(40, False)
    steps, scale = np.arange(1, 41), np.full(40, 64.0)
    largest, norms = np.linspace(2.0**-9, 2.0**-8, 40), np.linspace(0.25, 1.0, 40)
    for gradients, lowest, words in (
        ({"largest_gradient": largest}, 2**23, "largest gradients of 40 applied step(s) allowed 2^23 in each"),
        (
            {"largest_gradient": largest, "gradient_norm": norms},
            2**23,
            "largest gradients of 40 applied step(s) allowed 2^23",
        ),
        ({"gradient_norm": norms}, 2**15, "norms of 40 applied step(s) allowed at least 2^15 in each"),
    ):
        found = analyze(RecordedRun("run", (), "jsonl", steps, scale, flags, ~flags, **gradients))
        [advice] = found.advice
        assert (advice.rule, advice.settings) == ("start higher", {"loss_scale_value": lowest})
        assert f"Start at 2^{lowest.bit_length() - 1} (loss_scale_value: {lowest}) instead of 2^6." in advice.change
        assert "The scale never rose above 2^6" in advice.reason
        assert words in found.text().replace("\n          ", " ")
    assert analyze(RecordedRun("run", (), "jsonl", steps, scale, flags, ~flags)).advice == ()
    # What overflowed shows nothing of what the applied steps allowed.
    skipped, larger = steps == 7, np.where(steps == 7, 1e4, norms)
    shown = analyze(RecordedRun("run", (), "jsonl", steps, scale, skipped, ~flags, gradient_norm=larger)).to_dict()
    assert shown["shown_by_gradients"].items() >= {"steps": 39, "lowest": 65504.0}.items()
    # Less than 3 bits below what the gradients allow there is nothing to change.
    far, near = (
        analyze(RecordedRun("run", (), "jsonl", steps, scale * times, flags, ~flags, gradient_norm=norms))
        for times in (64, 128)
    )
    assert [advice.rule for advice in far.advice] == ["start higher"]
    assert near.advice == ()
    assert near.to_dict()["shown_by_gradients"]["lowest"] == 65504.0
