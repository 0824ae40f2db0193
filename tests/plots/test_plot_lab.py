"""The pictures of the offline lab show the replays of rules, and the Pareto front of the rules' results."""

import math
from functools import partial

import numpy as np
import pytest

from mindformers_adaptive.lab.replay import compare, replay
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.plots.lab import draw_comparison, draw_replays, draw_skips
from mindformers_adaptive.record.trace import Trace
from tests.plots.drawn import artists, legend, overlap, points, title
from tests.shared.traces import made_trace, with_gradients

NAMES = ("adaptive", "dynamic", "torch")


def replays_on(trace, names=NAMES):
    return {name: replay(start_rule(name), trace) for name in names}


def test_scales_ceiling_and_every_skipped_step_are_drawn():
    trace = made_trace("sudden drop", 500, seed=1)
    replays = replays_on(trace)
    upper, lower = draw_replays(trace, replays).axes
    assert points(upper, "ceiling") == (list(range(1, 501)), list(trace.ceiling))
    for name, replayed in replays.items():
        assert points(upper, name) == (list(range(1, 501)), list(replayed.loss_scale))
    assert legend(upper) == ["ceiling", "overflows", *NAMES]
    assert (upper.get_yscale(), upper.get_ylabel()) == ("log", "loss scale, log2")
    low, high = upper.get_ylim()
    assert low < min(replayed.loss_scale.min() for replayed in replays.values())
    assert high > max(replayed.loss_scale.max() for replayed in replays.values())
    for row, (name, replayed) in enumerate(replays.items()):
        skipped = [int(step) + 1 for step in np.flatnonzero(replayed.overflow)]
        assert points(lower, name) == (skipped, [row] * len(skipped))
    rows = [label.get_text() for label in lower.get_yticklabels()]
    assert rows == [f"{name} ({replayed.measures.skipped})" for name, replayed in replays.items()]
    assert lower.get_xlabel() == "step"


def test_long_names_leave_the_panels_their_room():
    trace = made_trace("sudden drop", 50, seed=0)
    rules = {f"dynamic:scale_window={window}": start_rule("dynamic", scale_window=window) for window in range(20, 27)}
    figure = draw_replays(trace, {name: replay(rule, trace) for name, rule in rules.items()})
    figure.canvas.draw()
    upper, box = figure.axes[0].get_window_extent(), figure.axes[0].get_legend().get_window_extent()
    assert upper.width > 0.6 * 1200
    assert 0 <= box.x0 < box.x1 <= 1200
    assert not overlap(box, figure._suptitle.get_window_extent())


def test_ceilings_that_are_no_numbers_stay_within_the_panel():
    trace = Trace.exact("edges", [0.0, math.inf, 2.0**10, 1e300])
    upper = draw_replays(trace, replays_on(trace)).axes[0]
    low, high = upper.get_ylim()
    assert points(upper, "ceiling")[1] == [low, high, 2.0**10, high]


@pytest.mark.parametrize("bounds", [(0.0, math.inf), (8.0, math.inf), (0.0, np.nextafter(8.0, 9.0))])
def test_ceiling_that_is_not_known_is_called_assumed(bounds):
    trace = Trace("log", *(np.array([number, math.inf]) for number in (8.0, *bounds)))
    assert legend(draw_replays(trace, replays_on(trace)).axes[0])[0] == "ceiling, partly assumed"
    exact = Trace.exact("made", trace.ceiling)
    assert legend(draw_replays(exact, replays_on(exact)).axes[0])[0] == "ceiling"


def test_long_trace_is_drawn_as_medians_within_a_band():
    trace = made_trace("spikes", 20_000, seed=0)
    replays = replays_on(trace, ["dynamic"])
    upper, lower = draw_replays(trace, replays).axes
    x, y = points(upper, "ceiling")
    assert x == [50 * block + 25.5 for block in range(400)]
    assert y == list(np.median(trace.ceiling.reshape(400, 50), axis=1))
    low, high = upper.get_ylim()
    [band] = [artist for artist in upper.collections if artist.get_gid() == "overflows"]
    assert band.get_datalim(upper.transData).y0 == pytest.approx(trace.ceiling.reshape(400, 50).max(axis=1).min())
    assert low < trace.ceiling.min() < high
    skipped = set(np.flatnonzero(replays["dynamic"].overflow) + 1)
    assert set(points(lower, "dynamic")[0]) == skipped


