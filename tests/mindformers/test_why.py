"""The command ``why`` names the layer that overflows, and helpful settings, for a YAML file of MindFormers."""

import json
import os
import re
import shutil
from pathlib import Path

import mindspore
import numpy as np
import pytest
import yaml
from mindspore import Tensor

from mindformers_adaptive.gradients.batch_file import save_batch
from mindformers_adaptive.mindformers.overflow_probe import training_of_file
from mindformers_adaptive.mindformers.run_configuration import OverflowCase, read_run, save_configuration
from mindformers_adaptive.mindformers.training_probe import TrainingSource, probe
from tests.conftest import CONFIG, PROGRAM, mindspore_mode
from tests.mindformers.training_runs import SMALL_MODEL, as_options
from tests.overflow.overflowing import Attention, Stack

pytestmark = pytest.mark.usefixtures("graph_mode", "registry_put_back")

# The FP16 softmax does no harm here, so `why` must find that float32 for the softmax does not help.
MODEL = {**SMALL_MODEL, "model.model_config.softmax_compute_type": "float16"}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Change into a new folder, because MindFormers writes its logs into the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("why"))
        yield


@pytest.fixture(scope="module")
def checkpoint(corpus):
    """Return a checkpoint that stands for a trained model whose feed-forward layers overflow in FP16."""
    with mindspore_mode("graph"):
        network = TrainingSource(CONFIG, None, corpus, MODEL).build().train_step.network
    for weight in network.get_parameters():
        if "feed_forward" in weight.name:
            weight.set_data(Tensor(weight.asnumpy() * 3e4))
    mindspore.save_checkpoint(network, "trained-1_5.ckpt")
    return "trained-1_5.ckpt"


@pytest.mark.slow
def test_layer_is_named_and_settings_of_the_file_are_tried(corpus, checkpoint, run_program):
    options = as_options({**MODEL, "load_checkpoint": checkpoint})
    command = ["why", "--config", CONFIG, "--train-dataset-dir", corpus, "--loss-scale", "2^10", "--batches", 1]
    code, printed, _ = run_program(*command, "--details", "--plot", "layers.svg", *options)
    assert code == 0
    lines = printed.splitlines()
    assert len(lines) <= 25
    assert re.search(r"forward pass overflows, .*loss scale: in model\.layers\.0\.feed_forward", lines[0])
    assert any(line.endswith("/trained-1_5.ckpt (load_checkpoint)") for line in lines)
    outcomes = dict(line.strip().split(" -> ") for line in lines if " -> " in line)
    assert outcomes["compute_dtype: float32"].startswith("no overflow up to 2^")
    still = outcomes["softmax_compute_type: float32"]
    assert all(part in still for part in ("the forward pass still overflows", " model.layers.0.feed"))
    assert "overflows before" in outcomes["a lower loss_scale_value"]
    assert "layernorm_compute_type: float32" not in outcomes
    assert "model.layers.0.feed_forward.w1" in Path("layers.svg").read_text(encoding="utf-8")


def test_json_has_every_layer_in_the_order_of_execution(corpus, run_program):
    command = ["why", "--config", CONFIG, "--train-dataset-dir", corpus, "--loss-scale", 1, "--batches", 1, "--json"]
    code, printed, _ = run_program(*command, *as_options(SMALL_MODEL))
    explanation = json.loads(printed)
    assert (code, explanation["overflow"], explanation["tried"]) == (0, False, [])
    layers = [layer["layer"] for layer in explanation["layers"]]
    assert layers.index("model.tok_embeddings") < layers.index("model.layers.0.attention.wo") < layers.index("lm_head")
    assert explanation["measured"].startswith("new weights")


