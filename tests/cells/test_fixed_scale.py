"""With a fixed scale, the train-step cell takes the steps of unscaled training, for any optimizer."""

import numpy as np
import pytest
from mindspore import amp, nn

from mindformers_adaptive import FixedScaleTrainOneStepCell
from tests.shared.networks import Dense


@pytest.mark.parametrize("optimizer", ["AdamWeightDecay", "Momentum"])
def test_step_is_that_of_unscaled_training(mode, optimizer):
    scaled, plain = Dense(), Dense()
    step = FixedScaleTrainOneStepCell(scaled.network, scaled.optimizer(optimizer), loss_scale=1024)
    reference = nn.TrainOneStepCell(plain.network, plain.optimizer(optimizer))
    for _ in range(3):
        before = scaled.weight()
        # The loss scale 1024 is a power of two, so scaling rounds nothing, and the results equal unscaled training.
        assert float(step(*scaled.batch())) == float(reference(*plain.batch()))
        np.testing.assert_array_equal(scaled.weight(), plain.weight())
        assert not np.array_equal(scaled.weight(), before)


def test_overflow_is_not_skipped(mode):
    dense = Dense()
    step = FixedScaleTrainOneStepCell(dense.network, dense.optimizer(), loss_scale=1024)
    step(*dense.batch(overflow=True))
    assert not np.isfinite(dense.weight()).all()


@pytest.mark.parametrize(
    ("loss_scale", "error", "message"),
    [
        ("1024", TypeError, "'loss_scale' must be a number"),
        (0, ValueError, "'loss_scale' must be finite and above 0"),
        (np.inf, ValueError, "'loss_scale' must be finite and above 0"),
        (amp.FixedLossScaleManager(1024.0, False), TypeError, r"Give manager\.get_loss_scale\(\)"),
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
