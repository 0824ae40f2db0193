"""The demo trains a real model that learns, and its report agrees with the checkpoint."""

import json
import re

import mindspore
import numpy as np
import pytest
from conftest import ROOT, write_corpus
from pages import figure
from record_checks import assert_follows

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from scripts.demo import demo

# Of the demo's 400, enough for it to learn and for the window to move; and samples a quarter as long learn as well.
STEPS = 120


def run_demo(run_python, corpus, *options, expect_exit=0):
    """Run the demo on a corpus, with keys of the YAML changed, in ``tmp_path``."""
    arguments = ["--corpus", corpus, "--output_dir", "output", "--options", "model.model_config.seq_length=32"]
    return run_python(ROOT / "scripts" / "demo" / "demo.py", *arguments, *options, expect_exit=expect_exit)


@pytest.mark.slow
def test_demo_learns_and_reports_what_the_checkpoint_holds(run_python, tmp_path):
    write_corpus(tmp_path / "corpus", samples=8 * STEPS)
    printed = run_demo(run_python, "corpus", f"train_dataset.data_loader.num_samples={8 * STEPS}").stdout
    first, last = map(float, re.search(r"Loss +from ([\d.]+) to ([\d.]+)", printed).groups())
    assert first > 5.4
    assert last < 3.2
    steps, skipped = map(int, re.search(r"Steps +(\d+), of which (\d+) were skipped", printed).groups())
    assert steps == STEPS
    assert 15 <= skipped <= 30
    # The report on the first page is of longer samples, and begins in the same way.
    held = "\n".join(figure("demo")["printed"])
    for begin, error in ((r"Loss +from ([\d.]+)", 0.1), (r"overflow: 1-(\d+)", 2)):
        now, shown = (float(re.search(begin, report)[1]) for report in (printed, held))
        assert now == pytest.approx(shown, abs=error)
    *_, final_scale, final_window = re.findall(r"2\^(\d+) +(?:\d+ -> )*(\d+)$", printed, re.MULTILINE)[-1]
    checkpoint = mindspore.load_checkpoint(str(tmp_path / re.search(r"Checkpoint +(\S+)", printed)[1]))
    state = {name: checkpoint[name].asnumpy().item() for name in ("scale_sense", "scale_window", "skipped_steps")}
    shown = {"scale_sense": 2.0 ** int(final_scale), "scale_window": int(final_window), "skipped_steps": skipped}
    assert state == shown
    assert checkpoint["global_step"].asnumpy().item() == steps - skipped
    run = tmp_path / "output" / "demo_1"
    assert_record_is_what_the_rule_and_the_log_say(run)
    assert {picture.name for picture in run.glob("*.png")} == {"run.png", "gradients.png", "underflow.png"}
    assert re.search(r"Next +.* && adaptive-loss-scale analyze (\S+)$", printed)[1] == f"output/demo_1/{demo.RECORD}"
    assert json.loads((run / "gradients.json").read_text())["weights"]["overall"]["size"] > 0


def assert_record_is_what_the_rule_and_the_log_say(run):
    record = read_record(run / "loss_scale_record.jsonl")
    log = read_log(run / "console.log")
    assert [entry["step"] for entry in record] == log.step.tolist() == list(range(1, STEPS + 1))
    assert log.log_format == "mindformers"
    rule = AdaptiveRule(2, 1000, 20)
    assert_follows(rule, rule.start(2.0**32, 20), record)
    assert [entry["overflow"] for entry in record] == log.overflow.tolist()
    # MindFormers prints eight digits of the scale, and six decimals of the loss.
    np.testing.assert_allclose([entry["loss_scale"] for entry in record[1:]], log.loss_scale[1:], rtol=1e-6)
    np.testing.assert_allclose([entry["loss"] for entry in record], log.loss, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_demo_that_fails_shows_why_and_where_the_log_is(run_python, corpus):
    printed = run_demo(run_python, corpus, "runner_wrapper.scale_sense.scale_factor=1", expect_exit=1).stderr
    assert "'scale_factor' must be a finite number above 1 in float32, but got 1" in printed
    assert "see output/demo_1/console.log" in printed
