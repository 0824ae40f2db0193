"""A run's record has each step once, despite kills, resumes, torn lines and full disks, and has a single writer."""

import contextlib
import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.record.logs import read_log, run_of_record
from mindformers_adaptive.record.writer import RunRecord, read_record
from mindformers_adaptive.text.files import json_text
from tests.conftest import ROOT
from tests.shared.records import missing

INF, NAN = float("inf"), float("nan")


def line_of(step, **values):
    """Return the line of a step with the fields that each line must have."""
    return {"step": step, "overflow": False, "loss_scale": 8.0, **values}


def entries(first, last):
    return [line_of(step, overflow=step % 3 == 0, next_loss_scale=2.0**step) for step in range(first, last + 1)]


def beside(path):
    """Return the files in the folder of a run record whose names begin with the record's name."""
    return sorted(path.parent.glob(f"{path.stem}_*{path.suffix}"))


def write(path, *parts, last_step=0, run=0):
    """Resume a run record after a step, append lines, and return the sentences that resume() returns for the user."""
    record = RunRecord(path)
    notes = record.resume(last_step, run)
    for part in parts:
        record.append(part)
    return notes


def test_a_number_that_is_not_finite_is_text_in_strict_json(tmp_path):
    path = tmp_path / "new" / "folder" / "record.jsonl"
    RunRecord(path).append([line_of(1, loss=NAN, loss_scale=INF, next_loss_scale=-INF, window_index=None)])
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line == line_of(1, loss="nan", loss_scale="inf", next_loss_scale="-inf", window_index=None)
    assert str(read_record(path)) == str([{**line, "loss": NAN, "loss_scale": INF, "next_loss_scale": -INF}])


@pytest.mark.parametrize("step", [2, 1, 0])
def test_a_step_that_cannot_follow_is_refused(path, step):
    write(path, entries(1, 2))
    record = RunRecord(path)
    record.resume(2)
    with pytest.raises(ValueError, match=f"step {step} cannot follow step 2 in .*record.jsonl"):
        record.append([line_of(step)])
    assert read_record(path) == entries(1, 2)


@pytest.mark.parametrize("run", [0, 7])
def test_steps_that_are_taken_again_are_replaced(path, run):
    write(path, entries(1, 27), run=run)
    [note] = write(path, [line_of(21, loss=0.5)], last_step=20, run=run)
    message = f"{path} went on to step 27: the steps after 20 were removed, because the resumed run takes them again."
    assert read_record(path) == [*entries(1, 20), line_of(21, loss=0.5)]
    # If the record has no run number, lines of steps 21 to 27 may belong to another run, so they move to another file.
    saved = beside(path)
    assert note == message + ("" if run else f" They were moved to {saved[0].name}.")
    assert [*map(read_record, saved)] == ([] if run else [entries(21, 27)])


def test_steps_put_aside_are_whole_however_many(path):
    # These record lines are longer than the block that the writer copies at once.
    later = [line_of(step, note="w" * 2**20) for step in (2, 3)]
    write(path, [line_of(1), *later])
    write(path, last_step=1)
    assert read_record(path) == [line_of(1)]
    assert [*map(read_record, beside(path))] == [later]


def test_first_line_has_the_number_of_the_run_after_a_cut(path):
    write(path, [line_of(3)], entries(4, 9), run=5)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"run": 5, **missing(1, 2)}
    assert not any("run" in line for line in lines[1:])
    assert write(path, entries(2, 3), last_step=1, run=5) != []
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"run": 5, **entries(2, 2)[0]},
        *entries(3, 3),
    ]
    assert read_record(path) == entries(2, 3)


@pytest.mark.parametrize(("run", "other"), [(5, 6), (5, 0), (0, 6)])
def test_the_record_of_another_run_is_never_continued(path, run, other):
    write(path, entries(1, 9), run=other)
    [note] = write(path, entries(5, 7), last_step=4, run=run)
    [first] = beside(path)
    assert note == f"{path} is the record of another run: this run is recorded in {first.name}."
    # A run resumes its own record file only if the run has a number. Without a number, it begins another file.
    assert bool(write(path, entries(8, 8), last_step=7, run=run)) == (not run)
    assert read_record(path) == entries(1, 9)
    assert sorted(line["step"] for file in beside(path) for line in read_record(file)) == [5, 6, 7, 8]
    assert len(beside(path)) == 1 + (not run)


