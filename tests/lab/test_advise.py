"""A run gets only advice that its log gives a reason for: a lower start, the guided rule, or to find the cause."""

import dataclasses
import json
import re

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze, last_error
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.trace import Trace
from tests.conftest import ROOT
from tests.record.log_writers import megatron_line, read
from tests.shared.records import record_of, run_of


def recorded(ceilings, name="dynamic", **params):
    """Return the run of a rule on a trace with given ceilings, the largest loss scales without overflow."""
    running = start_rule(name, **params)
    result = replay(running, Trace.exact("made", ceilings))
    return run_of(result.loss_scale, result.overflow, final_loss_scale=running.loss_scale)


def rules(run):
    return [advice.rule for advice in analyze(run).advice]


def demo_run():
    """Return a run like the demo training: 16 skipped steps at the start, 7 more after windows of 20 to 40 steps."""
    skipped = [*range(1, 16), 18, 94, 127, 137, 223, 284, 328, 399]
    running, scales = start_rule("adaptive", loss_scale_value=2.0**32), [2.0**32]
    for step in range(1, 401):
        scales.append(running.step(step in skipped))
    return record_of(scales, skipped)


def test_start_is_lowered_to_the_highest_scale_that_held():
    analysis = analyze(recorded([2.0**16] * 2000, init_loss_scale=2.0**32))
    [advice] = analysis.advice
    assert (advice.rule, advice.figures["scale"], advice.figures["saves_skipped_steps"]) == ("start lower", 65536, 16)
    assert advice.change == "Start at 2^16 (loss_scale_value: 65536) instead of 2^32."
    # The rule need not change.
    assert (analysis.scale_sense, analysis.guided_start) == (None, None)


def test_a_start_is_a_power_of_two_that_held():
    run = run_of(65535.0 / 2.0 ** np.minimum(np.arange(200), 4), np.arange(200) < 4)
    assert analyze(run).advice[0].figures["scale"] == 2048


@pytest.mark.parametrize(
    ("ceilings", "start", "window", "expected"),
    [
        # An initial loss scale that costs only two skipped steps gets no advice.
        ([2.0**16] * 500, 2.0**18, 2000, []),
        ([2.0**16] * 500, 2.0**19, 2000, ["start lower"]),
        # The log does not show whether a higher initial loss scale or smaller windows would help, so there is no
        # advice.
        ([2.0**20] * 1400, 2.0**8, 100, []),
        ([2.0**16] * 50 + [2.0**4] * 20 + [2.0**16] * 1200, 2.0**16, 100, []),
        # Only two raises of the loss scale lead to overflows. These are too few for advice.
        ([2.0**16] * 1900, 2.0**16, 900, []),
        # With a window of 20, the loss scale follows the rising ceiling for 2000 steps. Only the last raises of the
        # loss scale lead to overflows.
        (np.exp2(10.5 + np.minimum(np.arange(2100), 2000) / 25), 2.0**10, 20, ["take guided"]),
        ([2.0**16] * 3000, 2.0**16, 50, ["take guided"]),
        ([2.0**16] * 3000, 2.0**32, 50, ["start lower", "take guided"]),
        # A window of 1000 steps skips as few as can be.
        ([2.0**16] * 9000, 2.0**16, 1000, []),
    ],
)
def test_what_costs_little_or_is_unknown_is_left_alone(ceilings, start, window, expected):
    assert rules(recorded(ceilings, init_loss_scale=start, scale_window=window)) == expected


def test_steps_skipped_again_and_again_lead_to_the_guided_rule():
    analysis = analyze(recorded([2.0**16] * 3000, init_loss_scale=2.0**16, scale_window=50))
    [advice] = analysis.advice
    # The step before the last raise was applied; the scale held for the first time after it.
    assert advice.figures == {"skipped": 58, "steps": 3000, "places": 58}
    assert "window of 1000" in advice.reason
    assert analysis.scale_sense.startswith("scale_sense:\n  type: GradientGuidedLossScale\n  loss_scale_value: 65536\n")
    assert "58 of 3,000 steps were skipped" in " ".join(analysis.text().split())


