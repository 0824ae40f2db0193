"""The command-line program: its output, its exit codes, and its messages about wrong usage."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mindformers_adaptive
from mindformers_adaptive.cli import output, versions
from mindformers_adaptive.cli.program import COMMANDS
from mindformers_adaptive.text.install_hint import install_hint
from tests.cli.quiet_runs import assert_quiet
from tests.conftest import PROGRAM, ROOT

LOGS = ROOT / "tests" / "record" / "samples"
MINDFORMERS_LOG = str(LOGS / "mindformers_1_9_cpu.log")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_has_an_example_and_lines_that_fit(run_program, monkeypatch, command):
    monkeypatch.setattr(output, "_WIDTH", 100)
    code, printed, _ = run_program(*command, "--help")
    assert code == 0
    assert printed.startswith("usage: ")
    assert re.search("examples?:\n  adaptive-loss-scale", printed)
    assert [line for line in printed.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize(
    ("mindspore", "mindformers", "verdict"),
    [
        ("2.9.0", "1.9.0", "mindspore 2.9.0, mindformers 1.9.0: a tested pair"),
        ("2.9.0", "1.6.0", "not a tested pair, which are 2.9.0 with 1.9.0 or 2.7.0 with 1.6.0 or 2.10.0 with 1.9.0"),
        ("2.9.0", None, "mindspore 2.9.0, mindformers not installed: not a tested pair"),
    ],
)
def test_versions_are_those_of_what_is_installed(run_program, tmp_path, monkeypatch, mindspore, mindformers, verdict):
    for name, version in (("mindspore", mindspore), ("mindformers", mindformers)):
        if version is not None:
            # Create the folder of metadata that pip creates for an installed package.
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    code, printed, _ = run_program("--version")
    assert code == 0
    assert printed.startswith(f"mindformers_adaptive {mindformers_adaptive.__version__}\nmindspore ")
    assert verdict in printed
    assert "Python 3" in printed


def test_import_error_without_hyper_parallel_names_it():
    message = "'train' needs hyper_parallel, .*MindFormers 2.0.0 cannot .* pip install mindformers==1.9.0"
    with pytest.raises(ImportError, match=message), install_hint("'train'"):
        importlib.import_module("hyper_parallel")


def test_the_tested_pairs_are_those_of_the_readme():
    rows = re.findall(r"^\| (?:Reference|Also tested) \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    pairs = re.findall(r"([\d.]+) (?:and|with) (?:MindFormers )?([\d.]+\d)", " ".join(rows))
    assert tuple(pairs) == versions.TESTED_PAIRS


def test_options_may_have_underscores_or_hyphens(run_program):
    for option in ("--each_trace", "--each-trace"):
        assert run_program("compare", MINDFORMERS_LOG, option, "--rules", "torch")[0] == 0
    assert run_program("find", "--train_dataset_dir", "x", "--nonsense_")[2].splitlines() == [
        "adaptive-loss-scale find: error: the following arguments are required: --config",
        "All options: adaptive-loss-scale find --help",
    ]


def test_results_on_a_log_say_what_was_read_and_what_is_known(run_program):
    described = json.loads(run_program("compare", "--json", MINDFORMERS_LOG)[1])["sources"][0]
    assert (described["trace"], described["steps"]) == ("mindformers_1_9_cpu.log", 32)
    # The log states each overflow, but not the loss scale before the first one.
    assert described["known_share"] == 31 / 32


def test_compare_of_a_folder_has_a_row_for_each_rule_and_log(run_program, tmp_path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(Path(MINDFORMERS_LOG).read_text())
    comparison = json.loads(
        run_program("compare", "--json", *sorted(tmp_path.iterdir()), "--rules", "adaptive", "torch")[1]
    )
    assert len(comparison["sources"]) == 2
    # Where several runs are compared, all rules start at one scale.
    assert {row["start"] for row in comparison["rows"]} == {2.0**16}
    assert {(row["rule"], row["trace"]) for row in comparison["rows"]} == {
        (rule, trace)
        for rule in ("adaptive", "torch")
        for trace in (None, *(source["trace"] for source in comparison["sources"]))
    }


def test_a_log_that_leaves_open_what_steps_did_is_not_replayed(run_program):
    code, _, error = run_program("compare", str(LOGS / "megatron_gpt2_n4.log"))
    assert code == 1
    assert "states for 85% of its steps" in error
    assert "record of LossScaleMonitor" in error
    assert "--log-interval 1" in error


def test_a_rule_without_a_start_starts_where_the_run_did(run_program):
    arguments = ("--rules", "torch", "dynamic:scale_window=20", "adaptive", "torch:init_scale=8")
    rows = json.loads(run_program("compare", "--json", MINDFORMERS_LOG, *arguments)[1])["rows"]
    # The first overflow of the log led to 2^23, from there or from 2^24.
    assert [row["start"] for row in rows] == [2.0**24, 2.0**24, 2.0**24, 8.0]


@pytest.fixture
def guided_record(request, tmp_path):
    """Return the record of a run whose largest gradients allow loss scales up to 2^16, 2^17 and 2^18 in turn."""
    name, largest = getattr(request, "param", ("float16", 65504))
    scales = [2.0**20, 2.0**19, *[2.0**15] * 98]
    lines = [
        {"step": step, "loss": 2.0, "overflow": step < 3, "loss_scale": scale, "next_loss_scale": scale}
        | {"largest_gradient": "inf" if step < 3 else largest / 2.0 ** (16 + step % 3), "gradient_format": name}
        for step, scale in enumerate(scales, start=1)
    ]
    (tmp_path / "record.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "record.jsonl")


FORMATS = [("float16", 65504), ("float8_e4m3fn", 448)]


@pytest.mark.parametrize("guided_record", FORMATS, indirect=True, ids=["float16", "float8"])
def test_record_with_gradients_is_compared_with_the_guided_rule(run_program, guided_record, tmp_path):
    code, printed, error = run_program("compare", "--json", guided_record, "--plot", str(tmp_path / "rules.png"))
    assert (code, error) == (0, "")
    comparison = json.loads(printed)
    rows = {row["rule"]: row for row in comparison["rows"]}
    assert rows["guided"]["skipped"] < rows["dynamic:scale_window=20"]["skipped"]
    assert comparison["sources"][0]["gradients_known"] == 0.98
    assert (tmp_path / "rules.png").stat().st_size > 10_000


@pytest.mark.parametrize("guided_record", FORMATS[1:], indirect=True, ids=["float8"])
def test_a_rule_takes_the_format_of_the_gradients(run_program, guided_record):
    other = Path(guided_record).with_name("float16.jsonl")
    other.write_text(Path(guided_record).read_text().replace("float8_e4m3fn", "float16"))
    named = [f"guided:gradient_format={name}" for name in ("float8_e4m3fn", "float16")]
    rows = json.loads(run_program("compare", "--json", guided_record, "--rules", "guided", *named)[1])["rows"]
    asked, right, wrong = ({**row, "rule": ""} for row in rows)
    assert asked == right != wrong
    code, _, error = run_program("compare", guided_record, other)
    assert (code, "in float8_e4m3fn and float16: compare each format by itself" in error) == (2, True)


def test_the_guided_rule_without_gradients_is_a_warning(run_program):
    code, printed, error = run_program("compare", MINDFORMERS_LOG, "--rules", "guided:margin=5")
    assert code == 0
    assert printed
    assert re.search("mindformers_1_9_cpu.log has no largest gradients.*'guided' sees only overflows", error)
    assert run_program("compare", MINDFORMERS_LOG)[2] == ""
    assert "guided" not in run_program("compare", MINDFORMERS_LOG)[1]


def test_every_command_of_the_lab_takes_a_rule_of_ones_own(run_program, guided_record):
    rule = "tests.shared.own_rules.Follow:margin=1"
    rows = json.loads(run_program("compare", "--json", "--rules", rule, "torch", "--", guided_record)[1])["rows"]
    assert [row["rule"] for row in rows] == [rule, "torch"]
    error = run_program("compare", MINDFORMERS_LOG, "--rules", rule)[2]
    assert "'tests.shared.own_rules.Follow' sees only overflows" in error


def test_megatron_prints_the_section(run_program):
    code, printed, _ = run_program("megatron", "--fp16", "--loss-scale-window", "500", "--lr", "0.1")
    assert code == 0
    section = yaml.safe_load(printed)["runner_wrapper"]["scale_sense"]
    assert (section["max_scale_window"], section["hysteresis"]) == (500, 2)
    assert run_program("megatron", "--fp16 --loss-scale-window 500")[1] == printed
    assert run_program("megatron", "--", "--fp16", "--loss-scale-window", "500")[1] == printed


@pytest.mark.slow
def test_find_and_probe_print_json_alone_and_agree(run_forked, corpus, tmp_path):
    model = [f"model.model_config.{key}" for key in ("seq_length=32", "hidden_size=32", "num_layers=1")]
    common = ["--config", ROOT / "configs" / "tiny_llama_cpu_fp16.yaml", "--train_dataset_dir", corpus, "--batches", 1]
    common += ["--gradient-format", "hifloat8", "--options", *model]
    finished = run_forked(PROGRAM, "find", "--json", *common)
    assert_quiet(finished, tmp_path / "output" / "log" / "find.log")
    recommendation = json.loads(finished.stdout)
    scales = ["1", "2^12", str(int(recommendation["ceiling"])), str(int(2 * recommendation["ceiling"]))]
    sweep = ["--loss-scales", *scales, "--output", "ranges.json"]
    ranges = json.loads(run_forked(PROGRAM, "find", "--json", *common, *sweep).stdout)
    assert json.loads((tmp_path / "ranges.json").read_text()) == ranges
    assert [row["overflowed_batches"] for row in ranges["loss_scales"]] == [0, 0, 0, 1]
    assert recommendation["loss_scale_value"] == recommendation["ceiling"] / 2 ** recommendation["margin"]
    assert recommendation["gradient_format"] == ranges["gradient_format"] == "hifloat8"


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    command = [sys.executable, "-m", "mindformers_adaptive", "compare", MINDFORMERS_LOG]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    ) as run:
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0