def test_a_record_that_fits_is_left_alone(path):
    write(path, entries(1, 20))
    before = path.stat()
    assert write(path, last_step=20) == []
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(("last_step", "known"), [(3, 2), (2, 1), (4, None), (0, None)])
def test_skipped_steps_count_from_the_resumed_step(path, last_step, known):
    # Skipped steps are counted only up to the last step in the record, so the count after a later step is unknown.
    write(path, [line_of(step, skipped_steps=step - 1) for step in (1, 2, 3)])
    record = RunRecord(path)
    record.resume(last_step)
    assert record.last_skipped_steps == known


@pytest.mark.parametrize("last_step", [0, 2])
@pytest.mark.parametrize("content", ["no json\n{}\n", '{"step": 2}\n{"step": 1}\n', '{"step": "1"}\n'])
def test_a_file_that_is_no_record_is_not_touched(path, last_step, content):
    path.write_text(content)
    [note] = write(path, entries(last_step + 1, 4), last_step=last_step)
    [recorded] = beside(path)
    assert note.startswith(f"{path} is no run record, line ")
    assert note.endswith(f": this run is recorded in {recorded.name}.")
    assert path.read_text() == content
    assert read_record(recorded) == entries(last_step + 1, 4)


@pytest.mark.parametrize("run", [0, 5])
def test_the_record_of_an_earlier_run_is_renamed(path, run):
    write(path, entries(1, 5), run=run)
    [note] = write(path, entries(1, 2), run=9)
    [earlier] = beside(path)
    assert note == f"{path} has the steps of an earlier run: it was renamed to {earlier.name}."
    assert (read_record(path), read_record(earlier)) == (entries(1, 2), entries(1, 5))
    if run:
        # If the earlier run continues, the writer finds the renamed record by the number of the run.
        assert write(path, entries(6, 6), last_step=5, run=run) == []
        assert (read_record(path), read_record(earlier)) == (entries(1, 2), entries(1, 6))


def test_line_that_was_torn_for_good_is_passed_over(path, monkeypatch):
    lines = [{**line, "loss_scale": 8.0} for line in entries(1, 5)]
    write(path, lines[:2])
    record, real_write = RunRecord(path), os.write
    record.resume(2)

    def write_a_part_and_fail(file, content):
        real_write(file, content[:9])
        raise OSError(errno.EIO, "broken disk")

    def refuse(file, length):
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", write_a_part_and_fail)
        broken.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="broken disk"):
            record.append(lines[2:3])
    record.append(lines[2:4])
    record.close()
    assert path.read_text().splitlines()[2] == '{"step": '
    assert read_record(path) == lines[:4]
    run = read_log(path)
    assert (run.last.tolist(), len(run.problems)) == ([1, 2, 3, 4], 1)
    assert write(path, lines[3:], last_step=3)[0].startswith(f"{path} went on to step 4")
    assert read_record(path) == lines


def test_a_last_line_torn_at_any_place_is_taken_out(path):
    write(path, entries(1, 3))
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    # A machine that fails may leave zeros.
    for torn in [*(whole[start:end] for end in range(start, len(whole) - 1)), b"\0" * 40 + b"\n"]:
        path.write_bytes(whole[:start] + torn)
        assert read_record(path) == entries(1, 2)
        notes = write(path, entries(3, 4), last_step=2)
        assert [note.startswith(f"{path} ended in an unfinished line") for note in notes] == [True] * bool(torn)
        assert read_record(path) == entries(1, 4)


@pytest.mark.parametrize("end", ["", "\n\n", "\n\n\n", "\n  \n", "\n\r\n", "\n "])
@pytest.mark.parametrize("last_step", [3, 2, 1])
def test_the_end_of_the_last_line_is_no_step(path, end, last_step):
    lines = [{**line, "loss_scale": 8.0} for line in entries(1, 6)]
    write(path, lines[:3], run=5)
    path.write_text(path.read_text().rstrip() + end)
    assert (read_record(path), len(run_of_record(read_record(path)))) == (lines[:3], 3)
    assert (len(read_log(path)), read_log(path).problems) == (3, ())
    assert len(write(path, lines[last_step:], last_step=last_step, run=5)) == (last_step < 3)
    assert read_record(path) == lines
    assert len(path.read_text().splitlines()) == 6


def test_empty_lines_between_steps_are_no_steps(path):
    write(path, entries(1, 2))
    path.write_text("\n" + path.read_text().replace("\n", "\n\n"))
    assert write(path, entries(3, 4), last_step=2) == []
    assert read_record(path) == entries(1, 4)
    path.write_text(path.read_text() + "no step\n\n" + '{"step": 5}\n')
    with pytest.raises(ValueError, match="line 7 is b'no step'"):
        read_record(path)
    [note] = write(path, entries(5, 5), last_step=4)
    assert "is no run record, line 7 is b'no step'" in note


