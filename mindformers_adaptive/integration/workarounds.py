"""What MindFormers 1.9.0 needs to train on a CPU, and to resume in a single process or after a kill."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

__all__ = ["prepare"]

# The name that makes MindFormers take a folder's safetensors as whole, not as the part of one process.
_WHOLE_CHECKPOINT = "hyper_param.safetensors"


def prepare(config: Any) -> None:
    """Change a configuration so that MindFormers can train on a CPU and resume.

    On a CPU, sink mode is turned off and the barrier of several processes is replaced. A single process that resumes
    from the safetensors of MindFormers' ``CheckpointMonitor`` is given a link to them under a name that MindFormers
    accepts. A run in the ``checkpoint:`` format that was killed while it noted its newest checkpoint resumes from it.

    Args:
        config (MindFormerConfig): the configuration of a trainer; changed in place.

    Raises:
        FileNotFoundError: if ``resume_training`` names a file that is not there.
    """
    if _runs_on_cpu():
        _turn_off_sink_mode(config.runner_config)
        if config.use_parallel:
            _patch_barrier()
    _link_single_process_safetensors(config)
    _choose_newest_iteration(config)


def _runs_on_cpu() -> bool:
    import mindspore

    return bool(mindspore.get_context("device_target") == "CPU")


def _turn_off_sink_mode(runner_config: Any) -> None:
    if runner_config and runner_config.sink_mode:
        runner_config.sink_mode = False
        warnings.warn(
            "'runner_config.sink_mode' must be False on CPU: MindSpore cannot sink data there, and MindFormers would "
            "train sink_size times too long. False is used.",
            stacklevel=4,
        )


def _link_single_process_safetensors(config: Any) -> None:
    # MindFormers writes them to rank_0, and refuses to read a rank_0 without use_parallel.
    if not config.resume_training or config.use_parallel or config.load_ckpt_format != "safetensors":
        return
    rank_folder = Path(config.load_checkpoint or "", "rank_0")
    if config.get("checkpoint") or not rank_folder.is_dir():
        return
    file = _file_to_resume_from(rank_folder, config.resume_training)
    if file is None:
        return
    folder = Path(config.output_dir, "resume_from")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{_WHOLE_CHECKPOINT}-{os.getpid()}"
    unfinished.symlink_to(file.resolve())
    unfinished.replace(folder / _WHOLE_CHECKPOINT)
    config.load_checkpoint, config.resume_training = str(folder), True


def _file_to_resume_from(rank_folder: Path, resume_training: bool | str) -> Path | None:
    """Return the file that ``resume_training`` names, or the newest that is complete; None if there is no file."""
    if isinstance(resume_training, str):
        file = rank_folder / resume_training
        if not file.is_file():
            raise FileNotFoundError(
                f"'resume_training' must name a file in {rank_folder}, but there is no {file.name}."
            )
        return file
    try:
        # Written when a checkpoint is complete.
        return Path(rank_folder, json.loads((rank_folder / "meta.json").read_text())["last_ckpt_file"])
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        files = sorted(rank_folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        if not files:
            return None
        warnings.warn(
            f"{rank_folder / 'meta.json'} names no complete checkpoint: training resumes from the newest file, "
            f"{files[-1].name}.",
            stacklevel=5,
        )
        return files[-1]


def _choose_newest_iteration(config: Any) -> None:
    # MindFormers empties the note before it writes the step. It does so when that checkpoint is complete and before it
    # writes anything of the next, so the folder with the newest common.json is the right one.
    section, key = config.get("checkpoint") or {}, "load_path"
    if section.get(key) is None:
        section, key = config, "load_checkpoint"
    folder = Path(section.get(key) or "")
    note = folder / "latest_checkpointed_iteration.txt"
    if not note.is_file() or note.read_text().strip():
        return
    # By time, because who goes back to an older checkpoint may save beside folders of later steps.
    complete = sorted(folder.glob("iteration_*/common.json"), key=lambda file: file.stat().st_mtime_ns)
    if complete:
        newest = complete[-1].parent
        warnings.warn(f"{note} is empty: training resumes from the newest folder, {newest.name}.", stacklevel=4)
        section[key] = str(newest)


def _patch_barrier() -> None:
    """Let processes on a CPU wait for each other: MindFormers uses an operator that a CPU lacks."""
    from mindspore.communication import comm_func

    stock = comm_func.barrier
    if stock is _barrier_by_all_reduce:
        return
    for module in list(sys.modules.values()):
        # MindFormers' modules have imported it by name.
        if getattr(module, "__name__", "").startswith(("mindformers.", "mindspore.communication.comm_func")):
            for name, value in list(vars(module).items()):
                if value is stock:
                    setattr(module, name, _barrier_by_all_reduce)


def _barrier_by_all_reduce(group: str | None = None) -> None:
    # Adding up a number over all processes waits for all of them as well.
    from mindspore import Tensor, ops
    from mindspore.communication import GlobalComm

    ops.AllReduce(group=group or GlobalComm.WORLD_COMM_GROUP)(Tensor([1.0])).asnumpy()
