"""A picture of runs has every skipped step, shows no data that the record lacks, and has a title that fits the data."""

import dataclasses
import math
import re
from itertools import combinations

import numpy as np
import pytest

from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.writer import RunRecord, read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from tests.plots.drawn import artist, artists, legend, overlap, points, title
from tests.shared.records import gradient_line, record_of, run_of
from tests.shared.traces import made_trace

NAN = math.nan
# The loss scales of a run that fall from 2^6 to 1, and stay there.
FALLING = [2.0**exponent for exponent in range(6, 0, -1)] + [1.0] * 41


def draw_one(run, name=""):
    """Return the picture of a single run."""
    return draw_runs({name: run})


@pytest.fixture(scope="module")
def adaptive():
    """Return a record of adaptive scaling on a 600-step trace whose largest scale without overflow suddenly drops."""
    rule, record = AdaptiveRule(), []
    state = rule.start(2.0**24)
    for step, ceiling in enumerate(made_trace("sudden drop", 600, seed=0).ceiling, start=1):
        overflow, used = bool(state.loss_scale > ceiling), state.loss_scale
        state = rule.step(state, overflow)
        entry = {name: getattr(state, name) for name in ("scale_window", "window_index", "skipped_steps")}
        entry.update(step=step, loss=4.0, overflow=overflow, loss_scale=used, next_loss_scale=state.loss_scale)
        record.append(entry)
    return record


