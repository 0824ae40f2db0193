"""Only one run at a time writes a record, and a run that was killed stands in nobody's way."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from mindformers_adaptive.monitor.record import RunLock, RunRecord, read_record

HOLDER = """
import sys
from mindformers_adaptive.monitor.record import RunRecord
record = RunRecord(sys.argv[1])
print(*record.resume(int(sys.argv[2])), flush=True)
record.append([{"step": record.last_step + 1}])
print(record.path.name, flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that has resumed a record and written a step."""

    def __init__(self, path, last_step=0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(last_step)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.notes = self.process.stdout.readline().strip()
        self.name = self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def test_another_process_takes_another_file_and_says_so(path):
    with Holder(path) as first, Holder(path) as second, Holder(path) as third:
        assert (first.name, first.notes) == ("record.jsonl", "")
        assert [second.name, third.name] == ["record_2.jsonl", "record_3.jsonl"]
        assert second.notes == f"{path} is being written by another run: this run is recorded in record_2.jsonl."
    assert read_record(path) == read_record(path.with_name("record_2.jsonl")) == [{"step": 1}]


def test_the_lock_of_a_killed_run_does_not_count(path):
    with Holder(path) as killed:
        pass
    assert killed.process.returncode < 0
    assert path.with_name(".record.jsonl.lock").exists()
    with Holder(path, last_step=1) as resumed:
        assert resumed.name == "record.jsonl"
    assert read_record(path) == [{"step": 1}, {"step": 2}]


def test_a_lock_that_was_let_go_leaves_no_file(path):
    record = RunRecord(path)
    record.resume(0)
    record.append([{"step": 1}])
    assert len(list(path.parent.iterdir())) == 2
    record.close()
    assert [file.name for file in path.parent.iterdir()] == ["record.jsonl"]
    with Holder(path, last_step=1) as other:
        assert other.name == "record.jsonl"
        with pytest.raises(BlockingIOError):
            RunLock(path)


def test_a_record_without_references_lets_its_lock_go(path):
    RunRecord(path).resume(0)
    RunLock(path).release()


def test_a_process_that_was_forked_does_not_take_the_lock_with_it(path):
    record = RunRecord(path)
    record.resume(0)
    child = os.fork()
    if child == 0:
        record.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.with_name(".record.jsonl.lock").exists()
    with Holder(path) as other:
        assert other.name == "record_2.jsonl"
    record.close()


def test_a_folder_without_locks_is_written_all_the_same(tmp_path):
    (tmp_path / ".record.jsonl.lock").mkdir()
    record = RunRecord(tmp_path / "record.jsonl")
    assert record.resume(0) == []
    record.append([{"step": 1}])
    assert read_record(tmp_path / "record.jsonl") == [{"step": 1}]
