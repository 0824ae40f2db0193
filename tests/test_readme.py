"""What the READMEs show runs: the Python examples as they stand, the YAML as MindFormers builds it."""

import ast
import re

import mindformers
import mindspore.train
import pytest
import yaml
from conftest import ROOT
from mindformers.core.callback import build_callback
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper import build_wrapper

import mindformers_adaptive
from mindformers_adaptive import AdaptiveLossScaleUpdateCell, register, wrapper
from mindformers_adaptive.rule import megatron

READMES = ["README.md", "README_CN.md"]
MODULES_OF_THE_TABLE = [mindformers_adaptive, wrapper, megatron, mindspore.train, mindformers]


def blocks(readme, language):
    text = (ROOT / readme).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# Those of the other language are the same, as a test below shows.
PYTHON_BLOCKS = blocks(READMES[0], "python")
YAML_BLOCKS = blocks(READMES[0], "yaml")


def test_there_is_something_to_run():
    assert (len(PYTHON_BLOCKS), len(YAML_BLOCKS)) == (5, 3)


@pytest.mark.parametrize("code", PYTHON_BLOCKS, ids=range(1, 6))
def test_python_example_runs(run_python, tmp_path, code):
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    printed = run_python("example.py").stdout
    if "mindformers_adaptive.lab" in code:
        assert len(re.findall(r"^(?:adaptive|window 100|torch) +\(mean\) ", printed, re.MULTILINE)) == 3
    else:
        # The others end by printing the state of the cell.
        assert re.search(r"\{'scale_window': 20, .*'skipped_steps': \d+", printed.splitlines()[-1])


@pytest.mark.parametrize("text", YAML_BLOCKS, ids=range(1, 4))
def test_yaml_example_is_built_by_mindformers(text, tmp_path, monkeypatch):
    # MindFormers copies what auto_register names into the working folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGISTER_PATH", str(ROOT / "mindformers_adaptive" / "register_path"))
    register()
    config = MindFormerConfig(**yaml.safe_load(text))
    if config.runner_wrapper is None:
        callbacks = build_callback(config.callbacks, default_args={"MFLossMonitor": {}})
        assert [type(callback).__name__ for callback in callbacks] == [entry["type"] for entry in config.callbacks]
    else:
        cell = build_wrapper(config.runner_wrapper.scale_sense)
        assert type(cell) is AdaptiveLossScaleUpdateCell
        assert (cell.get_loss_scale(), cell.rule.ladder[0], cell.rule.ladder[-1]) == (2.0**32, 20, 1000)


def one_liners(readme):
    """The code in the table from situation to two lines, by row."""
    rows = re.findall(r"^\|.*`<br>.*\|$", (ROOT / readme).read_text(encoding="utf-8"), re.MULTILINE)
    return [re.findall("`([^`]+)`", row.rsplit(" | ", 1)[1]) for row in rows]


def test_two_lines_of_the_table_are_python_with_names_that_exist():
    rows = one_liners(READMES[0])
    assert len(rows) == 12
    assert one_liners(READMES[1]) == rows
    for line in (line for row in rows for line in row if not line.strip().startswith(("scale_sense:", "type:"))):
        names = re.findall(r"mfa\.(\w+)", line)
        called = re.findall(r"(?<![\w.])([A-Z]\w+|scale_sense_from_megatron)\(", line)
        assert all(hasattr(mindformers_adaptive, name) for name in names), line
        assert all(any(hasattr(module, name) for module in MODULES_OF_THE_TABLE) for name in called), line
        ast.parse(line)


@pytest.mark.parametrize("readme", READMES)
def test_links_and_commands_lead_to_files(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    commands = re.findall(r"\b((?:scripts|configs|tests|docs)/[\w./-]+\w)", text)
    assert links
    assert commands
    for path in (*links, *commands):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("language", ["text", "python", "yaml", "bash"])
def test_what_is_shown_is_the_same_in_both_languages(language):
    assert blocks(READMES[1], language) == blocks(READMES[0], language)
