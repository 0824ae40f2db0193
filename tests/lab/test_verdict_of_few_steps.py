"""What analyze says of starts, short logs, late streaks, and a fixed scale that always overflows."""

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.symptoms import last_error
from mindformers_adaptive.record.trace import Trace
from tests.shared.records import run_of

LINE = " iteration {:8d}/ 5000 | lm loss: {} | loss scale: {} | grad norm: {} | number of skipped iterations: {} |"


@pytest.mark.parametrize("steps", [1, 2, 19])
def test_few_steps_are_not_judged(steps):
    text = analyze(run_of(2.0 ** (32 - np.arange(steps)), [True] * steps)).text()
    assert "Too few steps to judge" in text
    assert ("1 of 1 step was skipped" in text) == (steps == 1)


@pytest.mark.parametrize(("after", "is_late_streak"), [(1.0, False), (3.0, True)])
def test_late_streak_with_a_worse_loss_leads_to_the_cause(after, is_late_streak):
    flags = [False] * 40 + [True] * 8 + [False] * 12
    scales = [512.0] * 40 + [2.0**k for k in range(8, 0, -1)] + [2.0] * 12
    loss = np.array([1.0] * 40 + [np.nan] * 8 + [after] * 12)
    analysis = analyze(run_of(scales, flags, loss=loss))
    rules = [advice.rule for advice in analysis.advice]
    assert rules == ["late streak"] if is_late_streak else "late streak" not in rules
    for text in ("from step 41 to 48", "adaptive-loss-scale why"):
        assert (text in analysis.text()) is is_late_streak


def test_a_scale_that_held_later_has_held():
    # At most 9 steps were skipped before a scale held, but the log states only that at least 2 were.
    flags, scales = [True] * 2 + [False] * 8 + [False] * 100, [16.0, 8.0] + [4.0] * 108
    known = [True] * 2 + [False] * 8 + [True] * 100
    lines = np.array([[1, 1, 1], [2, 2, 2], [10, 2, 9], *([step, 2, 9] for step in range(11, 111))])
    text = analyze(run_of(scales, flags, known=np.array(known), lines=lines)).text()
    assert ("settled" in text, "has held yet" in text) == (True, False)


def test_fixed_scale_stays():
    verdict = analyze(run_of([1024.0] * 30, [True] * 30)).to_dict()["verdict"]
    assert "stayed at 2^10: the last 30 steps" in " ".join(verdict)


@pytest.mark.parametrize(("end", "error"), [("", None), ("AssertionError", "AssertionError")])
def test_traceback_at_the_end_of_a_log_is_said(tmp_path, end, error):
    log = tmp_path / "run.log"
    trace = f"Traceback (most recent call last):\n  File 'a.py', line 1\n{end}\n" if end else ""
    log.write_text(LINE.format(1, 1.0, 2.0**32, 1.0, 1) + "\n" + trace)
    assert last_error([str(log)]) == error
    assert ("ends in a traceback" in analyze(read_log(log)).text()) == bool(error)


@pytest.mark.parametrize("window", [20, 30])
def test_advised_start_is_not_one_that_overflowed(window):
    trace = Trace.exact("constant", [2.0**15.5] * 600)
    replayed = replay(make_policy("dynamic", init_loss_scale=2.0**16, scale_window=window), trace)
    analysis = analyze(run_of(replayed.loss_scale, replayed.overflow))
    assert "1 at the start, because 2^16 was too high" in analysis.text()
    assert analysis.settings.arguments["loss_scale_value"] == 2.0**15
    assert "# was 2^16" in analysis.scale_sense


@pytest.mark.parametrize(
    ("scales", "note", "reason"),
    [
        # 2^14 holds, and no higher scale is used again.
        ([17, 16, 15, *[14] * 200], "highest that held 20 steps", "2^14 is the highest scale"),
        # 2^15 overflows first, and holds later.
        ([17, 16, 15, *[14] * 40, *[15] * 200], "14 held 20 steps, and higher", "Scales up to 2^15 held later"),
        # 2^15 never overflows, but has 19 steps at the end.
        (
            [18, 17, 16, *[14] * 200, *[15] * 19],
            "highest that held 20 steps",
            "Scales up to 2^15 had fewer",
        ),
    ],
)
def test_advised_start_says_why_higher_scales_are_left_out(scales, note, reason):
    [advice] = analyze(run_of(2.0 ** np.array(scales), np.arange(len(scales)) < 3)).advice
    assert note in advice.note
    assert reason in advice.reason
    assert "20 steps in a row" in advice.reason
