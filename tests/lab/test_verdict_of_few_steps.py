"""What analyze says of starts, short logs, late streaks, and a fixed scale that always overflows."""

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze, last_error
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.trace import Trace
from tests.shared.records import run_of

LINE = " iteration {:8d}/ 5000 | lm loss: {} | loss scale: {} | grad norm: {} | number of skipped iterations: {} |"


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
    log.write_text(LINE.format(1, 1.0, 2.0**32, 1.0, 1) + "\n" + trace)
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
