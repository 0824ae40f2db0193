"""The train-step cells: a skipped step changes nothing, and an applied step equals the step of FP32 training."""

import contextlib
import inspect
import types

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper import build_wrapper
from mindspore import Parameter, Tensor, amp, nn, ops

from mindformers_adaptive import AdaptiveLossScaleManager, AdaptiveLossScaler, register, wrapper
from mindformers_adaptive.cells import train_step
from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from tests.shared.networks import Dense

pytestmark = pytest.mark.slow

TRAIN_STEP_CELLS = [wrapper.TrainOneStepWithLossScaleCell, wrapper.MFTrainOneStepCell]

# float16 has 11 significant bits; a matrix product of 4 terms loses a few more bits.
FLOAT16_TOLERANCE = 2.0**-8


@pytest.mark.parametrize(
    ("cell", "optimizer", "mode"),
    [
        (TRAIN_STEP_CELLS[0], "Momentum", "graph"),
        (TRAIN_STEP_CELLS[0], "Momentum", "pynative"),
        (TRAIN_STEP_CELLS[1], "Adam", "graph"),
    ],
    indirect=["mode"],
)
def test_skipped_step_changes_nothing_applied_one_is_as_in_fp32(mode, cell, optimizer):
    half, full = Dense(fp16=True), Dense()
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = cell(half.network, half.optimizer(optimizer), scale_sense=update_cell)
    reference = nn.TrainOneStepCell(full.network, full.optimizer(optimizer))
    rule = AdaptiveRule()
    state = rule.start(1024.0)
    for overflow in (False, True, False, True, True, False):
        before = weights_and_optimizer_state(step)
        outputs = step(*Dense.batch(overflow))
        after = weights_and_optimizer_state(step)
        state = rule.step(state, overflow)
        assert bool(outputs[1]) == overflow
        assert float(step.scale_sense) == state.loss_scale
        if overflow:
            assert before.keys() == after.keys()
            assert all(np.array_equal(before[name], after[name]) for name in before)
        else:
            loss = reference(*Dense.batch())
            np.testing.assert_allclose(float(outputs[0]), float(loss), rtol=FLOAT16_TOLERANCE)
            name = half.layer.weight.name
            change = full.weight() - before[name]
            np.testing.assert_allclose(after[name] - before[name], change, rtol=0.02, atol=1e-3 * abs(change).max())
            assert not np.array_equal(before[name], after[name])
    assert update_cell.state()["skipped_steps"] == 3


@pytest.mark.parametrize(
    ("base", "mode"), list(zip(TRAIN_STEP_CELLS, ("pynative", "graph"), strict=True)), indirect=["mode"]
)
def test_subclass_with_arguments_trains_through_overflows(mode, base):
    class CountedTrainStep(base):
        """A user's own subclass, which counts its steps from ``first_step`` on."""

        def __init__(self, network, optimizer, first_step, *, scale_sense):
            super().__init__(network, optimizer, scale_sense=scale_sense)
            self.steps = Parameter(Tensor(first_step, mindspore.int32), name="steps", requires_grad=False)

        def construct(self, *inputs):
            outputs = super().construct(*inputs)
            ops.assign_add(self.steps, Tensor(1, mindspore.int32))
            return outputs

    assert list(inspect.signature(CountedTrainStep).parameters) == ["network", "optimizer", "first_step", "scale_sense"]
    dense, overflows = Dense(fp16=True), []
    update_cell = AdaptiveLossScaleUpdateCell(2**24, 2, 20)
    step = CountedTrainStep(dense.network, dense.optimizer(), 100, scale_sense=update_cell)
    for _ in range(15):
        before = dense.weight()
        overflows.append(bool(step(*Dense.batch())[1]))
        assert np.array_equal(dense.weight(), before) == overflows[-1]
    skipped = overflows.index(False)
    assert skipped > 0
    assert float(step.scale_sense) == 2.0 ** (24 - sum(overflows))
    assert update_cell.state()["skipped_steps"] == sum(overflows)
    assert int(step.steps) == 115
    assert "list_index" in step.optimizer.parameters_dict()


def test_overflow_detection_of_a_subclass_is_kept(graph_mode):
    class NeverOverflows(wrapper.TrainOneStepWithLossScaleCell):
        def get_overflow_status(self, status, compute_output):
            return Tensor(False)

    step = Dense().train_step(AdaptiveLossScaleUpdateCell(1024, 2, 20), NeverOverflows)
    assert not bool(step(*Dense.batch(overflow=True))[1])


@pytest.mark.parametrize("cell", TRAIN_STEP_CELLS)
def test_optimizer_that_divides_too_is_refused(cell):
    dense = Dense()
    optimizer = dense.optimizer(loss_scale=1024.0)
    for scale_sense in (AdaptiveLossScaleUpdateCell(1024, 2, 20), Tensor(1024.0)):
        with pytest.raises(ValueError, match=r"'optimizer' must not divide .*Momentum with loss_scale=1024.0. Create"):
            cell(dense.network, optimizer, scale_sense=scale_sense)