def test_all_ways_measure_the_weights_of_the_trainings_start(corpus, checkpoint):
    named = {"load_checkpoint": checkpoint}
    training = TrainingSource(CONFIG, None, corpus, {**MODEL, **named}).build_at_start()
    assert training.weights == f"weights of {Path.cwd() / checkpoint} (load_checkpoint)"
    saved = mindspore.load_checkpoint(checkpoint)
    for weight in training.train_step.network.get_parameters():
        np.testing.assert_array_equal(weight.asnumpy(), saved[weight.name].asnumpy())
    ranges = probe(TrainingSource(CONFIG, None, corpus, {**MODEL, **named}), [1], 1)
    assert ranges.overflowed_batches(1)
    assert ranges.to_dict()["measured"] == training.weights
    assert "(--checkpoint)" in TrainingSource(CONFIG, checkpoint, corpus, MODEL).build_at_start().weights
    section = {"checkpoint.load_path": checkpoint}
    with pytest.warns(UserWarning, match=r"'checkpoint.load_path' was not in"):
        assert (
            "(checkpoint.load_path)"
            in TrainingSource(CONFIG, None, corpus, {**MODEL, **section}).build_at_start().weights
        )


def test_what_cannot_be_measured_is_refused_without_a_traceback(corpus, tmp_path, run_program):
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    del config["train_dataset"], config["train_dataset_task"]
    (tmp_path / "no_data.yaml").write_text(yaml.safe_dump(config))
    missing = [[tmp_path / "no_data.yaml"], r"The YAML file .* has no 'train_dataset'.* Add .*sections"]
    named = [[CONFIG, "--train-dataset-dir", corpus, "--options", "load_checkpoint=gone.ckpt"]]
    named += [r"'load_checkpoint' of the YAML file .* there is no 'gone\.ckpt'.* --options load_checkpoint=''"]
    (tmp_path / "other.txt").write_text("")
    for words, message in (missing, named):
        for command in ("why", "find"):
            code, printed, errors = run_program(command, "--config", *words)
            assert (code, printed) == (1, "")
            assert errors.splitlines()[-1].startswith(f"adaptive-loss-scale {command}: error: ")
            assert re.search(message, errors)
    mindspore.save_checkpoint([{"name": "other", "data": Tensor([1.0])}], "other.ckpt")
    with pytest.raises(ValueError, match="must hold the network's weights"):
        training_of_file(
            OverflowCase(config=CONFIG, checkpoint="other.ckpt", train_dataset_dir=corpus, overrides=SMALL_MODEL)
        )


