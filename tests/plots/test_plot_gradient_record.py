"""The picture of gradients over the steps shows their magnitudes, and what FP16 loses at the training's loss scale."""

import json
import math

import numpy as np
import pytest

from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.gradients.statistics import array_statistics
from mindformers_adaptive.plots.gradient_records import draw_gradient_records, series_of_gradients
from tests.plots.drawn import artist, artists, points, title
from tests.shared.records import NAMES, REFERENCE, gradient_line, in_fp16

STEPS = {10: 64.0, 20: 64.0, 30: 2.0**30}


@pytest.fixture(scope="module")
def record():
    """Return a gradient record of two steps at a loss scale of 64 and a step at 2^30.

    At 64 some gradients underflow; at 2^30 they overflow. Each step's gradients are measured a second time, at 512.
    """
    return [{**gradient_line(step, scale, REFERENCE), "loss_scale": scale} for step, scale in STEPS.items()]


def test_bands_hold_the_shares_of_the_gradients_that_they_say(record):
    series = series_of_gradients(record, group=lambda name: name)
    for number, step in enumerate(STEPS):
        for name in NAMES:
            # The bands show quantiles of the gradients that were measured at the loss scale of the training, or at 512
            # if the gradients overflow at the loss scale of the training.
            scale = 64.0 if STEPS[step] == 64.0 else REFERENCE
            gradients = np.abs(in_fp16(step, scale)[name].astype(np.float64)) / scale
            nonzero = gradients[gradients > 0]
            expected = np.log2(np.quantile(nonzero, [0.05, 0.25, 0.5, 0.75, 0.95]))
            # A histogram has one bin for each power of two, in which gradients are assumed to be spread evenly. For the
            # smallest subnormal numbers this assumption is coarse: a bin has only one or two of these numbers.
            few = expected < np.log2(2.0**-22 / scale)
            error = np.abs(series.groups[name].bands[:, number] - expected)
            assert (error <= np.where(few, 1.0, 0.25)).all(), (name, step, error)
            assert series.groups[name].largest[number] == pytest.approx(np.log2(nonzero.max()))


def test_losses_are_those_at_the_scale_of_the_training(record):
    series = series_of_gradients(record, group=lambda name: name)
    assert series.loss_scale.tolist() == list(STEPS.values())
    assert series.overflow.tolist() == [False, False, True]
    for name in NAMES:
        for number, step in enumerate((10, 20)):
            at_64, at_512 = in_fp16(step, 64.0)[name], in_fp16(step, 512.0)[name]
            assert series.groups[name].underflowed[number] == np.mean((at_64 == 0) & (at_512 != 0))
            assert series.groups[name].subnormal[number] == np.mean((at_64 != 0) & (np.abs(at_64) < 2.0**-14))
        assert np.isnan([series.groups[name].underflowed[2], series.groups[name].subnormal[2]]).all()
    assert series.groups[NAMES[0]].underflowed[0] > 0.01


def test_rows_are_groups_with_medians_and_largest(record):
    figure = draw_gradient_records({"run": record})
    series = series_of_gradients(record, group=lambda name: "attention" if "attention" in name else "output")
    assert [axes.get_ylabel() for axes in figure.axes] == ["attention\nmagnitude", "output\nmagnitude"]
    for axes, group in zip(figure.axes, series.groups.values(), strict=True):
        assert points(axes, "median") == ([10, 20, 30], group.bands[2].tolist())
        assert points(axes, "largest") == ([10, 20, 30], group.largest.tolist())
        assert points(axes, "overflowed")[0] == [30]
        low, high = axes.get_ylim()
        assert low < group.bands.min() < group.largest.max() < high
    assert figure.axes[-1].get_xlabel() == "step"


@pytest.mark.parametrize("name", ["float16", "hifloat8"])
def test_limits_of_the_format_move_with_the_loss_scale(record, name):
    [axes, _] = draw_gradient_records({"run": [{**line, "gradient_format": name} for line in record]}).axes
    low, high = axes.get_ylim()
    subnormal, normal, largest = {"float16": (-24, -14, math.log2(65504)), "hifloat8": (-22, -15, 15)}[name]
    # The lower and the upper edge of each shaded area in the picture, at a loss scale of 1.
    limits = {"underflows to 0": (-math.inf, subnormal), "subnormal": (subnormal, normal)}
    limits["overflows"] = largest, math.inf
    for gid, edges in limits.items():
        shade = artist(axes, gid).get_data()
        assert shade.edges.tolist() == [9.5, 15, 25, 30.5]
        for drawn, edge in zip((shade.baseline, shade.values), edges, strict=True):
            assert drawn == pytest.approx(np.clip(edge - np.log2(list(STEPS.values())), low, high))
    assert low < -30 < -20 < high


