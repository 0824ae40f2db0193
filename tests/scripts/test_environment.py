"""The shell scripts show what matters of pip, and import names that exist."""

import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_pips_errors_are_shown_without_its_warnings(tmp_path):
    shutil.copytree(ROOT / "scripts" / "environment", tmp_path / "scripts" / "environment")
    (tmp_path / "requirements.txt").write_text("a-package-that-is-nowhere==1\n")
    # pip warns of a place that does not exist, and downloads nothing.
    settings = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "nowhere")}
    finished = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "source scripts/environment/make_venv.sh"],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert finished.returncode != 0
    assert "a-package-that-is-nowhere==1" in finished.stderr
    assert "WARNING" not in finished.stdout + finished.stderr
    # An environment that is not complete is not used.
    assert not (tmp_path / ".venv" / "installed_requirements.txt").exists()


@pytest.mark.parametrize(("script", "says"), [("demo", "Llama"), ("docs", "documentation"), ("test", "--quick")])
def test_help_installs_nothing(tmp_path, script, says):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    command = ["bash", f"{script}.sh", "--help"]
    finished = subprocess.run(command, cwd=tmp_path / "scripts", capture_output=True, text=True, timeout=60)
    assert (finished.returncode, finished.stderr, says in finished.stdout) == (0, "", True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scripts"]


IMPORTS = [
    (script.name, *names)
    for script in sorted((ROOT / "scripts").rglob("*.sh"))
    for names in re.findall(r"^from (mindformers_adaptive\S*) import (.+)$", script.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize(("script", "module", "names"), IMPORTS)
def test_python_code_in_a_shell_script_imports_names_that_exist(script, module, names):
    for name in names.split(", "):
        assert hasattr(importlib.import_module(module), name), f"{script}: {module} has no {name}"


def test_there_is_such_a_script():
    assert IMPORTS
