"""Runs side by side: every run has its line, its skipped steps and what it loses to underflow."""

import math

import numpy as np
import pytest
from drawn import artists, legend, points, title
from records import gradient_line, record_of

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.plots.runs import draw_runs


@pytest.fixture
def runs():
    """A run at 64 with a loss of 3, and one at 512 that skips two steps and has a loss of 2."""
    return {
        "64": record_of([64.0] * 41, loss=[3.0] * 40),
        "512": record_of([512.0] * 41, [5, 6], loss=[2.0] * 40),
    }


def gradients_at(scale, *others):
    return [{**gradient_line(step, scale, *others), "loss_scale": scale} for step in (10, 20)]


def test_each_run_has_its_lines_and_marks(runs):
    loss, scale = draw_runs(runs).axes
    assert points(loss, "64") == (list(range(1, 41)), [3.0] * 40)
    assert points(loss, "512") == (list(range(1, 41)), [2.0] * 40)
    assert legend(loss) == ["64", "512"]
    assert [list(marks.get_xdata()) for marks in artists(scale, "skipped steps")] == [[], [5, 6]]
    assert legend(scale) == ["64: 0 skipped", "512: 2 skipped"]
    assert scale.get_ylim()[0] < 64 < 512 < scale.get_ylim()[1]
    colours = {axes: [one.get_color() for one in axes.lines if len(one.get_xdata())] for axes in (loss, scale)}
    assert colours[loss][0] != colours[loss][1]
    assert set(colours[loss]) == set(colours[scale])


def test_title_compares_the_losses_at_the_end_and_the_skips(runs):
    assert title(draw_runs(runs)) == "Loss at the end: 2.00 (512), 3.00 (64); skipped steps: 2 (512), 0 (64)"
    # Compared where both runs have got to: the longer one has a loss of 1 afterwards.
    longer = runs["64"] + [{**row, "step": row["step"] + 40, "loss": 1.0} for row in runs["64"]]
    said = "Loss at step 40: 2.00 (512), 3.00 (64); skipped steps: 2 (512), 0 (64)"
    assert title(draw_runs({"64": longer, "512": runs["512"]})) == said


def test_underflow_is_drawn_where_it_is_known(runs):
    gradients = {"64": gradients_at(64.0, 512.0), "512": gradients_at(512.0, 512.0, 1024.0)}
    figure = draw_runs(runs, gradients)
    axes = figure.axes[2]
    assert axes.get_title("left") == "underflow, share of all gradients"
    for name in runs:
        steps, shares = points(axes, name)
        assert steps == [10, 20]
        [at_scale] = [one for one in gradients[name][0]["loss_scales"] if one["loss_scale"] == float(name)]
        assert shares[0] == pytest.approx(100 * at_scale["overall"]["underflowed_share"])
    most = max(points(axes, "64")[1])
    assert most > 1
    assert title(figure) == f"Loss at the end: 2.00 (512), 3.00 (64); underflow at most 0 % (512), {most:.2g} % (64)"


def test_subnormal_numbers_are_drawn_where_no_other_scale_was_measured(runs):
    figure = draw_runs(runs, {"64": gradients_at(64.0), "512": gradients_at(512.0, 512.0, 1024.0)})
    assert figure.axes[2].get_title("left") == "subnormal gradients, share of all gradients"
    assert all(share > 1 for share in points(figure.axes[2], "64")[1])
    assert "; subnormal gradients at most" in title(figure)


def test_one_run_may_lack_its_gradients(runs):
    axes = draw_runs(runs, {"64": gradients_at(64.0, 512.0)}).axes[2]
    assert artists(axes, "512") == []
    assert points(axes, "64")[0] == [10, 20]


def test_loss_that_breaks_is_marked_and_comes_last_in_the_title(runs):
    runs["512"][-1]["loss"] = math.nan
    figure = draw_runs(runs)
    assert [list(marks.get_xdata()) for marks in artists(figure.axes[0], "broken loss")] == [[40]]
    assert title(figure).startswith("Loss at the end: 3.00 (64), not finite (512)")


def test_logs_and_records_are_drawn_together(runs):
    steps = np.arange(1, 31)
    log = RecordedRun("x.log", (), "megatron", steps, np.full(30, 8.0), steps == 3, np.ones(30, bool))
    figure = draw_runs({"log": log, "512": runs["512"]})
    assert [list(marks.get_xdata()) for marks in artists(figure.axes[1], "skipped steps")] == [[3], [5, 6]]
    assert title(figure).startswith("Loss at step 30: 2.00 (512), not known (log)")


def test_many_runs_are_drawn_but_the_title_names_the_ends():
    runs = {f"run {number}": record_of([8.0] * 3, loss=[number, number]) for number in range(9)}
    figure = draw_runs(runs)
    assert len({(one.get_color(), one.get_linestyle()) for one in figure.axes[0].lines}) == 9
    assert title(figure).startswith("Loss at the end: 0.00 (run 0), ..., 8.00 (run 8)")


def test_many_skipped_steps_become_strips_of_their_own():
    skipped = range(1, 1001)
    figure = draw_runs({name: record_of([8.0] * 1001, skipped) for name in "ab"})
    heights = [set(marks.get_ydata()) for marks in artists(figure.axes[1], "skipped steps")]
    assert len(heights) == 2
    assert all(len(height) == 1 for height in heights)
    assert heights[0] != heights[1]


@pytest.mark.parametrize(("names", "gradients"), [((), None), (("64",), {"65": []})])
def test_what_belongs_to_no_run_is_refused(runs, names, gradients):
    with pytest.raises(ValueError, match="'runs' must have at least 1 entry, and one for each of 'gradients'"):
        draw_runs({name: runs[name] for name in names}, gradients)


def test_the_ceiling_of_the_one_run_that_shows_it_is_shaded(runs):
    gradients = [65504.0 / 2048.0] * 40
    shown = {"64": runs["64"], "512": [{**row, "largest_gradient": 65504.0 / 2048.0} for row in runs["512"]]}
    scale = draw_runs(shown).axes[1]
    steps, ceilings = points(scale, "ceiling")
    assert set(ceilings) == {2048.0}
    assert set(range(1, 41)) - set(steps) == {5, 6}
    assert legend(scale)[0] == "ceiling that gradients show (512)"
    both = {name: record_of([64.0] * 41, largest_gradient=gradients) for name in ("a", "b")}
    assert artists(draw_runs(both).axes[1], "ceiling") == []
