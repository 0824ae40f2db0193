"""Changes that MindFormers 1.9.0 needs to train on a CPU, and to resume in a single process or after a kill."""

import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# If a folder has a file of this name, MindFormers reads a complete checkpoint from this file, not the part of one
# process.
_WHOLE_CHECKPOINT = "hyper_param.safetensors"

# Each process checks the checkpoint files of all processes. If there are more rank folders than this number, check no
# files, because checking all of them would take minutes.
_MOST_FOLDERS = 16


def apply_workarounds(config: Any) -> None:
    """Change a configuration so that MindFormers can train on a CPU and resume.

    On a CPU, sink mode is turned off and the barrier of several processes is replaced. ``resume_training: True`` works
    with ``checkpoint.load_path`` alone, and gives a warning without a checkpoint. A single process that resumes from
    safetensors of MindFormers' ``CheckpointMonitor`` gets a link to these files under a name that MindFormers accepts.
    If the newest checkpoint is torn, or MindFormers' note that names it is damaged or wrong, the newest complete
    checkpoint is used.

    Args:
        config (MindFormerConfig): the configuration of a trainer; changed in place.

    Raises:
        FileNotFoundError: if ``resume_training`` names a file that is not there.
        ValueError: if ``resume_training`` is True, and no file to resume from is complete.
    """
    import mindspore

    _keep_resume_training(config)
    if mindspore.get_context("device_target") == "CPU":
        if config.runner_config and config.runner_config.sink_mode:
            config.runner_config.sink_mode = False
            warnings.warn(
                "'runner_config.sink_mode' must be False on CPU: MindSpore cannot sink data there, so MindFormers "
                "would train sink_size times as many steps as configured. Training goes on with sink_mode False.",
                stacklevel=3,
            )
        if config.use_parallel:
            _patch_barrier()
    _resume_from_whole_file(config)
    _choose_newest_iteration(config)


def _keep_resume_training(config: Any) -> None:
    """Find a checkpoint for ``resume_training: True``, or warn that training starts at step 1."""
    if config.resume_training is not True:
        return
    section = config.get("checkpoint") or {}
    if not config.load_checkpoint and section.get("load_path"):
        # With 'load_path' alone, MindFormers would load the weights, but neither the optimizer's state nor the step.
        config.load_checkpoint = section["load_path"]
    folder = Path(config.load_checkpoint or "")
    if not config.load_checkpoint or (folder.is_dir() and not any(folder.iterdir())):
        reason = f"the folder {folder} is empty" if config.load_checkpoint else "'load_checkpoint' is empty"
        warnings.warn(
            f"'resume_training' must have a checkpoint to resume from, but {reason}: training starts at step 1. Give "
            "'load_checkpoint' the folder of the checkpoints, or set 'resume_training' to False.",
            stacklevel=4,
        )


def _resume_from_whole_file(config: Any) -> None:
    """Choose a complete file of a legacy checkpoint to resume from, if MindFormers would choose a torn file or none."""
    from mindformers.tools.utils import get_real_group_size

    if not config.resume_training or not config.load_checkpoint or config.get("checkpoint"):
        return
    numbered = {folder: re.fullmatch(r"rank_(\d+)", folder.name) for folder in Path(config.load_checkpoint).glob("*")}
    folders = sorted((folder for folder, match in numbered.items() if match), key=lambda each: int(each.name[5:]))
    # MindFormers writes safetensors to the folder rank_0, but refuses to read from this folder without use_parallel.
    needs_link = config.load_ckpt_format == "safetensors" and not config.use_parallel
    if needs_link:
        folders = folders[:1]
    elif config.resume_training is not True or not get_real_group_size() <= len(folders) <= _MOST_FOLDERS:
        return
    if not folders or folders[0].name != "rank_0" or (not needs_link and _file_of_meta(folders)[0] is not None):
        return
    file = _file_to_resume_from(folders, config.load_ckpt_format or "ckpt", config.resume_training)
    if file is not None and needs_link:
        _link_safetensors(config, file)
    elif file is not None:
        # The file name holds rank_0. For each process, MindFormers puts the rank of the process in its stead, and looks
        # for this file in the folder of the process.
        config.resume_training = file.name


def _link_safetensors(config: Any, file: Path) -> None:
    folder = Path(config.output_dir, "resume_from")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{_WHOLE_CHECKPOINT}-{os.getpid()}"
    unfinished.symlink_to(file.resolve())
    unfinished.replace(folder / _WHOLE_CHECKPOINT)
    config.load_checkpoint, config.resume_training = str(folder), True


