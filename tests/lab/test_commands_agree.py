"""What analyze, report and plot say of the same log agrees: skipped bounds, and whether a scale settled and held."""

import numpy as np
import pytest

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots.run_series import series_of
from mindformers_adaptive.record.definitions import HELD, held_at, settled
from mindformers_adaptive.record.run import RecordedRun


def run_of(overflow, scales, known=True):
    steps = np.arange(1, len(scales) + 1)
    return RecordedRun("run", (), "jsonl", steps, np.array(scales), np.array(overflow), np.full(len(steps), known))


# Each second step overflows and the scale goes up and down within a factor of 2, so that no scale can hold.
RESTLESS = run_of([True, False] * 40, [65536.0, 32768.0] * 40)
CALM = run_of([True] * 4 + [False] * 76, [2.0**k for k in (16, 15, 14, 13)] + [4096.0] * 76)


@pytest.mark.parametrize("run", [RESTLESS, CALM], ids=["restless", "calm"])
def test_text_and_picture_agree_on_settled_and_on_the_bounds(run):
    analysis, series = analyze(run).to_dict(), series_of(run)
    said = " ".join(analysis["verdict"])
    assert ("settled" in said) == ("settled" in series.finding()) == bool(held_at(run))
    skipped = analysis["skipped"]
    assert (series.bounds or (series.skipped,) * 2) == (skipped["at_least"], skipped["at_most"])


@pytest.mark.parametrize("clean", [HELD - 1, HELD])
def test_a_scale_settles_only_where_one_held(clean):
    run = run_of(([True] + [False] * clean) * 4, ([2.0] + [1.0] * clean) * 4)
    assert (settled(run, run.loss_scale) is not None) == (clean == HELD)
