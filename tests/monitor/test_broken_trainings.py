"""What is printed of whole trainings: an update that was too large is named, and a healthy training gets no cause."""

import mindspore
import numpy as np
import pytest
from mindspore import Model, Tensor, nn
from mindspore.dataset import NumpySlicesDataset

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, LossScaleMonitor, wrapper
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.record.logs import read_log
from tests.conftest import mindspore_mode
from tests.overflow.overflowing import Autoencoder, Convolutions, Mixer, values

pytestmark = pytest.mark.slow

# For each network: its batches, its optimizer, and a learning rate with which it learns.
TRAININGS = {
    "autoencoder": (Autoencoder, values(60, 4, 16), nn.SGD, 0.1),
    "mixer": (Mixer, values(60, 5, 6, 8), nn.SGD, 0.05),
    "convolutions": (Convolutions, values(60, 2, 2, 6, 6), lambda p, rate: nn.Momentum(p, rate, 0.9), 0.01),
    "linear": (lambda: Autoencoder(is_linear=True), values(60, 4, 16), nn.Adam, 0.01),
}
CAUSES = ("learning rate", "unusually low", "What stands out", "batch itself", "mask leaves")


@pytest.fixture(scope="module", params=TRAININGS)
def training(request):
    """Return a function that trains one compiled network from its first weights, at a learning rate."""
    make, batches, make_optimizer, rate = TRAININGS[request.param]
    with mindspore_mode("graph"):
        mindspore.set_seed(0)
        network = make()
        optimizer = make_optimizer(network.trainable_params(), rate)
        scale = AdaptiveLossScaleUpdateCell(2.0**16, 2, 20)
        train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
        first = {parameter: parameter.asnumpy().copy() for parameter in train_step.get_parameters()}

        def train(factor, steps, folder, outlier=None):
            for parameter, value in first.items():
                growth = 4000 if outlier and parameter.name.endswith(outlier) else 1
                parameter.set_data(Tensor(value * growth, parameter.dtype))
            optimizer.learning_rate.set_data(Tensor(np.float32(rate * factor)))
            data = NumpySlicesDataset((batches[:steps],), shuffle=False)
            record = folder / "loss_scale_record.jsonl"
            with mindspore_mode("graph"):
                callbacks = [LossScaleMonitor(record, explain=True)]
                Model(train_step).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
            return analyze(read_log(record)).text().replace("\n", " ")

        yield train


def warned(mindformers_log):
    lines = [record.getMessage() for record in mindformers_log.records if record.levelname == "WARNING"]
    return "\n".join(lines)


def test_an_update_that_was_too_large_is_named(training, request, tmp_path, mindformers_log):
    factor = 1e5 if request.node.callspec.params["training"] in ("linear", "convolutions") else 1e3
    analysis = training(factor, 12, tmp_path)
    log = warned(mindformers_log)
    print(log, analysis, sep="\n\n")
    assert "lower the learning rate" in log
    assert "lower the learning rate" in analysis


OUTLIERS = {"autoencoder": "decoder", "linear": "decoder", "mixer": "head", "convolutions": "conv2"}


def test_a_weight_outlier_is_named(training, request, tmp_path, mindformers_log):
    weight = f"{OUTLIERS[request.node.callspec.params['training']]}.weight"
    analysis = training(1.0, 60, tmp_path, weight)
    assert all(f"{weight} has a weight of" in text for text in (analysis, warned(mindformers_log)))


def test_a_healthy_training_gets_no_cause(training, tmp_path, mindformers_log):
    analysis = training(1.0, 60, tmp_path)
    log = warned(mindformers_log)
    assert [cause for cause in (*CAUSES, "stands out") if cause in log or cause in analysis] == []
