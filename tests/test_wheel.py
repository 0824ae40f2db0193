"""The wheel, built and used as a user would, away from the checkout."""

import importlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

PACKAGE_FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mindformers_adaptive").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because building leaves a build folder behind, and takes up an old one.
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "mindformers_adaptive", source / "mindformers_adaptive")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == PACKAGE_FILES


def test_wheel_names_the_supported_versions(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    required = {line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")}
    assert {"mindspore<2.11,>=2.7", "mindformers<1.10,>=1.6", "numpy<2,>=1.20"} <= {
        line.replace(" ", "").replace("(", "").replace(")", "") for line in required
    }
    assert {line for line in lines if line.startswith("Provides-Extra")} == {
        "Provides-Extra: dev",
        "Provides-Extra: plot",
    }


def test_wheel_installs_the_program(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(entry_points).decode()
    module, function = re.search(r"^adaptive-loss-scale ?= ?([\w.]+):(\w+)$", text, re.MULTILINE).groups()
    assert callable(getattr(importlib.import_module(module), function))


def test_installed_wheel_works_away_from_the_checkout(wheel, tmp_path):
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, capture_output=True
    )

    def run(*arguments):
        command = [sys.executable, "-P", *arguments]
        environment = {"PYTHONPATH": str(installed), "PATH": "", "HOME": str(tmp_path)}
        finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return finished.stdout.splitlines()[-1]

    assert run("-m", "mindformers_adaptive.register_path") == str(installed / "mindformers_adaptive" / "register_path")
    code = (
        "import mindformers_adaptive as m; print(m.__file__, m.AdaptiveLossScaleUpdateCell(1, 2, 20).get_loss_scale())"
    )
    assert run("-c", code) == f"{installed / 'mindformers_adaptive' / '__init__.py'} 1.0"
