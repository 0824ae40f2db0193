"""The probe: a YAML file of MindFormers and a checkpoint in, gradient ranges out."""

import json

import pytest
from conftest import ROOT
from launched import run_in_processes
from training_runs import TrainingRun

from mindformers_adaptive.integration.training_probe import probe

CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"


@pytest.mark.parametrize("name", ["missing", ""])
def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_built(name):
    with pytest.raises(FileNotFoundError, match=f"'checkpoint' must name a file or folder, but there is no '{name}'"):
        probe(CONFIG, name)


PROBES = """
import json, sys, warnings
import mindspore
from mindformers_adaptive.integration.training_probe import build_training, load_weights, probe

config, corpus = sys.argv[1:]
small = {"model.model_config." + key: value for key, value in
         {"seq_length": 32, "hidden_size": 32, "num_layers": 1}.items()}
told = []
fresh = probe(config, None, corpus, [2.0**4, 2.0**12, 2.0**30], 2, overrides=small, progress=told.append)

network = build_training(config, corpus, small)[0].network
weights = network.parameters_dict()
name = next(iter(weights))
for weight in weights.values():
    weight.set_data(weight * 0.5)
mindspore.save_checkpoint(network, "halved-1_5.ckpt")
mindspore.save_checkpoint(network, "checkpoints/rank_0/halved-1_5.safetensors", format="safetensors")
mindspore.save_checkpoint(network, "iteration_00000005/x-model-0000000-0000001.safetensors", format="safetensors")
halved = probe(config, "halved-1_5.ckpt", corpus, [2.0**4], 1, overrides=small)

ratios = []
for path in ("halved-1_5.ckpt", "checkpoints", "iteration_00000005"):
    before = weights[name].asnumpy()
    weights[name].set_data(weights[name] * 3)
    load_weights(network, path)
    ratios.append(float((weights[name].asnumpy() / before).max()))

problems = []
mindspore.save_checkpoint([{"name": name, "data": weights[name]}], "part.ckpt")
mindspore.save_checkpoint([{"name": "other", "data": weights[name]}], "other.ckpt")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    load_weights(network, "part.ckpt")
problems += [str(each.message) for each in caught]
try:
    load_weights(network, "other.ckpt")
except ValueError as error:
    problems.append(str(error))
content = {"told": told, "fresh": fresh.to_dict(), "halved": halved.to_dict(), "ratios": ratios, "problems": problems}
json.dump(content, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("probe")
    for name in ("checkpoints/rank_0", "iteration_00000005"):
        (folder / name).mkdir(parents=True)
    (folder / "probes.py").write_text(PROBES)
    run_in_processes(1, folder, folder / "probes.py", CONFIG, corpus)
    return json.loads((folder / "found.json").read_text())


def test_every_weight_of_the_model_is_probed_at_every_scale(found):
    fresh = found["fresh"]
    names = fresh["weights"]["parameters"].keys()
    assert {"model.tok_embeddings.embedding_weight", "lm_head.weight"} < names
    for scale in fresh["loss_scales"]:
        assert scale["parameters"].keys() == names
    assert [scale["overflowed_batches"] for scale in fresh["loss_scales"]] == [0, 0, 2]
    assert fresh["loss_scales"][1]["overall"]["largest"] > 0
    assert found["told"] == [1, 2, 3, 4, 5, 6]


def test_loss_is_that_of_an_untrained_model_and_batches_differ(found):
    losses = [batch["loss_scales"][0]["loss"] for batch in found["fresh"]["batches"]]
    assert losses == pytest.approx([5.55, 5.55], abs=0.1)
    assert losses[0] != losses[1]


def test_weights_are_those_of_the_checkpoint(found):
    fresh = found["fresh"]["weights"]["overall"]["norm"]
    assert found["halved"]["weights"]["overall"]["norm"] == pytest.approx(fresh / 2)


def test_checkpoints_are_read_in_every_format(found):
    assert found["ratios"] == [1.0, 1.0, 1.0]


def test_a_checkpoint_of_another_model_is_refused_and_one_with_gaps_warned_of(found):
    gaps, other = found["problems"]
    assert "does not have" in gaps
    assert "of the network's" in gaps
    assert "has none of them" in other


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batches": 0}, ValueError, "'batches' must be at least 1"),
        ({"batches": 2.0}, TypeError, "'batches' must be an integer"),
        ({"config_path": "missing.yaml"}, FileNotFoundError, "there is no file 'missing.yaml'"),
    ],
)
def test_bad_input_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        probe(**{"config_path": str(CONFIG), **changes})


FIND = """
import json, sys
from mindformers_adaptive.gradients.recommendation import recommend_loss_scale
from mindformers_adaptive.integration.training_probe import probe

config, corpus, overrides = sys.argv[1:]
ranges = probe(config, None, corpus, [2.0**e for e in range(25)], 2, overrides=json.loads(overrides))
json.dump(recommend_loss_scale(ranges).to_dict(), open("found.json", "w"))
"""


@pytest.mark.slow
def test_scale_found_for_a_loss_per_token_trains_and_norms_are_those_that_mindformers_logs(
    run_forked, corpus, tmp_path
):
    model = {"model.model_config.seq_length": 32, "model.model_config.hidden_size": 32}
    overrides = {**model, "calculate_per_token_loss": True}
    script = tmp_path / "find.py"
    script.write_text(FIND)
    run_forked(script, CONFIG, corpus, json.dumps(overrides))
    scale = json.loads((tmp_path / "found.json").read_text())["loss_scale_value"]
    monitor = "{type: GradientRangeMonitor, every_n_steps: 1, loss_scales: [1]}"
    options = {"calculate_per_token_loss": True, "callbacks.1": monitor}
    options |= {"runner_wrapper.scale_sense.loss_scale_value": scale, "runner_wrapper.scale_sense.scale_window": 20}
    options |= {"runner_wrapper.scale_sense.min_scale_window": 20, "runner_wrapper.scale_sense.max_scale_window": 1000}
    with TrainingRun(tmp_path / "run", corpus, options, steps=8) as run:
        steps = run.wait().steps()
    assert sum(step.overflow for step in steps.values()) <= 1
    lines = (tmp_path / "run" / "gradient_ranges.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        logged = steps[line["step"]]
        [batch] = line["batches"]
        # 8 samples of 32 tokens.
        assert batch["grad_scale_factor"] == 256
        for at_scale in line["loss_scales"]:
            norm = at_scale["overall"]["norm"] / at_scale["loss_scale"] / batch["grad_scale_factor"]
            assert logged.overflow or norm == pytest.approx(float(logged.global_norm.strip("[]")), rel=1e-3)
    assert len(lines) == len(steps) == 8
