"""Two processes of MindFormers' PyNative trainer agree whether to skip or to apply each step."""

import pickle
import subprocess

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.shared.launched import free_port, with_this_python
from tests.shared.versions import BEFORE_2

pytestmark = pytest.mark.skipif(BEFORE_2, reason="this version of MindFormers has another PyNative trainer")

SCRIPT = ROOT / "tests" / "mindformers" / "pynative_two_processes.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Train in two processes; return a dictionary for each process: the results of its trainings by name."""
    folder = tmp_path_factory.mktemp("two")
    command = ["msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"]
    subprocess.run(
        [*command, f"--log_dir={folder}", str(SCRIPT), str(folder)],
        cwd=folder,
        env={**with_this_python(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=600,
    )
    files = [folder / f"rank_{rank}.pickle" for rank in range(2)]
    assert all(file.is_file() for file in files), "".join(log.read_text()[-3000:] for log in folder.glob("worker*.log"))
    return [pickle.loads(file.read_bytes()) for file in files]


@pytest.mark.parametrize("kind", ["adaptive", "guided"])
@pytest.mark.parametrize("gradients", ["added up", "own"])
def test_inf_in_one_process_skips_the_step_in_both(seen, kind, gradients):
    first, second = (of_process[f"{kind} {gradients}"] for of_process in seen)
    np.testing.assert_array_equal(first["steps"][:, 2:], second["steps"][:, 2:])
    assert [*np.diff(first["steps"][:, 3], prepend=0)] == [0, 0, 1, 0, 0, 0]
    assert first["state"] == second["state"]
    names = [name for name in first if name.startswith("weight ")]
    assert len(names) == 8
    assert all(np.isfinite(process[name]).all() for process in (first, second) for name in names)
    same = all((first[name] == second[name]).all() for name in names)
    assert same is (gradients == "added up")
