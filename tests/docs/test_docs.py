"""The pages of the documentation are true: code runs, MindFormers builds the YAML, and commands exist."""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import mindformers
import mindspore.train
import pytest
import yaml
from log_max import LogMaxRule
from mindformers.core.callback import build_callback
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper import build_wrapper
from mindspore import nn

import mindformers_adaptive
from mindformers_adaptive import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    GradientRangeMonitor,
    LossScaleMonitor,
    LossScaleState,
    RuleLossScaleUpdateCell,
    register,
    wrapper,
)
from mindformers_adaptive.cli import program
from mindformers_adaptive.lab.running_rule import RULE_NAMES
from mindformers_adaptive.mindformers.configuration_check import check_config
from mindformers_adaptive.rules import megatron
from mindformers_adaptive.rules.guided import MARGIN
from tests.conftest import ROOT
from tests.shared.networks import Dense
from tests.shared.pages import ENGLISH_DOCS as DOCS
from tests.shared.pages import blocks, blocks_in, chinese, prose, tables

MODULES_OF_THE_TABLE = [mindformers_adaptive, wrapper, megatron, mindspore.train, mindformers]


# Tests of the Python code blocks on the documentation's pages


# Runs each file as a separate program. The programs share a process, so only the first compiles its first graph slowly.
# In PyNative mode, MindSpore waits for each operator, because its threads would otherwise spin while they wait.
RUN_EACH = """
import runpy, sys

import mindspore

mindspore.set_context(pynative_synchronize=True)
for file in sys.argv[1:]:
    print("ran", file)
    runpy.run_path(file, run_name="__main__")
"""
# This block runs in tests/docs/test_own_loop.py.
RUN_ELSEWHERE = "docs/en/own_loop.md 3"