@pytest.mark.parametrize(
    ("scales", "skipped", "counted", "moved"),
    [
        ([8.0] * 3, [], "None of 2 steps", "stayed at $2^{3}$"),
        ([8.0] * 2, [1], "1 of 1 step", "stayed at $2^{3}$"),
        ([8.0, 4.0, 2.0], [1, 2], "All 2 steps", "fell from $2^{3}$ to $2^{1}$"),
        ([8.0, 8.0, 16.0], [], "None of 2 steps", "rose from $2^{3}$ to $2^{4}$"),
        ([8.0, 4.0, 8.0], [1], "1 of 2 steps", "moved between $2^{2}$ and $2^{3}$"),
        ([2.0**20] * 30 + [8.0, 16.0] * 20, [30], "1 of 69 steps", "settled between $2^{3}$ and $2^{4}$"),
        ([2.0**20] * 30 + [8.0] * 41, [30], "1 of 70 steps", "settled at $2^{3}$"),
        ([2.0**20] * 30 + [8.0] * 8, [30], "1 of 37 steps", "fell from $2^{20}$ to $2^{3}$"),
        ([2.0**20] * 30 + [8.0, 64.0] * 20, [], "None of 69 steps", "fell from $2^{20}$ to $2^{6}$"),
        # A loss scale counts as settled even if a single step has a far lower loss scale.
        ([8.0] * 450 + [2.0**-5] + [4.0] * 50, [], "None of 500 steps", "settled between $2^{2}$ and $2^{3}$"),
        # A loss scale that rises every 20 steps has not settled, and neither has a loss scale that has just fallen.
        (np.exp2(10 + np.arange(81) // 20).tolist(), [], "None of 80 steps", "rose from $2^{10}$ to $2^{14}$"),
        ([8.0] * 70 + [4.0] * 20, [70], "1 of 89 steps", "fell from $2^{3}$ to $2^{2}$"),
        (FALLING, range(3, 47), "44 of 46 steps", "collapsed to $2^{0}$"),
        # A loss scale has not collapsed if a step is applied at the lowest scale. It has not settled either, because no
        # scale held.
        (FALLING, range(3, 46), "43 of 46 steps", "fell from $2^{6}$ to $2^{0}$"),
        ([None] * 3, [2], "1 of 2 steps", "skipped"),
    ],
)
def test_title_says_what_was_found(scales, skipped, counted, moved):
    finding = title(draw_one(record_of(scales, skipped)))
    assert finding.startswith(f"{counted} skipped")
    assert finding.endswith(moved)
    assert finding.count(";") == (moved != "skipped")  # The title says nothing else.


def test_lines_and_marks_are_the_records_on_axes_with_units(adaptive):
    loss, scale, window = draw_one(adaptive).axes
    labels = tuple(axes.get_ylabel() for axes in (loss, scale, window))
    assert labels == ("loss, unscaled", "loss scale, log2", "scale window, steps")
    assert (window.get_xlabel(), scale.get_yscale()) == ("step", "log")
    drawn = [entry["loss_scale"] for entry in adaptive] + [adaptive[-1]["next_loss_scale"]]
    assert points(scale, "loss scale") == (list(range(1, 602)), drawn)
    # The first loss scales fall from 2^24. The upper end of the loss-scale axis lies below them, so that the much
    # smaller loss scales of the later steps are readable.
    assert scale.get_ylim()[0] < min(drawn) < max(drawn[40:]) < scale.get_ylim()[1] < max(drawn)
    assert artist(scale, "start").get_text() == "the start, from $2^{24}$, is cut off"
    assert points(window, "scale window") == (list(range(1, 601)), [entry["scale_window"] for entry in adaptive])
    skipped = [entry for entry in adaptive if entry["overflow"]]
    assert len(skipped) > 20
    assert points(scale, "skipped steps")[0] == [entry["step"] for entry in skipped]
    assert f"skipped step ({len(skipped)})" in legend(scale)


def test_legends_and_titles_lie_beside_the_data_and_each_other(adaptive):
    figure = draw_one(adaptive, "a name that is rather long, of a run that went on for some time, as runs often do")
    figure.canvas.draw()
    for axes in figure.axes[:2]:
        artists = (axes.get_legend(), axes, figure._suptitle, axes._left_title)
        beside = [artist.get_window_extent() for artist in artists]
        assert not any(overlap(artist, other) for artist, other in combinations(beside, 2))


def test_what_the_monitor_wrote_is_drawn(adaptive, tmp_path):
    record = RunRecord(tmp_path / "record.jsonl")
    record.resume(last_step=0)
    record.append(adaptive[:200])
    record.append(adaptive[300:])
    figure = draw_one(read_record(record.path))
    skipped = adaptive[-1]["skipped_steps"]
    recorded = sum(entry["overflow"] for entry in adaptive[:200] + adaptive[300:])
    assert recorded < skipped
    assert title(figure).startswith(f"{skipped} of 600 steps skipped; ")
    assert f"skipped step ({recorded} of {skipped})" in legend(figure.axes[1])
    assert figure.axes[-1].get_xlabel() == "step (500 recorded)"
    [span] = artist(figure.axes[0], "gaps").get_paths()
    assert (span.vertices[:, 0].min(), span.vertices[:, 0].max()) == (200.5, 300.5)
    steps, scales = points(figure.axes[1], "loss scale")
    assert np.isnan(scales[steps.index(201)])
    for gid in ("loss", "median loss"):
        x, y = points(figure.axes[0], gid)
        assert np.isnan(y[x.index(201)])


def test_skips_in_a_gap_are_not_counted():
    record = [*record_of([8.0] * 11, [3]), {"missing_steps": 5, "first_step": 11, "last_step": 15}]
    finding = title(draw_one(record))
    assert finding.startswith("1 to 6 of 15 steps skipped; ")
    assert "loss scale was $2^{3}$ on each line" in finding


def test_record_of_single_steps_has_lines_and_no_shades():
    record = []
    for entry in record_of([8.0] * 101, range(1, 101), skipped_steps=range(1, 101)):
        if entry["step"] % 10 == 0:
            record += [{"missing_steps": 9, "first_step": entry["step"] - 9, "last_step": entry["step"] - 1}, entry]
    figure = draw_one(record)
    assert artists(figure.axes[0], "gaps") == []
    assert points(figure.axes[0], "loss")[0] == list(range(10, 101, 10))
    assert title(figure).startswith("All 100 steps skipped")
    assert figure.axes[-1].get_xlabel() == "step (10 recorded)"


def test_losses_that_are_not_finite_are_marked():
    record = record_of([8.0] * 6, loss=[1.0, NAN, 2.0, math.inf, None])
    loss = draw_one(record).axes[0]
    assert points(loss, "broken loss")[0] == [2, 4]
    assert points(loss, "loss") == ([1, 3], [1.0, 2.0])
    assert legend(loss) == ["loss", "inf or NaN (2)"]


def test_resumes_and_checkpoints_are_marked(adaptive):
    marks = {100: {"saved": True}, 101: {"resumed": True}, 400: {"resumed": True, "saved": True}}
    figure = draw_one([line | marks.get(line["step"], {}) for line in adaptive])
    for axes in figure.axes:
        [marks] = artists(axes, "resumed")
        assert [segment[0][0] for segment in marks.get_segments()] == [100.5, 399.5]
    assert {"resumed (2)", "checkpoint (2)"} <= set(legend(figure.axes[1]))
    assert points(figure.axes[1], "saved")[0] == [100, 400]
    assert not any(artists(axes, mark) for axes in draw_one(adaptive).axes for mark in ("resumed", "saved"))


@pytest.mark.parametrize(("loss", "broken"), [(NAN, 4), (None, 0)])
def test_record_without_any_finite_loss_or_norm_says_so(loss, broken):
    axes, _ = draw_one(record_of([8.0] * 5, loss=[loss] * 4, gradient_norm=[None, NAN] * 2)).axes
    assert [text.get_text() for text in axes.texts] == ["no finite loss in the record"]
    assert len(artists(axes, "broken loss")) == (broken > 0)


def test_skipped_step_of_unknown_scale_is_marked():
    for scales in ([8.0, None, 8.0], [None] * 3):
        steps, places = points(draw_one(record_of(scales, [2])).axes[1], "skipped steps")
        assert steps == [2]
        assert np.isfinite(places).all()


def test_loss_that_falls_far_is_on_a_logarithmic_axis():
    for last, expected in ((1.0, "linear"), (0.05, "log"), (-1.0, "linear")):
        axes = draw_one(record_of([8.0] * 3, loss=[10.0, last])).axes[0]
        assert axes.get_yscale() == expected


def test_every_outlier_of_a_million_steps_is_seen():
    steps, random = 1_000_000, np.random.default_rng(0)
    loss, scale = 3.0 + random.normal(0.0, 0.3, steps), np.full(steps, 2.0**16)
    overflow, peaks, dips = np.zeros(steps, bool), random.integers(0, steps, 20), random.integers(0, steps, 20)
    loss[peaks], scale[dips], overflow[[5, 500_000, 999_999]] = 9.0, 2.0**3, True
    figure = draw_one(run_of(scale, overflow, loss=loss))
    figure.canvas.draw()
    upper, lower = figure.axes
    assert points(lower, "skipped steps")[0] == [6, 500_001, 1_000_000]
    assert legend(upper)[1] == "median of 10,000 steps"
    for axes, outliers, value, nothing in ((upper, peaks, 8.0, 9.5), (lower, dips, 2.0**4, 2.0**17)):
        # Each outlier of the loss or the loss scale is drawn: the picture is darker than the white background within a
        # pixel of the outlier.
        assert darkest(axes, outliers + 1, value).max() < 0.9
        assert darkest(axes, outliers + 1, nothing).min() == 1.0


def darkest(axes, x, y):
    """Return, for each point of a panel, the brightness at the point, from 0 (black) to 1 (white).

    This is the brightness of the darkest of three pixels: the point's pixel, and the pixels to its left and its right.
    """
    picture = np.asarray(axes.figure.canvas.buffer_rgba())[::-1, :, :3].min(axis=2) / 255
    across, up = axes.transData.transform(np.column_stack([x, np.full(len(x), y)])).astype(int).T
    return np.min([picture[up, across + near] for near in (-1, 0, 1)], axis=0)


def test_run_of_a_log_is_named_and_drawn_without_window():
    run = run_of([8.0, 4.0, 4.0, 4.0], [True, False, False, False], loss=np.array([NAN, 3.0, NAN, 2.0]))
    figure = draw_one(dataclasses.replace(run, after=np.array([4.0] * 4)), run.name)
    assert title(figure).startswith("run: 1 of 4 steps skipped; ")
    assert title(figure).endswith(" fell from $2^{3}$ to $2^{2}$")
    # The log has the loss of every second step only. The loss curve must still be drawn without gaps.
    assert points(figure.axes[0], "loss") == ([2, 4], [3.0, 2.0])
    assert artists(figure.axes[0], "broken loss") == []
    assert len(figure.axes) == 2


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ([], ValueError, "record .* at least 1 step .* none.*Wait until"),
        ([{"missing_steps": 3, "first_step": 1, "last_step": 3}], ValueError, "at least 1 step to draw"),
        ([{"step": 1, "loss_scales": []}], ValueError, "Line 1 .* `overflow`.*draw_gradient_records"),
        ("record.jsonl", TypeError, "'record' .* list of lines.* dict.* got .*read_record"),
        ([{"step": 1}, "torn"], TypeError, "'record' .* list of lines.* dict.* got .*read_record"),
        (record_of(["many", 2.0]), ValueError, r"Line 1 .* got `str` - at `\$\.loss_scale`"),
    ],
)
def test_what_is_no_record_is_refused(record, error, message):
    with pytest.raises(error, match=message):
        draw_one(record)


