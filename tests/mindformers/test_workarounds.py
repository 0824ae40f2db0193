"""Tests, with real checkpoint files, of how this package corrects settings of a YAML file before MindFormers trains."""

import json
import os
import shutil
import sys

import mindspore
import numpy as np
import pytest
from mindformers import TrainingArguments
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor
from safetensors.numpy import save_file

from mindformers_adaptive.mindformers.launcher import load_config
from mindformers_adaptive.mindformers.trainer import Trainer
from mindformers_adaptive.mindformers.workarounds import apply_workarounds
from tests.conftest import CONFIG, ROOT
from tests.mindformers.trained_llama import build_model
from tests.shared.versions import NEEDS_SECTION


@pytest.fixture
def ckpt_folders(tmp_path):
    """Create the checkpoint folders of two processes; ``meta.json`` names the last of three checkpoints in each."""
    folders = [tmp_path / "checkpoint" / f"rank_{rank}" for rank in range(2)]
    for rank, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for age, step in enumerate((20, 40, 60)):
            file = folder / f"a_rank_{rank}-1_{step}.ckpt"
            parameters = [{"name": name, "data": Tensor(np.full(300, age, np.float32))} for name in ("weight", "bias")]
            mindspore.save_checkpoint(parameters, str(file), append_dict={"step_num": step})
            os.chmod(file, 0o644)
            os.utime(file, (age, age))
        (folder / "meta.json").write_text(json.dumps({"last_epoch": 1, "last_step": 60, "last_ckpt_file": file.name}))
    return folders