def test_a_run_gives_its_own_newest_whole_files(tmp_path, run_program, checkpoint):
    run, saved, other = tmp_path / "run", tmp_path / "run/checkpoint/rank_0", tmp_path / "elsewhere"
    saved.mkdir(parents=True)
    other.mkdir()
    code, _, errors = run_program("why", "--run", run)
    assert code == 1
    assert re.search(r"'run' must be .* has no loss_scale_config\.yaml.* Give --config, --checkpoint", errors)
    monitor = {"type": "LossScaleMonitor", "record_path": str(other / "record.jsonl")}
    config = {"output_dir": str(run), "seed": 1, "callbacks": [monitor], "parallel_config": object(), "metric": []}
    assert save_configuration(config, {"parallel_config": "parallel_config: {data_parallel: 1}\n"}) == str(run)
    written = run / "loss_scale_config.yaml"
    assert "parallel_config: {data_parallel: 1}" in written.read_text()
    assert read_run(run) == {"config": str(written)}
    for step in (1, 2, 3):
        shutil.copy(checkpoint, saved / f"model-1_{step}.ckpt")
    with (saved / "model-1_3.ckpt").open("r+b") as torn:
        torn.truncate(1000)
    steps = [{"step": 1, "loss": 2.0, "loss_scale": 8.0}, {"step": 2, "loss": "nan", "loss_scale": 4.0}]
    (other / "record.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (other / "overflow_batch.npz").touch()
    inputs = read_run(run)
    assert [(finding.kind, finding.step) for finding in inputs.pop("findings")] == [("bad loss", 2)]
    expected = {"checkpoint": saved / "model-1_2.ckpt", "batch": other / "overflow_batch.npz", "config": written}
    assert inputs == {**{name: str(path) for name, path in expected.items()}, "loss_scale": 4.0}
    # Files that are older than the written YAML file belong to an earlier training in the same folder.
    os.utime(written, (later := written.stat().st_mtime + 60, later))
    assert read_run(run) == {"config": str(written)}


PROGRAM_OF_A_USER = """
import numpy as np
from mindspore import Tensor, nn
from mindformers_adaptive import AdaptiveLossScaleUpdateCell, wrapper
from tests.overflow.overflowing import Attention, Stack

def network():
    return Stack(Attention(), Attention(growth=300.0))

def build():
    model = network()
    scale = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    return wrapper.TrainOneStepWithLossScaleCell(model, nn.SGD(model.trainable_params(), 0.01), scale_sense=scale)

def nothing():
    return None

def failing():
    raise RuntimeError("no device")
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Change into a folder with the module of a user, a record of its training and the saved batch."""
    monkeypatch.chdir(tmp_path)
    name = f"program_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(PROGRAM_OF_A_USER)
    steps = [{"step": step, "loss": "nan", "overflow": True, "loss_scale": 2.0**-step} for step in (1, 2)]
    (tmp_path / "loss_scale_record.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    save_batch("overflow_batch.npz", [np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)])
    return name


def test_a_program_is_explained_by_the_advised_command(program, run_program):
    advice = run_program("analyze", ".")[1]
    [advised] = re.findall(r"adaptive-loss-scale (why --record .*)", advice)
    words = advised.replace("MODULE.FUNCTION", f"{program}.build").split()
    for command in (words, ["why", "--record", ".", "--network", f"{program}:network"]):
        code, printed, errors = run_program(*command, "--json")
        assert code == 0, errors
        explanation = json.loads(printed)
        assert explanation["loss_scale"] == 0.25
        assert explanation["origin"]["layer"].startswith("layers.1")
        assert explanation["measured"].endswith("overflow_batch.npz")
        assert explanation["failure"].startswith("the loss of step 1")


def test_a_program_is_measured_with_batch_and_checkpoint(program, run_program):
    Path("overflow_batch.npz").rename("other.npz")
    network = ["why", "--network", f"{program}.network"]
    code, _, errors = run_program(*network, "--record", ".")
    assert code == 2
    assert all(part in errors for part in ("overflow_batch.npz", "--batch FILE"))
    healthy = Stack(Attention(), Attention())
    mindspore.save_checkpoint(healthy, "healthy.ckpt")
    explanation = json.loads(run_program(*network, "--batch", "other.npz", "--checkpoint", "healthy.ckpt", "--json")[1])
    # The weights that the function gives overflow in the forward pass.
    assert (explanation["origin"]["phase"], explanation["loss_scale"]) == ("backward", 2.0**16)
    assert "healthy.ckpt" in explanation["measured"]


def test_a_network_that_cannot_be_built_is_refused(program, run_program):
    refused = {
        "build": "'module.function'",
        "gone.build": "No module named 'gone'",
        f"{program}.gone": "has no attribute 'gone'",
        f"{program}.nothing": "returned None",
        f"{program}.failing": "RuntimeError('no device')",
    }
    for name, message in refused.items():
        code, printed, errors = run_program("why", "--network", name, "--batch", ".")
        assert (code, printed) == (1, "")
        assert message in errors.splitlines()[-1]
    for wrong in (["--config", str(CONFIG), "--record", "."], ["--network", "a.b", "--options", "seed=1"]):
        code, _, errors = run_program("why", *wrong)
        assert code == 2
        assert "--config" in errors or "--run" in errors


@pytest.mark.slow
def test_training_without_monitor_that_skips_every_step_says_so(corpus, checkpoint, run_forked, tmp_path):
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["callbacks"] = [{"type": "MFLossMonitor", "per_print_times": 1}]
    config["load_checkpoint"] = str(Path.cwd() / checkpoint)
    (tmp_path / "silent.yaml").write_text(yaml.safe_dump(config))
    training = ["train", "--config", "silent.yaml", "--train-dataset-dir", corpus, "--num-samples", 32]
    finished = run_forked(PROGRAM, *training, *as_options(MODEL))
    printed = finished.stdout + finished.stderr
    assert re.search("The loss of step 1 is nan.* no loss scale can help", printed)
    assert re.search("all 4 steps .*overflowed and were skipped", printed)