GUIDED_SCALES = [64.0, 32.0, 8.0, 8.0, 16.0]


def guided_record(gradients, **values):
    return record_of(GUIDED_SCALES, [1, 2], largest_gradient=gradients, **values)


def test_ceilings_that_gradients_show_are_drawn_above_the_scale():
    gradients = ["inf", float("inf"), 57344.0 / 32, 57344.0 / 40]
    figure = draw_one(guided_record(gradients, gradient_format=["float8_e5m2"] * 4))
    loss, scale = figure.axes  # A scale window that never changes has no panel.
    assert points(scale, "ceiling") == ([3.0, 4.0], [32.0, 40.0])
    assert scale.get_ylim()[1] > 64.0
    assert legend(scale)[:2] == ["ceiling that gradients show", "overflows"]
    assert title(figure).endswith("loss scale fell from $2^{6}$ to $2^{4}$, 2.2 bits below the ceiling")
    assert artists(loss, "ceiling") == []
    moving = guided_record([None, None, 65504.0 / 32, 65504.0 / 40], scale_window=[500, 500, 500, 4000])
    assert re.match("scale window: .* before the limit of .* raised$", draw_one(moving).axes[2].get_title("left"))


@pytest.mark.parametrize("gradients", [[None] * 4, [0.0] * 4, ["inf", 1.0, "nan", None], [NAN] * 4])
def test_picture_is_as_before_without_telling_gradients(gradients):
    figure, before = draw_one(guided_record(gradients)), draw_one(record_of(GUIDED_SCALES, [1, 2]))
    assert title(figure) == title(before)
    assert len(figure.axes) == 2
    assert artists(figure.axes[1], "ceiling") == artists(figure.axes[1], "overflows") == []
    assert figure.axes[1].get_ylim() == before.axes[1].get_ylim()


