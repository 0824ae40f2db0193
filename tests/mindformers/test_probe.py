"""The command ``find`` measures gradient ranges of a training, from MindFormers' YAML file and a checkpoint."""

import json
import sys
from pathlib import Path

import mindspore
import numpy as np
import pytest
import yaml

from mindformers_adaptive.mindformers.training_probe import TrainingSource, load_weights, probe
from tests.conftest import CONFIG, PROGRAM, mindspore_mode
from tests.mindformers.training_runs import SMALL_MODEL, TrainingRun, as_options
from tests.monitor.event_files import read_scalars

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graph_mode", "registry_put_back")]

# Checkpoint files with the weights of a new model, multiplied by 0.5.
HALVED = ["halved-1_5.ckpt", "checkpoints/rank_0/halved-1_5.safetensors"]
HALVED += ["iteration_00000005/x-model-0000000-0000001.safetensors"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Change into a new folder, because MindFormers writes its logs into the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("probe"))
        yield


@pytest.fixture(scope="module")
def network(corpus):
    """Return a new model with all weights multiplied by 0.5, and save these weights in each checkpoint format."""
    with mindspore_mode("graph"):
        network = TrainingSource(CONFIG, None, corpus, SMALL_MODEL).build().train_step.network
    for weight in network.get_parameters():
        weight.set_data(weight * 0.5)
    for file in map(Path, HALVED):
        file.parent.mkdir(parents=True, exist_ok=True)
        mindspore.save_checkpoint(network, str(file), format=file.suffix[1:])
    return network


def test_every_weight_of_the_model_is_probed_at_every_scale(corpus, network):
    done = []
    scales = [2.0**4, 2.0**12, 2.0**30]
    fresh = probe(TrainingSource(CONFIG, None, corpus, SMALL_MODEL), scales, 2, progress=done.append).to_dict()
    names = fresh["weights"]["parameters"].keys()
    assert {"model.tok_embeddings.embedding_weight", "lm_head.weight"} < names
    for scale in fresh["loss_scales"]:
        assert scale["parameters"].keys() == names
    assert [scale["overflowed_batches"] for scale in fresh["loss_scales"]] == [0, 0, 2]
    assert fresh["loss_scales"][1]["overall"]["largest"] > 0
    assert done == [1, 2, 3, 4, 5, 6]
    # The losses show that the model is untrained, and that the batches differ.
    losses = [batch["loss_scales"][0]["loss"] for batch in fresh["batches"]]
    assert losses == pytest.approx([5.55, 5.55], abs=0.1)
    assert losses[0] != losses[1]
    halved = probe(TrainingSource(CONFIG, HALVED[0], corpus, SMALL_MODEL), scales[:1], 1).to_dict()
    assert halved["weights"]["overall"]["norm"] == pytest.approx(fresh["weights"]["overall"]["norm"] / 2)


@pytest.mark.parametrize("path", [HALVED[0], "checkpoints", "iteration_00000005"])
def test_checkpoints_are_read_in_every_format(network, path):
    weight = next(network.get_parameters())
    before = weight.asnumpy().copy()
    weight.set_data(weight * 3)
    load_weights(network, path)
    np.testing.assert_array_equal(weight.asnumpy(), before)


def test_checkpoint_of_another_model_is_refused_or_warned_of(network):
    weight = next(network.get_parameters())
    for name in (weight.name, "other"):
        mindspore.save_checkpoint([{"name": name, "data": weight}], f"{name}.ckpt")
    with pytest.warns(UserWarning, match=r"does not have \d+ of the network's"):
        load_weights(network, f"{weight.name}.ckpt")
    with pytest.raises(ValueError, match="has none of them"):
        load_weights(network, "other.ckpt")


@pytest.mark.parametrize(
    ("named", "batches", "error", "message"),
    [
        ({}, 0, ValueError, "'batches' must be at least 1"),
        ({}, 2.0, TypeError, "'batches' must be an integer"),
        ({"config_path": "missing.yaml"}, 1, FileNotFoundError, "there is no file 'missing.yaml'"),
        ({"checkpoint": "missing"}, 1, FileNotFoundError, "'checkpoint' must name .*, but there is no 'missing'"),
        ({"checkpoint": ""}, 1, FileNotFoundError, "'checkpoint' must name .*, but there is no ''"),
    ],
)
def test_bad_input_is_refused(named, batches, error, message):
    with pytest.raises(error, match=message):
        probe(TrainingSource(**{"config_path": str(CONFIG), **named}), batches=batches)


UPDATE_CELL = """
from mindformers.tools.register import MindFormerRegister
from mindformers_adaptive import AdaptiveLossScaleUpdateCell

@MindFormerRegister.register("wrapper")
class CellOfAUser(AdaptiveLossScaleUpdateCell):
    pass
"""