@pytest.mark.parametrize("last_step", range(10))
def test_any_lines_are_continued(path, last_step):
    lines = [*entries(1, 3), line_of(4, names=["a", "b"], of={"a": [1]}, text='a "word" \\')]
    lines += [missing(5, 7), line_of(8, loss=INF, flag=None), {"loss": 1, **line_of(9)}]
    path.write_text("".join(json_text(line) + "\n" for line in [{"run": 5, **lines[0]}, *lines[1:]]))
    notes = write(path, [line_of(10)], last_step=last_step, run=5)
    assert len(notes) == (last_step < 9)
    left = [line for line in lines if line.get("last_step", line.get("step")) <= last_step]
    first = (left[-1].get("last_step") or left[-1]["step"]) + 1 if left else 1 + last_step
    gap = [missing(first, 9)] if first < 10 else []
    assert read_record(path) == [*left, *gap, line_of(10)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step": 1}\nstep 2\n{"step": 3}\n', "line 2 is b'step 2'"),
        ('{"step": 1}\n{"loss": 2}\n', "line 2 is .*names no step"),
        ('{"missing_steps": 2, "first_step": 1}\n', "line 1 is .*names no step"),
        ('{"step": 2}\n{"step": 2}\n', "line 2 is .*step 2 cannot follow step 2"),
        ('{"step": true}\n', "line 1 is .*Expected `int.*`, got `bool`"),
        ("[1]\n", "line 1 is "),
        pytest.param("[" * 100_000 + "\n{}\n", "line 1 is ", id="deep"),
    ],
)
def test_reading_what_is_no_record_names_the_line(path, content, message):
    path.write_text(content)
    with pytest.raises(ValueError, match=f"record.jsonl is no run record: {message}"):
        read_record(path)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 3)), max_size=6))
def test_any_row_of_resumes_leaves_each_step_once(tmp_path_factory, runs):
    path = tmp_path_factory.mktemp("runs") / "record.jsonl"
    end = 0
    for last_step, steps, every in runs:
        last_step = min(last_step, end)
        looked_at = [entries(step, step) for step in range(last_step + 1, last_step + steps + 1, every)]
        write(path, *looked_at, last_step=last_step)
        end = last_step + len(range(0, steps, every)) * every - every + 1
        steps_told = [
            step
            for line in read_record(path)
            for step in range(line.get("first_step", line.get("step")), line.get("last_step", line.get("step")) + 1)
        ]
        assert steps_told == list(range(1, end + 1))


WRITER = """
import sys
from mindformers_adaptive.record.writer import RunRecord
record = RunRecord(sys.argv[1])
record.resume(int(sys.argv[2]))
while True:
    first = record.last_step + 1
    record.append([{"step": step, "overflow": False, "loss_scale": 1 / step} for step in range(first, first + 3)])
"""


def test_kills_lose_no_line_and_tear_none(path):
    delays, last = random.Random(0), 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(last)], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        while not path.exists() or len(path.read_bytes().splitlines()) <= last:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(delays.uniform(0, 0.05))
        process.kill()
        process.wait()
        lines = read_record(path)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        last = len(lines) - 2
    assert path.read_bytes().endswith(b"\n")