def test_one_tiny_gradient_does_not_squeeze_the_picture():
    scale = draw_one(guided_record([None, None, 65504.0 / 2.0**80, 65504.0 / 32])).axes[1]
    assert scale.get_ylim()[1] < 2.0**20
    assert points(scale, "ceiling")[1] == [scale.get_ylim()[1], 32.0]


@pytest.fixture
def runs():
    """Return a run at a loss scale of 64 with a loss of 3, and a run at 512 with 2 skipped steps and a loss of 2."""
    other = record_of([512.0] * 41, [5, 6], loss=[2.0] * 40)
    return {"64": record_of([64.0] * 41, loss=[3.0] * 40), "512": other}


ONLY_SUBNORMAL = "subnormal gradients, share of all gradients"


def gradients_at(scale, *scales):
    return [{**gradient_line(step, scale, *scales), "loss_scale": scale} for step in (10, 20)]


def test_each_run_has_its_lines_and_marks(runs):
    loss, scale, _ = draw_runs(runs).axes
    assert points(loss, "64: loss") == (list(range(1, 41)), [3.0] * 40)
    assert points(loss, "512: loss") == (list(range(1, 41)), [2.0] * 40)
    assert legend(loss) == ["64: loss", "512: loss"]
    assert [list(marks.get_xdata()) for marks in artists(scale, "skipped steps")] == [[], [5, 6]]
    assert legend(scale) == ["64: skipped step (0)", "512: skipped step (2)"]
    assert scale.get_ylim()[0] < 64 < 512 < scale.get_ylim()[1]
    colours = {axes: [line.get_color() for line in axes.lines if len(line.get_xdata())] for axes in (loss, scale)}
    assert colours[loss][0] != colours[loss][1]
    assert set(colours[loss]) == set(colours[scale])


