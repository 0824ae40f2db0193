"""The wheel, built and used as a user would, away from the checkout."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from conftest import CONFIG, ROOT, with_exit_code

import mindformers_adaptive

PACKAGE_FILES = {
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "*.pyi", "py.typed")
    for path in (ROOT / "mindformers_adaptive").rglob(pattern)
}
SAMPLES = ROOT / "tests" / "lab" / "samples"


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because building leaves a build folder behind, and takes up an old one.
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "mindformers_adaptive", source / "mindformers_adaptive")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == PACKAGE_FILES


def test_wheel_requires_no_mindspore_but_in_its_extra(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        assert archive.read(metadata.replace("METADATA", "LICENSE")) == (ROOT / "LICENSE").read_bytes()
    required = {}
    for line in lines:
        if line.startswith("Requires-Dist: "):
            requirement, _, extra = line.removeprefix("Requires-Dist: ").replace("'", '"').partition("; extra == ")
            required.setdefault(extra.strip('" '), set()).add(re.sub(r"[ ()]", "", requirement))
    assert required[""] == {"numpy>=1.21", "pyyaml>=6", "tqdm>=4.60"}
    assert required["mindformers"] == {"mindspore<2.11,>=2.7", "mindformers<1.10,>=1.6", "numpy<2"}
    assert required.keys() == {"", "mindformers", "plot", "tensorboard", "docs", "dev"}
    assert required["mindformers"] | required["plot"] | required["tensorboard"] < required["dev"]


def test_installed_wheel_works_away_from_the_checkout(wheel, tmp_path):
    installed = tmp_path / "installed"
    pip("install", "--no-deps", "--target", installed, wheel)

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


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """The programs of an environment that has this package and what it requires, but no MindSpore.

    pip may download nothing, so it fails if the package requires more than the environment has.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "PyYAML", "tqdm"):
        distribution = importlib.metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (site_packages / entry).symlink_to(distribution.locate_file(entry))
    pip("--python", folder, "install", "--no-index", wheel)
    return folder / "bin"


@pytest.fixture
def run_bare(bare, tmp_path):
    def run(program, *arguments, expect_exit=0):
        command = [str(bare / program), *map(str, arguments)]
        finished = subprocess.run(
            command, cwd=tmp_path, env={"PATH": str(bare), "HOME": str(tmp_path)}, capture_output=True, text=True
        )
        return with_exit_code(expect_exit, finished)

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "commands:"),
        (["inspect", "--help"], "checkpoint"),
        (["find", "--help"], "--margin"),
        (["simulate", "--policy", "torch", "synthetic:sudden drop"], "skipped"),
        (["compare", "synthetic:sudden drop"], "megatron"),
        (["analyze", SAMPLES / "megatron_gpt2_n4.log"], "skipped"),
        (["megatron", "--fp16", "--loss-scale", "1024"], "type: FixedLossScaleUpdateCell"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_offline_commands_work_without_mindspore(run_bare, arguments, expected):
    assert expected in run_bare("adaptive-loss-scale", *arguments).stdout


@pytest.mark.parametrize("command", ["train", "probe", "find"])
def test_commands_that_need_mindspore_say_what_to_install(run_bare, command):
    finished = run_bare("adaptive-loss-scale", command, "--config", CONFIG, expect_exit=1)
    assert f"error: '{command}' needs mind" in finished.stderr
    assert "pip install mindformers_adaptive[mindformers]" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(("ending", "package"), [("ckpt", "mindspore"), ("safetensors", "safetensors")])
def test_checkpoints_that_need_a_package_say_what_to_install(run_bare, tmp_path, ending, package):
    file = tmp_path / f"saved.{ending}"
    file.write_bytes(b"any")
    finished = run_bare("adaptive-loss-scale", "inspect", file, expect_exit=1)
    assert f"A .{ending} file needs {package}, which is not installed." in finished.stdout + finished.stderr


# Prints the public names that can be had, and the errors of the others; the wrapper is a module of its own.
PUBLIC_NAMES = """
import importlib
import mindformers_adaptive
for name in mindformers_adaptive.__all__:
    try:
        getattr(mindformers_adaptive, name)
        print(name)
    except ImportError as error:
        print(error)
try:
    importlib.import_module("mindformers_adaptive.wrapper")
except ImportError as error:
    print(error)
"""


def test_names_that_need_mindspore_say_what_to_install(run_bare):
    printed = run_bare("python", "-c", PUBLIC_NAMES).stdout.splitlines()
    rooms = {name: module.partition(".")[0] for name, module in mindformers_adaptive._MODULE_OF.items()}
    free = {name for name, room in rooms.items() if room in ("rules", "lab")}
    assert {line for line in printed if " " not in line} == free >= {"AdaptiveRule", "make_policy", "window_ladder"}
    errors = [line for line in printed if " " in line]
    assert len(errors) == len(rooms) - len(free) + 1  # and that of the wrapper
    for error in errors:
        assert re.match(
            r"mindformers_adaptive\.\w+ needs mind(spore|formers), which is not installed\. On Ascend", error
        )
