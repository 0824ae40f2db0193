"""Explain a bad loss or a collapsed loss scale for ``LossScaleMonitor(explain=True)``, and save the step's batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindformers_adaptive
from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.batch_file import save_batch
from mindformers_adaptive.record.run_folder import BATCH_FILE, EXPLANATION_FILE
from mindformers_adaptive.record.symptom import Finding
from mindformers_adaptive.text.files import write_json

__all__ = ["explain_collapse"]


def explain_collapse(
    train_step: Any, batch: Any, loss_scale: float | None, step: int, folder: Path, findings: Sequence[Finding] = ()
) -> tuple[bool, str]:
    """Explain the overflow of a batch, and write the explanation and the batch to a folder.

    The weights and the state of the training stay as they are.

    Args:
        train_step (Cell): the train-step cell, at the weights of that step.
        batch (tuple[Tensor], optional): the inputs of the network; None in data-sink mode, which hides the batch.
        loss_scale (float, optional): the loss scale of that step; None if it is not known.
        step (int): the number of that step.
        folder (Path): the folder to write to.
        findings (Sequence[Finding]): what the steps of the training show. Default: nothing.

    Returns:
        tuple[bool, str], whether there is an explanation, and for the log: the explanation in at most four lines, or
        the reason why there is none.
    """
    if not batch:
        return False, (
            "'explain' needs the batch, but in data-sink mode the host does not see the batch. Set "
            "'runner_config.sink_mode' to False, or run 'adaptive-loss-scale why' on a checkpoint."
        )
    if loss_scale is None or not (math.isfinite(loss_scale) and loss_scale > 0):
        return False, f"'explain' needs a finite loss scale above 0, but the loss scale is {loss_scale}."
    file, saved = folder / EXPLANATION_FILE, folder / BATCH_FILE
    try:
        # Save the batch first, so that it is kept even if the explanation fails.
        save_batch(saved, [to_numpy(column) for column in batch])
        explain: Any = mindformers_adaptive.explain_overflow
        explanation = explain(train_step, [batch], loss_scale)
        explanation = dataclasses.replace(explanation.after(findings), measured="weights of this step")
        write_json(file, {"step": step, **explanation.to_dict()})
    # If the overflow cannot be explained, the training still goes on, so catch all errors.
    except Exception as error:
        return False, f"The overflow could not be explained: {type(error).__name__}: {error}"
    return True, f"{explanation.summary()}\nAll details: {file}. The batch of step {step}: {saved}."
