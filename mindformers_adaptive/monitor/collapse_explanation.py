"""Explain a bad loss or a collapsed loss scale for ``LossScaleMonitor(explain=True)``, and save the step's batch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import mindformers_adaptive
from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.batch_file import save_batch
from mindformers_adaptive.record.run_folder import BATCH_FILE
from mindformers_adaptive.text.files import write_json

__all__ = ["EXPLANATION_FILE", "explain_collapse"]

EXPLANATION_FILE = "overflow_explanation.json"


def explain_collapse(train_step: Any, batch: Any, loss_scale: float, folder: Path) -> str:
    """Explain the overflow of a batch, and write the explanation and the batch to a folder.

    The weights and the state of the training stay as they are.

    Args:
        train_step (Cell): the train-step cell, at the weights of that step.
        batch (tuple[Tensor], optional): the inputs of the network; None in data-sink mode, which hides the batch.
        loss_scale (float): the loss scale of that step.
        folder (Path): the folder to write to.

    Returns:
        str for the log: the explanation, or the reason why there is none.
    """
    if not batch:
        return (
            "'explain' needs the batch, but in data-sink mode the host does not see the batch. Set "
            "'runner_config.sink_mode' to False, or run 'adaptive-loss-scale why' on a checkpoint."
        )
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        return f"'explain' needs a finite loss scale above 0, but the loss scale is {loss_scale}."
    file = folder / BATCH_FILE
    try:
        # Save the batch first, so that it is kept even if the explanation fails.
        save_batch(file, [to_numpy(column) for column in batch])
        explain: Any = mindformers_adaptive.explain_overflow
        explanation = explain(train_step, [batch], loss_scale)
        explanation = dataclasses.replace(explanation, measured="weights of this step")
        write_json(folder / EXPLANATION_FILE, explanation.to_dict())
    # If the overflow cannot be explained, the training still goes on, so catch all errors.
    except Exception as error:
        return f"The overflow could not be explained: {type(error).__name__}: {error}"
    return f"Why it overflows, on the batch of this step, which is saved as {file}:\n{explanation}"
