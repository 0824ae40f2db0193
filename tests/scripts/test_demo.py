"""The demo trains a real model in three ways, and its report agrees with the records, the log and the checkpoint."""

import re

import mindspore
import numpy as np
import pytest

from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.text.table import as_power_of_two
from scripts.demo import demo
from tests.conftest import ROOT, write_corpus
from tests.shared.records import assert_follows

# Enough steps for the two losses to differ and for the loss scale to change.
STEPS = 100


def run_demo(run_python, corpus, *options, expect_exit=0):
    """Run the demo in ``tmp_path`` on a small corpus, with changed values in its YAML file."""
    arguments = ["--corpus", corpus, "--output_dir", "output", "--steps", STEPS]
    sizes = {"seq_length": 32, "hidden_size": 64, "num_layers": 1}
    arguments += ["--options", *(f"model.model_config.{name}={size}" for name, size in sizes.items()), *options]
    return run_python(ROOT / "scripts" / "demo" / "demo.py", *arguments, expect_exit=expect_exit)


@pytest.mark.slow
def test_demo_shows_what_scaling_is_worth(run_python, run_program, tmp_path):
    write_corpus(tmp_path / "corpus", samples=demo.BATCH_SIZE * STEPS)
    finished = run_demo(run_python, "corpus")
    *first, alone, adaptive, guided, picture, following = finished.stdout.splitlines()
    assert all(name in " ".join(first[:2]) for name in demo.SCALING)
    # The output is no terminal, so it has lines of progress, and nothing that redraws a line.
    progress = re.findall(r"^(.*\S) +step (\d+) of 100, loss [\d.]+, scale \S+$", finished.stderr, re.MULTILINE)
    assert {name for name, _ in progress} == demo.SCALING.keys()
    assert len(progress) <= 3 * demo.LINES
    assert not re.search("[\r\x1b]", finished.stdout + finished.stderr)
    run = tmp_path / "output" / "demo_1"
    records = {name: read_record(run / folder / demo.RECORD) for name, folder in demo.FOLDERS.items()}
    assert records[demo.ADAPTIVE] == assert_record_is_what_the_rule_and_the_log_say(run)
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in (alone, adaptive, guided)]
    for name, loss in zip(records, losses, strict=True):
        last = [entry["loss"] for entry in records[name] if not entry["overflow"]][-demo.AVERAGED :]
        assert loss == pytest.approx(np.mean(last), abs=0.005)
    # Without loss scaling, the final loss is higher. The difference is small after the 100 steps of this test, and
    # larger after the demo's full number of steps, so the test requires only 0.1.
    assert losses[0] > max(losses[1:]) + 0.1
    assert {entry["loss_scale"] for entry in records[demo.FP16_ALONE]} == {1 / demo.MICRO_BATCHES}
    assert {entry.get("gradient_format") for entry in records[demo.GUIDED]} == {"float16"}
    skipped = int(re.search(r"(\d+) of 100 steps skipped", adaptive)[1])
    [checkpoint] = run.glob(f"checkpoint/rank_0/*_{STEPS}.ckpt")
    saved = {
        name: value.asnumpy().item()
        for name, value in mindspore.load_checkpoint(str(checkpoint)).items()
        if value.size == 1
    }
    assert (saved["skipped_steps"], saved["global_step"]) == (skipped, STEPS - skipped)
    assert saved["scale_sense"] == records[demo.ADAPTIVE][-1]["next_loss_scale"]
    assert (tmp_path / picture.split()[-1]).read_bytes().startswith(b"\x89PNG")
    assert following.endswith(f"adaptive-loss-scale analyze output/demo_1/{demo.RECORD}")
    analyzed = run_program("analyze", run / demo.RECORD, "--details")[1]
    assert_scales_agree(records, adaptive, analyzed)


def assert_scales_agree(records, line, analyzed):
    """Check that the report, the picture and ``analyze`` have the scales of the record, in the same unit."""
    adaptive = records[demo.ADAPTIVE]
    first, last = (as_power_of_two(entry["loss_scale"]) for entry in (adaptive[0], adaptive[-1]))
    assert f"loss scale {first} to {last}" in line
    drawn = [line.get_ydata().tolist() for line in demo.draw(records).axes[1].lines]
    assert drawn == [[entry["loss_scale"] for entry in record] for record in records.values()]
    assert {first, last} <= set(re.findall(r"\b2\^\d+", analyzed))


def assert_record_is_what_the_rule_and_the_log_say(run):
    record = read_record(run / "loss_scale_record.jsonl")
    log = read_log(run / "console.log")
    assert [entry["step"] for entry in record] == log.last.tolist() == list(range(1, STEPS + 1))
    assert log.log_format == "mindformers"
    rule = AdaptiveRule(2, 1000, 20)
    assert_follows(rule, rule.start(float(demo.START), 20), record)
    assert [entry["overflow"] for entry in record] == log.most.tolist() == log.fewest.tolist()
    # MindFormers prints eight digits of the loss scale, and six decimals of the loss.
    np.testing.assert_allclose([entry["loss_scale"] for entry in record[1:]], log.used[1:], rtol=1e-6)
    np.testing.assert_allclose([entry["loss"] for entry in record], log.column("loss"), rtol=0, atol=1e-6)
    return record


@pytest.mark.slow
def test_demo_that_fails_shows_why_and_where_the_log_is(run_python, tmp_path):
    # The launcher refuses these options before it imports MindFormers.
    printed = run_demo(run_python, tmp_path, "scale_sense", expect_exit=1).stderr
    assert "'scale_sense'" in printed
    assert "output/demo_1/fp16_alone/console.log" in printed
