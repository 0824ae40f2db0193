"""A gradient sweep measures the gradient as computed in FP16 at each loss scale. It does not change the training."""

import dataclasses
import json
import random
import sys

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.gradients.ranges import GradientSweep, gradient_ranges
from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.gradients.statistics import array_statistics
from mindformers_adaptive.wrapper import MFTrainOneStepCell
from tests.shared.networks import (
    Dense,
    HalfPrecisionSum,
    OnlyLoss,
    WithStateAndDropout,
    gradient_in_fp16,
    rows,
    seeded_train_step,
)
from tests.shared.versions import BEFORE_1_7

# Gradients over the whole range of FP16 and beyond both ends of the range, and an exact 0.
SPREAD = np.array([0.0, *2.0 ** np.arange(-24, 2), 1.5], np.float32)
FACTOR = 2.0**-6


def test_statistics_are_those_of_the_fp16_gradient(mode):
    scales = [1, 2**10, 2**20, 2**23]
    sweep = gradient_ranges(HalfPrecisionSum(SPREAD.size, FACTOR), SPREAD, scales)
    assert sweep.to_dict()["batches"][0]["reference_loss_scale"] == 2.0**20
    reference = gradient_in_fp16(SPREAD, FACTOR, 2.0**20)
    for ranges in sweep.batches[0]:
        scale = ranges.loss_scale
        expected = gradient_in_fp16(SPREAD, FACTOR, scale)
        overflow = not np.isfinite(expected).all()
        assert ranges.overflow == overflow
        compared = () if overflow else (reference, scale / 2.0**20, scale)
        noise = ranges.parameters["weight"].noise
        assert ranges.parameters == {"weight": dataclasses.replace(array_statistics(expected, *compared), noise=noise)}
        other = gradient_in_fp16(SPREAD, FACTOR, 0.75 * 2.0**20) / 0.75
        assert noise == (None if overflow else pytest.approx(np.linalg.norm(other - reference) / 2.0**20))
    assert [sweep.overall(scale).underflowed for scale in scales] == [6, 0, 0, None]


def test_loss_in_fp16_overflows_where_the_scale_does_not_fit_it():
    class HalfPrecisionLoss(HalfPrecisionSum):
        def construct(self, x):
            return self.cast((self.weight * x).sum(), mstype.float16)

    sweep = gradient_ranges(HalfPrecisionLoss(1), np.full(1, 2.0**-10, np.float32), [2**15, 2**16])
    assert [sweep.overflowed_batches(scale) for scale in sweep.loss_scales] == [0, 1]


def test_each_batch_has_its_own_reference():
    batches = [(np.full(2, 1.0, np.float32),), (np.array([4.0, 2.0**-20], np.float32),)]
    sweep = gradient_ranges(HalfPrecisionSum(2), batches, [2.0**-6, 2**13, 2**15])
    assert [batch["reference_loss_scale"] for batch in sweep.to_dict()["batches"]] == [2.0**15, 2.0**13]
    assert [sweep.overflowed_batches(scale) for scale in sweep.loss_scales] == [0, 0, 1]
    lowest = sweep.overall(2.0**-6)
    assert (lowest.size, lowest.underflowed, lowest.largest) == (4, 1, 0.0625)
    # The root mean square of the gradient norms of both batches, sqrt(1 + 1) and 4, times the loss scale.
    assert lowest.norm == pytest.approx(2.0**-6 * np.sqrt((2 + 16) / 2))


def test_batches_come_in_many_forms():
    network = HalfPrecisionSum(2)
    array = np.ones(2, np.float32)
    data = mindspore.dataset.NumpySlicesDataset([array, array, array], shuffle=False)
    forms = [array, Tensor(array), (array,), [Tensor(array)], [(array,), (array,)], data.create_tuple_iterator()]
    assert [len(gradient_ranges(network, form, [1]).batches) for form in forms] == [1, 1, 1, 1, 2, 3]


def test_first_of_several_outputs_is_the_loss(mode):
    mindspore.set_seed(1)
    network = WithStateAndDropout()
    both = gradient_ranges(network, rows(), [2**8, 2**30])
    only = gradient_ranges(OnlyLoss(network), rows(), [2**8, 2**30])
    assert both.to_dict() == only.to_dict()
    assert both.overall(2**8).largest > 0


def test_graph_is_compiled_once_for_all_loss_scales(graph_mode):
    sweep = GradientSweep(HalfPrecisionSum(3))
    for _ in range(2):
        sweep(np.ones(3, np.float32), [1, 2, 4])
    assert len(sweep._backward.compile_cache) == 1


def everything(train_step):
    """Return everything that a backward pass could change: Parameters, modes and random states."""
    return {
        "parameters": {value.name: value.asnumpy().tobytes() for value in train_step.get_parameters()},
        "modes": [(name, cell.training, cell.phase) for name, cell in train_step.cells_and_names()],
        "update cell": train_step.loss_scaling_manager.state(),
        "generator": mindspore.get_rng_state().asnumpy().tobytes(),
        "kernel seeds": dict(sys.modules["mindspore.common.seed"]._KERNEL_SEED),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
    }


@pytest.mark.filterwarnings("ignore:The loss of one batch")
def test_nothing_is_changed(mode):
    step = seeded_train_step(functional_dropout=True)
    step(*map(Tensor, rows()))
    sweep = GradientSweep(step.network)
    for training in (True, False):
        step.set_train(training)
        before = everything(step)
        sweep(rows(seed=2), [1, 2**10, 2**32])
        assert everything(step) == before


