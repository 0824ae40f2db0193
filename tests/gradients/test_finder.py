"""The loss-scale finder is exact for known gradients, answers clearly if no scale helps, and is right for the demo."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

import mindformers_adaptive
from mindformers_adaptive import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    GuidedRule,
    RuleLossScaleUpdateCell,
)
from mindformers_adaptive.gradients.ranges import GradientSweep, find_loss_scale
from mindformers_adaptive.gradients.recommendation import DEFAULT_MARGIN as MARGIN
from mindformers_adaptive.gradients.recommendation import EVERY_POWER, recommend_loss_scale
from mindformers_adaptive.gradients.report import ArrayStatistics, GradientRanges, ScaleRanges
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell
from tests.conftest import CONFIG, PROGRAM, write_corpus
from tests.shared.networks import HalfPrecisionSum
from tests.shared.pages import figure

# Run the tests in graph mode, because a sweep over 33 loss scales takes only a moment there.
pytestmark = pytest.mark.usefixtures("graph_mode")

ONES = np.ones(2, np.float32)


class TimesFactor(nn.Cell):
    """A network whose loss, and with it every gradient, is multiplied by a Parameter."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network
        self.factor = Parameter(Tensor(1.0, mstype.float32), name="factor", requires_grad=False)

    def construct(self, *inputs):
        return self.network(*inputs) * self.factor


@pytest.fixture(scope="module")
def find():
    """Return a replacement for find_loss_scale() that compiles its network, a sum in FP16, only once."""
    network = TimesFactor(HalfPrecisionSum(2))
    sweep = GradientSweep(network)

    def find(batches, factor=1.0, margin=MARGIN, loss_scales=EVERY_POWER):
        network.factor.set_data(Tensor(factor, mstype.float32))
        return recommend_loss_scale(sweep(batches, loss_scales), margin)

    return find


@pytest.mark.parametrize("power", [-17, 0, 13, 15])
def test_recommendation_is_the_largest_power_minus_margin(find, power):
    recommendation = find(ONES, factor=2.0**power, margin=3)
    # 2^15 is the largest power of two in FP16.
    assert recommendation.ceiling == 2.0 ** (15 - power)
    assert recommendation.loss_scale_value == max(2.0 ** (12 - power), 1.0)


def test_recommendation_is_the_lowest_of_several_batches(find):
    assert find([(ONES,), (8 * ONES,), (ONES,)], margin=0).loss_scale_value == 2.0**12


# For each reason to recommend no start: the batch and the factor of its gradients, the ceiling, and the text.
NO_START = {
    "overflow at 1": (ONES, 2.0**16, None, r"No loss scale from 2\^0 can help\b.* in 1 batch\..* float32"),
    "bad loss": (np.nan * ONES, 1.0, None, r"No loss scale can help\b.* is inf or NaN, in 1 batch\."),
    "gradients of 0": (0 * ONES, 1.0, 2.0**15, r"No start can be\b.* are 0 .* up to 2\^32.* labels .* masked"),
}


@pytest.mark.parametrize("case", NO_START)
def test_where_no_start_is_recommended_it_is_said_why(find, case):
    batch, factor, ceiling, said = NO_START[case]
    recommendation = find(batch, factor)
    assert (recommendation.loss_scale_value, recommendation.needs_scaling, recommendation.yaml) == (None, None, "")
    assert (recommendation.ceiling, recommendation.loss_is_finite) == (ceiling, case != "bad loss")
    assert re.match(said, str(recommendation))
    assert ("'adaptive-loss-scale why'" in str(recommendation)) == (ceiling is None)


def test_nothing_that_underflows_is_said():
    recommendation = find_loss_scale(HalfPrecisionSum(2), ONES)
    assert (recommendation.ceiling, recommendation.needs_scaling, recommendation.is_in_format) == (2.0**15, False, True)
    assert "train without loss scaling" in str(recommendation)


@pytest.mark.parametrize("factor", [1.0, 2.0**-10, 3e4])
def test_a_network_in_fp32_needs_no_loss_scaling(factor):
    recommendation = find_loss_scale(HalfPrecisionSum(2, factor, mstype.float32), ONES)
    facts = recommendation.loss_scale_value, recommendation.needs_scaling, recommendation.is_in_format
    assert facts == (1.0, False, False)
    assert "NoLossScaleUpdateCell()" in str(recommendation)
    assert re.match(r"No loss scaling is needed\b.* 2\^32 .* FP16", str(recommendation))
    assert "lost at" not in f"{recommendation}{recommendation.details()}".replace("loses", "")
    assert yaml.safe_load(recommendation.yaml)["runner_wrapper"]["scale_sense"] == 1.0


