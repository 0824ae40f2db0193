"""Advice is given as Python where a program recorded the run without a YAML file, and as YAML otherwise."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

import mindformers_adaptive
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots.report import write_report
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.rules import make_rule
from mindformers_adaptive.rules.pasting import arguments_of_rule, cell_call
from tests.conftest import ROOT
from tests.record.log_writers import record_line


def write_record(folder, steps):
    """Write a record of steps, given as pairs of loss scale and overflow, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "loss_scale_record.jsonl"
    rows = enumerate(steps, start=1)
    record.write_text("".join(record_line(step, flag, scale, next_loss_scale=scale) for step, (scale, flag) in rows))
    return record


def too_high():
    """Return steps of a run that starts at 2^32, of which 2^16 is the first scale that holds, and skips steps again."""
    again = [*[(2.0**16, False)] * 20, (2.0**17, True)]
    return [*((2.0 ** (32 - step), True) for step in range(16)), *again * 10]


def built(text):
    """Return the update cell that Python text from advice makes."""
    [(call, name)] = re.findall(r"^((\w+UpdateCell)\(\n(?:    .*\n)+\))$", text, re.MULTILINE)
    return eval(call, {name: getattr(mindformers_adaptive, name)})


def test_settings_for_a_program_make_the_cell(tmp_path, run_program):
    record = write_record(tmp_path, too_high())
    _, text, _ = run_program("analyze", record)
    cell = built(text)
    assert "runner_wrapper" not in text
    section = yaml.safe_load(analyze(read_log(record)).scale_sense)["scale_sense"]
    assert section.pop("type") == "GradientGuidedLossScale"
    assert cell.state()["loss_scale"] == section.pop("loss_scale_value") == 2.0**16
    assert {name: getattr(cell.rule, name) for name in section} == section
    analysis = json.loads(run_program("analyze", "--json", record)[1])
    assert analysis["in_python"]
    assert analysis["update_cell"] in text
    page = write_report({"run": record}, tmp_path / "page.html", "").read_text()
    assert "GradientGuidedLossScaleUpdateCell(" in page
    assert "runner_wrapper" not in page


def configured(folder):
    (folder / "loss_scale_config.yaml").touch()


def configured_above(folder):
    (folder.parent / "loss_scale_config.yaml").touch()


def logged(folder):
    log = folder / "log" / "rank_0" / "info.log"
    log.parent.mkdir(parents=True)
    log.write_text("2026-01-01 - INFO - { Epoch:[  1/  1], step:[    1/  800], loss: 6.2 }\n")


@pytest.mark.parametrize("leave_sign", [configured, configured_above, logged])
def test_settings_for_a_yaml_file_are_yaml(leave_sign, tmp_path, run_program):
    record = write_record(tmp_path / "output" / "run", too_high())
    leave_sign(record.parent)
    text = run_program("analyze", record)[1]
    assert (
        yaml.safe_load(text[text.index("scale_sense:") :].split("\n\n")[0])["scale_sense"]["loss_scale_value"] == 65536
    )
    assert built(run_program("analyze", "--python", record)[1]).state()["loss_scale"] == 2.0**16


def test_a_log_without_a_sign_gets_yaml_unless_asked(tmp_path, run_program):
    log = ROOT / "tests" / "record" / "samples" / "mindformers_1_9_cpu.log"
    assert not analyze(read_log(log)).in_python
    assert analyze(read_log(log), in_python=True).in_python
    record = write_record(tmp_path, too_high())
    assert "scale_sense:" in run_program("analyze", "--no-python", record)[1]


COMMANDS = {
    "collapse": ([(1.0, True)] * 60, "why --record {} --network"),
    "scale of 1": ([(1.0, False)] * 30, "find_loss_scale(train_step, batches)"),
    "no scale held": ([(2.0 ** (32 - step), True) for step in range(8)] + [(2.0**24, False)] * 13, "find_loss_scale("),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands_for_a_program_need_no_yaml_file(case, tmp_path, run_program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps, expected = COMMANDS[case]
    record = write_record(tmp_path, steps)
    text = run_program("analyze", record)[1]
    assert expected.format(Path(record).name) in text
    assert "--config" not in text


@pytest.mark.parametrize("overflows", [[*[True] * 20, False], [step % 25 == 0 for step in range(400)]])
def test_advice_for_the_guided_rule_has_no_windows(overflows, tmp_path):
    record = write_record(tmp_path, [(2.0**16, overflow) for overflow in overflows])
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines = [line | {"largest_gradient": None if line["overflow"] else 0.4} for line in lines]
    record.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines[:5], *lines[8:]]))
    assert not re.search("window|hysteresis", analyze(read_log(record)).text())


def test_a_log_of_unknown_origin_gets_a_command_for_both(tmp_path):
    run = dataclasses.replace(read_log(write_record(tmp_path, [(1.0, True)] * 60)), log_format="another")
    [advice] = analyze(run).advice
    assert re.findall(r"^adaptive-loss-scale why (--\w+)", advice.change, re.MULTILINE) == ["--config", "--network"]


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("adaptive", {"min_loss_scale": 2.0**-10, "hysteresis": 2}),
        ("guided", {"margin": 8, "gradient_format": "float8_e5m2"}),
        ("guided", {"max_loss_scale": 2.0**20}),
        ("tests.shared.own_rules.Follow", {}),
    ],
)
def test_a_call_to_paste_makes_the_cell_of_the_rule(rule, arguments):
    configured = make_rule(rule, **arguments)
    values = {"loss_scale_value": 2.0**12, **arguments_of_rule(configured)}
    cell = built(cell_call(type(configured), values))
    assert cell.state()["loss_scale"] == 2.0**12
    assert repr(cell.rule) == repr(configured)