@pytest.mark.slow
def test_python_blocks_run_as_they_stand(run_forked, tmp_path):
    codes = [code for name, code in blocks_in("python").items() if name != RUN_ELSEWHERE]
    assert len(codes) >= 8
    files = [tmp_path / f"block_{number}.py" for number in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        file.write_text(code, encoding="utf-8")
    # Code on the page about user-defined rules imports log_max.py, so copy this file to the folder of the code.
    shutil.copy(ROOT / "scripts" / "examples" / "log_max.py", tmp_path)
    (tmp_path / "run_each.py").write_text(RUN_EACH)
    first, *printed = re.split(r"^ran .*\n", run_forked(tmp_path / "run_each.py", *files).stdout, flags=re.MULTILINE)
    assert first == ""
    for code, text in zip(codes, printed, strict=True):
        lines = text.splitlines()
        if ".state())" in code:
            # The last line that this code prints is the state of loss scaling.
            assert re.search(r"\{.*'scale_window': 20, .*'skipped_steps': \d+", lines[-1]), code
        if "compare(" in code:
            assert {"adaptive", "window 100", "torch"} <= {line.split("  ")[0] for line in lines}


def one_liners(page):
    """Return, for each row of the documentation's table of situations, the code in the row."""
    rows = re.findall(r"^\|.*`<br>.*\|$", prose(page), re.MULTILINE)
    return [re.findall("`([^`]+)`", row.rsplit(" | ", 1)[1]) for row in rows]


def test_lines_of_the_table_are_python_with_names_that_exist():
    rows = one_liners(DOCS / "choose.md")
    assert len(rows) == 17
    assert one_liners(chinese(DOCS / "choose.md")) == rows
    for line in (line for row in rows for line in row if not line.strip().startswith(("scale_sense:", "type:"))):
        names = re.findall(r"mfa\.(\w+)", line)
        called = re.findall(r"(?<![\w.])([A-Z]\w+|scale_sense_from_megatron)\(", line)
        assert all(hasattr(mindformers_adaptive, name) for name in names), line
        assert all(any(hasattr(module, name) for module in MODULES_OF_THE_TABLE) for name in called), line
        ast.parse(line)


# The pages' tables of arguments: page, words of the table's first row or of its heading, and what has the arguments.
ARGUMENTS = [
    ("rule", "`loss_scale_value`", AdaptiveLossScaleUpdateCell),
    ("guided", "`loss_scale_value`", GradientGuidedLossScaleUpdateCell),
    ("monitoring", "`LossScaleMonitor`", LossScaleMonitor),
    ("monitoring", "`GradientRangeMonitor`", GradientRangeMonitor),
]


@pytest.mark.parametrize(("page", "words", "described"), ARGUMENTS)
def test_table_of_arguments_is_the_signature(page, words, described):
    [rows] = [rows for rows in tables(DOCS / f"{page}.md") if words in rows[0][0] + rows[2][0]]
    parameters = inspect.signature(described).parameters.values()
    defaults = {it.name: "" if it.default is it.empty else str(it.default).lower() for it in parameters}
    if page == "guided":
        # The default of this argument depends on the format of the gradients.
        defaults["margin"] = str(MARGIN)
    assert [(row[0].strip("`"), row[1].lower()) for row in rows[2:]] == list(defaults.items())


def test_fields_of_the_state_of_the_rule_are_those_of_its_table():
    [rows] = [rows[2:] for rows in tables(DOCS / "rule.md") if "LossScaleState" in rows[0][0]]
    assert tuple(name for row in rows for name in re.findall(r"`(\w+)`", row[0])) == LossScaleState._fields


# Tests of the YAML blocks on the documentation's pages


@pytest.mark.parametrize("name", blocks_in("yaml"))
def test_yaml_block_is_built_by_mindformers(name, tmp_path, monkeypatch):
    config = read_yaml(blocks_in("yaml")[name], tmp_path, monkeypatch)
    if config.runner_wrapper is None:
        callbacks = build_callback(config.callbacks)
        assert [type(callback).__name__ for callback in callbacks] == [entry["type"] for entry in config.callbacks]
    else:
        check_config(config)
        cell = build_wrapper(config.runner_wrapper.scale_sense)
        if "/guided.md" in name:
            assert type(cell) is GradientGuidedLossScaleUpdateCell
            assert (cell.get_loss_scale(), cell.rule.margin) == (2.0**16, 2)
        elif "formats.md" in name:
            assert type(cell) is GradientGuidedLossScaleUpdateCell
            assert cell.rule.gradient_format.name == "float8_e5m2"
        elif "own_rule.md" in name:
            assert type(cell) is RuleLossScaleUpdateCell
            assert (cell.get_loss_scale(), type(cell.rule), cell.rule.margin) == (2.0**16, LogMaxRule, 2.0)
        else:
            assert type(cell) is AdaptiveLossScaleUpdateCell
            assert (cell.get_loss_scale(), cell.rule.ladder[0], cell.rule.ladder[-1]) == (2.0**16, 20, 1000)


def read_yaml(text, tmp_path, monkeypatch):
    """Return the MindFormerConfig that MindFormers makes of a YAML text, with this package registered."""
    # MindFormers copies the files that auto_register names into the working folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGISTER_PATH", str(ROOT / "mindformers_adaptive" / "register_path"))
    register()
    return MindFormerConfig(**yaml.safe_load(text))


# Tests of the diff blocks on the documentation's pages


def sides(diff):
    """Return the old and the new version of the text that a diff changes."""
    return ["".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in f" {sign}\n") for sign in "-+"]


def diff_with(word):
    [diff] = [text for text in blocks_in("diff").values() if word in text]
    return sides(diff)


def test_every_diff_is_one_of_the_two_below():
    assert ["import" in diff for diff in blocks_in("diff").values()] == [False, True]


def test_yaml_diff_leads_from_the_stock_cell_to_this_one(tmp_path, monkeypatch):
    cells = [
        build_wrapper(read_yaml(side, tmp_path, monkeypatch).runner_wrapper.scale_sense)
        for side in diff_with("runner_wrapper:")
    ]
    assert [type(cell) for cell in cells] == [nn.DynamicLossScaleUpdateCell, AdaptiveLossScaleUpdateCell]
    assert [cell.get_loss_scale() for cell in cells] == [65536, 65536]
    assert cells[1].state()["scale_window"] == 20


def test_python_diff_leads_from_the_stock_cells_to_these():
    steps = []
    for side in diff_with("import"):
        dense = Dense()
        names = {"net_with_loss": dense.network, "optimizer": dense.optimizer()}
        exec(side, names)
        steps.append(names["train_network"])
    assert [type(step) for step in steps] == [
        nn.TrainOneStepWithLossScaleCell,
        wrapper.TrainOneStepWithLossScaleCell,
    ]
    loss, overflow, loss_scale = steps[1](*Dense.batch())
    assert not bool(overflow)
    assert float(loss_scale) == 2.0**12
    assert float(loss) > 0


# Tests of the commands on the documentation's pages


