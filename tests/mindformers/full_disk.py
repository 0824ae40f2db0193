"""Save a checkpoint at every second step; from step 5 to step 11, no file may grow beyond 128 KiB, as on a full disk.

``test_callbacks.py`` starts this script with a JSON list: whether to use MindFormers' legacy checkpoint
format, and how to save asynchronously. The script writes to rows.json, by the number of the step, the checkpoint files
that exist after each step, and the step's warnings.
"""

import json
import multiprocessing
import os
import resource
import stat
import sys
import time
import warnings
from pathlib import Path

import mindspore
import numpy as np
from mindformers.core.context import set_context
from mindspore import dataset, nn
from mindspore.train import LambdaCallback, Model

from mindformers_adaptive.mindformers.callbacks import CheckpointMonitor
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell

NOTES = ("saved/latest_checkpointed_iteration.txt", "saved/checkpoint/rank_0/meta.json")


def main(legacy, async_save):
    # With MindFormers 2, only graph mode can save the `checkpoint:` format without the package hyper-parallel.
    set_context(mode=0)
    network = nn.WithLossCell(nn.Dense(3000, 20), nn.MSELoss())
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    train_step = MFTrainOneStepCell(network, optimizer, scale_sense=AdaptiveLossScaleUpdateCell(1024, 2, 20))
    saving = {"save_checkpoint_steps": 2, "keep_checkpoint_max": 2, "async_save": async_save, "integrated_save": False}
    form = {"checkpoint_format": "safetensors", "use_legacy_format": legacy, "global_batch_size": 4}
    rows = {}

    def look(run_context):
        step = run_context.original_args().cur_step_num
        # A later step notices that a save has failed, so let each save end before the next step begins.
        wait_until(lambda: not (mindspore.async_ckpt_thread_status() or multiprocessing.active_children()))
        if step == 4:
            wait_until(lambda: is_saved(step))
        if step in (5, 11):
            limit = 2**17 if step == 5 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        paths = [os.path.join(folder, name) for folder, _, names in os.walk("saved") for name in names]
        files = sorted(os.path.relpath(path, "saved") for path in paths)
        notes = [Path(note).read_text() for note in NOTES if os.path.exists(note)]
        rows[step] = {"files": files, "note": "".join(notes), "warnings": [str(each.message) for each in caught]}
        caught.clear()

    callbacks = [CheckpointMonitor("a", "saved", **saving, **form), LambdaCallback(on_train_step_end=look)]
    data = dataset.NumpySlicesDataset((np.ones((56, 3000), np.float32), np.zeros((56, 20), np.float32))).batch(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Model(train_step).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    Path("rows.json").write_text(json.dumps(rows))


def wait_until(is_so):
    """Wait up to a minute until a condition holds."""
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)


def is_saved(step):
    """Return whether the checkpoint of a step is complete, which the file-size limit, set afterwards, would break."""
    files = [f"saved/iteration_{step:08d}/a-{kind}-0000000-0000001.safetensors" for kind in ("model", "opt")]
    return is_whole(f"saved/checkpoint/rank_0/a_rank_0-1_{step}.safetensors") or all(map(is_whole, files))


def is_whole(file):
    # MindSpore makes a checkpoint file read-only when the file is complete.
    return os.path.exists(file) and not os.stat(file).st_mode & stat.S_IWUSR


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
