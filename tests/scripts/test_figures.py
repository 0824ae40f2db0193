"""The numbers in the documentation equal the files in docs/figures, and agree with the present code.

Measurements of trainings and compiled graphs are compared where the trainings and graphs run: in
tests/gradients/test_finder.py and tests/scripts.
"""

import json
import re

import pytest

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from scripts.benchmarks import costs as benchmark
from scripts.demo import demo
from scripts.studies import figures
from scripts.studies.figures import DATA, FIGURES, PAGES, Figure
from tests.conftest import ROOT
from tests.shared.pages import ENGLISH, ENGLISH_DOCS, blocks, chinese, figure, name_of


def shown_on(page):
    return re.findall(r"^<!-- figures: (\w+)/(\w+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_shows_what_the_data_say(page):
    text = page.read_text(encoding="utf-8")
    assert figures.rendered(text, page) == text, "run: python -m scripts.studies.figures --render"
    assert text.splitlines().count("<!-- end of figures -->") == len(shown_on(page))
    for name, _ in shown_on(page):
        assert FIGURES[name].command.partition(" ")[2] in text


def test_every_table_is_on_a_page_of_each_language():
    assert [shown_on(chinese(page)) for page in ENGLISH] == [shown_on(page) for page in ENGLISH]
    tables = {(name, table) for name in FIGURES for table in figures.tables_of(name)}
    assert {shown for page in ENGLISH for shown in shown_on(page)} == tables


def test_data_are_of_the_present_commands_and_versions():
    assert {file.stem for file in DATA.iterdir()} == {*FIGURES, "chinese"}
    pinned = dict(re.findall(r"^(mind\w+)==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    for name, measured in FIGURES.items():
        data = figure(name)
        assert (data["command"], data["mindspore"], data["mindformers"]) == (measured.command, *pinned.values()), name


def test_a_block_is_replaced_and_translated(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "DATA", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", {"one": Figure("command")})
    (tmp_path / "chinese.json").write_text('{"steps": "步数", "# of # seeds": "{1}个种子中的{0}个"}', encoding="utf-8")
    (tmp_path / "one.json").write_text('{"printed": ["| steps | seen |", "|---|---|", "| 2.5 | 2 of 3 seeds |"]}')
    figures.tables_of.cache_clear()
    text = "before\n<!-- figures: one/printed -->\n{}<!-- end of figures -->\nafter"
    english = figures.rendered(text.format("old\n"), ROOT / "README.md")
    in_chinese = figures.rendered(text.format("old\n"), ROOT / "README_CN.md")
    # The language of a page must not depend on the folder of the repository, because a clone may be in a folder zh.
    assert figures.rendered(text.format("old\n"), tmp_path / "zh" / "README.md") == english
    figures.tables_of.cache_clear()
    assert english == text.format("| steps | seen |\n|---|---|\n| 2.5 | 2 of 3 seeds |\n")
    assert in_chinese == text.format("| 步数 | seen |\n|---|---|\n| 2.5 | 3个种子中的2个 |\n")


def test_a_command_that_fails_leaves_the_data_as_they_were(tmp_path):
    file = tmp_path / "streams.json"
    command = "python -m scripts.studies.streams --seeds 1 --steps"
    figures.measure(Figure(f"{command} 2", "streams"), file)
    assert json.loads(file.read_text())["command"] == f"{command} 2"
    before = file.read_bytes()
    with pytest.raises(figures.subprocess.CalledProcessError):
        figures.measure(Figure(f"{command} 0", "streams"), file)
    assert file.read_bytes() == before


def test_only_some_runs_are_measured_again(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(figures.subprocess, "run", lambda command, **_: commands.append(command))
    with pytest.raises(FileNotFoundError):
        figures.measure(FIGURES["worth"], tmp_path / "worth.json", "guided")
    assert commands[0][3:5] == ["--again", "guided"]


LOGGED = [
    "2026-01-02 03:04:05,678 - mindformers/output/log[cells/train_step.py:400] - INFO - Loss scaling by a fixed scale",
    "[WARNING] ME(10394:1400,MainProcess):2026-01-02-03:04:05.670.000 [mindspore/x.py:59] Module is deprecated",
]


def test_only_what_a_command_prints_is_kept():
    printed = [
        "MindFormers says hello",
        "LeNet5  steps",
        LOGGED[0],
        "fixed  64",
        *LOGGED,
        "",
        "adaptive  64",
        LOGGED[1],
        "",
    ]
    assert figures.kept("\n".join(printed), "LeNet5") == ["LeNet5  steps", "fixed  64", "", "adaptive  64"]
    # A log line may come first, also where all lines are kept.
    assert figures.kept("\n".join([*LOGGED, "| a |"]), "") == ["| a |"]


@pytest.mark.parametrize("name", [name for name, measured in FIGURES.items() if not measured.module])
def test_printed_figures_hold_no_log(name):
    assert not [line for line in figure(name)["printed"] if figures.LOG_LINE.match(line)]


# Measurements that are quick to repeat


def test_rows_of_what_was_timed_are_those_of_the_script():
    for name, mode in (("update", "graph"), ("update_pynative", "PyNative")):
        assert (figure(name)["mode"], list(figure(name)["times"])) == (mode, list(benchmark.CELLS))
    step, detection = figure("step"), figure("detection")
    callbacks = [benchmark.MONITOR, benchmark.GRADIENTS]
    assert list(step["times"]) == [benchmark.STEP, *callbacks, benchmark.FORWARD, benchmark.BACKWARD]
    assert list(step["scalings"]) == list(benchmark.SCALINGS)
    ways = [benchmark.EMPTY, benchmark.PLAIN, benchmark.ALL_FINITE, *benchmark.DETECTIONS, benchmark.NUMPY]
    assert [list(times) for times in detection["times"].values()] == [ways] * len(benchmark.TENSORS)
    assert (list(detection["times"]), detection["elements"]) == (list(map(str, benchmark.TENSORS)), benchmark.ELEMENTS)


def test_report_on_the_page_has_the_lines_of_the_demo(tmp_path):
    state, record = (rule := AdaptiveRule(2, 1000, 20)).start(2.0**24, 20), []
    for step in range(1, demo.STEPS + 1):
        before, state = state, rule.step(state, step <= 8)
        scales = {"loss_scale": before.loss_scale, "next_loss_scale": state.loss_scale}
        record.append({"step": step, "overflow": step <= 8, "scale_window": state.scale_window, "loss": 0.0, **scales})
    (tmp_path / demo.RECORD).write_text("".join(f"{json.dumps(entry)}\n" for entry in record))
    expected = demo.report(dict.fromkeys((demo.FP16_ALONE, demo.ADAPTIVE, demo.GUIDED), record), tmp_path)
    printed = figure("demo")["printed"]
    assert [line.partition(":")[0] for line in printed] == [line.partition(":")[0] for line in expected]
    for line in printed[:3]:
        assert f"of {demo.STEPS} steps skipped" in line


def test_commands_of_the_version_table_are_its_rows():
    script = (ROOT / "scripts" / "versions" / "version_table.sh").read_text(encoding="utf-8")
    pairs = re.search(r"\|\| set -- (.*)", script)[1].split()
    columns, *rows = figures.tables_of("versions")["printed"]
    assert f'echo "| {" | ".join(columns)} |"' in script
    assert ["+".join(row[:2]) for row in rows] == pairs


def test_line_of_a_record_is_what_the_rule_does():
    [line] = [json.loads(text) for _, text in blocks(ENGLISH_DOCS / "monitoring.md") if text.startswith('{"step"')]
    rule = AdaptiveRule(2, 1000, 20)
    state = rule.start(2.0**32, 20)
    for step in range(1, line["step"]):
        state = rule.step(state, overflow=step <= line["skipped_steps"])
    assert line["loss_scale"] == state.loss_scale
    state = rule.step(state, line["overflow"])
    assert line["next_loss_scale"] == state.loss_scale
    for key in ("scale_window", "window_index", "growth_num", "down_num", "skipped_steps"):
        assert line[key] == getattr(state, key), key
