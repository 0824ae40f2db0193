"""The pictures of a gradient sweep show exactly how FP16 changes the gradients of each group at each loss scale."""

import json

import numpy as np
import pytest

from mindformers_adaptive.gradients.groups import group_parameters, parameter_group
from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.gradients.statistics import array_statistics
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.gradients import draw_sweeps, draw_underflow
from tests.plots.drawn import artist, artists, legend, points, title
from tests.shared.records import NAMES, gradient_line, in_fp16

SCALES = (1.0, 64.0, 512.0, 2.0**30)


@pytest.fixture(scope="module")
def sweep():
    """Return a gradient sweep over the loss scales ``SCALES``, as loaded from JSON; a scale of 2^30 overflows."""
    return gradient_line(1, *SCALES)


def at_scale(scale, names=NAMES):
    """Return the gradients of the named Parameters at a loss scale, joined into one array."""
    return np.concatenate([in_fp16(1, scale)[name] for name in names])


def bars(axes):
    """Return the height of each bar of a histogram by its left edge, without bars of height 0."""
    return {round(bar.get_x()): bar.get_height() for bar in axes.patches if bar.get_height()}


def test_bars_are_the_shares_of_all_gradients_of_a_group(sweep):
    figure = draw_sweeps({"": sweep}, [64, 512])
    grid = np.array(figure.axes).reshape(2, 2)
    for column, scale in enumerate((64.0, 512.0)):
        together = {"attention": NAMES[:2], "output": NAMES[2:]}
        for row, names in enumerate(together.values()):
            all_of_them, zeros_in_512 = at_scale(scale, names).astype(np.float64), at_scale(512.0, names) == 0
            nonzero = np.abs(all_of_them[all_of_them != 0])
            exponents, counts = np.unique(np.floor(np.log2(nonzero)), return_counts=True)
            expected = {int(e): 100 * n / len(all_of_them) for e, n in zip(exponents, counts, strict=True)}
            underflowed = np.count_nonzero((all_of_them == 0) & ~zeros_in_512)
            if underflowed:
                expected[-33] = 100 * underflowed / len(all_of_them)
            assert bars(grid[row, column]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "limits"), [("float16", [-24, -14, np.log2(65504)]), ("float8_e4m3fn", [-9, -6, np.log2(448)])]
)
def test_grid_is_labelled_and_marks_the_limits_of_the_format(sweep, name, limits):
    figure = draw_sweeps({"": {**sweep, "gradient_format": name}}, [64, 512])
    grid = np.array(figure.axes).reshape(2, 2)
    assert [axes.get_title("left") for axes in grid[0]] == ["loss scale $2^{6}$ = 64", "loss scale $2^{9}$ = 512"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["attention\nshare, %", "output\nshare, %"]
    [label] = {axes.get_xlabel() for axes in grid[-1]}
    assert label.startswith("magnitude of gradient ")
    assert label.endswith("loss scale, log2")
    for axes in grid.flat:
        assert [segment[0, 0] for segment in artist(axes, "limits").get_segments()] == pytest.approx(limits)
        # All panels in a row of the picture have the same y axis, so that their bars can be compared.
        assert axes.get_ylim() == grid[axes.get_subplotspec().rowspan.start, 0].get_ylim()


def test_overflowed_scale_says_so(sweep):
    figure = draw_sweeps({"": sweep}, [2.0**30])
    said = [artist(axes, "lost").get_text() for axes in figure.axes]
    assert said[0] == "underflow not known, subnormal 0 %"
    share = 100 * np.mean(~np.isfinite(at_scale(2.0**30, NAMES[2:])))
    assert said[1] == f"inf or NaN {share:.0f} %"
    assert bars(figure.axes[1])[22] == pytest.approx(share)


def test_gradients_beyond_fp16_count_at_the_ends():
    statistics = array_statistics([2.0**-100, 2.0**-40, 1.0, 2.0**90], np.ones(4))
    ranges = GradientRanges({"a": statistics}, ((ScaleRanges(1.0, 1.0, {"a": statistics}),),))
    assert bars(draw_sweeps({"": ranges}).axes[0]) == {-30: 50.0, 0: 25.0, 19: 25.0}


def test_subnormals_are_those_below_the_smallest_normal_number():
    statistics = array_statistics([2.0**-25, 2.0**-15, 1.99 * 2.0**-15, 2.0**-14, 1.0], np.ones(5))
    ranges = GradientRanges({"a": statistics}, ((ScaleRanges(1.0, 1.0, {"a": statistics}),),))
    axes = draw_sweeps({"": ranges}).axes[0]
    assert artist(axes, "lost").get_text() == "underflow 0 %, subnormal 60 %"
    colours = {round(bar.get_x()): bar.get_facecolor() for bar in axes.patches}
    assert colours[-25] == colours[-15] != colours[-14] == colours[0]


def test_underflow_is_drawn_for_each_group_and_all(sweep):
    axes = draw_underflow(sweep).axes[0]
    for gid, names in (("attention", NAMES[:2]), ("output", NAMES[2:]), ("all", NAMES)):
        x, y = points(axes, gid)
        assert x == list(SCALES)
        reference = at_scale(512.0, names)
        shares = [100 * np.mean((at_scale(scale, names) == 0) & (reference != 0)) for scale in SCALES[:3]]
        assert y[:3] == pytest.approx(shares)
        assert np.isnan(y[3])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("loss scale, log2", "underflowed share of the gradients, %")
    assert legend(axes) == ["attention", "output", "all", "a batch overflowed"]


def test_overflowed_scales_are_shaded(sweep):
    axes = draw_underflow(sweep).axes[0]
    [shade] = artists(axes, "overflow")
    assert (shade.get_extents().x0, shade.get_extents().x1) == pytest.approx(
        tuple(axes.transData.transform([(np.sqrt(512.0 * 2.0**30), 0), (2.0**31, 0)])[:, 0])
    )


@pytest.mark.parametrize("not_a_sweep", [{}, {"loss_scales": []}, [], "ranges.json", {"loss_scales": [1]}])
def test_what_is_no_sweep_is_refused(not_a_sweep):
    with pytest.raises(TypeError, match=r"'sweep' must be what GradientRanges\.to_dict\(\) returns"):
        draw_underflow(not_a_sweep)


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("embedding", ["model.tok_embeddings.embedding_weight", "backbone.embedding.word_embedding.embedding_table"]),
        ("embedding", ["embedding.word_embeddings.weight", "transformer.wte.weight", "wpe.weight"]),
        ("attention", ["model.layers.0.attention.wq.weight", "decoder.layers.1.self_attention.linear_qkv.weight"]),
        ("attention", ["bert.encoder.layer.0.attention.output.dense.weight", "layers.3.self_attn.q_proj.weight"]),
        ("feed forward", ["model.layers.0.feed_forward.w1.weight", "decoder.layers.0.mlp.linear_fc1.weight"]),
        ("feed forward", ["backbone.blocks.0.output.mapping.weight", "encoder.layer.0.output.dense.weight"]),
        ("feed forward", ["layers.0.mlp.experts.3.gate_proj.weight"]),
        ("norm", ["model.layers.0.attention_norm.weight", "model.layers.0.ffn_norm.weight", "model.norm_out.weight"]),
        ("norm", ["decoder.final_layernorm.weight", "transformer.h.0.ln_1.weight", "bn1.gamma", "layer.beta"]),
        ("output", ["lm_head.weight", "head.weight", "output_layer.weight", "output.weight", "classifier.bias"]),
        (None, ["conv1.weight", "fc2.bias", "d.weight", "headroom.weight", "global.alpha"]),
    ],
)
def test_group_is_told_from_the_name(group, names):
    assert {name: parameter_group(name) for name in names} == dict.fromkeys(names, group)