class NaNLoss(HalfPrecisionSum):
    """A network whose loss is NaN, but whose gradients are the gradients of a sum."""

    def construct(self, x):
        # Compute the NaN from the input, because the compiler folds a constant NaN away.
        return super().construct(x) + ops.stop_gradient(ops.log(-x)).sum()


def test_a_loss_of_nan_with_finite_gradients_is_said():
    recommendation = find_loss_scale(NaNLoss(2), ONES)
    assert (recommendation.loss_scale_value, recommendation.loss_is_finite) == (2.0**13, False)
    assert re.search(
        r"\n\nThe loss is inf or NaN\b.* gradients are finite\..* 'adaptive-loss-scale why'", str(recommendation)
    )


@pytest.mark.parametrize("micro_batches", [3, 256])
def test_a_micro_batch_starts_higher_by_their_number(micro_batches):
    recommendation = find_loss_scale(HalfPrecisionSum(2), ONES, micro_batches=micro_batches)
    # From 65520 on, FP16 rounds a number to inf.
    assert recommendation.ceiling == 2.0 ** math.floor(math.log2(65519 * micro_batches))
    assert re.search(rf"one of {micro_batches} micro-batches\b.* divided by {micro_batches} ", str(recommendation))
    with pytest.raises(ValueError, match="'micro_batches' must be at least 1"):
        find_loss_scale(HalfPrecisionSum(2), ONES, micro_batches=0)


@pytest.mark.parametrize(("large", "lost", "needs_scaling"), [(2.0**-20, "3.12", False), (2.0**-23, "24.25", True)])
def test_underflow_needs_scaling_if_much_of_the_norm_is_lost(find, large, lost, needs_scaling):
    # The network has two gradients: ``large`` and 2^-25. At a loss scale of 1, FP16 rounds 2^-25 to 0. So half of the
    # gradients always underflow, but the lost share of the gradient norm depends on ``large``.
    gradients = np.array([1.0, 2.0**-25 / large], np.float32)
    recommendation = find(gradients, factor=large)
    assert "Gradients that underflow: 50.000% at 2^0, 0.000% at 2^30." in recommendation.details()
    assert recommendation.needs_scaling is needs_scaling
    assert re.search(rf"Without scaling, FP16 loses (at most )?{lost}% of (a|the) gradient", str(recommendation))
    said = ["needs loss scaling" in str(recommendation), "train without loss scaling" not in str(recommendation)]
    assert said == [needs_scaling] * 2


def test_a_coarse_sweep_serves_as_well(find):
    recommendation = find(np.array([1.0, 2.0**-5], np.float32), 2.0**-20, margin=2, loss_scales=[1, 2**16, 2**32])
    assert recommendation.loss_scale_value == 2.0**30
    assert "50.000% at 2^0, 0.000% at 2^16." in recommendation.details()


@pytest.mark.parametrize("loss_scales", [[2, 4], [1]])
def test_sweep_that_cannot_see_underflow_does_not_deny_it(find, loss_scales):
    recommendation = find(ONES, loss_scales=loss_scales)
    assert recommendation.needs_scaling is None
    assert "without loss scaling" not in str(recommendation)


def test_yaml_to_paste_keeps_the_rule_of_the_training(find):
    of_training = {"type": "GradientGuidedLossScale", "loss_scale_value": 65536, "margin": 8, "scale_factor": 2}
    recommendation = replace(find(ONES), scale_sense=of_training)
    pasted = yaml.safe_load(recommendation.yaml)["runner_wrapper"]["scale_sense"]
    assert pasted == {**of_training, "loss_scale_value": recommendation.loss_scale_value}


def test_yaml_to_paste_makes_the_update_cell():
    recommendation = find_loss_scale(HalfPrecisionSum(2), ONES, margin=2)
    pasted = yaml.safe_load(recommendation.yaml)["runner_wrapper"]
    assert pasted["type"] == "MFTrainOneStepCell"
    assert pasted["scale_sense"].pop("type") == "GradientGuidedLossScale"
    assert GradientGuidedLossScaleUpdateCell(**pasted["scale_sense"]).get_loss_scale() == 2.0**13
    assert json.loads(json.dumps(recommendation.to_dict()))["loss_scale_value"] == 2.0**13


CELLS = {
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**20, 2, 50, min_scale_window=50, hysteresis=2),
    "guided": lambda: GradientGuidedLossScaleUpdateCell(2.0**20, margin=8),
    "own": lambda: RuleLossScaleUpdateCell(loss_scale_value=2.0**20, rule="tests.shared.own_rules.Follow"),
}


