"""What MindFormers 1.9.0 needs to resume on a CPU, in a single process, or after a kill: used by the launcher."""

import json
import os
import sys
import warnings
from pathlib import Path

__all__ = ["offer_barrier_on_cpu", "offer_newest_iteration", "offer_single_process_safetensors"]

# The name that makes MindFormers take a folder's safetensors as whole, not as the part of one process.
_WHOLE_CHECKPOINT = "hyper_param.safetensors"


def offer_single_process_safetensors(config):
    """Let a single process resume from the safetensors that MindFormers' ``CheckpointMonitor`` wrote.

    MindFormers writes them to ``rank_0``, and refuses to read a ``rank_0`` without ``use_parallel``. So the newest
    complete file there (or the one that ``resume_training`` names) is linked, under the name that MindFormers looks
    for in a folder of whole safetensors, into ``resume_from`` in the output folder.

    Args:
        config (MindFormerConfig): the loaded YAML file; ``load_checkpoint`` and ``resume_training`` are changed.

    Raises:
        FileNotFoundError: if ``resume_training`` names a file that is not there.
    """
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


def _file_to_resume_from(rank_folder, resume_training):
    if isinstance(resume_training, str):
        file = rank_folder / resume_training
        if not file.is_file():
            raise FileNotFoundError(
                f"'resume_training' must name a file in {rank_folder}, but there is no {file.name}."
            )
        return file
    try:
        # Written when a checkpoint is complete.
        return rank_folder / json.loads((rank_folder / "meta.json").read_text())["last_ckpt_file"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        files = sorted(rank_folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        if not files:
            return None
        warnings.warn(
            f"{rank_folder / 'meta.json'} names no complete checkpoint: training resumes from the newest file, "
            f"{files[-1].name}.",
            stacklevel=4,
        )
        return files[-1]


def offer_newest_iteration(config):
    """Let a run resume where the last one was killed while it noted which of its checkpoints is the newest.

    In its ``checkpoint:`` format MindFormers empties ``latest_checkpointed_iteration.txt`` before it writes the step.
    It does so when that checkpoint is complete and before it writes anything of the next, so the folder with the
    newest ``common.json`` is the right one.

    Args:
        config (MindFormerConfig): the loaded YAML file; ``checkpoint.load_path`` or, where that is not given,
            ``load_checkpoint`` is changed.
    """
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
        warnings.warn(f"{note} is empty: training resumes from the newest folder, {newest.name}.", stacklevel=3)
        section[key] = str(newest)


def offer_barrier_on_cpu(config):
    """Let several processes on a CPU wait for each other, which MindFormers does with an operator a CPU lacks.

    Adding up a number over all processes waits for all of them as well.

    Args:
        config (MindFormerConfig): the loaded YAML file.
    """
    if not config.use_parallel or config.context.device_target != "CPU":
        return
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


def _barrier_by_all_reduce(group=None):
    from mindspore import Tensor, ops
    from mindspore.communication import GlobalComm

    ops.AllReduce(group=group or GlobalComm.WORLD_COMM_GROUP)(Tensor([1.0])).asnumpy()
