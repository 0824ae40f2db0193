"""With a fixed scale, the train-step cell takes the steps of unscaled training, for any optimizer."""

import numpy as np
import pytest
from mindspore import amp, nn

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, FixedScaleTrainOneStepCell
from mindformers_adaptive.wrapper import NoLossScaleUpdateCell
from tests.shared.networks import Dense


@pytest.mark.parametrize(
    ("optimizer", "mode"), [("AdamWeightDecay", "graph"), ("Momentum", "pynative")], indirect=["mode"]
)
def test_step_is_that_of_unscaled_training_and_none_is_skipped(mode, optimizer):
    scaled, plain = Dense(), Dense()
    step = FixedScaleTrainOneStepCell(scaled.network, scaled.optimizer(optimizer), loss_scale=1024)
    reference = nn.TrainOneStepCell(plain.network, plain.optimizer(optimizer))
    for _ in range(3):
        before = scaled.weight()
        # The loss scale 1024 is a power of two, so scaling rounds nothing, and the results equal unscaled training.
        assert float(step(*scaled.batch())) == float(reference(*plain.batch()))
        np.testing.assert_array_equal(scaled.weight(), plain.weight())
        assert not np.array_equal(scaled.weight(), before)
    step(*scaled.batch(overflow=True))
    assert not np.isfinite(scaled.weight()).all()


@pytest.mark.parametrize(
    ("loss_scale", "error", "message"),
    [
        ("1024", TypeError, "'loss_scale' must be a number"),
        (0, ValueError, "'loss_scale' must be finite and above 0"),
        (np.inf, ValueError, "'loss_scale' must be finite and above 0"),
        (
            amp.FixedLossScaleManager(1024.0, False),
            TypeError,
            "'loss_scale' must be a number.* FixedLossScaleM",
        ),
    ],
)
def test_bad_loss_scale_is_refused(loss_scale, error, message):
    dense = Dense()
    with pytest.raises(error, match=message):
        FixedScaleTrainOneStepCell(dense.network, dense.optimizer(), loss_scale)


def test_optimizer_that_divides_too_is_refused():
    dense = Dense()
    with pytest.raises(ValueError, match=r"'optimizer' must not divide the gradients.*Momentum with loss_scale=1024"):
        FixedScaleTrainOneStepCell(dense.network, dense.optimizer(loss_scale=1024.0), 1024)


def test_without_loss_scaling_the_state_of_a_scaler_is_ignored(graph_mode):
    step = Dense().train_step(NoLossScaleUpdateCell())
    cell, before = step.loss_scaling_manager, float(step.scale_sense)
    state = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20).state_dict()
    for saved in (state, {"loss_scale": 1024.0}, {"optimizer": {}, "grad_scaler": state}):
        with pytest.warns(UserWarning, match=r"state of a gradient scaler.*ignores.*use AdaptiveLossScaleUpdateCell"):
            assert cell.load_state_dict(saved) is None
    # Megatron-LM saves None in a training without a scaler: there is nothing to say.
    cell.load_state_dict({"optimizer": {}, "grad_scaler": None})
    cell.load_state_dict(cell.state_dict())
    step(*Dense.batch())
    assert float(step.scale_sense) == before == cell.get_loss_scale()


def test_no_loss_scaling_has_a_reciprocal():
    assert NoLossScaleUpdateCell().inv_scale == 1.0
