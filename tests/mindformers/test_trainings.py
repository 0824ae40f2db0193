"""MindFormers' PyNative trainer with loss scaling trains through overflows, and continues after kills.

``hyper_parallel_stand_in`` replaces hyper-parallel and the kernels that a CPU lacks. The stand-ins change MindSpore, so
the trainings run in separate processes.
"""

import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

from mindformers_adaptive.mindformers.checkpoint_reader import newest_state
from mindformers_adaptive.record.writer import read_record
from tests.conftest import ROOT
from tests.shared.launched import with_this_python
from tests.shared.versions import BEFORE_2

if BEFORE_2:
    pytest.skip("MindFormers before 2.0 has a different PyNative trainer", allow_module_level=True)

STEPS = 16
SCRIPT = ROOT / "tests" / "mindformers" / "pynative_runs.py"
pytestmark = pytest.mark.xdist_group("pynative trainings")


def run(folder, task, expect_exit=0, prefix=(sys.executable,)):
    """Run the trainings of a task in a separate process, and return what the process printed."""
    finished = subprocess.run(
        [*prefix, str(SCRIPT), str(folder), task],
        cwd=folder,
        env={**with_this_python(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    printed = finished.stdout + finished.stderr
    assert finished.returncode == expect_exit, printed[-5000:]
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder to which the trainings write."""
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def seen(folder):
    """Run all trainings that can share one process; return their results by name, and the printed text."""
    printed = run(folder, "all")
    return pickle.loads((folder / "all.pickle").read_bytes()) | {"printed": printed}


def assert_same_weights(first, other):
    names = [name for name in first if name.startswith("weight ")]
    assert len(names) == 8
    for name in names:
        assert np.isfinite(first[name]).all()
        np.testing.assert_array_equal(first[name], other[name], err_msg=name)


def overflows_of(training):
    """Return, for each step of a training, whether the number of skipped steps rose, that is, the step overflowed."""
    return np.diff(training["steps"][:, 3], prepend=0) > 0


@pytest.mark.parametrize("name", ["adaptive", "guided", "own", "accumulated"])
def test_losses_scales_and_weights_equal_a_plain_loop(seen, name):
    trained, loop = seen[name], seen[f"{name} loop"]
    np.testing.assert_array_equal(trained["steps"][:, [0, 2, 3]], loop["steps"][:, [0, 2, 3]])
    assert_same_weights(trained, loop)
    # Accept a single overflow of the guided rule: one may be enough to bring the initial loss scale down.
    assert (1 if name == "guided" else 5) <= overflows_of(trained).sum() <= STEPS - 4


@pytest.mark.parametrize("name", ["adaptive", "guided", "own", "accumulated"])
def test_step_that_overflows_does_not_count_for_the_optimizer(seen, name):
    trained = seen[name]
    overflows = overflows_of(trained)
    assert trained["updates"] == STEPS - overflows.sum()
    # The gradient norm shows the overflows: only an overflow makes the norm inf or NaN.
    np.testing.assert_array_equal(np.isfinite(trained["steps"][:, 1]), ~overflows)


def test_micro_batches_share_one_decision(seen):
    assert seen["accumulated"]["decisions"] == seen["adaptive"]["decisions"] == STEPS


def test_the_state_of_the_trainer_has_scale_and_count(seen):
    assert seen["adaptive"]["steps"][-1, 2] > 1.0
    assert seen["adaptive"]["steps"][-1, 3] > 0


@pytest.mark.parametrize("name", ["one", "scaled"])
def test_unchanged_trainer_takes_the_same_steps_in_float32(seen, name):
    stock, trained = seen["stock float32"], seen[f"{name} float32"]
    np.testing.assert_array_equal(trained["steps"][:, :2], stock["steps"][:, :2])
    assert_same_weights(trained, stock)
    assert {*trained["steps"][:, 2]} == {1.0 if name == "one" else 1024.0}


def test_gradients_are_clipped_by_their_norm_without_the_scale(seen):
    """MindFormers clips with ``Tensor.mul_``. If it works in place, clipping is the same at every loss scale."""
    stock, trained = seen["stock clipped in place"], seen["scaled clipped in place"]
    np.testing.assert_array_equal(trained["steps"][:, :2], stock["steps"][:, :2])
    assert_same_weights(trained, stock)
    assert (trained["steps"][:, 1] > 0.5).all()


def test_on_a_cpu_the_clipping_of_mindformers_changes_nothing(seen):
    """If this test fails, MindFormers clips gradients on a CPU, and the documentation must no longer deny this."""
    unclipped, clipped = seen["stock clipped"], seen["stock clipped in place"]
    assert any((unclipped[name] != clipped[name]).any() for name in clipped if name.startswith("weight "))


def test_the_record_is_what_the_trainer_did(seen, folder):
    for name in ("adaptive", "guided", "own", "accumulated"):
        record, steps = read_record(folder / name / "record.jsonl"), seen[name]["steps"]
        assert [line["step"] for line in record] == [*range(1, STEPS + 1)]
        assert [(line["loss"], line["next_loss_scale"], line["skipped_steps"]) for line in record] == [
            (loss, scale, skipped) for loss, _, scale, skipped in steps
        ]
        assert [line["overflow"] for line in record] == [*overflows_of(seen[name])]
    assert all(line["largest_gradient"] > 0 for line in read_record(folder / "guided" / "record.jsonl"))


def test_checkpoints_hold_the_state_and_inspect_shows_it(seen, folder):
    state = newest_state(folder / "adaptive" / "checkpoint")
    scale, skipped = seen["adaptive"]["steps"][-1, 2:]
    assert (state["loss_scale"], state["skipped_steps"]) == (scale, skipped)


def test_killed_run_takes_the_same_steps_after_a_resume(seen, folder):
    run(folder, "killed", expect_exit=-signal.SIGKILL)
    [*_, last] = read_record(folder / "killed" / "record.jsonl")
    assert last["step"] == 10
    run(folder, "resumed")
    resumed = pickle.loads((folder / "resumed.pickle").read_bytes())["resumed"]
    np.testing.assert_array_equal(resumed["steps"], seen["adaptive"]["steps"][6:])
    assert_same_weights(resumed, seen["adaptive"])
    whole, record = (read_record(folder / name / "record.jsonl") for name in ("adaptive", "killed"))
    assert [line | {"run": 0} for line in record] == [line | {"run": 0} for line in whole]


def test_the_program_starts_the_trainer_with_a_file(seen, folder):
    printed = run(folder, "launched")
    assert "Loss scaling is recorded in" in printed
    record = read_record(folder / "launched" / "record.jsonl")
    assert [line["step"] for line in record] == [*range(1, 9)]
    assert sum(line["overflow"] for line in record) >= 5