def test_names_that_say_nothing_go_by_their_differing_component():
    names = ("net.conv1.weight", "net.conv1.bias", "net.fc.weight", "net.bn1.gamma")
    assert group_parameters(dict.fromkeys(names, 1)) == {
        "norm": ["net.bn1.gamma"],
        "conv1": ["net.conv1.weight", "net.conv1.bias"],
        "fc": ["net.fc.weight"],
    }
    assert group_parameters({"weight": 1, "net.a.b": 1}) == {"weight": ["weight"], "net": ["net.a.b"]}
    assert group_parameters({"net.a.weight": 1, "net.a.bias": 1}) == {"a": ["net.a.weight", "net.a.bias"]}


def test_small_groups_of_many_are_gathered():
    sizes = {f"part{number}.weight": number for number in range(1, 9)} | {"embed.weight": 1}
    grouped = group_parameters(sizes)
    assert list(grouped) == [*(f"part{number}" for number in range(4, 9)), "others"]
    assert grouped["others"] == ["embed.weight", "part1.weight", "part2.weight", "part3.weight"]


def test_a_sweep_of_several_batches_is_drawn_as_its_file_is(tmp_path):
    def at(step, scale):
        reference = in_fp16(step, 512.0) if scale <= 512 else {}
        gradients = in_fp16(step, scale).items()
        counts = {name: array_statistics(each, reference.get(name), scale / 512) for name, each in gradients}
        return ScaleRanges(scale, 1.0, counts)

    batches = tuple(tuple(at(step, scale) for scale in SCALES) for step in (1, 2))
    sweep = GradientRanges({name: array_statistics([1.0, 2.0**-20]) for name in NAMES}, batches)
    file = json.loads(json.dumps(sweep.to_dict()))
    for draw in (
        lambda source: draw_sweeps({"": source}),
        draw_underflow,
        lambda source: draw_sweeps({"": source}, kind="weights", modules=NAMES[:1]),
    ):
        drawn, expected = (save(draw(source), tmp_path / "picture.png").read_bytes() for source in (sweep, file))
        assert drawn == expected