def test_find_takes_classes_of_a_users_folder(corpus, run_program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("REGISTER_PATH", "")
    (tmp_path / "cells_of_a_user.py").write_text(UPDATE_CELL)
    section = {"type": "CellOfAUser", "auto_register": "cells_of_a_user.CellOfAUser", "loss_scale_value": 8}
    config = {"base_config": str(CONFIG), "runner_wrapper": {"scale_sense": section}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = ["find", "--config", tmp_path / "run.yaml", "--train-dataset-dir", corpus, "--batches", 1, "--details"]
    command += as_options(SMALL_MODEL)
    assert "in the folder that --register-path names" in run_program(*command)[2]
    code, printed, errors = run_program(*command, "--register-path", tmp_path)
    assert code == 0, errors
    assert "lost at 2^0" in printed
    # What the file takes from its base_config is in the section too.
    assert all(line in printed for line in ("    type: CellOfAUser\n", "    max_scale_window: 1000\n"))


def test_scale_found_for_a_loss_per_token_trains(run_forked, corpus, tmp_path):
    model = as_options({**SMALL_MODEL, "calculate_per_token_loss": True})
    training = ["--config", CONFIG, "--train-dataset-dir", corpus, "--batches", 1, *model]
    scale = json.loads(run_forked(PROGRAM, "find", "--json", *training).stdout)["loss_scale_value"]
    monitor = "{type: GradientRangeMonitor, every_n_steps: 1, loss_scales: [1]}"
    options = {"calculate_per_token_loss": True, "callbacks.1": monitor}
    options["tensorboard.tensorboard_dir"] = tmp_path / "board"
    options |= {"runner_wrapper.scale_sense.loss_scale_value": scale, "runner_wrapper.scale_sense.scale_window": 20}
    options |= {"runner_wrapper.scale_sense.min_scale_window": 20, "runner_wrapper.scale_sense.max_scale_window": 1000}
    with TrainingRun(tmp_path / "run", corpus, options, steps=8) as run:
        steps = run.wait().steps()
    assert sum(step.overflow for step in steps.values()) <= 1
    lines = (tmp_path / "run" / "gradient_ranges.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        logged = steps[line["step"]]
        [batch] = line["batches"]
        # The batch has 8 samples of 32 tokens.
        assert batch["grad_scale_factor"] == 256
        for at_scale in line["loss_scales"]:
            norm = at_scale["overall"]["norm"] / at_scale["loss_scale"] / batch["grad_scale_factor"]
            assert logged.overflow or norm == pytest.approx(float(logged.global_norm.strip("[]")), rel=1e-3)
    assert len(lines) == len(steps) == 8
    events = read_scalars(tmp_path / "board" / "rank_0")
    assert 8 in events["lm_head.weight/grad"]
    assert 4 in events["gradients/norm"]


def test_gradients_are_written_as_the_optimizer_takes_them(corpus, run_program):
    training = ["find", "--config", CONFIG, "--train-dataset-dir", corpus, "--batches", "2"]
    model = as_options(SMALL_MODEL)
    layers = {12: ["--layers", "*.feed_forward", "--output", "ranges.json"], 14: []}
    for scale in layers:
        sweep = ["--loss-scales", f"2^{scale}", "--gradients", f"{scale}.safetensors"]
        code, printed, _ = run_program(*training, *sweep, *layers[scale], *model)
        assert code == 0
        assert ("\ngradients of these outputs\nat 2^12" in printed) == (scale == 12)
    verdict, table, _ = run_program("diff", "12.safetensors", "14.safetensors")[1].split("\n\n")
    rows = table.splitlines()
    assert "Parameters differ." in verdict
    assert {"model.tok_embeddings.embedding_weight", "lm_head.weight"} < {row.split()[0] for row in rows[1:]}
    # The command divides gradients by their loss scale before it writes them to a file. So the gradients at 2^12 and
    # 2^14 differ only where FP16 rounded subnormal numbers at 2^12.
    assert 0 < float(rows[1].split()[-2]) < 0.01
    [at_scale] = json.loads(Path("ranges.json").read_text())["activation_gradients"]
    # The layer's gradients have the size of its outputs: 2 batches of 8 samples of 32 tokens, hidden size 32.
    assert {name: each["size"] for name, each in at_scale["layers"].items()} == {
        "model.layers.0.feed_forward": 2 * 8 * 32 * 32
    }
    drawn = run_program("plot", "ranges.json", "x.png", "--of", "activation_gradients", "--modules", "*.feed_forward")
    assert drawn[0] == 0, drawn[2]
    refused = run_program(*training, "--loss-scales", "1", "2", "--gradients", "x.safetensors", *model)
    assert refused[0] == 2
    assert "one loss scale" in refused[2]