@pytest.mark.parametrize("cell", TRAIN_STEP_CELLS)
@pytest.mark.parametrize(
    ("scale_sense", "remedy"),
    [
        (
            "AdaptiveLossScaleUpdateCell",
            r"type str. Give AdaptiveLossScaleUpdateCell\(\.\.\.\), .*Tensor\(1024\.0\)",
        ),
        (True, "type bool. Give AdaptiveLossScaleUpdateCell"),
        (AdaptiveLossScaleUpdateCell, r"Give an instance: AdaptiveLossScaleUpdateCell\(\.\.\.\)"),
        ({"loss_scale_value": 1024}, "'scale_sense' needs a 'type', such as AdaptiveLossScaleUpdateCell"),
        (AdaptiveLossScaleManager(), r"manager\.get_update_cell\(\)"),
        (amp.FixedLossScaleManager(), r"manager\.get_update_cell\(\)"),
        (AdaptiveLossScaler(1024), "give AdaptiveLossScaleUpdateCell"),
        (amp.FixedLossScaleManager(8, False).get_update_cell(), "use FixedScaleTrainOneStepCell"),
    ],
)
def test_what_is_no_update_cell_is_named_with_its_remedy(cell, scale_sense, remedy):
    with pytest.raises(TypeError, match=f"'scale_sense' must be an update cell .*{remedy}"):
        Dense().train_step(scale_sense, cell)


@pytest.mark.parametrize("name", ["TrainOneStepWithLossScaleCell", "MFTrainOneStepCell", "MFPipelineWithLossScaleCell"])
def test_arguments_have_the_order_and_defaults_of_the_stock(name):
    stock = getattr(mindformers.wrapper, name, None) or getattr(nn, name)
    parameters = inspect.signature(getattr(wrapper, name)).parameters.values()
    written = [
        (parameter.name, parameter.default)
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert written[:2] == [("network", inspect.Parameter.empty), ("optimizer", inspect.Parameter.empty)]
    all_stock = [(parameter.name, parameter.default) for parameter in inspect.signature(stock).parameters.values()]
    assert written == all_stock[: len(written)]
    assert "scale_sense" in dict(written)


def test_loss_per_token_needs_the_mixin_that_keeps_token_counts():
    class Mixed(train_step.LossScaleTrainStep, mindformers.wrapper.MFTrainOneStepCell):
        pass

    dense = Dense()
    for update_cell in (AdaptiveLossScaleUpdateCell(1024, 2, 20), wrapper.GradientGuidedLossScaleUpdateCell(1024)):
        options = {"scale_sense": update_cell, "calculate_per_token_loss": True}
        expected = pytest.raises(TypeError, match=r"Mixed must .*'calculate_per_token_loss'.*Use PerTokenTrainStep")
        with expected if update_cell.needs_gradients else contextlib.nullcontext():
            Mixed(dense.network, dense.optimizer(), **options)


def test_arguments_of_mindformers_cell_name_the_cell():
    """MindFormers' trainer passes the arguments of MFTrainOneStepCell to every class that a YAML file names."""
    register()
    dense = Dense()
    arguments = {"network": dense.network, "optimizer": dense.optimizer(), "calculate_per_token_loss": False}
    config = MindFormerConfig(type="TrainOneStepWithLossScaleCell", scale_sense=1024)
    with pytest.raises(TypeError, match=r"'calculate_per_token_loss'.*use the type MFTrainOneStepCell"):
        build_wrapper(config, default_args=arguments)


@pytest.mark.parametrize(
    ("cell", "mode"), list(zip(TRAIN_STEP_CELLS, ("graph", "pynative"), strict=True)), indirect=["mode"]
)
def test_without_loss_scaling_no_step_is_skipped(mode, cell):
    dense, plain = Dense(), Dense()
    step = dense.train_step(wrapper.NoLossScaleUpdateCell(), cell)
    stock = nn.TrainOneStepCell(plain.network, plain.optimizer())
    for overflow in (False, True):
        step(*Dense.batch(overflow)), stock(*Dense.batch(overflow))
        np.testing.assert_array_equal(dense.weight(), plain.weight())
    assert not np.isfinite(dense.weight()).all()
    assert float(step.scale_sense) == 1.0


def test_off_cpu_the_stock_detection_is_what_is_compiled(graph_mode, monkeypatch):
    """A CPU cannot compile a train-step cell for Ascend, because the cell has MindSpore's Ascend overflow detection."""
    monkeypatch.setattr(train_step, "context", types.SimpleNamespace(get_context=lambda name: "Ascend"))
    step = Dense().train_step(AdaptiveLossScaleUpdateCell(1024, 2, 20))
    with pytest.raises(RuntimeError, match="NPUGetFloatStatusV2"):
        step(*Dense.batch())


def weights_and_optimizer_state(step):
    """Return a train step's weights and optimizer state by name, without loss scale and update cell."""
    scaling = {"scale_sense", *step.loss_scaling_manager.parameters_dict()}
    return {name: value.asnumpy().copy() for name, value in step.parameters_dict().items() if name not in scaling}
