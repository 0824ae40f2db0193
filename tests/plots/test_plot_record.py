"""The picture of a run shows every skipped step, says what was found, and does not invent what is not recorded."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from drawn import artist, artists, legend, overlap, points, title
from records import record_of

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.lab.traces.synthetic import synthetic_trace
from mindformers_adaptive.monitor.record import RunRecord, read_record
from mindformers_adaptive.plots.record import draw_record, draw_run
from mindformers_adaptive.rules.adaptive import AdaptiveRule

NAN = math.nan


@pytest.fixture(scope="module")
def adaptive():
    """What the monitor records of adaptive loss scaling on a made-up trace: 600 steps with a drop in the middle."""
    rule, record = AdaptiveRule(), []
    state = rule.start(2.0**24)
    for step, ceiling in enumerate(synthetic_trace("sudden drop", 600, seed=0).ceiling, start=1):
        overflow, used = bool(state.loss_scale > ceiling), state.loss_scale
        state = rule.step(state, overflow)
        entry = {name: getattr(state, name) for name in ("scale_window", "window_index", "skipped_steps")}
        entry.update(step=step, loss=4.0, overflow=overflow, loss_scale=used, next_loss_scale=state.loss_scale)
        record.append(entry)
    return record


@pytest.mark.parametrize(
    ("scales", "skipped", "finding"),
    [
        ([8.0] * 3, [], "None of 2 steps skipped; loss scale stayed at $2^{3}$"),
        ([8.0] * 2, [1], "1 of 1 step skipped; loss scale stayed at $2^{3}$"),
        ([8.0, 4.0, 2.0], [1, 2], "All 2 steps skipped; loss scale fell from $2^{3}$ to $2^{1}$"),
        ([8.0, 8.0, 16.0], [], "None of 2 steps skipped; loss scale rose from $2^{3}$ to $2^{4}$"),
        ([8.0, 4.0, 8.0], [1], "1 of 2 steps skipped; loss scale ended where it began, at $2^{3}$"),
        ([2.0**20] * 30 + [8.0, 16.0] * 20, [30], "1 of 69 steps skipped; loss scale settled at $2^{3}$ to $2^{4}$"),
        ([2.0**20] * 30 + [8.0] * 41, [30], "1 of 70 steps skipped; loss scale settled at $2^{3}$"),
        ([2.0**20] * 30 + [8.0] * 8, [30], "1 of 37 steps skipped; loss scale fell from $2^{20}$ to $2^{3}$"),
        ([2.0**20] * 30 + [8.0, 64.0] * 20, [], "None of 69 steps skipped; loss scale fell from $2^{20}$ to $2^{6}$"),
        ([None] * 3, [2], "1 of 2 steps skipped"),
    ],
)
def test_title_says_what_was_found(scales, skipped, finding):
    assert title(draw_record(record_of(scales, skipped))) == finding


def test_one_far_spike_does_not_unsettle_the_scale():
    scales = [2.0**20] * 100 + [8.0] * 400
    scales[450] = 2.0**-5
    assert title(draw_record(record_of(scales))).endswith("settled at $2^{3}$")


def test_run_is_named():
    assert title(draw_record(record_of([2.0, 2.0]), "a.jsonl")).startswith("a.jsonl: None of 1 step skipped")


def test_every_skipped_step_is_marked_at_its_scale(adaptive):
    _, scale, _ = draw_record(adaptive).axes
    skipped = [entry for entry in adaptive if entry["overflow"]]
    assert len(skipped) > 20
    expected = [entry["step"] for entry in skipped], [entry["loss_scale"] for entry in skipped]
    assert points(scale, "skipped steps") == expected
    assert artist(scale, "skipped steps").get_linestyle() == "None"
    assert f"skipped step ({len(skipped)})" in legend(scale)


def test_lines_are_those_of_the_record(adaptive):
    _, scale, window = draw_record(adaptive).axes
    drawn = [entry["loss_scale"] for entry in adaptive] + [adaptive[-1]["next_loss_scale"]]
    assert points(scale, "loss scale") == (list(range(1, 602)), drawn)
    assert points(window, "scale window") == (list(range(1, 601)), [entry["scale_window"] for entry in adaptive])


def test_scale_after_the_last_step_is_drawn():
    assert points(draw_record(record_of([8.0, 4.0, 2.0], [1, 2])).axes[1], "loss scale") == ([1, 2, 3], [8.0, 4.0, 2.0])


def test_axes_have_units_and_hold_all_that_is_drawn(adaptive):
    loss, scale, window = draw_record(adaptive).axes
    assert [axes.get_ylabel() for axes in (loss, scale, window)] == [
        "loss, unscaled",
        "loss scale, log2",
        "scale window, steps",
    ]
    assert window.get_xlabel() == "step"
    assert (scale.get_yscale(), scale.yaxis.get_transform().base, window.get_yscale()) == ("log", 2, "log")
    scales = [entry["loss_scale"] for entry in adaptive]
    assert scale.get_ylim()[0] < min(scales) < max(scales) < scale.get_ylim()[1]
    windows = {entry["scale_window"] for entry in adaptive}
    assert {label.get_text() for label in window.get_yticklabels()} <= {str(one) for one in windows}
    for axes in (loss, scale, window):
        assert axes.get_xlim()[0] < 1 < 600 < axes.get_xlim()[1]


def test_legends_and_titles_lie_beside_the_data_and_each_other(adaptive):
    figure = draw_record(adaptive, "a name that is rather long, of a run that went on for some time, as runs often do")
    figure.canvas.draw()
    for axes in figure.axes[:2]:
        beside = [axes.get_legend().get_window_extent(), axes.get_window_extent(), figure._suptitle.get_window_extent()]
        beside.append(axes._left_title.get_window_extent())
        boxes = [(one, other) for place, one in enumerate(beside) for other in beside[:place]]
        assert not any(overlap(one, other) for one, other in boxes)


def test_what_the_monitor_wrote_is_drawn(adaptive, tmp_path):
    record = RunRecord(tmp_path / "record.jsonl")
    record.resume(last_step=0)
    record.append(adaptive[:200])
    record.append(adaptive[300:])
    figure = draw_record(read_record(record.path))
    skipped = adaptive[-1]["skipped_steps"]
    recorded = sum(entry["overflow"] for entry in adaptive[:200] + adaptive[300:])
    assert recorded < skipped
    assert title(figure).startswith(f"{skipped} of 600 steps skipped; ")
    assert f"skipped step ({recorded} of {skipped} recorded)" in legend(figure.axes[1])
    assert figure.axes[-1].get_xlabel() == "step (500 recorded)"
    [span] = artist(figure.axes[0], "gaps").get_paths()
    assert (span.vertices[:, 0].min(), span.vertices[:, 0].max()) == (200.5, 300.5)
    steps, scales = points(figure.axes[1], "loss scale")
    assert np.isnan(scales[steps.index(201)])
    for gid in ("loss", "median loss"):
        x, y = points(figure.axes[0], gid)
        assert np.isnan(y[x.index(201)])


def test_skips_in_a_gap_are_not_counted_where_the_record_does_not_tell():
    record = [*record_of([8.0] * 11, [3]), {"missing_steps": 5, "first_step": 11, "last_step": 15}]
    assert title(draw_record(record)) == "1 of 10 recorded steps skipped; loss scale stayed at $2^{3}$"


def test_record_of_single_steps_has_lines_and_no_shades():
    record = []
    for entry in record_of([8.0] * 101, range(1, 51), skipped_steps=range(1, 101)):
        if entry["step"] % 10 == 0:
            record += [{"missing_steps": 9, "first_step": entry["step"] - 9, "last_step": entry["step"] - 1}, entry]
    figure = draw_record(record)
    assert artists(figure.axes[0], "gaps") == []
    assert points(figure.axes[0], "loss")[0] == list(range(10, 101, 10))
    assert title(figure).startswith("All 100 steps skipped")
    assert figure.axes[-1].get_xlabel() == "step (10 recorded)"


def test_losses_that_are_not_finite_are_marked():
    record = record_of([8.0] * 6, loss=[1.0, NAN, 2.0, math.inf, None])
    loss = draw_record(record).axes[0]
    assert points(loss, "broken loss")[0] == [2, 4]
    assert points(loss, "loss") == ([1, 3], [1.0, 2.0])
    assert legend(loss) == ["loss", "inf or NaN (2)"]


@pytest.mark.parametrize(("loss", "broken"), [(NAN, 4), (None, 0)])
def test_record_without_any_finite_loss_says_so(loss, broken):
    axes = draw_record(record_of([8.0] * 5, loss=[loss] * 4)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no finite loss in the record"]
    assert len(artists(axes, "broken loss")) == (broken > 0)


def test_skipped_step_of_unknown_scale_is_marked():
    for scales in ([8.0, None, 8.0], [None] * 3):
        steps, places = points(draw_record(record_of(scales, [2])).axes[1], "skipped steps")
        assert steps == [2]
        assert np.isfinite(places).all()


def test_record_without_windows_has_no_panel_for_them():
    assert len(draw_record(record_of([8.0] * 3, scale_window=[None] * 2)).axes) == 2


def test_loss_that_falls_far_is_on_a_logarithmic_axis():
    for last, expected in ((1.0, "linear"), (0.05, "log"), (-1.0, "linear")):
        axes = draw_record(record_of([8.0] * 3, loss=[10.0, last])).axes[0]
        assert axes.get_yscale() == expected


def test_every_outlier_of_a_million_steps_is_seen_within_seconds():
    steps, random = 1_000_000, np.random.default_rng(0)
    loss, scale = 3.0 + random.normal(0.0, 0.3, steps), np.full(steps, 2.0**16)
    overflow, peaks, dips = np.zeros(steps, bool), random.integers(0, steps, 20), random.integers(0, steps, 20)
    loss[peaks], scale[dips], overflow[[5, 500_000, 999_999]] = 9.0, 2.0**3, True
    run = RecordedRun("run", (), "jsonl", np.arange(1, steps + 1), scale, overflow, np.ones(steps, bool), loss)
    started = time.process_time()
    figure = draw_run(run)
    figure.canvas.draw()
    assert time.process_time() - started < 30
    upper, lower = figure.axes
    assert points(lower, "skipped steps")[0] == [6, 500_001, 1_000_000]
    assert legend(upper)[1] == "median of 10,000 steps"
    for axes, outliers, value, nothing in ((upper, peaks, 8.0, 9.5), (lower, dips, 2.0**4, 2.0**17)):
        # Within a pixel of its place each outlier leaves ink on the white panel.
        assert darkest(axes, outliers + 1, value).max() < 0.9
        assert darkest(axes, outliers + 1, nothing).min() == 1.0


def darkest(axes, x, y):
    """The darkest of the three pixels around each place of a panel; 1 is white."""
    picture = np.asarray(axes.figure.canvas.buffer_rgba())[::-1, :, :3].min(axis=2) / 255
    across, up = axes.transData.transform(np.column_stack([x, np.full(len(x), y)])).astype(int).T
    return np.min([picture[up, across + near] for near in (-1, 0, 1)], axis=0)


def test_many_skipped_steps_become_a_strip():
    skipped = set(range(3, 50_000, 5))
    scale = draw_record(record_of([2.0**16] * 50_001, skipped)).axes[1]
    steps, places = points(scale, "skipped steps")
    assert set(steps) <= skipped
    assert 1000 < len(steps) <= 2001
    assert set(places) == {0.96}
    assert "skipped step (10,000)" in legend(scale)


def test_run_of_a_log_is_drawn_without_window():
    loss = np.array([NAN, 3.0, NAN, 2.0])
    run = RecordedRun(
        name="run.log",
        files=("run.log",),
        log_format="megatron",
        step=np.array([1, 2, 3, 4]),
        loss_scale=np.array([8.0, 4.0, 4.0, 4.0]),
        overflow=np.array([True, False, False, False]),
        position_known=np.ones(4, bool),
        loss=loss,
    )
    figure = draw_run(run)
    assert title(figure) == "run.log: 1 of 4 steps skipped; loss scale fell from $2^{3}$ to $2^{2}$"
    # The log tells every other loss: the line goes on.
    assert points(figure.axes[0], "loss") == ([2, 4], [3.0, 2.0])
    assert artists(figure.axes[0], "broken loss") == []
    assert len(figure.axes) == 2


@pytest.mark.parametrize("record", [[], [{"missing_steps": 3, "first_step": 1, "last_step": 3}]])
def test_record_without_steps_is_refused(record):
    with pytest.raises(ValueError, match="There must be at least 1 step to draw, but there is none"):
        draw_record(record)


@pytest.mark.parametrize("record", ["record.jsonl", [1, 2], None, [{"step": 1}, "torn"]])
def test_what_is_no_record_is_refused(record):
    with pytest.raises(TypeError, match=r"'record' must be a list of lines, each a dict, but got .*read_record"):
        draw_record(record)


def test_text_in_place_of_a_number_is_refused():
    with pytest.raises(
        TypeError, match=r"'loss_scale' must be a number or None in each line of the record, but: .*many"
    ):
        draw_record(record_of(["many", 2.0]))


GUIDED_SCALES = [64.0, 32.0, 8.0, 8.0, 16.0]


def guided_record(gradients, **others):
    return record_of(GUIDED_SCALES, [1, 2], largest_gradient=gradients, **others)


def test_ceilings_that_gradients_show_are_drawn_above_the_scale():
    gradients = ["inf", float("inf"), 65504.0 / 32, 65504.0 / 40]
    figure = draw_record(guided_record(gradients))
    loss, scale = figure.axes  # A window that never moves has no panel.
    assert points(scale, "ceiling") == ([3.0, 4.0], [32.0, 40.0])
    assert scale.get_ylim()[1] > 64.0
    assert legend(scale)[:2] == ["ceiling that gradients show", "overflows"]
    assert title(figure).endswith("loss scale fell from $2^{6}$ to $2^{4}$, 2.2 bits below the ceiling")
    assert artists(loss, "ceiling") == []
    moving = guided_record(gradients, scale_window=[500, 500, 500, 4000])
    assert draw_record(moving).axes[2].get_title("left").endswith("before the limit of the loss scale is raised")


@pytest.mark.parametrize("gradients", [[None] * 4, [0.0] * 4, ["inf", 1.0, "nan", None], [NAN] * 4])
def test_without_gradients_that_show_anything_the_picture_is_as_before(gradients):
    figure, before = draw_record(guided_record(gradients)), draw_record(record_of(GUIDED_SCALES, [1, 2]))
    assert title(figure) == title(before)
    assert len(figure.axes) == 3
    assert artists(figure.axes[1], "ceiling") == artists(figure.axes[1], "overflows") == []
    assert figure.axes[1].get_ylim() == before.axes[1].get_ylim()


def test_one_tiny_gradient_does_not_squeeze_the_picture():
    scale = draw_record(guided_record([None, None, 65504.0 / 2.0**80, 65504.0 / 32])).axes[1]
    assert scale.get_ylim()[1] < 2.0**20
    assert points(scale, "ceiling")[1] == [scale.get_ylim()[1], 32.0]


def test_the_run_that_was_read_from_its_record_has_the_ceilings_too():
    none = np.full(4, NAN)
    run = RecordedRun(
        "run",
        (),
        "jsonl",
        np.arange(1, 5),
        np.array(GUIDED_SCALES[:4]),
        np.array([True, True, False, False]),
        np.full(4, True),
        largest_gradient=np.array([math.inf, math.inf, 65504.0 / 32, 65504.0 / 64]),
    )
    figure = draw_run(run)
    assert points(figure.axes[1], "ceiling") == ([3.0, 4.0], [32.0, 64.0])
    assert title(figure).endswith("2.5 bits below the ceiling")
    assert artists(draw_run(replace(run, largest_gradient=none)).axes[1], "ceiling") == []


def test_a_long_run_has_a_band_of_ceilings():
    steps = 9000
    record = record_of([8.0] * (steps + 1), largest_gradient=(65504.0 / np.tile([32.0, 64.0], steps // 2)).tolist())
    scale = draw_record(record).axes[1]
    x, y = points(scale, "ceiling")
    assert len(x) == 400
    assert set(y) <= {32.0, 48.0, 64.0}