@pytest.mark.parametrize("steps", [5, 9000])
def test_replays_of_another_trace_are_refused(steps):
    short, long = (made_trace("sudden drop", length, seed=0) for length in (steps, steps + 1))
    with pytest.raises(ValueError, match="dimension"):
        draw_replays(long, replays_on(short, ["torch"]))


def test_results_are_drawn_with_their_names():
    figure = draw_skips([1, 5, 9, 5], [3.0, 1.0, 2.0, 1.0], ["a", "b", "c", "d"], "x")
    [axes] = figure.axes
    drawn = [(*artist.get_xdata(), *artist.get_ydata()) for artist in artists(axes, "rule")]
    assert drawn == [(1, 3.0), (5, 1.0), (9, 2.0)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b, d", "c"]
    assert title(figure) == "x: skipped steps and bits below the ceiling"
    assert axes.get_ylabel() == "bits below the ceiling, mean of applied steps (16 are free)"
    assert axes.get_xlabel() == "skipped steps"


def test_results_without_headroom_are_left_out_and_counted():
    figure = draw_skips([0, 1], [math.nan, 2.0], ["never applied", "a"], "x")
    assert points(figure.axes[0], "rule") == ([1], [2.0])
    assert figure.axes[0].get_xlabel() == "skipped steps; 1 result without headroom not shown"


def test_of_many_results_those_that_skip_fewest_are_named():
    x = np.arange(40.0)
    figure = draw_skips(x, 40 - x, [f"rule {number}" for number in range(40)], "x")
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["free up to 16 bits", "not named", *(f"rule {number}" for number in range(12))]
    assert len(points(figure.axes[0], "not named")[0]) == 28


def test_comparison_is_drawn_by_its_means():
    rules = {name: partial(start_rule, name) for name in NAMES}
    comparison = compare(rules, [made_trace(name, 300) for name in ("sudden drop", "spikes")])
    figure = draw_comparison(comparison)
    means = comparison.means()
    drawn = {(*artist.get_xdata(), *artist.get_ydata()) for artist in artists(figure.axes[0], "rule")}
    assert drawn == {(means[name]["skipped"], means[name]["headroom_lost"]) for name in means}
    assert title(figure).startswith("mean of 2 traces: ")


def test_far_outlier_in_skipped_steps_gets_a_logarithmic_axis():
    for most, scale in ((3, "linear"), (3000, "symlog")):
        assert draw_skips([1, 2, most], [3, 2, 1], list("abc"), "x").axes[0].get_xscale() == scale


@pytest.mark.parametrize("skipped", [[1, 2], []])
def test_results_without_any_headroom_are_refused(skipped):
    message = f"{len(skipped)} results must have a headroom.*another trace"
    with pytest.raises(ValueError, match=message):
        draw_skips(skipped, [math.nan for _ in skipped], ["a" for _ in skipped], "x")


def test_what_the_gradients_show_has_its_own_line():
    trace = with_gradients(made_trace("sudden drop", 300, seed=1), bits=3.0)
    upper = draw_replays(trace, replays_on(trace, ["guided"])).axes[0]
    assert points(upper, "shown")[1] == pytest.approx(trace.ceiling * 8.0)
    assert legend(upper) == ["ceiling", "overflows", "what the gradients show", "guided"]
    assert upper.get_ylim()[1] > trace.ceiling.max() * 8.0
    exact = with_gradients(trace)
    upper = draw_replays(exact, replays_on(exact, ["guided"])).axes[0]
    assert artists(upper, "shown") == []
