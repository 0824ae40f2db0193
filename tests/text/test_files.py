"""Files are replaced completely or not at all, even if the machine fails right after writing."""

import os
import stat

import pytest

from mindformers_adaptive.text.files import atomic_write, make_folder_of


def test_written_data_is_on_the_disk_before_it_replaces_a_file(tmp_path, monkeypatch):
    target, done = tmp_path / "report.txt", []
    target.write_text("before")
    sync, replace = os.fsync, os.replace

    def seen_sync(file):
        done.append(("synchronized", os.fstat(file).st_size, target.read_text()))
        sync(file)

    def seen_replace(*names):
        done.append("replaced")
        replace(*names)

    monkeypatch.setattr(os, "fsync", seen_sync)
    monkeypatch.setattr(os, "replace", seen_replace)
    with atomic_write(target, permissions=0o640) as file:
        file.write("after" * 1000)
    assert done == [("synchronized", 5000, "before"), "replaced"]
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("after" * 1000, 0o640)


def write_half(target, error):
    with atomic_write(target) as file:
        file.write("after")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_halfway_leaves_the_file_as_it_was(tmp_path, error):
    target = tmp_path / "report.txt"
    target.write_text("before")
    with pytest.raises(error):
        write_half(target, error)
    assert (target.read_text(), os.listdir(tmp_path)) == ("before", ["report.txt"])


def test_what_a_link_points_to_is_replaced(tmp_path):
    (tmp_path / "link.txt").symlink_to("report.txt")
    with atomic_write(tmp_path / "link.txt") as file:
        file.write("after")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "report.txt").read_text() == "after"


@pytest.mark.parametrize(
    ("name", "why"), [("", "must be a file, .*is a folder"), ("missing/a.txt", "can be written, .*: No such file")]
)
def test_a_place_that_takes_no_file_is_named(tmp_path, name, why):
    target = tmp_path / name
    with pytest.raises(OSError, match=why) as caught, atomic_write(target):
        pass
    assert caught.value.filename == str(target)
    assert os.listdir(tmp_path) == []


def test_file_where_a_folder_is_needed_is_an_error(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(FileExistsError, match=r"folder of the output file .*: File exists.*run/a\.png"):
        make_folder_of(tmp_path / "run" / "a.png")
