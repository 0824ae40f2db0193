"""The source distribution and the wheel built from it work outside the checkout, as a user would use them."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import mindformers_adaptive
from mindformers_adaptive.cli.versions import TESTED_PAIRS
from mindformers_adaptive.public_names import PUBLIC
from tests.conftest import CONFIG, ROOT, with_exit_code

pytestmark = pytest.mark.slow

PACKAGE_FILES = {
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "*.pyi", "*.html", "py.typed")
    for path in (ROOT / "mindformers_adaptive").rglob(pattern)
}
SAMPLES = ROOT / "tests" / "record" / "samples"


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a copy of this checkout without ignored files, because a build would reuse files of earlier builds."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    folder = tmp_path_factory.mktemp("clone") / "mindformers_adaptive"
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", *ignored))


@pytest.fixture(scope="module")
def sdist(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    files = {file.relative_to(clone).as_posix() for file in clone.rglob("*") if file.is_file()}
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=clone, check=True, capture_output=True)
    (file,) = folder.glob("*.tar.gz")
    return file, files


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist[0]) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist[0])
    (file,) = folder.glob("*.whl")
    return file


def test_source_distribution_has_all_that_a_clone_has(sdist, unpacked):
    added = re.compile(r"PKG-INFO|setup\.cfg|mindformers_adaptive\.egg-info/.*")
    names = {file.relative_to(unpacked).as_posix() for file in unpacked.rglob("*") if file.is_file()}
    assert {name for name in names if not added.fullmatch(name)} == sdist[1]


def test_source_distribution_runs_its_own_tests(unpacked):
    # Run only quick tests, which read the files around the package and do not import MindSpore.
    tests = ("tests/docs/test_links.py", "tests/docs/test_translation.py", "tests/text/test_files.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    with_exit_code(0, subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True))


def test_public_ci_runs_both_commands_and_every_pair_and_python():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert jobs["reference"]["strategy"]["matrix"]["command"] == ["scripts/demo.sh", "scripts/test.sh"]
    rows = jobs["pairs"]["strategy"]["matrix"]["include"]
    assert {(row["mindspore"], row["mindformers"]) for row in rows} == {*TESTED_PAIRS}
    pythons = re.findall(r"\((3), (\d+)\)", (ROOT / "scripts" / "environment" / "python.sh").read_text())
    assert {row["python"] for row in rows} == {".".join(python) for python in pythons}


def test_metadata_name_every_tested_python(unpacked):
    metadata = (unpacked / "PKG-INFO").read_text()
    pythons = re.findall(r"\((3), (\d+)\)", (ROOT / "scripts" / "environment" / "python.sh").read_text())
    named = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", metadata, re.MULTILINE)
    assert named == [".".join(python) for python in pythons]


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == PACKAGE_FILES


def check_release(root, *arguments, expect_exit=0):
    """Run ``scripts/release.sh`` for a checkout, and return what it prints."""
    command = ["bash", ROOT / "scripts" / "release.sh", *arguments, "--root", root]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finished = subprocess.run(map(str, command), env=environment, capture_output=True, text=True)
    return (with_exit_code(expect_exit, finished).stdout + finished.stderr).strip()


def test_the_checkout_can_be_released(wheel):
    version = mindformers_adaptive.__version__
    printed = check_release(ROOT, "--check", "--wheel", wheel)
    assert printed == f"Version {version}: version, change log, wheel and docs agree."


def test_what_keeps_a_checkout_from_a_release_is_named(clone, wheel, tmp_path):
    root = shutil.copytree(clone, tmp_path / "checkout")
    log = root / "CHANGELOG.md"
    text = log.read_text()
    log.write_text(text.replace("## Unreleased\n", "").replace("## 2.0.0 - ", "## 9.0.0 - ", 1))
    (root / "docs" / "zh" / "rule.md").unlink()
    (root / "mindformers_adaptive" / "new.py").touch()
    (root / "README.md").write_text("Another description.")
    printed = check_release(root, "--check", "--wheel", wheel, expect_exit=1)
    for part in (
        "must begin with '## Unreleased'",
        "newest version in CHANGELOG.md is 9.0.0",
        "only one has rule.md",
        "the wheel lacks mindformers_adaptive/new.py",
        "must be README.md",
    ):
        assert part in printed, part


def test_a_release_moves_the_changes_below_its_version(clone, wheel, tmp_path):
    root = shutil.copytree(clone, tmp_path / "checkout")
    log = root / "CHANGELOG.md"
    log.write_text(log.read_text().replace("## Unreleased\n", "## Unreleased\n\n- A change.\n", 1))
    # The wheel has the former version, so the release is refused; version and change log are set.
    printed = check_release(root, "9.8.7", "--wheel", wheel, expect_exit=1)
    assert "must have version 9.8.7" in printed
    assert "CHANGELOG" not in printed
    assert re.search(r"## Unreleased\n\n## 9.8.7 - \d{4}-\d\d-\d\d\n\n- A change.", log.read_text())
    assert '__version__ = "9.8.7"' in (root / "mindformers_adaptive" / "__init__.py").read_text()
    assert "the form X.Y.Z" in check_release(root, "9.8", "--wheel", wheel, expect_exit=1)


def test_wheel_requires_no_mindspore_but_in_its_extra(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        # Search for the license file, because its place in the package's metadata depends on the version of setuptools.
        (license_file,) = [name for name in archive.namelist() if name.endswith("LICENSE")]
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
    required = {}
    for line in lines:
        if line.startswith("Requires-Dist: "):
            requirement, _, extra = line.removeprefix("Requires-Dist: ").replace("'", '"').partition("; extra == ")
            required.setdefault(extra.strip('" '), set()).add(re.sub(r"[ ()]", "", requirement))
    assert required[""] == {"numpy>=1.21", "pyyaml>=6", "filelock>=3.30", "tqdm>=4.60", "msgspec>=0.18"}
    assert required["mindformers"] == {"mindspore<2.11,>=2.7", "mindformers<1.10,>=1.6", "numpy<2"}
    assert required.keys() == {"", "mindformers", "plot", "tensorboard", "docs", "dev"}
    assert required["mindformers"] | required["plot"] | required["tensorboard"] < required["dev"]


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Return the program folder (bin) of a virtual environment with this package, but without MindSpore.

    The environment has the requirements of this package. pip may download nothing, so it fails if the package requires
    more.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "PyYAML", "filelock", "tqdm", "msgspec"):
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


def test_installed_program_has_the_version_of_the_change_log(run_bare, sdist):
    version = re.search(r"^## ([\d.]+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert run_bare("adaptive-loss-scale", "--version").stdout.startswith(f"mindformers_adaptive {version}\n")
    assert sdist[0].name == f"mindformers_adaptive-{version}.tar.gz"
    # CITATION.cff does not repeat the version of the package.
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_installed_wheel_works_away_from_the_checkout(bare, run_bare, tmp_path):
    [installed] = bare.parent.glob("lib/python*/site-packages/mindformers_adaptive")
    assert run_bare("python", "-m", "mindformers_adaptive.register_path").stdout.strip() == f"{installed}/register_path"
    code = (
        "import mindformers_adaptive as m; print(m.__file__, m.AdaptiveLossScaleUpdateCell(1, 2, 20).get_loss_scale())"
    )
    # This Python has MindSpore.
    environment = {"PYTHONPATH": str(installed.parent), "PATH": "", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == f"{installed}/__init__.py 1.0"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "exit codes:"),
        (["inspect", "--help"], "checkpoint"),
        (["find", "--help"], "--margin"),
        (["compare", SAMPLES / "mindformers_1_9_cpu.log"], "megatron"),
        (["analyze", SAMPLES / "megatron_gpt2_n4.log"], "skipped"),
        (["megatron", "--fp16", "--loss-scale", "1024"], "type: FixedLossScaleUpdateCell"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_offline_commands_work_without_mindspore(run_bare, arguments, expected):
    assert expected in run_bare("adaptive-loss-scale", *arguments).stdout


@pytest.mark.parametrize("command", ["train", "find"])
def test_commands_that_need_mindspore_say_what_to_install(run_bare, command):
    finished = run_bare("adaptive-loss-scale", command, "--config", CONFIG, expect_exit=1)
    assert f"error: '{command}' needs mind" in finished.stderr
    assert "pip install '.[mindformers]' in the clone" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(("ending", "package"), [("ckpt", "mindspore"), ("safetensors", "safetensors")])
def test_checkpoints_that_need_a_package_say_what_to_install(run_bare, tmp_path, ending, package):
    file = tmp_path / f"saved.{ending}"
    file.write_bytes(b"any")
    finished = run_bare("adaptive-loss-scale", "inspect", file, expect_exit=1)
    assert f"A .{ending} file needs {package}, which is not installed." in finished.stdout + finished.stderr


# This program prints the public names that can be imported without MindSpore. For each other public name, and for the
# module ``wrapper``, it prints the error.
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
    modules = {name: module for group in PUBLIC.values() for name, module in group.items()}
    rooms = {name: modules[name].partition(".")[0] for name in mindformers_adaptive.__all__}
    free = {name for name, room in rooms.items() if room in ("rules", "lab")}
    assert {line for line in printed if " " not in line} == free >= {"AdaptiveRule", "start_rule", "window_ladder"}
    errors = [line for line in printed if " " in line]
    assert len(errors) == len(rooms) - len(free) + 1  # one more error is for the module wrapper
    for error in errors:
        assert re.match(
            r"mindformers_adaptive\.\w+ needs mind(spore|formers), which is not installed\. On Ascend", error
        )