def test_title_compares_the_losses_at_the_end_and_the_skips(runs):
    assert title(draw_runs(runs)) == "Loss at the end: 2.00 (512), 3.00 (64); skipped steps: 2 (512), 0 (64)"
    # Losses are compared at the last step of the shorter run, so the longer run's later loss of 1 must be ignored.
    longer = runs["64"] + [{**row, "step": row["step"] + 40, "loss": 1.0} for row in runs["64"]]
    said = "Loss at step 40: 2.00 (512), 3.00 (64); skipped steps: 2 (512), 0 (64)"
    assert title(draw_runs({"64": longer, "512": runs["512"]})) == said


def test_underflow_is_drawn_where_it_is_known(runs):
    gradients = {"64": gradients_at(64.0, 512.0), "512": gradients_at(512.0, 512.0, 1024.0)}
    figure = draw_runs(runs, gradients)
    axes = figure.axes[3]
    assert axes.get_title("left") == "underflow, share of all gradients"
    for name in runs:
        steps, shares = points(axes, name)
        assert steps == [10, 20]
        [at_scale] = [entry for entry in gradients[name][0]["loss_scales"] if entry["loss_scale"] == float(name)]
        assert shares[0] == pytest.approx(100 * at_scale["overall"]["underflowed_share"])
    most = max(points(axes, "64")[1])
    assert most > 1
    assert title(figure) == f"Loss at the end: 2.00 (512), 3.00 (64); underflow at most 0 % (512), {most:.2g} % (64)"


def test_subnormal_numbers_are_drawn_at_a_single_scale(runs):
    figure = draw_runs(runs, {"64": gradients_at(64.0), "512": gradients_at(512.0, 512.0, 1024.0)})
    assert figure.axes[3].get_title("left") == ONLY_SUBNORMAL
    assert all(share > 1 for share in points(figure.axes[3], "64")[1])
    assert "; subnormal gradients at most" in title(figure)


def test_logs_and_records_are_drawn_together(runs):
    log = run_of([8.0] * 30, np.arange(1, 31) == 3)
    figure = draw_runs({"log": log, "512": runs["512"]})
    assert [list(marks.get_xdata()) for marks in artists(figure.axes[1], "skipped steps")] == [[3], [5, 6]]
    assert title(figure).startswith("Loss at step 30: 2.00 (512), not known (log)")


def test_many_runs_are_drawn_but_the_title_names_the_ends():
    runs = {f"run {number}": record_of([8.0] * 3, loss=[number, number]) for number in range(13)}
    figure = draw_runs(runs)
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 13
    assert title(figure).startswith("Loss at the end: 0.00 (run 0), ..., 12.00 (run 12)")


def test_many_skipped_steps_become_a_strip_for_each_run():
    skipped = set(range(3, 50_000, 5))
    run = run_of(np.full(50_000, 2.0**16), np.arange(1, 50_001) % 5 == 3)
    scale = draw_runs({"a": run, "b": run}).axes[1]
    for strip, height in zip(artists(scale, "skipped steps"), (0.96, 0.89), strict=True):
        assert set(strip.get_xdata()) <= skipped
        assert 1000 < len(strip.get_xdata()) <= 2001
        assert {round(height_of_point, 2) for height_of_point in strip.get_ydata()} == {height}
    assert legend(scale) == ["a: skipped step (10,000)", "b: skipped step (10,000)"]


@pytest.mark.parametrize(("names", "gradients"), [((), None), (("64",), {"65": []})])
def test_what_belongs_to_no_run_is_refused(runs, names, gradients):
    said = rf"'runs' must have at least 1 entry.* 'gradients'.* {re.escape(str(list(names)))} .* same names"
    with pytest.raises(ValueError, match=said):
        draw_runs({name: runs[name] for name in names}, gradients)