HOLDER = """
import sys
from mindformers_adaptive.record.writer import RunRecord
record = RunRecord(sys.argv[1])
print(*record.resume(*map(int, sys.argv[2:])), flush=True)
record.append([{"step": record.last_step + 1, "overflow": False, "loss_scale": 8.0}])
print(record.path.name, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(path, last_step=0, run=0):
    """Start another process that resumes a run record and writes a step; kill the process after the test."""
    command = [sys.executable, "-c", HOLDER, *map(str, (path, last_step, run))]
    environment = {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | environment, **pipes) as process:
        notes, name = (process.stdout.readline().strip() for _ in range(2))
        try:
            yield SimpleNamespace(process=process, notes=notes, name=name)
        finally:
            process.kill()


def test_another_process_takes_another_file_and_says_so(path):
    with holder(path) as first, holder(path) as second, holder(path) as third:
        assert (first.name, first.notes) == ("record.jsonl", "")
        assert {second.name, third.name} == {file.name for file in beside(path)}
        assert second.notes == f"{path} is being written by another run: this run is recorded in {second.name}."
    assert [*map(read_record, [path, *beside(path)])] == [[line_of(1)]] * 3


def test_two_runs_from_one_checkpoint_have_a_record_each(path):
    write(path, entries(1, 5), run=5)
    with holder(path, last_step=5, run=5) as first:
        second = RunRecord(path)
        [note] = second.resume(5, run=5)
        second.append(entries(6, 8))
        second.close()
        assert (first.name, note.partition(": ")[0]) == ("record.jsonl", f"{path} is being written by another run")
    assert second.run not in (0, 5)
    of_second = path.with_name(f"record_{second.run}.jsonl")
    assert write(path, entries(8, 9), last_step=7, run=second.run) == [
        f"{of_second} went on to step 8: the steps after 7 were removed, because the resumed run takes them again."
    ]
    assert (read_record(path), read_record(of_second)) == ([*entries(1, 5), line_of(6)], entries(6, 9))


def test_the_lock_of_a_killed_run_does_not_count(path):
    with holder(path) as killed:
        pass
    assert killed.process.returncode < 0
    assert path.with_name(".record.jsonl.lock").exists()
    with holder(path, last_step=1) as resumed:
        assert resumed.name == "record.jsonl"
    assert read_record(path) == [line_of(1), line_of(2)]


def test_a_lock_that_was_let_go_leaves_no_file(path):
    record = RunRecord(path)
    record.resume(0)
    record.append([line_of(1)])
    assert len(list(path.parent.iterdir())) == 2
    record.close()
    assert [file.name for file in path.parent.iterdir()] == ["record.jsonl"]
    with holder(path, last_step=1) as other:
        assert other.name == "record.jsonl"
        assert record.resume(1)[0].startswith(f"{path} is being written")
        record.close()
    assert record.path.name != "record.jsonl"


def test_lock_whose_file_was_deleted_is_taken_on_a_new_one(path, monkeypatch):
    hidden, flock = path.with_name(".record.jsonl.lock"), fcntl.flock

    def lock_after_release_of_another(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        hidden.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_after_release_of_another)
    record = RunRecord(path)
    assert record.resume(0) == []
    assert hidden.exists()
    record.close()
    assert not hidden.exists()


def test_a_record_without_references_lets_its_lock_go(path):
    RunRecord(path).resume(0)
    with holder(path) as other:
        assert other.name == "record.jsonl"


def test_forked_process_does_not_take_the_lock_with_it(path):
    record = RunRecord(path)
    record.resume(0)
    child = os.fork()
    if child == 0:
        record.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.with_name(".record.jsonl.lock").exists()
    with holder(path) as other:
        assert other.name != "record.jsonl"
    record.close()


def test_a_folder_without_locks_is_written_all_the_same(tmp_path):
    (tmp_path / ".record.jsonl.lock").mkdir()
    record = RunRecord(tmp_path / "record.jsonl")
    assert record.resume(0) == []
    record.append([line_of(1)])
    assert read_record(tmp_path / "record.jsonl") == [line_of(1)]


@pytest.mark.parametrize("step", [np.int64(1), np.int32(1), np.uint8(1)])
def test_numbers_of_numpy_are_written(path, step):
    write(path, [{"step": step, "overflow": np.bool_(True), "loss_scale": np.float32(8), "loss": np.float64("nan")}])
    assert path.read_text() == '{"step": 1, "overflow": true, "loss_scale": 8.0, "loss": "nan"}\n'


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (line_of(1, loss=object()), "'loss' of step 1 .*has the type object"),
        (line_of(1, loss=np.zeros(2)), "'loss' of step 1 .*has the type ndarray"),
        (line_of(1, loss=1j), "'loss' of step 1 .*has the type complex"),
        ({"step": 1.0}, "'step' must be a whole number, but got 1.0 of type float"),
        ({"step": True}, "'step' must be a whole number, but got True"),
        ({"step": 1, "loss_scale": 8.0}, "Step 1 lacks 'overflow'. Give"),
        ({"step": np.int64(1), "overflow": None}, "Step 1 lacks 'loss_scale'. Give"),
        ({"loss": 1.0}, "'step' must be a whole number, but got None"),
    ],
)
def test_an_entry_that_cannot_be_written_is_refused(tmp_path, entry, message):
    record = RunRecord(tmp_path / "run.jsonl")
    with pytest.raises((TypeError, ValueError), match=message):
        record.append([entry])
    assert (record.last_step, record.path.read_bytes()) == (0, b"")