def test_of_overflows_that_are_not_stated_none_is_counted():
    run = recorded([2.0**16] * 3000, init_loss_scale=2.0**32, scale_window=50)
    known = ~np.isin(run.last, run.last[run.skipped][[3, 30]])
    start, again = analyze(run_of(run.used, run.skipped, known)).advice
    assert (start.figures["saves_skipped_steps"], start.figures["saves_at_most"]) == (15, 16)
    assert again.figures["skipped"] == run.skipped.sum() - 16 - 2
    assert (start.reason[:18], ", at least " in again.reason) == ("At least 15 steps ", True)


def test_nothing_is_advised_where_outcomes_are_not_stated():
    run = recorded([2.0**16] * 3000, init_loss_scale=2.0**16, scale_window=50)
    assert analyze(run_of(run.used, run.skipped, known=False)).advice == ()


@pytest.mark.parametrize("resumed", [None, np.arange(60) == 30])
def test_a_restart_that_lost_the_scale_is_the_cause(resumed):
    scales, flags = [2.0**14] * 30 + [2.0**k for k in range(32, 24, -1)] + [2.0**24] * 22, [False] * 60
    flags[30:38] = [True] * 8
    columns = {} if resumed is None else {"resumed": resumed.astype(float)}
    analysis = analyze(run_of(scales, flags, **columns))
    [advice] = analysis.advice
    assert (advice.rule, advice.figures) == ("restart", {"step": 31, "scale": 2.0**14, "skipped": 8})
    assert "resuming.md" in advice.change
    assert analysis.guided_start is None


def test_start_of_a_log_that_begins_later_may_be_a_resumed_one():
    run = run_of(2.0 ** np.maximum(32 - np.arange(200), 16), np.arange(200) < 16, first_step=501)
    assert "begins at step 501" in analyze(run).advice[0].reason


def test_a_scale_that_held_for_less_than_a_window_is_no_start():
    assert rules(run_of([2.0**32, 2.0**31, 2.0**30] + [2.0**29] * 19, [1] * 3 + [0] * 19)) == []
    assert "Too few steps to judge" in analyze(run_of([8, 4, 2, 1, 1], [1, 1, 1, 0, 0])).text()
    unknown = analyze(run_of([8.0] * 60, [False] * 60, known=np.arange(60) % 10 > 0)).text()
    assert "does not show whether" in unknown


def test_a_scale_held_where_few_of_many_steps_are_inferred(tmp_path):
    """Among 100 steps with 1 skipped step, 20 or more steps in a row have no overflow, wherever the skipped step is."""
    log = tmp_path / "train.log"
    line = "iteration {:8d}/ 1000 | loss scale: {:.1f} | number of skipped iterations: {:3d} |\n"
    lines = [line.format(100, 2.0**17, 15), line.format(200, 2.0**17, 0), line.format(300, 2.0**16, 1)]
    log.write_text("".join(lines))
    (start,) = analyze(read_log(log)).advice
    assert (start.rule, start.figures["scale"]) == ("start lower", 2.0**17)


def test_room_is_named_without_a_setting():
    climbed = analyze(recorded([2.0**20] * 4000, init_loss_scale=2.0**12, scale_window=200))
    assert re.search(r"room at the start: [^.]* 2\^12 to 2\^2", climbed.text())
    scale, norms = np.full(40, 64.0), np.linspace(0.25, 1.0, 40)
    for gradients, room in (({"gradient_norm": norms}, 9), ({"largest_gradient": norms / 256}, 17), ({}, 0)):
        analysis = analyze(run_of(scale, np.full(40, False), **gradients))
        assert (analysis.advice, analysis.guided_start) == ((), None)
        assert (f"there is room for {room} bits more" in " ".join(analysis.text().split())) == bool(room)