def test_the_ceiling_of_the_one_run_that_shows_it_is_shaded(runs):
    gradients = [65504.0 / 2048.0] * 40
    shown = {"64": runs["64"], "512": [{**row, "largest_gradient": 65504.0 / 2048.0} for row in runs["512"]]}
    scale = draw_runs(shown).axes[1]
    steps, ceilings = points(scale, "ceiling")
    assert set(ceilings) == {2048.0}
    assert set(range(1, 41)) - set(steps) == {5, 6}
    assert "512: ceiling that gradients show" in legend(scale)
    both = {name: record_of([64.0] * 41, largest_gradient=gradients) for name in ("a", "b")}
    assert artists(draw_runs(both).axes[1], "ceiling") == []


def test_two_runs_have_a_panel_with_the_difference_of_losses():
    first = record_of([8.0] * 6)
    second = [{**line, "loss": line["loss"] + 0.5 * line["step"]} for line in first[1:]]
    second[1]["loss"] = None
    figure = draw_runs({"64": first, "512": second})
    assert len(figure.axes) == 3
    axes = figure.axes[2]
    assert axes.get_title("left") == "loss of 512 minus loss of 64"
    # Only the first run has step 1, and the second run has no loss at step 3.
    steps, apart = points(axes, "difference")
    assert (steps, apart) == ([2, 4, 5], pytest.approx([1.0, 2.0, 2.5]))
    gradients = {"64": [{**gradient_line(2, 64.0), "loss_scale": 64.0}]}
    panels = draw_runs({"64": first, "512": second}, gradients).axes
    assert [axes.get_title("left") for axes in panels[2:]] == [axes.get_title("left"), ONLY_SUBNORMAL]


def test_of_many_steps_the_difference_has_a_line_of_medians():
    first = record_of([8.0] * 401)
    second = [{**line, "loss": line["loss"] + 1.0} for line in first]
    axes = draw_runs({"a": first, "b": second}).axes[2]
    assert points(axes, "median difference")[1] == pytest.approx([1.0] * 40)


@pytest.mark.parametrize("runs", [{"a": [1, 2], "b": [3, 4]}, {"a": [1], "b": [1], "c": [1]}])
def test_difference_needs_two_runs_with_common_steps(runs):
    line = {"loss": 1.0, "overflow": False, "loss_scale": 8.0, "next_loss_scale": 8.0}
    figure = draw_runs({name: [{**line, "step": step} for step in steps] for name, steps in runs.items()})
    assert len(figure.axes) == 2


def test_norms_of_several_runs_leave_out_skipped_steps():
    few = record_of([8.0] * 5, [2], gradient_norm=[0.5, NAN, 0.25, None])
    many = record_of([8.0] * 5, gradient_norm=[5.0, 4.0, 3.0, math.inf])
    figure = draw_runs({"1 device": few, "4 devices": many})
    loss, norm, scale, _ = figure.axes
    assert (norm.get_ylabel(), norm.get_yscale()) == ("gradient norm", "log")
    assert points(norm, "1 device: norm") == ([1, 3], [0.5, 0.25])
    assert points(norm, "4 devices: norm") == ([1, 2, 3], [5.0, 4.0, 3.0])
    assert (loss.get_ylabel(), scale.get_ylabel()) == ("loss, unscaled", "loss scale, log2")
    norms = "skipped steps: 1 (1 device), 0 (4 devices); median norm: 0.38 (1 device), 4 (4 devices)"
    assert title(figure).endswith(norms)


def test_losses_that_were_nan_are_named_of_several_runs_too():
    good, bad = record_of([8.0] * 41), record_of([8.0] * 41)
    bad[4]["loss"] = bad[5]["loss"] = NAN
    assert "; loss inf or NaN in 2 steps (bad)" in title(draw_runs({"good": good, "bad": bad}))
    bad[-1]["loss"] = bad[-2]["loss"] = NAN
    # A loss that is broken at the end comes last.
    finding = title(draw_runs({"bad": bad, "good": good}))
    assert re.match(r"Loss at the end: [\d.]+ \(good\), inf or NaN \(bad\)", finding)
