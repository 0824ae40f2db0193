"""Fixtures that many tests share: MindSpore's modes, the demo's corpus, and functions that run commands as a user."""

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from mindformers_adaptive.cli import output
from tests.shared.source_memo import remember_source_lines

remember_source_lines()

# Keep compiled modules, even if the environment forbids it: the tests start many processes, and each of them would
# compile the modules that it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests compare sentences, wherever the program would wrap them. Programs that tests start see it in COLUMNS.
UNWRAPPED = 100000
output._WIDTH = UNWRAPPED
# pytest-xdist sets COLUMNS in its workers.
os.environ.pop("COLUMNS", None)

# Hypothesis draws the same examples on every machine, however slow the machine is.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent
# The YAML file of the demo training.
CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
# The script with which ``run_forked`` runs the command-line program.
PROGRAM = ROOT / "mindformers_adaptive" / "__main__.py"

# Folders of tests that build MindFormers' trainers in their own process.
TRAINERS = [ROOT / "tests" / name for name in ("gradients", "mindformers")]

# The time limit of a test, in seconds. A busy machine may be slow, but a test that takes longer than this hangs.
TIME_LIMIT = 1800

# How often, in seconds, processes that train together try to reach each other. MindSpore's default is 3 to 5 seconds.
os.environ |= {"MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="number of kills of each run that a test kills during a save")
    parser.addoption("--judged", type=int, default=60, help="number of random runs whose analyses are judged")
    parser.addoption("--release", action="store_true", help="also check that the API reference is all in Chinese too")


# Fixtures that build the site or an environment. A test that uses one of them is slow.
SLOW_FIXTURES = {"site", "browse", "bare", "run_bare"}


def pytest_itemcollected(item):
    if item.get_closest_marker("xdist_group") is None:
        # Run all tests of a file in one worker, so that only one worker computes what they share.
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if not SLOW_FIXTURES.isdisjoint(fixtures(item)):
        item.add_marker("slow")


def pytest_ignore_collect(collection_path):
    """Let pytest collect only files of tests. Some other files are programs that change MindSpore on import."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_helper else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Run tests of several processes first, then slow tests, and tests that build MindFormers' trainers last.

    Tests of several processes take longest, because some need two processes that have missed a lost machine. Until
    these have, the other tests of several processes run. MindFormers' trainers leave settings in the test process that
    change how later graphs compile.
    """
    items.sort(
        key=lambda item: (
            not has_several_processes(item),
            "until_lost" in fixtures(item),
            "cut_off" not in fixtures(item),
            any(folder in item.path.parents for folder in TRAINERS),
            not is_slow(item),
        )
    )
    for item in items:
        if item.name == "mindformers_adaptive.mindformers.trainer.Trainer":
            # Import MindFormers only for the docstring example of Trainer, because other tests do not need it.
            from tests.shared.versions import BEFORE_1_7

            why = "MindFormers before 1.7 writes its log into the output that this docstring example checks"
            item.add_marker(pytest.mark.skipif(BEFORE_1_7, reason=why))


def fixtures(item):
    return getattr(item, "fixturenames", ())


def has_several_processes(item):
    return any(mark.args == ("several processes",) for mark in item.iter_markers("xdist_group"))


def is_slow(item):
    return item.get_closest_marker("slow") is not None


@pytest.fixture(scope="module", autouse=True)
def _older_objects_left_alone():
    """Exclude all objects that exist before the first test of a file from garbage collection.

    MindSpore collects garbage before it compiles a graph. Without this fixture, each collection would look through some
    hundred thousand objects of MindSpore, which takes as long as compiling a small graph. MindSpore also keeps objects
    of each graph for good.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def time_limit(seconds):
    """Fail the test at its current line if the block takes longer than ``seconds``."""

    def fail(*_):
        pytest.fail(f"The test took longer than its time limit of {seconds} seconds. It may hang in the current line.")

    handler = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with time_limit(TIME_LIMIT):
        return (yield)


pytest_runtest_call = pytest_runtest_setup


@pytest.fixture(params=["graph", "pynative"])
def mode(request):
    """Run the test in GRAPH_MODE and once more in PYNATIVE_MODE."""
    with mindspore_mode(request.param):
        yield request.param


@pytest.fixture
def graph_mode():
    """Run the test in GRAPH_MODE, the mode of training on Ascend."""
    with mindspore_mode("graph"):
        yield


@pytest.fixture
def scaling_on_cpu(monkeypatch):
    """Run the test after ``enable_loss_scale_in_model()``, and undo its effect afterwards."""
    import mindspore.train.amp

    from mindformers_adaptive import enable_loss_scale_in_model

    for module in (mindspore.amp, mindspore.train.amp):
        monkeypatch.setattr(module, "build_train_network", module.build_train_network)
    enable_loss_scale_in_model()


@contextlib.contextmanager
def mindspore_mode(name):
    """Run the block in "graph" mode, synchronous PyNative mode ("pynative"), or default PyNative mode ("asynchronous").

    The mode ``pynative`` computes the same as ``asynchronous``, but waits for each operator. Without this waiting,
    MindSpore's threads spin while they wait for each other, and a small step takes thirty times as long.
    """
    import mindspore

    mode = {"mode": mindspore.GRAPH_MODE if name == "graph" else mindspore.PYNATIVE_MODE}
    context = {**mode, "pynative_synchronize": True} if name == "pynative" else mode
    before = {name: mindspore.get_context(name) for name in context}
    mindspore.set_context(**context)
    try:
        yield
    finally:
        mindspore.set_context(**before)


@pytest.fixture
def registry_put_back():
    """Restore MindFormers' registry after the test."""
    from mindformers.tools.register import MindFormerRegister

    registry = {kind: dict(classes) for kind, classes in MindFormerRegister.registry.items()}
    names = dict(MindFormerRegister.search_names_map)
    yield
    MindFormerRegister.registry.update(registry)
    MindFormerRegister.search_names_map = names


@pytest.fixture
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Run the test in an empty folder, because MindFormers writes logs and gradient norms to the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mindformers_log(caplog):
    """Return the captured log, including MindFormers' messages, which do not propagate to other loggers."""
    from mindformers.tools.logger import get_logger

    caplog.set_level("INFO")
    get_logger().addHandler(caplog.handler)
    yield caplog
    get_logger().removeHandler(caplog.handler)


@pytest.fixture
def messages(caplog):
    """Return a function without arguments that returns the messages that the monitors have logged so far."""
    caplog.set_level("INFO")
    files = ("loss_scale_monitor.py", "recording_callback.py")
    return lambda: [record.getMessage() for record in caplog.records if record.filename in files]


@pytest.fixture
def path(tmp_path):
    """Return the path of the run record that a monitor writes in the test."""
    return tmp_path / "record.jsonl"


@pytest.fixture
def run_program(capsys):
    """Return a function that runs the program in this process, and returns its exit code, output and error output."""
    from mindformers_adaptive.__main__ import main

    def run(*arguments):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_python(tmp_path):
    """Return a function that runs Python in the folder ``tmp_path`` and returns the finished process.

    The function takes Python's arguments. The process can import this checkout like an installed package. Its exit code
    must be ``expect_exit``.
    """

    def run(*arguments, expect_exit=0, timeout=600, **environment):
        command = [sys.executable, *map(str, arguments)]
        finished = subprocess.run(
            command, cwd=tmp_path, env=as_installed(environment), capture_output=True, text=True, timeout=timeout
        )
        return with_exit_code(expect_exit, finished)

    return run


@pytest.fixture
def run_forked(tmp_path, tmp_path_factory):
    """Return a function that runs a Python script in a process that has already imported MindSpore and MindFormers.

    Otherwise the function does the same as the function that ``run_python`` returns.
    """
    from tests.shared.launched import ForkedRun

    def run(script, *arguments, expect_exit=0, timeout=600, **environment):
        folder = tmp_path_factory.mktemp("printed")
        command, output, errors = list(map(str, [script, *arguments])), folder / "stdout", folder / "stderr"
        code = ForkedRun(command, tmp_path, as_installed(environment), output, errors).wait(timeout)
        finished = subprocess.CompletedProcess(command, code, stdout=output.read_text(), stderr=errors.read_text())
        return with_exit_code(expect_exit, finished)

    return run


def as_installed(environment):
    """Return environment variables with which this checkout can be imported like an installed package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # MindFormers stores a trainer's output folder in LOCAL_DEFAULT_PATH. A process that inherits this variable writes
    # its logs to that folder.
    inherited = {name: value for name, value in os.environ.items() if name != "LOCAL_DEFAULT_PATH"}
    return {**inherited, "PYTHONPATH": path, "COLUMNS": str(UNWRAPPED), **environment}


def with_exit_code(expected, finished):
    """Return the finished process if it has the expected exit code; otherwise fail with the end of its output."""
    assert finished.returncode == expected, (finished.stdout + finished.stderr)[-5000:]
    return finished


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return a function that makes a folder for a compiled graph. Calls with equal arguments get the same folder."""
    return functools.cache(lambda *_: tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Return the folder of a small byte corpus in MindRecord format: 64 samples of 33 bytes."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "samples", samples=64)


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory):
    """Return the folder of a larger byte corpus in MindRecord format: 3200 samples of 33 bytes."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "samples", samples=3200)


def write_corpus(folder, samples, seq_length=32):
    """Write ``samples`` samples of ``seq_length`` + 1 bytes to a new folder, and return the folder."""
    from mindspore.mindrecord import FileWriter

    length = seq_length + 1
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)[: samples * length]
    folder.mkdir()
    writer = FileWriter(str(folder / "corpus.mindrecord"), shard_num=1)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [length]}}, "source code")
    writer.write_raw_data([{"input_ids": row} for row in text.astype(np.int32).reshape(samples, length)])
    writer.commit()
    return folder
