"""The commands on the page about comparing runs draw figures of loss scales, iterations, checkpoints and devices.

The data come from real runs of the demo's model, see tests/plots/shrink_run.py.
"""

import re
import shlex
import shutil

import pytest

from tests.conftest import ROOT

DATA = ROOT / "tests" / "plots" / "runs"
PAGES = {"en": "## Figures, one by one", "zh": "## 逐一画图"}


def commands_of(language):
    """Return the ``plot`` and ``diff`` commands that the page about comparing runs has in its section about figures."""
    page = (ROOT / "docs" / language / "lab.md").read_text(encoding="utf-8")
    section = re.split("^##+ ", page.partition(PAGES[language])[2], maxsplit=1, flags=re.MULTILINE)[0]
    code = "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL)).replace("\\\n", "")
    commands = [shlex.split(line)[1:] for line in code.splitlines()]
    return [command for command in commands if command and command[0] in ("plot", "diff")]


COMMANDS = commands_of("en")


def picture_of(command):
    """Return the name of the picture that a command writes, or the command's first word if it prints a table."""
    return next((word for word in command if word.endswith(".png")), command[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shutil.copytree(DATA, tmp_path_factory.mktemp("figures") / "runs")


@pytest.mark.parametrize("command", COMMANDS, ids=picture_of)
def test_figure_is_built_by_its_command(folder, monkeypatch, run_program, command):
    monkeypatch.chdir(folder)
    code, printed, errors = run_program(*command)
    assert code == 0, errors
    if command[0] == "plot":
        assert (folder / picture_of(command)).stat().st_size > 20_000
    else:
        for language in PAGES:
            page = (ROOT / "docs" / language / "lab.md").read_text(encoding="utf-8")
            assert f"```text\n{printed}```" in page


def test_every_figure_is_there_on_the_pages_of_both_languages():
    assert commands_of("zh") == COMMANDS
    assert [command[0] for command in COMMANDS].count("diff") == 1
    assert len({picture_of(command) for command in COMMANDS}) == len(COMMANDS) == 7