def commands(block):
    """Yield the commands of a bash block as lists of words, without comments and assignments of variables."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            yield words
        # The text inside $( ) is a command too.
        yield from (shlex.split(inner) for inner in re.findall(r"\$\(([^)]+)\)", line))


def options_of(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def with_hyphens(options):
    return {f"--{option[2:].replace('_', '-')}" for option in options}


@functools.cache
def help_of(script, *arguments):
    """Return the options in the help of a script, which runs in this process."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), *arguments, "--help"])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(script), run_name="__main__")
    return options_in(printed.getvalue())


def help_of_the_program(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        program.main([*arguments, "--help"])
    return printed.getvalue()


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[\w-]+", text))


def check_script(script, words):
    """Assert that a script exists and has the options of a command."""
    if script == "run_mindformer.py":
        # run_mindformer.py is MindFormers' own script. This package's launcher has the same options, with hyphens.
        assert "-" not in "".join(option[2:] for option in options_of(words))
        script = "scripts/launch/run_mindformer.py"
    assert (ROOT / script).is_file()
    if options_of(words):
        subcommand = words[: next(number for number, word in enumerate(words) if word.startswith("--"))]
        assert with_hyphens(options_of(words)) <= with_hyphens(help_of(ROOT / script, *subcommand)), words


def check_python(words):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1])
    else:
        check_script(words[0], words[1:])


def check_program(words):
    command, *arguments = words
    if command == "--version":
        return
    assert command in program.COMMANDS
    if command == "megatron":
        assert program.main(words) == 0
    else:
        assert options_of(arguments) <= options_in(help_of_the_program(command)), words


def check_msrun(words):
    number = next(number for number, word in enumerate(words) if word.endswith(".py"))
    assert options_of(words[:number]) <= help_of(Path(sys.executable).parent / "msrun")
    check_script(words[number], words[number + 1 :])


def check_pip(words):
    assert words[0] == "install"
    extras = re.fullmatch(r"\.(?:\[(\w+)\])?", words[1])[1]
    packaging = "".join((ROOT / name).read_text() for name in ("pyproject.toml", "setup.py") if (ROOT / name).exists())
    assert extras is None or re.search(rf'^\W*{extras}"? ?[:=] ?\[', packaging, re.MULTILINE)


def check_source(words):
    assert words == [".venv/bin/activate"]
    assert "venv .venv" in (ROOT / "scripts" / "environment" / "make_venv.sh").read_text().replace("--clear ", "")


CHECKS = {
    "bash": lambda words: check_script(words[0], []),
    "python": check_python,
    "adaptive-loss-scale": check_program,
    "msrun": check_msrun,
    "pip": check_pip,
    "source": check_source,
}


@pytest.mark.parametrize("name", blocks_in("bash"))
def test_bash_block_is_bash_and_its_commands_exist(name):
    block = blocks_in("bash")[name]
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    checked = list(commands(block))
    assert checked
    for words in checked:
        # A command without a check in CHECKS fails here, and needs a check.
        CHECKS[words[0]](words[1:])


def test_commands_of_the_program_are_those_of_its_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    [listed] = [text for _, text in blocks(DOCS / "lab.md") if text.startswith("before a training")]
    assert listed in help_of_the_program()


# Tests of the figures and lists on the documentation's pages


def test_badges_say_what_the_project_says():
    pinned = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text())
    said = {"version": mindformers_adaptive.__version__, "python": ", ".join(pythons), "device": "CPU"}
    said |= {"mindspore": pinned["mindspore"], "mindformers": pinned["mindformers"], "license": "Apache 2.0"}
    for name, value in said.items():
        picture = (ROOT / "docs" / "images" / f"badge_{name}.svg").read_text()
        # Screen readers read the title of the badge, and sighted users see the text of the badge. So both must state
        # the value.
        assert picture.partition("</title>")[0].endswith(f": {value}")
        assert f">{value}</text>" in picture
    assert re.search(r"Apache License\s+Version 2\.0", (ROOT / "LICENSE").read_text())


def test_tree_of_the_package_names_every_room():
    [tree] = [text for _, text in blocks(DOCS / "contributing.md") if text.startswith("mindformers_adaptive/")]
    package = ROOT / "mindformers_adaptive"
    there = {path.name for path in package.glob("*.py")}
    there |= {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^  (\S+)", tree, re.MULTILINE)) == there


def test_list_of_rules_is_complete():
    text = prose(DOCS / "lab.md")
    section = text[text.index("## Rules by name") : text.index("## The program")]
    assert set(RULE_NAMES) <= set(re.findall(r"`(\w+)`", section))
    assert f"has {len(RULE_NAMES)} rules" in section
