"""The log of a broken training prints a ``why`` command, which works as pasted and names the cause of the overflows."""

import re
import shlex

import mindspore
import numpy as np
import pytest
from mindspore import Model, Tensor, nn
from mindspore.dataset import NumpySlicesDataset

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, LossScaleMonitor, explain_overflow, wrapper
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.mindformers.training_probe import TrainingSource
from mindformers_adaptive.record.logs import read_log
from tests.conftest import CONFIG, PROGRAM, mindspore_mode
from tests.mindformers.training_runs import SMALL_MODEL, as_options
from tests.overflow.overflowing import Attention, Stack, values

pytestmark = pytest.mark.usefixtures("graph_mode", "registry_put_back")

LORA = "{pet_type: lora, lora_rank: 2, lora_alpha: 2, target_modules: '.*wq|.*wv'}"
# Trainings that must overflow. Each has three entries. The first is a dict: weights whose name contains the key are
# multiplied by the value. The second has the launcher's options. The third is a pattern for the first words that the
# command ``why`` prints.
BROKEN = {
    "learning rate": (
        {},
        {"lr_schedule.learning_rate": 3.0, "callbacks.1.save_checkpoint_steps": 1, "lr_schedule.warmup_steps": 1}
        | {"runner_wrapper.scale_sense.loss_scale_value": 2**16},
        # What lets the weights pass is no remedy for the update.
        "The training: .*lower the learning rate .*\nThe forward pass overflows, whatever the loss scale: in "
        r"model.layers.0[^`]*but does not undo an update that was too large:\n  compute_dtype: float32",
    ),
    "frozen layer": (
        {"lm_head": 3e5, "norm_out": 1e-6},
        {"runner_wrapper.scale_sense": 2**20, "model.model_config.pet_config": LORA},
        r"The backward pass overflows at a loss scale of 2\^\d+, but not at 2\^\d+: in lm_head",
    ),
}


@pytest.fixture(scope="module")
def weights(corpus, tmp_path_factory):
    """Yield a function that saves a checkpoint of a new model, with some weights multiplied by a factor."""
    with pytest.MonkeyPatch.context() as patch, mindspore_mode("graph"):
        patch.chdir(tmp_path_factory.mktemp("weights"))
        network = TrainingSource(CONFIG, None, corpus, SMALL_MODEL).build().train_step.network

        def save(file, changes):
            arrays = {weight.name: weight.asnumpy() for weight in network.get_parameters()}
            factors = {name: np.prod([f for part, f in changes.items() if part in name]) for name in arrays}
            saved = [{"name": name, "data": Tensor(arrays[name] * np.float32(factors[name]))} for name in arrays]
            mindspore.save_checkpoint(saved, str(file))

        yield save


def pasted(text):
    """Return the arguments of the ``why`` command that a log or advice suggests; there must be only one command."""
    commands = set(re.findall(r"adaptive-loss-scale (why [^\n'()]*)", text))
    assert len(commands) == 1, commands
    return shlex.split(commands.pop())


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_a_yaml_file(case, corpus, weights, run_forked, run_program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, options, expected = BROKEN[case]
    weights("start.ckpt", changes)
    options = {**SMALL_MODEL, **options, "load_checkpoint": "start.ckpt"}
    training = ["train", "--config", CONFIG, "--train-dataset-dir", corpus]
    finished = run_forked(PROGRAM, *training, *as_options(options))
    command = pasted(finished.stdout + finished.stderr)
    assert command == ["why", "--run", "output"]
    code, printed, errors = run_program(*command)
    assert code == 0, errors[-2000:]
    assert re.match(expected, printed), printed
    if case == "frozen layer":
        # Eight skipped steps do not count as a collapse of the loss scale, so analyze gives no advice yet.
        return
    advice = str(analyze(read_log("output/loss_scale_record.jsonl")))
    assert pasted(advice) == command


BAD_STEP = 5
EMPTY_ROW = np.ones((6, 6), bool)
IN_PROGRAMS = {
    "batch": (
        lambda: Stack(Attention()),
        np.nan,
        "The forward pass overflows, whatever the loss scale: the batch itself has inf or NaN",
        f"The loss was nan in step {BAD_STEP} only: look at that batch (overflow_batch.npz)",
    ),
    "mask": (
        lambda: Stack(Attention(), Attention(mask=EMPTY_ROW)),
        1.0,
        "A mask leaves nothing of a row, of which NaN is made: in layers.1 (Attention, Softmax",
        "all 8 steps of this training overflowed and were skipped",
    ),
}


@pytest.mark.parametrize(("case", "explain"), [("batch", True), ("batch", False), ("mask", True)])
def test_a_program(case, explain, in_a_folder_of_its_own, mindformers_log):
    make, value, verdict, last = IN_PROGRAMS[case]
    network = make()
    optimizer = nn.SGD(network.trainable_params(), 0.01)
    scale = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
    batches = values(8, 1, 6, 4)
    batches[BAD_STEP - 1, 0, 0] *= value
    data = NumpySlicesDataset((batches,), shuffle=False)
    monitor = LossScaleMonitor("record.jsonl", explain=explain)
    Model(train_step).train(1, data, callbacks=[monitor], dataset_sink_mode=False)
    lines = [record.getMessage() for record in mindformers_log.records if record.filename == "loss_scale_monitor.py"]
    [bad] = [line for line in lines if line.startswith("The loss of step ")]
    assert (last in lines[-1]) is (explain or case == "mask")
    explanations = [line for line in lines if verdict in line]
    assert len(explanations) == explain
    code = re.search(r"in a program, print\((.*?)\);", bad)[1]
    batch = (Tensor(batches[BAD_STEP - 1]),)
    explanation = eval(code, {"explain_overflow": explain_overflow, "train_step": train_step, "batch": batch})
    assert explanation.headline.startswith(verdict)
    assert not any("float32" in tried.setting for tried in explanation.tried)
