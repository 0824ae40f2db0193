"""The demo: it trains a real model, it learns, and its report is true to the checkpoint."""

import json
import math
import re

import demo
import mindspore
import pytest
from conftest import ROOT

from mindformers_adaptive.monitor.record import read_record
from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule


def log_line(number, loss, overflow, loss_scale):
    return (
        f"2026-01-01 00:00:00,000 - INFO - {{ Epoch:[  1/  1], step:[{number:>5}/    4], loss:[{loss}/{loss}], "
        f"per_step_time: 9ms, lr: 0.1, overflow cond: {overflow}, loss_scale: {loss_scale}, global_norm: [1.0]\n"
    )


def test_a_line_of_mindformers_log_is_read():
    step = demo.parse_step(log_line(3, 5.5, True, 2147483600.0))
    assert step == (3, 4, 5.5, True, 2147483600.0)
    assert demo.parse_step("2026-01-01 - INFO - Training Over!\n") is None


def test_report_tells_of_every_change():
    rows = [(1, 5.0, True, 512), (2, 4.0, False, 1024), (3, 3.0, False, 2048), (4, 2.0, True, 1024)]
    steps = [demo.parse_step(log_line(*row)) for row in rows]
    scale_sense = {"loss_scale_value": 1024, "scale_window": 1, "max_scale_window": 1, "min_scale_window": 1}
    moments = demo.replay(steps, scale_sense)
    assert [re.split(r"\s{2,}", line.strip()) for line in demo.path(moments)] == [
        ["1", "1 drop", "2^10 -> 2^9", "1"],
        ["2-3", "2 raises", "2^9 -> 2^11", "1"],
        ["4", "1 drop", "2^11 -> 2^10", "1"],
    ]


def test_report_refuses_a_log_that_does_not_follow_the_rule():
    steps = [demo.parse_step(log_line(1, 5.0, True, 999.0))]
    scale_sense = {"loss_scale_value": 1024, "scale_window": 1, "max_scale_window": 1, "min_scale_window": 1}
    with pytest.raises(SystemExit, match=r"Step 1: the log has loss scale 999.0, the rule 512.0"):
        demo.replay(steps, scale_sense)


@pytest.mark.parametrize(("numbers", "text"), [([], "none"), ([1, 2, 3, 7], "1-3, 7"), ([5], "5")])
def test_ranges_of_steps(numbers, text):
    assert demo.ranges(numbers) == text


@pytest.mark.slow
def test_demo_learns_and_reports_what_the_checkpoint_holds(run_python, tmp_path):
    run_python(ROOT / "scripts" / "prepare_corpus.py", "corpus")
    printed = run_python(ROOT / "scripts" / "demo.py", "--corpus", "corpus", "--output_dir", "output").stdout
    first, last = map(float, re.search(r"Loss +from ([\d.]+) to ([\d.]+)", printed).groups())
    assert first > 5.4
    assert last < 2.8
    steps, skipped = map(int, re.search(r"Steps +(\d+), of which (\d+) were skipped", printed).groups())
    assert steps == 400
    assert 15 <= skipped <= 40
    *_, final_scale, final_window = re.findall(r"2\^(\d+) +(?:\d+ -> )*(\d+)$", printed, re.MULTILINE)[-1]
    checkpoint = mindspore.load_checkpoint(str(tmp_path / re.search(r"Checkpoint +(\S+)", printed)[1]))
    state = {name: checkpoint[name].asnumpy().item() for name in ("scale_sense", "scale_window", "skipped_steps")}
    assert state == {
        "scale_sense": 2.0 ** int(final_scale),
        "scale_window": int(final_window),
        "skipped_steps": skipped,
    }
    assert checkpoint["global_step"].asnumpy().item() == steps - skipped
    run = tmp_path / "output" / "demo_1"
    assert_record_is_what_the_rule_and_the_log_say(run)
    assert {picture.name for picture in run.glob("*.png")} == {"run.png", "gradients.png", "underflow.png"}
    assert json.loads((run / "gradients.json").read_text())["weights"]["overall"]["size"] > 0


def assert_record_is_what_the_rule_and_the_log_say(run):
    record = read_record(run / "loss_scale_record.jsonl")
    log = [step for line in (run / "console.log").read_text().splitlines() if (step := demo.parse_step(line))]
    assert [entry["step"] for entry in record] == [step.number for step in log] == list(range(1, 401))
    rule = AdaptiveRule(2, 1000, 20)
    state = rule.start(2.0**32, 20)
    for entry, step in zip(record, log, strict=True):
        assert entry["loss_scale"] == state.loss_scale
        state = rule.step(state, entry["overflow"])
        assert entry["next_loss_scale"] == state.loss_scale
        for name in ("scale_window", "window_index", "growth_num", "down_num", "skipped_steps"):
            assert entry[name] == getattr(state, name)
        # MindFormers prints eight digits of the scale, and six decimals of the loss.
        assert entry["overflow"] == step.overflow
        assert math.isclose(entry["next_loss_scale"], step.loss_scale, rel_tol=1e-6)
        assert math.isclose(entry["loss"], step.loss, abs_tol=1e-6)


@pytest.mark.slow
def test_demo_that_fails_shows_why_and_where_the_log_is(run_python):
    run_python(ROOT / "scripts" / "prepare_corpus.py", "corpus", "--samples", "8")
    options = ["--options", "runner_wrapper.scale_sense.scale_factor=1"]
    printed = run_python(
        ROOT / "scripts" / "demo.py", "--corpus", "corpus", "--output_dir", "output", *options, expect_exit=1
    ).stderr
    assert "'scale_factor' must be a finite number above 1 in float32, but got 1" in printed
    assert "see output/demo_1/console.log" in printed