@pytest.mark.parametrize("cell", [*CELLS, None])
def test_python_to_paste_keeps_the_rule_of_the_train_step(cell):
    network = HalfPrecisionSum(2)
    if cell is not None:
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        network = TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=CELLS[cell]())
    recommendation = find_loss_scale(network, ONES)
    text = str(recommendation).split("\n\n")[1]
    name = text.partition("(")[0]
    update_cell = eval(text, {name: getattr(mindformers_adaptive, name)})
    assert update_cell.get_loss_scale() == recommendation.loss_scale_value
    assert repr(update_cell.rule) == repr(CELLS[cell]().rule if cell else GuidedRule())
    assert ("window" in text) is (cell == "adaptive")
    assert "runner_wrapper" not in str(recommendation)
    assert recommendation.to_dict()["update_cell"].rstrip() == text


def sweep_of(overflows):
    """Return a sweep of one batch over loss scales 2^0, 2^1, ...; ``overflows`` says at which of them it overflows."""
    statistics = [ArrayStatistics(size=1, infs_and_nans=int(overflow), underflowed=0) for overflow in overflows]
    at_scales = [ScaleRanges(2.0**exponent, 1.0, {"weight": each}) for exponent, each in enumerate(statistics)]
    return GradientRanges({"weight": ArrayStatistics(size=1)}, (tuple(at_scales),))


@given(overflows=st.lists(st.booleans(), min_size=1, max_size=6), margin=st.integers(0, 8))
def test_no_scale_up_to_the_recommendation_overflows(overflows, margin):
    recommendation = recommend_loss_scale(sweep_of(overflows), margin)
    if overflows[0]:
        assert recommendation.loss_scale_value is None
        return
    ceiling = round(math.log2(recommendation.ceiling))
    assert not any(overflows[: ceiling + 1])
    assert recommendation.loss_scale_value == 2.0 ** max(ceiling - margin, 0)
    assert recommendation.ceiling_is_highest == (ceiling == len(overflows) - 1)
    assert recommendation.ceiling_is_highest or overflows[ceiling + 1]


def test_a_dtype_that_the_device_lacks_is_named():
    network = nn.WithLossCell(nn.Dense(3, 1).to_float(mstype.bfloat16), nn.MSELoss())
    with pytest.raises(TypeError, match=r"MatMul.* does not support .*BFloat16.* on this CPU\. Compute in float16"):
        find_loss_scale(network, [(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))])


def test_bad_margin_is_refused():
    with pytest.raises(TypeError, match="'margin' must be an integer"):
        find_loss_scale(HalfPrecisionSum(2), ONES, 1.0)
    with pytest.raises(ValueError, match="'margin' must be at least 0"):
        find_loss_scale(HalfPrecisionSum(2), ONES, -1)


def without_numbers(lines):
    """Return lines of text in which # replaces each number and each name of a Parameter in parentheses."""
    return [re.sub(r"[\d.]+|\([\w.]+\)", "#", line) for line in lines]


@pytest.mark.slow
def test_demo_from_the_found_scale_skips_at_most_1_of_100_steps(run_forked, tmp_path):
    # Run the demo with one layer of half its width on samples a quarter as long, and stop after 100 of its 400 steps.
    corpus = write_corpus(tmp_path / "corpus", samples=800)
    training = ["--config", CONFIG, "--train-dataset-dir", corpus]
    sizes = {"seq_length": 32, "hidden_size": 64, "num_layers": 1}
    options = ["--options", *(f"model.model_config.{name}={size}" for name, size in sizes.items())]
    text = run_forked(PROGRAM, "find", *training, "--batches", 2, *options).stdout.strip()
    scale = yaml.safe_load(text.split("\n\n")[1])["runner_wrapper"]["scale_sense"]["loss_scale_value"]
    assert 2**12 <= scale == 2 ** (int(re.search(r"without overflow was 2\^(\d+)", text)[1]) - MARGIN)
    # The section to paste has as many lines as the section of the configuration.
    assert len([line for line in text.splitlines() if not line.startswith(" ")]) <= 9
    # The documentation shows the output of ``find`` for samples of full length. The smaller training here may change
    # only the numbers and the name of a Parameter in the output.
    # Where its lines are wrapped depends on these, too.
    on_one_line = [" ".join(" ".join(lines).split()) for lines in (text.splitlines(), figure("find")["printed"])]
    assert without_numbers(on_one_line[:1]) == without_numbers(on_one_line[1:])
    options += [f"runner_wrapper.scale_sense.loss_scale_value={scale}"]
    options += ["train_dataset.data_loader.num_samples=800", "lr_schedule.total_steps=400"]
    run_forked(PROGRAM, "train", *training, "--output-dir", "run", *options)
    record = read_record(tmp_path / "run" / "loss_scale_record.jsonl")
    assert record[0]["loss_scale"] == scale
    assert [line["step"] for line in record] == list(range(1, 101))
    assert sum(line["overflow"] for line in record) <= 1
    assert np.mean([line["loss"] for line in record[-20:]]) < 3.5
