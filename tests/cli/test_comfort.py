"""What makes the program pleasant: a quick start, folders, default names, colour, and a quiet terminal."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from mindformers_adaptive.cli import output
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.record.logs import read_log
from tests.cli.quiet_runs import assert_quiet
from tests.conftest import CONFIG, PROGRAM, ROOT, as_installed

SMALL = ["model.model_config.seq_length=32", "model.model_config.hidden_size=32", "model.model_config.num_layers=1"]


@pytest.fixture
def run_folder(tmp_path):
    """Return an output folder with a record of 60 steps, as a training leaves it."""
    (tmp_path / "output").mkdir()
    lines = [
        {"step": step, "loss": 2.0, "overflow": step < 3, "loss_scale": 2.0**18 if step > 2 else 2.0 ** (21 - step)}
        | {"next_loss_scale": 2.0**18}
        for step in range(1, 61)
    ]
    (tmp_path / "output" / "loss_scale_record.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "output"


HEAVY = {"numpy", "yaml", "mindspore", "mindformers", "matplotlib", "msgspec", "tqdm", "filelock"}


@pytest.mark.parametrize("arguments", [["--help"], [], ["-h"], ["anlyze"]])
def test_help_imports_no_package(run_python, arguments):
    code = (
        "import sys; from mindformers_adaptive.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)"
    )
    assert run_python("-c", code, *arguments).stderr.splitlines()[-1] == "[]"


PROSE = "The overflow began in the first step that had a batch of zeros, and nothing else was found to change. "


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (PROSE * 2, 3),
        (f"  {PROSE}", 2),
        (f"{PROSE}Find the layer: adaptive-loss-scale why --run output/a/long/path/to/the/folder/of/a/run", 2),
        (f"adaptive-loss-scale why --run {'x' * 100}", 1),
        (f"model.layers.0.weight   {PROSE}", 1),
    ],
)
def test_prose_is_wrapped_and_a_command_stays_whole(monkeypatch, line, lines):
    monkeypatch.setattr(output, "_WIDTH", 100)
    shown = output.wrapped(line).split("\n")
    assert " ".join(each.strip() for each in shown).split() == line.split()
    assert len(shown) == lines
    if lines > 1:
        assert max(map(len, shown)) <= 100
        assert {len(each) - len(each.lstrip()) for each in shown} == {len(line) - len(line.lstrip())}


@pytest.mark.parametrize("command", [["analyze"], ["analyze", "--details"], ["compare"]])
@pytest.mark.parametrize("log", ["mindformers_1_9_cpu.log", "megatron_gpt2_n4.log", "deepspeed_overflow.log"])
def test_no_line_about_a_log_is_too_long(run_program, monkeypatch, command, log):
    monkeypatch.setattr(output, "_WIDTH", 100)
    monkeypatch.chdir(ROOT / "tests" / "record" / "samples")
    printed = run_program(*command, log)[1:]
    assert [line for text in printed for line in text.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("log", ["mindformers_1_9_cpu.log", "megatron_gpt2_n4.log", "deepspeed_overflow.log"])
def test_an_analysis_is_wrapped_once(monkeypatch, log):
    """A second wrap at another width leaves lines of a few words."""
    monkeypatch.setattr(output, "_WIDTH", 100)
    text = analyze(read_log(ROOT / "tests" / "record" / "samples" / log)).text()
    assert output.wrapped(text) == text


@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_the_folder_of_a_run_stands_for_its_record(run_program, run_folder, command):
    of_file = run_program(command, "--json", run_folder / "loss_scale_record.jsonl")
    assert of_file[0] == 0
    assert run_program(command, "--json", run_folder) == of_file


def test_a_log_of_mindformers_is_found_where_there_is_no_record(run_program, tmp_path):
    (tmp_path / "log" / "rank_0").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "record" / "samples" / "mindformers_1_9_cpu.log", tmp_path / "log/rank_0/info.log")
    code, printed, _ = run_program("analyze", tmp_path)
    assert (code, "11 of 32" in printed) == (0, True)


def test_folders_that_hold_no_or_several_records_are_refused(run_program, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "output_2")
    code, _, error = run_program("analyze", tmp_path)
    assert (code, "output_2" in error, "Name one run's folder" in error) == (1, True, True)
    (tmp_path / "empty").mkdir()
    code, _, error = run_program("analyze", tmp_path / "empty")
    assert (code, "must hold loss_scale_record.jsonl" in error) == (1, True)


def test_report_and_plot_have_default_names(run_program, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_program("report", "output")[:2] == (0, "written: report.html\n")
    shutil.copytree("output", "output_2")
    assert run_program("plot", "output", "output_2")[:2] == (0, "written: loss_scale_record.png\n")
    shutil.copy(run_folder / "loss_scale_record.jsonl", "tuesday.jsonl")
    assert run_program("plot", "tuesday.jsonl", "output")[:2] == (0, "written: tuesday.png\n")
    assert run_program("plot", "tuesday.jsonl", "output", "other.svg")[:2] == (0, "written: other.svg\n")
    assert {"report.html", "loss_scale_record.png", "tuesday.png", "other.svg"} < set(os.listdir())


def test_the_configuration_is_found_in_the_folder_of_a_run(run_program, tmp_path):
    (tmp_path / "loss_scale_config.yaml").write_text("[1]")
    assert "loss_scale_config.yaml must hold keys" in run_program("find", "--config", tmp_path)[2]
    (tmp_path / "empty").mkdir()
    assert "there is no file" in run_program("find", "--config", tmp_path / "empty")[2]


def on_a_terminal(*arguments, folder, **environment):
    """Run the program with its output on a pseudo-terminal, and return the exit code and what appears there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mindformers_adaptive", *map(str, arguments)]
    settings = as_installed({"TERM": "xterm", "NO_COLOR": "", **environment})
    with subprocess.Popen(command, cwd=folder, env=settings, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        # On Linux, reading fails at the end of a pseudo-terminal.
        try:
            while part := os.read(ours, 1024):
                shown += part
        except OSError:
            pass
    os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.parametrize(
    ("arguments", "coloured"),
    [(["analyze", "output"], "skipped"), (["analyze", "nowhere"], "error: "), (["x"], "error")],
)
def test_colour_is_for_terminals_only(run_folder, run_program, arguments, coloured, monkeypatch):
    folder = run_folder.parent
    code, shown = on_a_terminal(*arguments, folder=folder)
    assert re.search(rf"\x1b\[1[;\d]*m[^\x1b]*{coloured}[^\x1b]*\x1b\[0m", shown)
    # Without colour, the same text.
    for variable in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = on_a_terminal(*arguments, folder=folder, **variable)
        assert plain == (code, re.sub(r"\x1b\[[\d;]*m", "", shown))
    monkeypatch.chdir(folder)
    assert "\x1b" not in "".join(run_program(*arguments)[1:])


@pytest.mark.slow
def test_the_lines_of_mindformers_are_in_a_file(run_forked, corpus, tmp_path):
    odd_start = "runner_wrapper.scale_sense.loss_scale_value=65535"
    # MindFormers sets up its log anew if the output folder is not its default.
    training = ["--config", CONFIG, "--train-dataset-dir", corpus, "--output-dir", "runs"]
    training += ["--options", *SMALL, odd_start]
    log = tmp_path / "runs" / "log" / "train.log"
    quiet = run_forked(PROGRAM, "train", "--num-samples", 64, *training)
    assert_quiet(quiet, log)
    # Messages of this package are shown, also while MindFormers' are not.
    assert "Loss scaling is recorded in" in quiet.stdout + quiet.stderr
    assert re.search(r"^steps: 8 of 8, loss [\d.]+, loss scale \S+, skipped \d+$", quiet.stderr, re.MULTILINE)
    # Warnings are shown too, although MindFormers writes all warnings to its log.
    assert re.search("^warning: .*loss_scale_value' must be a power of two, but got 65535", quiet.stderr, re.MULTILINE)
    size_before = log.stat().st_size
    # This run fails early, so it takes less time.
    loud = run_forked(PROGRAM, "train", "--verbose", *training, "optimizer.eps=x", expect_exit=1)
    assert " - INFO - " in loud.stdout + loud.stderr
    assert log.stat().st_size == size_before
    assert (tmp_path / "runs" / "loss_scale_record.jsonl").is_file()


@pytest.mark.slow
def test_the_last_lines_are_shown_where_mindformers_fails(run_forked, corpus, tmp_path):
    words = ["find", "--config", CONFIG, "--train-dataset-dir", corpus, "--options", *SMALL]
    failed = run_forked(PROGRAM, *words, "model.model_config.num_heads=7", expect_exit=1).stderr
    assert " - INFO - " in failed
    assert "last lines of output/log/find.log" in failed
    assert failed.splitlines()[-1].startswith("adaptive-loss-scale find: error: ")
    # A message of this package needs no lines of MindFormers.
    refused = run_forked(PROGRAM, *words, "optimizer.type=Lamb", expect_exit=1).stderr
    assert ("'optimizer.type' must be" in refused, " - INFO - " in refused) == (True, False)