def _file_to_resume_from(folders: Sequence[Path], extension: str, resume_training: bool | str) -> Path | None:
    """Return the checkpoint that ``resume_training`` or ``meta.json`` names, else the newest complete one, or None."""
    first = folders[0]
    if isinstance(resume_training, str):
        file = first / resume_training
        if file.is_file():
            return file
        raise FileNotFoundError(
            f"'resume_training' must name a file in {first}, but there is no {file.name}. Check the name"
        )
    named, problem = _file_of_meta(folders)
    if named is not None:
        return named
    files = sorted(first.glob(f"*.{extension}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    whole = next((file for file in files if _is_whole_in_all(file, folders)), None)
    if whole is not None:
        warnings.warn(f"{problem}: training resumes from the newest complete file, {whole.name}.", stacklevel=5)
    elif files:
        raise ValueError(
            f"{problem}, and none of the .{extension} files beside it is complete. Give another 'load_checkpoint'."
        )
    return whole


def _file_of_meta(folders: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the checkpoint file that ``meta.json`` names, or None and a text that says what is wrong."""
    meta = folders[0] / "meta.json"
    try:
        # MindFormers writes meta.json when a checkpoint is complete.
        name = json.loads(meta.read_text(encoding="utf-8"))["last_ckpt_file"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, f"{meta} names no complete checkpoint"
    if not isinstance(name, str) or not name or name != Path(name).name:
        return None, f"{meta} must name a file beside it, but names {name!r}"
    if not (folders[0] / name).is_file():
        return None, f"{meta} names {name!r}, which is not there"
    if not _is_whole_in_all(folders[0] / name, folders):
        return None, f"{meta} names {name!r}, which is not a complete file"
    return folders[0] / name, ""


def _is_whole_in_all(file: Path, folders: Sequence[Path]) -> bool:
    """Return whether a checkpoint file and the corresponding files of all other processes are complete."""
    return all(is_whole(folder / re.sub(r"rank_\d+", folder.name, file.name)) for folder in folders)


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint file has all bytes its headers promise, or a folder ``iteration_N`` all its files."""
    if checkpoint.is_dir():
        return _is_complete(checkpoint)
    from safetensors import SafetensorError, safe_open

    try:
        if checkpoint.suffix == ".ckpt":
            return _ends_with_an_entry(checkpoint)
        with safe_open(checkpoint, "np"):
            return True
    except (OSError, SafetensorError):
        return False


def _ends_with_an_entry(file: Path) -> bool:
    """Return whether a ``.ckpt`` file ends where an entry ends. Each entry is a protobuf field 1 with a length."""
    size = file.stat().st_size
    with file.open("rb") as content:
        while content.tell() < size:
            if content.read(1) != b"\n":
                return False
            length, shift, byte = 0, 0, b"\x80"
            while byte >= b"\x80":
                byte = content.read(1)
                length |= (ord(byte or b"\0") & 0x7F) << shift
                shift += 7
            if length == 0:
                return False
            content.seek(length, os.SEEK_CUR)
        return 0 < size == content.tell()


def _choose_newest_iteration(config: Any) -> None:
    # latest_checkpointed_iteration.txt names the last saved step. When a new checkpoint is complete, MindFormers first
    # empties this file, and then writes the new step to it. A kill in between leaves the file empty. Then resume from
    # the newest complete checkpoint.
    section, key = config.get("checkpoint") or {}, "load_path"
    if section.get(key) is None:
        section, key = config, "load_checkpoint"
    folder = Path(section.get(key) or "")
    note = folder / "latest_checkpointed_iteration.txt"
    if not note.is_file():
        return
    step = note.read_text(encoding="utf-8", errors="replace").strip()
    if step and not (step.isdecimal() and not _is_complete(folder / f"iteration_{int(step):08d}")):
        return
    # Choose the newest checkpoint folder by time, not by step: a run that resumed from an older checkpoint saves its
    # folders beside older folders of later steps.
    folders = filter(_is_complete, folder.glob("iteration_*"))
    complete = sorted(folders, key=lambda iteration: (iteration / "common.json").stat().st_mtime_ns)
    if complete:
        problem = f"names step {step}, whose folder is not complete" if step else "is empty"
        warnings.warn(
            f"{note} {problem}: training resumes from the newest complete folder, {complete[-1].name}.", stacklevel=4
        )
        section[key] = str(complete[-1])


def _is_complete(iteration: Path) -> bool:
    files = list(iteration.glob("*.safetensors"))
    try:
        json.loads((iteration / "common.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(files) and all(map(is_whole, files))


def _patch_barrier() -> None:
    """Replace MindFormers' barrier, by which processes wait for each other: it uses an operator that a CPU lacks."""
    try:
        from mindspore.communication import comm_func
    except ImportError:  # MindSpore 2.11 and newer
        return
    # MindFormers 2.1 uses another barrier, which works on a CPU too.
    stock = comm_func.barrier
    if stock is _barrier_by_all_reduce:
        return
    for module in list(sys.modules.values()):
        # MindFormers' modules have imported barrier() by name, so replace it in each module.
        if getattr(module, "__name__", "").startswith(("mindformers.", "mindspore.communication.comm_func")):
            for name, value in list(vars(module).items()):
                if value is stock:
                    setattr(module, name, _barrier_by_all_reduce)


def _barrier_by_all_reduce(group: str | None = None) -> None:
    # A sum over all processes is a barrier too, because it waits for all of them.
    from mindspore import Tensor, ops
    from mindspore.communication import GlobalComm

    ops.AllReduce(group=group or GlobalComm.WORLD_COMM_GROUP)(Tensor([1.0])).asnumpy()
