"""The share of each gradient norm that FP16 loses without loss scaling, and the verdict whether this does harm."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.ranges import gradient_ranges
from mindformers_adaptive.gradients.recommendation import HARMLESS_SHARE, judge, recommend_loss_scale, table_of_groups
from mindformers_adaptive.gradients.report import ArrayStatistics, GradientRanges, ScaleRanges
from mindformers_adaptive.rules.formats import FORMATS
from tests.shared.networks import HalfPrecisionSum, gradient_in_fp16

ATTENTION, OUTPUT, SILENT = "layers.0.attention.wq.weight", "lm_head.weight", "layers.0.feed_forward.w1.weight"


def sweep(*batches):
    """Return a gradient sweep over loss scales 1 and 1024.

    A batch maps the name of a Parameter to two norms: of the part of its gradient lost at 1, and of its gradient.
    """
    measured = []
    for lost in batches:
        at_1 = {name: ArrayStatistics(1, lost=share, reference_norm=norm) for name, (share, norm) in lost.items()}
        at_1024 = {name: replace(statistics, lost=0.0) for name, statistics in at_1.items()}
        measured.append((ScaleRanges(1.0, 1.0, at_1), ScaleRanges(1024.0, 1.0, at_1024)))
    return GradientRanges({}, tuple(measured))


def test_share_counts_underflow_and_the_rounding_of_subnormals(graph_mode):
    gradients, factor = np.array([1.0, 2.0**-8, 1.25 * 2.0**-4], np.float32), 2.0**-20
    sweep = gradient_ranges(HalfPrecisionSum(3, factor), gradients, [1, 2**20, 2**40])
    reference = gradient_in_fp16(gradients, factor, 2.0**20) / 2.0**20
    at_1 = gradient_in_fp16(gradients, factor, 1.0)
    assert (at_1[0], at_1[1], at_1[2] == reference[2]) == (2.0**-20, 0.0, False)
    assert sweep.overall(1).lost_share == pytest.approx(np.linalg.norm(at_1 - reference) / np.linalg.norm(reference))
    assert sweep.overall(2**20).lost_share == 0.0
    assert sweep.overall(2**40).lost_share is None
    assert (
        json.loads(json.dumps(sweep.to_dict()))["loss_scales"][0]["overall"]["lost_share"]
        == sweep.overall(1).lost_share
    )
    assert f"{sweep.overall(1).lost_share:.3%}" in sweep.table().splitlines()[1]


def test_groups_and_the_worst_parameter_over_batches():
    verdict = judge(sweep({ATTENTION: (3.0, 5.0), OUTPUT: (0.0, 1.0)}, {ATTENTION: (4.0, 5.0), OUTPUT: (0.0, 1.0)}), 1)
    assert verdict.groups == {"attention": pytest.approx(5.0 / 50.0**0.5), "output": 0.0}
    assert (verdict.parameter, verdict.parameter_share) == (ATTENTION, pytest.approx(5.0 / 50.0**0.5))
    assert verdict.is_harmful
    assert f"Without scaling, FP16 loses 70.71% of the gradient of {ATTENTION}." in str(verdict)
    assert json.loads(json.dumps(verdict.to_dict()))["is_harmful"] is True


def test_a_format_is_named_by_verdict_texts_and_records():
    ranges = replace(sweep({ATTENTION: (0.5, 1.0)}), gradient_format=FORMATS["hifloat8"])
    recommendation = recommend_loss_scale(ranges)
    assert f"HiF8 loses 50.00% of the gradient of {ATTENTION}" in str(recommendation)
    assert "This training needs loss scaling." in str(recommendation)
    assert "FP16" not in f"{recommendation}{recommendation.details()}"
    reports = [ranges.to_dict(), recommendation.to_dict(), *recommendation.to_dict()["verdicts"]]
    assert {json.loads(json.dumps(each))["gradient_format"] for each in reports} == {"hifloat8"}
    assert GradientRanges.from_dict(ranges.to_dict()).gradient_format == FORMATS["hifloat8"]


@pytest.mark.parametrize(("lost", "is_harmful"), [(HARMLESS_SHARE, False), (HARMLESS_SHARE + 1e-9, True)])
def test_harm_begins_above_the_limit(lost, is_harmful):
    # The gradient of OUTPUT is a million times larger, but must not hide that the gradient of ATTENTION underflows.
    verdict = judge(sweep({ATTENTION: (lost, 1.0), OUTPUT: (0.0, 1e6)}), 1)
    assert verdict.is_harmful is is_harmful


def test_one_weight_may_lose_more_than_its_group():
    other_layers = {f"layers.{layer}.attention.wq.weight": (0.0, 1.0) for layer in range(1, 6)}
    verdict = judge(sweep({ATTENTION: (0.003, 0.01), **other_layers}), 1)
    assert (verdict.parameter, verdict.is_harmful) == (ATTENTION, False)
    assert re.search(f"loses 30.00% of the gradient of {ATTENTION}, but .* 0.13% .attention.", str(verdict))
    # Above one half, its group does not make up for it.
    verdict = judge(sweep({ATTENTION: (0.0051, 0.01), **other_layers}), 1)
    assert verdict.is_harmful


class KeyBias(nn.Cell):
    """Attention in FP16. A bias that is added to all keys moves all scores of a query alike, so its gradient is 0."""

    def __init__(self, size=16):
        super().__init__()
        # Initial weights and inputs are drawn by NumPy: the test must not depend on other tests.
        draw = np.random.default_rng(0)
        self.wq, self.wk, self.wv = (
            Parameter(Tensor(draw.normal(size=(size, size)) / size**0.5, mstype.float32), name=name)
            for name in ("wq", "wk", "wv")
        )
        self.bias = Parameter(Tensor(draw.normal(size=size), mstype.float32), name="key_bias")
        self.cast, self.float16 = ops.Cast(), mstype.float16

    def construct(self, x):
        x, half = self.cast(x, self.float16), self.float16
        query, value = ops.matmul(x, self.cast(self.wq, half)), ops.matmul(x, self.cast(self.wv, half))
        key = ops.matmul(x, self.cast(self.wk, half)) + self.cast(self.bias, half)
        attended = ops.matmul(ops.softmax(ops.matmul(query, key.swapaxes(-1, -2)) * 0.25, -1), value)
        return (self.cast(attended, mstype.float32) ** 2).mean() * 2.0**-7


def test_a_gradient_that_is_rounding_error_decides_nothing(graph_mode):
    inputs = Tensor(np.random.default_rng(1).normal(size=(4, 8, 16)), mstype.float32)
    ranges = gradient_ranges(KeyBias(), inputs, [1, 2**8, 2**18])
    verdict = judge(ranges, 1)
    assert verdict.only_noise == ("key_bias",)
    # Its error at a scale of 1 is much larger than its gradient.
    bias = ranges.parameters(1)["key_bias"]
    assert bias.lost > bias.reference_norm
    assert (bias.lost_share, verdict.is_harmful, "key_bias" in verdict.groups) == (None, False, False)
    assert re.search("1 Parameter, such as key_bias, .*rounding error", str(verdict))
    recommendation = recommend_loss_scale(ranges)
    assert recommendation.needs_scaling is False
    # No room is left for it, as for a gradient of 0 that can grow.
    assert recommendation.loss_scale_value == recommendation.ceiling / 4


def test_a_parameter_without_gradient_is_named():
    verdict = judge(sweep({OUTPUT: (0.01, 1.0), SILENT: (0.0, 0.0)}), 1)
    assert verdict.without_gradient == (SILENT,)
    assert verdict.groups == {"output": 0.01}
    assert f"1 Parameter, such as {SILENT}, had a gradient of 0 at every scale" in str(verdict)


def test_start_leaves_room_where_a_parameter_has_no_gradient():
    known = recommend_loss_scale(sweep({OUTPUT: (0.01, 1.0)}), margin=1)
    not_all_known = recommend_loss_scale(sweep({OUTPUT: (0.01, 1.0), SILENT: (0.0, 0.0)}), margin=1)
    assert (known.loss_scale_value, not_all_known.loss_scale_value) == (2.0**9, 2.0**7)
    assert all(part in str(not_all_known) for part in ("3 bits", "margin"))


@pytest.mark.parametrize(("name", "start"), [("float16", 8), ("bfloat16", 8), ("float8_e5m2", 6), ("hifloat8", 6)])
def test_a_start_leaves_more_room_in_formats_of_8_bits(name, start):
    ranges = replace(sweep({OUTPUT: (0.01, 1.0)}), gradient_format=FORMATS[name])
    assert recommend_loss_scale(ranges).loss_scale_value == 2.0**start
    assert recommend_loss_scale(ranges, margin=1).loss_scale_value == 2.0**9


def test_nothing_is_said_where_nothing_is_known():
    verdict = judge(gradient_ranges(HalfPrecisionSum(2), np.ones(2, np.float32), [1]), 1)
    assert (verdict.is_harmful, verdict.parameter, dict(verdict.groups)) == (None, None, {})
    assert "not known" in str(verdict)


def test_table_has_a_column_for_each_scale():
    ranges = sweep({ATTENTION: (0.5, 1.0), OUTPUT: (0.0, 0.0)})
    lines = table_of_groups([judge(ranges, 1), judge(ranges, 1024)]).splitlines()
    assert [line.split() for line in lines] == [
        ["gradients", "of", "lost", "at", "2^0", "lost", "at", "2^10"],
        ["attention", "50.000%", "0.000%"],
    ]