def chosen(folder, **changes):
    """Prepare a run that resumes from ``.ckpt`` files; return the ``resume_training`` value that MindFormers gets."""
    changes = {"load_checkpoint": str(folder), "resume_training": True, "load_ckpt_format": "ckpt", **changes}
    config = load_config(CONFIG, changes, may_add=changes)
    apply_workarounds(config)
    assert config.load_checkpoint == str(folder)
    return config.resume_training


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        (b'{"last_ckpt_file": "gone-1_80.ckpt"}', "names 'gone-1_80.ckpt', which is not there"),
        (b'{"last_ckpt_file": "a_rank_0-1_60.ckpt"}', "names 'a_rank_0-1_60.ckpt', which is not a complete file"),
        (b'{"last_ckpt_file": ""}', "must name a file beside it, but names ''"),
        (b'{"last_ckpt_file": ".."}', "must name a file beside it, but names '..'|names '..', which is not there"),
        (b'{"last_ckpt_file": "../../other.ckpt"}', "must name a file beside it, but names '../../other"),
        (b'{"last_ckpt_file": "%s"}', "must name a file beside it, but names '/"),
        (b'{"last_ckpt_file": 7}', "must name a file beside it, but names 7"),
        (b'{"last_ckpt_file": "a\\u0000b"}', "names 'a.x00b', which is not there"),
        (b'{"last_ckpt_file": "\xff\xfe.ckpt"}', "names no complete checkpoint"),
        (b"[" * 100_000, "names no complete checkpoint"),
        (b"[]", "names no complete checkpoint"),
        (b"", "names no complete checkpoint"),
        (None, "names no complete checkpoint"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_newest_whole_file_is_read_without_meta_json(ckpt_folders, tmp_path, meta, problem):
    first, _ = ckpt_folders
    outside = shutil.copy(first / "a_rank_0-1_20.ckpt", tmp_path / "other.ckpt")
    newest = first / "a_rank_0-1_60.ckpt"
    newest.write_bytes(newest.read_bytes()[:-4])
    os.utime(newest, (9, 9))
    (first / "meta.json").unlink()
    if meta is not None:
        (first / "meta.json").write_bytes(meta.replace(b"%s", str(outside).encode()))
    resumes = "training resumes from the newest complete file, a_rank_0-1_40.ckpt"
    with pytest.warns(UserWarning, match=f"meta.json ({problem}).*: {resumes}"):
        assert chosen(first.parent) == "a_rank_0-1_40.ckpt"


def test_a_single_process_gets_a_link_to_its_safetensors(tmp_path):
    folder = tmp_path / "checkpoint" / "rank_0"
    folder.mkdir(parents=True)
    for name in ("a-1_20", "a-1_40"):
        save_file({"weight": np.ones(8, np.float32)}, folder / f"{name}.safetensors")
    (folder / "meta.json").write_text(json.dumps({"last_ckpt_file": "a-1_20.safetensors"}))
    changes = {"load_ckpt_format": "safetensors", "output_dir": str(tmp_path / "output"), "resume_training": True}
    config = load_config(CONFIG, changes | {"load_checkpoint": str(folder.parent)})
    # Warnings are errors, so this run must not warn.
    apply_workarounds(config)
    [link] = os.scandir(config.load_checkpoint)
    assert os.path.realpath(link.path) == str(folder / "a-1_20.safetensors")
    assert config.resume_training is True


DAMAGES = {
    "torn": lambda content: content[:-7],
    "torn in a length": lambda content: content[:2],
    "zeros": lambda content: bytes(len(content)),
    "empty": lambda content: b"",
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_ckpt_gives_way_to_the_newest_whole_one(ckpt_folders, damage, processes):
    if processes == 1:
        shutil.rmtree(ckpt_folders.pop())
    folder = ckpt_folders[0].parent
    # The checkpoint that meta.json names is complete, so MindFormers uses it.
    assert chosen(folder) is True
    newest = ckpt_folders[-1] / f"a_rank_{processes - 1}-1_60.ckpt"
    newest.write_bytes(DAMAGES[damage](newest.read_bytes()))
    message = (
        "names 'a_rank_0-1_60.ckpt', which is not a complete file: training resumes .* complete file, a_rank_0-1_40"
    )
    with pytest.warns(UserWarning, match=message):
        assert chosen(folder) == "a_rank_0-1_40.ckpt"
    # Without meta.json, MindFormers would take the newest checkpoint of each process, even if that checkpoint is
    # damaged. A checkpoint file that resume_training names is used without a check.
    (ckpt_folders[0] / "meta.json").unlink()
    with pytest.warns(UserWarning, match="names no complete checkpoint: .* complete file, a_rank_0-1_40"):
        assert chosen(folder) == "a_rank_0-1_40.ckpt"
    assert chosen(folder, resume_training="a_rank_0-1_60.ckpt") == "a_rank_0-1_60.ckpt"
    for file in ckpt_folders[-1].glob("*.ckpt"):
        file.write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"meta.json names no complete .* none of the .ckpt files .* is complete"):
        chosen(folder)


@pytest.mark.parametrize(("folder", "reason"), [("", "'load_.*' is empty"), ("empty", "the folder .*/empty is empty")])
def test_resuming_without_a_checkpoint_is_warned_of(tmp_path, folder, reason):
    (tmp_path / "empty").mkdir()
    config = load_config(CONFIG, {"resume_training": True, "load_checkpoint": folder and str(tmp_path / folder)})
    with pytest.warns(UserWarning, match=rf"'resume_training' must have .* {reason}: training starts at step 1"):
        apply_workarounds(config)


@pytest.mark.parametrize("changes", [{}, {"resume_training": False}, {"load_checkpoint": str(ROOT)}], ids=str)
def test_other_starts_are_not_warned_of(changes):
    # Warnings are errors, so these configurations must not warn.
    apply_workarounds(load_config(CONFIG, changes))


def save_iteration(folder, step, torn=False):
    iteration = folder / f"iteration_{step:08d}"
    iteration.mkdir(parents=True)
    file = iteration / "a-model-0000000-0000001.safetensors"
    save_file({"weight": np.ones(8, np.float32)}, file)
    if torn:
        file.write_bytes(file.read_bytes()[:-4])
    (iteration / "common.json").write_text(json.dumps({"step_num": step}))
    return iteration


def load_path_after(folder, note):
    """Prepare a run that resumes from a folder with this note of the last step; return the ``load_path`` it gets."""
    (folder / "latest_checkpointed_iteration.txt").write_text(note)
    config = load_config(CONFIG, {"checkpoint": {"load_path": str(folder)}}, may_add=("checkpoint",))
    apply_workarounds(config)
    return config.checkpoint.load_path


@pytest.mark.parametrize(
    ("note", "problem"),
    [
        ("", "is empty"),
        ("60", "names step 60, whose folder is not complete"),
        ("80", "names step 80, whose folder is not"),
    ],
)
@pytest.mark.parametrize("torn", ["weights", "common.json"])
def test_note_of_no_complete_iteration_gives_way_to_the_newest(tmp_path, note, problem, torn):
    # A run reached step 40. A later run went back to step 10, and saved step 20 beside the older steps.
    for age, step in enumerate((40, 20)):
        complete = save_iteration(tmp_path, step)
        os.utime(complete / "common.json", (age, age))
    newest = save_iteration(tmp_path, 60, torn=torn == "weights")
    if torn == "common.json":
        (newest / torn).write_text((newest / torn).read_text()[:-3])
    with pytest.warns(UserWarning, match=f"txt {problem}.*: .* newest complete folder, {complete.name}"):
        assert load_path_after(tmp_path, note) == str(complete)


@pytest.mark.parametrize("note", ["20", "release"])
def test_a_note_that_mindformers_can_use_is_left_to_it(tmp_path, note):
    for step in (20, 40):
        save_iteration(tmp_path, step)
    assert load_path_after(tmp_path, note) == str(tmp_path)


@NEEDS_SECTION
def test_resume_training_with_a_load_path_loads_the_optimizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved" / "iteration_00000004").mkdir(parents=True)
    trainer = Trainer(TrainingArguments(output_dir="output", sink_mode=False), model=build_model())
    trainer.config.resume_training = True
    trainer.config.checkpoint = MindFormerConfig(load_path=str(tmp_path / "saved"))
    trainer._check_config_rules()
    assert trainer.config.checkpoint.no_load_optim is False
    assert trainer.config.checkpoint.load_path == str(tmp_path / "saved")


def test_a_mindspore_without_the_old_barrier_is_left_alone(monkeypatch):
    monkeypatch.delattr("mindspore.communication.comm_func")
    monkeypatch.setitem(sys.modules, "mindspore.communication.comm_func", None)
    apply_workarounds(load_config(CONFIG, {"use_parallel": True}))