def test_where_the_loss_is_nan_nothing_else_is_advised():
    start = 2.0 ** np.maximum(32 - np.arange(200), 16)
    loss = np.where(np.arange(200) >= 150, np.inf, 2.0)
    for run in (run_of(start, np.arange(200) < 16, loss=loss), run_of([1.0] * 200, [False] * 200, loss=loss)):
        analysis = analyze(run)
        [advice] = analysis.advice
        assert (advice.rule, advice.figures) == ("loss jump", {"first_step": 151})
        assert "from step 151 on" in advice.reason
        assert re.search(r"\bNaN in 50 steps, .* 151\.", " ".join(analysis.verdict))
        assert "adaptive-loss-scale why" in advice.change
        assert analysis.guided_start is None


def test_a_run_at_a_scale_of_1_may_be_one_in_bf16():
    norms = np.full(40, 2.0**-8)
    analysis = analyze(run_of([1.0] * 40, [False] * 40, gradient_norm=norms))
    assert ([advice.rule for advice in analysis.advice], analysis.guided_start) == (["scale of 1"], None)
    assert "BF16?" in analysis.text()
    assert rules(run_of([1.0] * 20 + [2.0] * 20, [False] * 40)) == []


def test_overflows_at_a_scale_of_1_lead_to_the_layer(tmp_path):
    """DeepSpeed prints this log line for an overflow at the smallest loss scale. The line has no step number."""
    line = "[stage2.py:1628:step] [deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1"
    log = tmp_path / "deepspeed.log"
    for overflows, rule in ((9, "scale of 1"), (22, "collapse")):
        log.write_text(f"{line}\n" * overflows)
        [advice] = analyze(read_log(log)).advice
        assert advice.rule == rule
    assert re.search(r"At least 22 steps overflowed, .*scale of 1\.", advice.reason)
    assert "adaptive-loss-scale why" in advice.change


def test_nan_gradients_at_a_scale_of_1_lead_to_the_layer(tmp_path):
    """Megatron-LM prints such a log for a BF16 run: the run skips no steps, and the log does not show a loss of NaN."""
    norms = enumerate(["0.752", "0.741", "nan"], start=1)
    analysis = analyze(read(tmp_path, *(megatron_line(step, 1.0).replace("16.999", norm) for step, norm in norms)))
    [advice] = analysis.advice
    assert (advice.rule, advice.figures) == ("bad gradients", {"steps": 1, "first_step": 3})
    assert "not skipped" in advice.change
    assert "adaptive-loss-scale why" in advice.change
    assert "BF16?" not in analysis.text()


def test_a_nan_norm_of_an_applied_step_leads_to_the_layer():
    norms = np.where(np.arange(200) < 150, 1.0, np.inf)
    assert rules(run_of([2.0**16] * 200, [False] * 200, gradient_norm=norms)) == ["bad gradients"]
    assert (
        rules(run_of([2.0**16] * 200, np.arange(200) >= 195, gradient_norm=np.where(np.arange(200) < 195, 1.0, np.inf)))
        == []
    )
    dropped = np.arange(200) >= 150
    assert rules(run_of([2.0**16] * 200, [False] * 200, gradient_norm=norms, dropped_by_norm=dropped)) == []
    # A log of Megatron-DeepSpeed does not show which steps were skipped.
    [advice] = analyze(run_of([1.0] * 9, [False] * 9, known=False, gradient_norm=np.full(9, np.inf))).advice
    assert (advice.rule, "no loss scale can help" in advice.change) == ("bad gradients", True)


def test_a_guided_run_is_not_told_to_take_the_guided_rule():
    run = recorded([2.0**16] * 3000, init_loss_scale=2.0**16, scale_window=50)
    columns = {"largest_gradient": np.where(run.skipped, np.inf, 0.5)}
    assert analyze(dataclasses.replace(run, columns=columns)).advice == ()