class SumsLosses(MFTrainOneStepCell):
    """A train step that adds up its losses in a Parameter beside the weights, as MindFormers' cells do."""

    def __init__(self, network, optimizer, scale_sense):
        super().__init__(network, optimizer, scale_sense=scale_sense)
        self.sum_of_losses = Parameter(Tensor(0.5, mstype.float32), name="sum_of_losses", requires_grad=False)

    def grads_for_legacy(self, scaling_sens, *inputs):
        loss, gradients, divisor = super().grads_for_legacy(scaling_sens, *inputs)
        return ops.depend(loss, ops.assign_add(self.sum_of_losses, loss)), gradients, divisor


@pytest.mark.skipif(BEFORE_1_7, reason="the train step of this MindFormers has no grads_for_legacy()")
def test_sums_of_losses_beside_the_weights_stay(mode):
    dense = Dense()
    step = SumsLosses(dense.network, dense.optimizer(), AdaptiveLossScaleUpdateCell(2**10, 2, 20)).set_train()
    before = everything(step)
    gradient_ranges(step, dense.batch(), [1, 2**10])
    assert everything(step) == before
    # A step itself changes the sum.
    step(*dense.batch())
    assert float(step.sum_of_losses) > 0.5


def test_nothing_is_changed_by_a_sweep_that_fails():
    step = seeded_train_step()
    before = everything(step)
    with pytest.raises(TypeError, match="'inputs' must be a Tensor"):
        gradient_ranges(step.network, [rows(), "rows"], [1])
    assert everything(step) == before


def test_dropout_is_off_so_that_all_scales_see_one_network(mode):
    mindspore.set_seed(1)
    sweep = gradient_ranges(WithStateAndDropout(), rows(), [1, 2, 4])
    assert len({ranges.loss for ranges in sweep.batches[0]}) == 1


def test_a_network_that_stays_random_is_warned_of(graph_mode):
    mindspore.set_seed(1)
    with pytest.warns(UserWarning, match=r"same at every loss scale, .* random numbers .*Dropout"):
        gradient_ranges(WithStateAndDropout(functional_dropout=True), rows(), [1, 2, 4])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"network": np.sum}, TypeError, r"'network' must be a Cell .*sum.* nn\.WithLossCell"),
        ({"network": nn.MSELoss()}, ValueError, r"'network' must have a Parameter .* MSELoss .*requires_grad=True"),
        ({"inputs": 3}, TypeError, "'inputs' must be a Tensor"),
        ({"inputs": {"x": np.ones(2)}}, TypeError, "'inputs' must be a Tensor"),
        ({"inputs": []}, ValueError, "'inputs' must hold .*batch, .* tuple of Tensors"),
        ({"loss_scales": {1: 2}}, TypeError, r"'loss_scales' must be a list .* of type dict\. .*\[65536\]"),
        ({"loss_scales": "65536"}, TypeError, r"'loss_scales' must be a list .* of type str\. .*\[65536\]"),
        ({"loss_scales": 65536}, TypeError, r"'loss_scales' must be a list .* of type int\. .*\[65536\]"),
        ({"loss_scales": ["2"]}, TypeError, "'loss_scales' must be a number"),
        ({"loss_scales": []}, ValueError, r"'loss_scales' must hold .* number, .* 2\^0 to 2\^32"),
        ({"loss_scales": [0]}, ValueError, "'loss_scales' must be finite and above 0"),
    ],
)
def test_bad_input_is_refused(changes, error, message):
    arguments = {"network": HalfPrecisionSum(2), "inputs": np.ones(2, np.float32), "loss_scales": [1], **changes}
    with pytest.raises(error, match=message):
        gradient_ranges(**arguments)


@pytest.fixture(scope="module")
def report():
    batches = [(np.array([1.0, 2.0**-20], np.float32),), (np.array([np.inf, 1.0], np.float32),)]
    return gradient_ranges(HalfPrecisionSum(2), batches, [2.0**-6, 1000, 2**15])


def test_table_has_a_row_for_each_scale_or_each_parameter(report):
    lines = [line.split() for line in report.table().splitlines()]
    assert lines[0][:3] == ["loss", "scale", "overflowed"]
    assert [line[:2] for line in lines[1:]] == [["2^-6", "1/2"], ["1000", "1/2"], ["2^15", "1/2"]]
    # The columns of the largest gradient, the smallest gradient and the gradient norm. The table shows these values
    # divided by the loss scale, and ignores the inf in the second batch.
    assert lines[2][2:5] == ["1.00e+00", "9.54e-07", "1"]
    assert [line.split()[0] for line in report.table(1000).splitlines()] == ["at", "weight", "all"]
    with pytest.raises(ValueError, match=r"'loss_scale' must be one of .* 2\^-6, 1000, 2\^15, .* 3\."):
        report.table(3)


def test_report_is_saved_whole_and_read_back(report, tmp_path):
    file = tmp_path / "new" / "ranges.json"
    report.save(file)
    report.save(file)
    assert [path.name for path in file.parent.iterdir()] == ["ranges.json"]
    saved = json.loads(file.read_text())
    assert [scale["overflowed_batches"] for scale in saved["loss_scales"]] == [1, 1, 1]
    assert [batch["reference_loss_scale"] for batch in saved["batches"]] == [2.0**15, None]
    assert saved["batches"][1]["loss_scales"][0]["loss"] == "inf"
    assert saved["loss_scales"][0]["parameters"]["weight"]["infs_and_nans"] == 1
    read = GradientRanges.from_dict(saved)
    assert read.weights == report.weights
    for scale in report.loss_scales:
        plain = dataclasses.replace(report.overall(scale), norm=0.0, lost=None, noise=None, reference_norm=0.0)
        assert dataclasses.replace(read.overall(scale), norm=0.0) == plain