def test_weights_and_outputs_have_one_column_and_no_scale():
    weights = {name: array_statistics([2.0**-20, 0.0, 1.0, 8.0]) for name in NAMES}
    outputs = {"lm_head": array_statistics([0.25, 2.0**-30])}
    sweep = GradientRanges(weights, ((ScaleRanges(64.0, 1.0, weights), ScaleRanges(128.0, 1.0, weights)),), outputs)
    figure = draw_sweeps({"": sweep.to_dict()}, kind="weights", modules=[NAMES[0]])
    [axes] = figure.axes
    # The x axis is log2 of the magnitude. Zeros have no logarithm, so their bar is at the left end, at x = -33.
    assert bars(axes) == {-33: 25, -20: 25, 0: 25, 3: 25}
    assert figure.legends[0].get_texts()[0].get_text() == "0"
    assert artist(axes, "lost").get_text() == "0: 25 %, subnormal or below 25 %"
    assert title(figure) == "Weights by magnitude"
    [axes] = draw_sweeps({"": sweep.to_dict()}, kind="outputs").axes
    assert (axes.get_ylabel(), axes.get_title("left")) == ("output\nshare, %", "outputs")
    assert bars(axes) == {-30: 50, -2: 50}


def test_gradients_of_outputs_are_drawn_at_their_measured_scale(sweep):
    layers = {"layers.0.attention": array_statistics([0.25, 0.0, 0.0, -8.0], reference=[1.0, 1.0, 0.0, -8.0])}
    weights = {NAMES[0]: array_statistics([1.0])}
    scales = ScaleRanges(64.0, 1.0, layers), ScaleRanges(128.0, 1.0, {"layers.0.attention": array_statistics([np.inf])})
    measured = GradientRanges({}, ((ScaleRanges(64.0, 1.0, weights),),), activation_gradients=(scales,)).to_dict()
    figure = draw_sweeps({"": measured}, kind="activation_gradients")
    [axes] = figure.axes
    assert bars(axes) == {-33: 25, -2: 25, 3: 25}
    assert axes.get_xlabel().startswith("magnitude of activation gradient ")
    assert axes.get_xlabel().endswith("loss scale, log2")
    both = draw_sweeps({"": measured}, [64, 128], kind="activation_gradients").axes
    assert [axes.get_title("left") for axes in both] == ["loss scale $2^{6}$ = 64", "loss scale $2^{7}$ = 128"]
    figure = draw_sweeps({"": measured}, kind="activation_gradients", axis="linear")
    assert artist(figure.axes[0], "range").get_text() == "-0.125 to 0.00391"
    assert title(figure) == "Activation gradients by value"
    with pytest.raises(ValueError, match=r"no activation gradients .* 'layers' or --layers"):
        draw_sweeps({"": sweep}, kind="activation_gradients")


def test_several_sweeps_share_their_axes():
    def sweep_of(**weights):
        statistics = {name: array_statistics(values) for name, values in weights.items()}
        return GradientRanges(statistics, ((ScaleRanges(8.0, 1.0, statistics),),)).to_dict()

    both = {"gpu": sweep_of(norm=[0.99, 1.01], wq=[-1.0, 2.0]), "npu": sweep_of(norm=[0.9, 1.2])}
    figure = draw_sweeps(both, kind="weights", axis="linear")
    norm_of_gpu, norm_of_npu, wq_of_gpu, none = figure.axes
    assert norm_of_gpu.get_xlim() == norm_of_npu.get_xlim() != wq_of_gpu.get_xlim()
    assert norm_of_gpu.get_ylim() == norm_of_npu.get_ylim()
    assert artist(norm_of_npu, "range").get_text() == "0.9 to 1.2"
    assert [axes.get_title("left") for axes in figure.axes[:2]] == ["gpu: weights", "npu: weights"]
    assert [text.get_text() for text in none.texts] == ["not in this one"]
    values, edges, _ = artist(wq_of_gpu, "signed").get_data()
    assert (values.sum(), edges[0], edges[-1]) == (100.0, -1.0, 2.0)


def test_columns_are_at_the_highest_fitting_scale_or_at_both(sweep):
    lowest, highest = "loss scale $2^{0}$ = 1", "loss scale $2^{9}$ = 512"
    alone, beside = draw_sweeps({"": sweep}).axes[:2], draw_sweeps({"a": sweep, "b": sweep}).axes[:2]
    assert [axes.get_title("left") for axes in alone] == [lowest, highest]
    assert [axes.get_title("left") for axes in beside] == [f"a: {highest}", f"b: {highest}"]