def test_each_panel_says_what_its_group_loses_in_the_worst_step(record):
    lost = []
    for step in (10, 20):
        at_64, at_512 = (in_fp16(step, scale)[NAMES[2]] for scale in (64.0, 512.0))
        lost.append([np.mean((at_64 == 0) & (at_512 != 0)), np.mean((at_64 != 0) & (np.abs(at_64) < 2.0**-14))])
    underflow, subnormal = 100 * np.max(lost, axis=0)
    title = draw_gradient_records({"run": record}).axes[1].get_title("right")
    assert title == f"at most {underflow:.2g} % underflow, {subnormal:.2g} % are subnormal"


def test_runs_have_columns_on_one_axis(record):
    figure = draw_gradient_records({"a": record[:2], "b": record[2:]})
    grid = np.array(figure.axes).reshape(2, 2)
    assert [axes.get_title("left") for axes in grid[0]] == ["a", "b"]
    assert len({axes.get_ylim() for axes in grid.flat}) == 1
    assert points(grid[0, 1], "median")[0] == [30]


def test_magnitudes_alone_are_drawn_for_an_unknown_scale(record):
    lines = [{**line, "loss_scale": None} for line in record]
    assert np.isfinite(series_of_gradients(lines, group=lambda name: name).overall.bands).all()
    figure = draw_gradient_records({"run": lines})
    assert [axes.get_title("right") for axes in figure.axes] == ["", ""]
    assert artists(figure.axes[0], "overflows") == []


def test_steps_without_gradients_above_0_break_the_line():
    zeros = array_statistics(np.zeros(4))
    nothing = GradientRanges({"a": zeros}, ((ScaleRanges(64.0, 1.0, {"a": zeros}),),)).to_dict()
    record = [{"step": 1, "loss_scale": 64.0, **nothing}]
    assert np.isnan(series_of_gradients(record, group=lambda name: name).groups["a"].bands).all()
    assert draw_gradient_records({"run": record}).axes[0].get_title("right").startswith("at most 0 % are subnormal")


def test_missing_steps_are_no_steps(record):
    with_gaps = [{"missing_steps": 9, "first_step": 1, "last_step": 9}, *record]
    assert series_of_gradients(with_gaps, group=lambda name: name).step.tolist() == [10, 20, 30]


def line_of(step, **kinds):
    """Return a gradient record's line with the given weights and layer outputs; the gradients equal the weights."""
    statistics = {
        kind: {name: array_statistics(array) for name, array in arrays.items()} for kind, arrays in kinds.items()
    }
    sweep = GradientRanges(
        statistics["weights"], ((ScaleRanges(64.0, 1.0, statistics["weights"]),),), statistics["outputs"]
    )
    return {"step": step, "loss_scale": 64.0, **sweep.to_dict()}


@pytest.fixture(scope="module")
def values():
    """Return a gradient record of two steps with weights and layer outputs; some weights double between the steps."""
    random = np.random.default_rng(1).normal(0, 1, 1000)
    layers = {"layers.0.attention": random * 8, "lm_head": random * 2.0**-9}
    return [
        line_of(step, weights=dict.fromkeys(NAMES[:2], random * factor) | {NAMES[2]: np.ones(4)}, outputs=layers)
        for step, factor in ((10, 2.0**-6), (20, 2.0**-5))
    ]


def test_weights_and_outputs_are_drawn_without_a_scale(values):
    figure = draw_gradient_records({"run": values}, kind="weights")
    assert [axes.get_ylabel() for axes in figure.axes] == ["attention\nmagnitude", "output\nmagnitude"]
    first, second = points(figure.axes[0], "median")[1]
    assert second - first == pytest.approx(1.0)
    # If all weights are 1, the band that shows their magnitudes does not go beyond 1.
    assert points(figure.axes[1], "median")[1] == [0, 0]
    assert artists(figure.axes[0], "overflows") == []
    outputs = draw_gradient_records({"run": values}, kind="outputs")
    assert title(outputs) == "Outputs over the steps"
    assert [axes.get_ylabel() for axes in outputs.axes] == ["attention\nmagnitude", "output\nmagnitude"]