def test_a_run_without_trouble_has_nothing_to_change():
    analysis = analyze(recorded([2.0**16] * 900, init_loss_scale=2.0**16, scale_window=1000))
    assert (analysis.advice, analysis.guided_start) == ((), None)
    assert "nothing that should be changed" in analysis.text()
    assert "scale stayed at 2^16." in analysis.text()
    assert "states no change" in analysis.text(details=True)


def test_a_sample_log_starts_where_a_scale_held():
    [start] = analyze(read_log(ROOT / "tests" / "record" / "samples" / "megatron_gpt2_n4.log")).advice
    assert start.figures["scale"] == 2.0**14


@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_the_demo_is_answered_in_18_lines(tmp_path, run_program, command):
    # The launcher leaves the configuration beside the record.
    (tmp_path / "loss_scale_config.yaml").touch()
    (tmp_path / "demo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in demo_run()))
    code, printed, errors = run_program(command, tmp_path / "demo.jsonl")
    assert (code, errors) == (0, "")
    assert len(printed.splitlines()) <= 18
    if command == "analyze":
        assert re.match(r"23 of 400 steps .*skipped \(5\.8%\): 16 .*start, .* 2\^32 .* 7 ", printed)
        assert "Start at 2^16 (loss_scale_value: 65536) instead of 2^32." in printed
        assert "type: GradientGuidedLossScale" in printed
        assert len(run_program(command, tmp_path / "demo.jsonl", "--details")[1].splitlines()) > 18
    else:
        [header] = [line for line in printed.splitlines() if line.startswith("rule  ")]
        assert 2 <= len([name for name in header.split("  ") if name]) <= 6


@pytest.mark.parametrize("steps", [1, 2, 19])
def test_few_steps_are_not_judged(steps):
    text = analyze(run_of(2.0 ** (32 - np.arange(steps)), [True] * steps)).text()
    assert "Too few steps to judge" in text
    assert ("1 of 1 step was skipped" in text) == (steps == 1)


def test_fixed_scale_stays():
    verdict = analyze(run_of([1024.0] * 30, [True] * 30)).to_dict()["verdict"]
    assert "stayed at 2^10: the last 30 steps" in " ".join(verdict)


@pytest.mark.parametrize(("end", "error"), [("", None), ("AssertionError", "AssertionError")])
def test_traceback_at_the_end_of_a_log_is_said(tmp_path, end, error):
    log = tmp_path / "run.log"
    trace = f"Traceback (most recent call last):\n  File 'a.py', line 1\n{end}\n" if end else ""
    log.write_text(megatron_line(1, 2.0**32, 1) + trace)
    assert last_error([str(log)]) == error
    assert ("ends in a traceback" in analyze(read_log(log)).text()) == bool(error)


@pytest.mark.parametrize("window", [20, 30])
def test_advised_start_is_not_one_that_overflowed(window):
    trace = Trace.exact("constant", [2.0**15.5] * 600)
    replayed = replay(start_rule("dynamic", init_loss_scale=2.0**16, scale_window=window), trace)
    analysis = analyze(run_of(replayed.loss_scale, replayed.overflow))
    assert "1 at the start, because 2^16 was too high" in analysis.text()
    assert analysis.guided_start == 2.0**15


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        # 2^14 holds, and no higher scale is used again.
        ([17, 16, 15, *[14] * 200], "From step 4 on, 2^14 held: 20 steps in a row were not skipped."),
        # 2^15 overflows first, and holds later.
        ([17, 16, 15, *[14] * 40, *[15] * 200], "Scales up to 2^15 held later"),
    ],
)
def test_advised_start_says_why_it_held(scales, reason):
    [advice] = analyze(run_of(2.0 ** np.array(scales), np.arange(len(scales)) < 3)).advice
    assert reason in advice.reason
