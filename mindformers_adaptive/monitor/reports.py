"""Messages in the log of a training: how to find the cause of its overflows, and warnings at its begin and its end."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspore import dtype as mstype

import mindformers_adaptive
from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.batch_file import save_batch
from mindformers_adaptive.gradients.reading import read_values
from mindformers_adaptive.overflow.causes import large_weights
from mindformers_adaptive.record.run_folder import BATCH_FILE, EXPLANATION_FILE, why_command
from mindformers_adaptive.record.symptom import Finding, Sign
from mindformers_adaptive.text.files import write_json
from mindformers_adaptive.text.table import counted

# Check the weights of models with at most this many elements, half a gigabyte in float32.
_MOST_ELEMENTS = 2**27


def way_to_the_cause(callbacks: Iterable[Any] = (), batch: str = "") -> str:
    """Return the sentence that says how to find the layer that overflows and a remedy, with a command to paste.

    Args:
        callbacks (Iterable[Callback]): the callbacks of the training. If the training can be repeated, one callback
            has its output folder as ``run_folder``.
        batch (str): the file of the batch, if the batch was saved. Default: "".
    """
    folder = next(filter(None, (getattr(callback, "run_folder", None) for callback in callbacks)), None)
    if folder is not None:
        return f"Find the layer and a remedy: {why_command(folder)}"
    in_program = f"print(explain_overflow(train_step, {repr(batch) if batch else 'batch'}))"
    return f"Find the layer and a remedy: in a program, {in_program}; with a YAML file, {why_command(None)}"


def message_of(sign: Sign, way: str) -> str:
    """Return the line of a log for a sign of something wrong: with a remedy where it begins, and the text alone later.

    Args:
        sign (Sign): what :meth:`mindformers_adaptive.record.diagnosis.Diagnosis.feed` returned.
        way (str): the sentence of :func:`way_to_the_cause`.
    """
    return f"{sign.text} {sign.remedy} {way}" if sign.remedy else sign.text


def explain_collapse(
    train_step: Any, batch: Any, loss_scale: float | None, step: int, folder: Path, findings: Sequence[Finding] = ()
) -> str:
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
        str, for the end of a message in the log: the explanation in at most five lines, or why there is none.
    """
    if not batch:
        return (
            " 'explain' needs the batch, but in data-sink mode the host does not see the batch. Set "
            "'runner_config.sink_mode' to False, or run 'adaptive-loss-scale why' on a checkpoint."
        )
    if loss_scale is None or not (math.isfinite(loss_scale) and loss_scale > 0):
        return f" 'explain' needs a finite loss scale above 0, but the loss scale is {loss_scale}."
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
        return f" The overflow could not be explained: {type(error).__name__}: {error}"
    return f"\nWhy it overflows:\n{explanation.summary()}\nAll details: {file}. The batch of step {step}: {saved}."


def none_applied(steps: int, way: str) -> str:
    """Return a warning for a training that ends after ``steps`` steps, all of which were skipped."""
    return f"Loss scaling: all {steps} steps of this training overflowed and were skipped. No weight has changed. {way}"


def of_weights(train_step: Any, way: str) -> list[str]:
    """Return warnings for the weights with which a training begins: in FP16, or far above all others of their kind.

    To find large weights, they are copied to the host, so this is not done for a large model.

    Args:
        train_step (Cell): the train-step cell.
        way (str): the sentence of :func:`way_to_the_cause`.
    """
    messages, weights = [], [weight for weight in train_step.network.get_parameters() if weight.is_floating_point()]
    trained = [weight for weight in weights if weight.requires_grad]
    if names := [weight.name for weight in trained if weight.dtype == mstype.float16]:
        more = f" and {counted(len(names) - 1, 'more Parameter')}" if len(names) > 1 else ""
        messages.append(
            f"The trained weights are in FP16: {names[0]}{more}. There an update below 1/4096 of a weight is lost, and "
            "an optimizer that keeps squared gradients and eps in FP16 rounds them to 0. So the loss may not fall, or "
            "may jump. No loss scale helps. Keep the weights in float32 (param_init_type: float32 in the YAML file)."
        )
    if sum(weight.size for weight in weights) <= _MOST_ELEMENTS:
        # Vectors that are not trained, such as the moving variances of a BatchNorm, may have any size.
        compared = (weight for weight in weights if weight.requires_grad or weight.ndim > 1)
        sizes = {weight.name: (weight.ndim, read_values(to_numpy(weight), "").largest) for weight in compared}
        messages += [
            f"A weight stands out as this training begins: {cause}. It may overflow, or its layer may learn nothing. "
            f"{way}"
            for cause in large_weights(sizes)
            if cause.layer
        ]
    return messages


def too_short_for_window(params: Mapping[str, Any], scale_window: int | None, steps_before: int) -> str | None:
    """Return a warning for a training that ends before its loss scale can rise, else None.

    Args:
        params (Mapping): what MindSpore gives to a callback; ``epoch_num`` and ``batch_num`` tell the number of steps.
        scale_window (int, optional): steps without overflow before the scale rises; None if unknown.
        steps_before (int): steps taken before; after a resume there is no warning, as the window began earlier.

    Examples:
        >>> too_short_for_window({"epoch_num": 1, "batch_num": 25}, 1000, 0).partition(":")[0]
        'The loss scale cannot rise in this training'
        >>> too_short_for_window({"epoch_num": 40, "batch_num": 25}, 1000, 0) is None
        True
    """
    steps = (params.get("epoch_num") or 0) * (params.get("batch_num") or 0)
    if scale_window is None or steps_before or not 0 < steps < scale_window:
        return None
    return (
        f"The loss scale cannot rise in this training: it has {steps} steps, and the scale rises after {scale_window} "
        "steps without an overflow. It trains on from where it starts, and can only fall. Start at the scale that "
        f"'adaptive-loss-scale find' says, or set 'scale_window' and 'min_scale_window' below {steps}."
    )