def test_gradients_of_outputs_have_limits_and_no_scale():
    random = np.random.default_rng(1).normal(0, 1, 1000)
    lines = []
    for step, scale in ((10, 64.0), (20, 128.0)):
        at_scale = [ScaleRanges(scale, 1.0, {"lm_head": array_statistics(scale * random)})]
        at_scale.append(ScaleRanges(1024.0, 1.0, {"lm_head": array_statistics([np.inf, *random])}))
        sweep = GradientRanges({}, (tuple(at_scale),), activation_gradients=(tuple(at_scale),))
        lines.append({"step": step, "loss_scale": scale if step == 10 else 1024.0, **sweep.to_dict()})
    figure = draw_gradient_records({"run": lines}, kind="activation_gradients")
    [axes] = figure.axes
    first, second = points(axes, "median")[1]
    assert first == pytest.approx(second)
    assert 2**first == pytest.approx(np.median(np.abs(random)), rel=0.1)
    assert len(artists(axes, "overflowed")) == len(artists(axes, "overflows")) == 1
    assert title(figure) == "Activation gradients over the steps"


def test_modules_have_a_row_each_and_nothing_else_is_drawn(values):
    modules = ["layers.1.attention", NAMES[0]]
    figure = draw_gradient_records({"run": values}, kind="weights", modules=modules)
    labels = ["layers.1.\nattention\nmagnitude", "layers.0.\nattention.wq.\nweight\nmagnitude"]
    assert [axes.get_ylabel() for axes in figure.axes] == labels
    series = series_of_gradients(values, "weights", ["*.wo.weight"])
    assert [*series.groups] == ["*.wo.weight"]
    assert series.overall.largest.tolist() == series.groups["*.wo.weight"].largest.tolist()


GAP = {"missing_steps": 9, "first_step": 1, "last_step": 9}
NO_SWEEP = {"step": 1, "loss_scales": 64}
REFUSED = {
    "no run": (lambda record: {}, {}, ValueError, "positive integer, not 0"),
    "no step": (lambda record: {"run": [GAP]}, {}, ValueError, "at least 1 step with gradients.*'every_n_steps'"),
    "no sweep": (lambda record: {"run": [NO_SWEEP]}, {}, TypeError, "'sweep' must be what GradientRanges"),
    "no signs": (
        lambda record: {"run": json.loads(json.dumps(record).replace('"signed"', '"unknown"'))},
        {"axis": "linear"},
        ValueError,
        "'axis' must be 'log2' .*without signs.*got 'linear'",
    ),
    "misspelt": (
        lambda record: {"run": record},
        {"modules": ["layers.0.atention"]},
        ValueError,
        "'layers.0.atention' is not among them. The nearest names are layers.0.at",
    ),
    "too many": (lambda record: {"run": record}, {"modules": ["*"] * 7}, ValueError, "at most 6 names.*got 7"),
    "outputs": (lambda record: {"run": record}, {"kind": "outputs"}, ValueError, "no outputs to draw: .*'layers' or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_not_drawn(record, case):
    records_of, how, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        draw_gradient_records(records_of(record), **how)


def test_signed_values_show_a_drift_of_weights():
    def record_around(*middles):
        return [
            line_of(step, weights={"norm.gamma": np.linspace(middle - 0.01, middle + 0.01, 999)}, outputs={})
            for step, middle in enumerate(middles, start=1)
        ]

    runs = {"a": record_around(1.0, 1.001), "b": record_around(1.0, 1.008)}
    figure = draw_gradient_records(runs, kind="weights", modules=["norm.gamma"], axis="linear")
    assert [axes.get_ylabel() for axes in figure.axes] == ["norm.gamma\nvalue", ""]
    for axes, last in zip(figure.axes, (1.001, 1.008), strict=True):
        assert points(axes, "median")[1] == pytest.approx([1.0, last], abs=4e-4)
        assert points(axes, "largest")[1] == pytest.approx([1.01, last + 0.01])
        assert axes.get_yscale() == "linear"


def test_gradients_on_a_linear_axis_have_no_loss_scale(record):
    series = series_of_gradients(record, axis="linear", group=lambda name: name)
    at_64 = in_fp16(10, 64.0)[NAMES[2]].astype(np.float64) / 64.0
    np.testing.assert_allclose(
        series.groups[NAMES[2]].bands[:, 0], np.quantile(at_64, [0.05, 0.25, 0.5, 0.75, 0.95]), atol=np.ptp(at_64) / 64
    )
