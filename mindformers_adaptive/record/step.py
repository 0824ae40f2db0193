"""The fields of a line in a run's record. The record's writer and readers and the tables are derived from them.

To add a field, add a line here and a line where the field is measured.
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np

from mindformers_adaptive.rules.checks import with_type
from mindformers_adaptive.text.files import json_text

# The largest valid step number. Above 2^53, float64 does not represent every integer, and no training takes so many
# steps, so a larger number comes from a damaged log line.
LARGEST_STEP = 2**53


def _field(description: str, ge: int | None = None, le: int | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=description, ge=ge, le=le)


class Step(msgspec.Struct, kw_only=True, gc=False):
    """A training step, as one line of a record stores it.

    A value is None if it is unknown. A field that only few lines have is UNSET in the other lines and is not written
    there. A rule may also record parts of its state.
    """

    step: Annotated[int, _field("number of the step, from 1; a resumed run counts on", ge=0, le=LARGEST_STEP)]
    loss: Annotated[float | None, _field("mean of the loss that the train-step cell returns")] = None
    overflow: Annotated[bool | None, _field("whether the step overflowed and was skipped")]
    loss_scale: Annotated[float | None, _field("the loss scale that the step used")]
    next_loss_scale: Annotated[float | None, _field("the loss scale of the next step, as in MindFormers' log")] = None
    scale_window: Annotated[float | None, _field("the scale window after the step, in steps")] = None
    window_index: Annotated[int | None, _field("the place of the window on the ladder, from 0; -1 for window 1")] = None
    growth_num: Annotated[int | None, _field("raises since the window last changed")] = None
    down_num: Annotated[int | None, _field("drops since the last raise")] = None
    skipped_steps: Annotated[int | None, _field("overflowed steps of the run so far")] = None
    largest_gradient: Annotated[float | None, _field("largest absolute gradient, unscaled and before clipping")] = None
    dropped_by_norm: Annotated[
        bool | None, _field("whether MindFormers dropped the step for its gradient norm; that is no overflow")
    ] = None
    gradient_norm: Annotated[float | None, _field("norm of all gradients, unscaled and before clipping")] = None
    gradient_format: Annotated[
        Any, _field("the format of the gradients; only for rules that follow the largest gradient")
    ] = msgspec.UNSET
    resumed: Annotated[
        bool | msgspec.UnsetType | None,
        _field("true in the first step after the training was resumed; only there"),
    ] = msgspec.UNSET
    saved: Annotated[
        bool | msgspec.UnsetType | None,
        _field("true where a checkpoint callback saves after the step; only there"),
    ] = msgspec.UNSET
    applied_bad_loss: Annotated[
        bool | msgspec.UnsetType | None,
        _field("true where the loss was inf or NaN and the step was applied; only there"),
    ] = msgspec.UNSET


class LogLine(Step, kw_only=True, gc=False):
    """A line of a training log, which may state less about a step than a record line, or be about several steps.

    Attributes:
        step (int): the last step that the line is about; -1 if it names none, as on an overflow in DeepSpeed.
        steps (int, optional): how many steps the line is about, if the line states their number.
        skipped_since (int, optional): how many steps were skipped since the last line that counts skipped steps.
        rounding (float): how far the printed ``next_loss_scale`` may be from the true value.
        source (str), rank (str): the source file and the rank that printed an overflow; empty if the line names none.
        moment (str): the time at which an overflow was printed, in ISO format; empty if the line names none.
    """

    step: int = -1
    overflow: bool | None = None
    loss_scale: float | None = None
    steps: int | None = None
    skipped_since: int | None = None
    rounding: float = 0.0
    source: str = ""
    rank: str = ""
    moment: str = ""


_BY_NAME = {field.name: field for field in msgspec.structs.fields(Step)}

# The fields that every line of a run's record has, and the fields that only some of these lines have.
FIELDS = tuple(name for name, field in _BY_NAME.items() if field.default is not msgspec.UNSET)
RARE_FIELDS = tuple(name for name in _BY_NAME if name not in FIELDS)
# The optional fields that are numbers or flags. A run has a column for each of these fields that its log states.
# Integers are left out: they count for a rule, and -1 stands for unknown in LogLines, but can be a window index.
COLUMNS = tuple(
    name
    for name, hint in get_type_hints(Step).items()
    if not _BY_NAME[name].required and {float, bool}.intersection(get_args(hint))
)
# The fields of a record line that say whether the run was resumed before the step, or saved after it. They do not
# describe the step itself, and differ between a run that was resumed and a run that never stopped.
MARKS = ("resumed", "saved")


def field_descriptions() -> dict[str, str]:
    """Return the description of each field of a record line, by the name of the field.

    Examples:
        >>> field_descriptions()["loss_scale"]
        'the loss scale that the step used'
    """
    hints = get_type_hints(Step, include_extras=True)
    return {name: hints[name].__metadata__[0].description for name in _BY_NAME}


def entry_of(values: Mapping[str, Any], is_step: bool = True) -> dict[str, Any]:
    """Return the values of a record line as Python values, where they are numbers of NumPy.

    Args:
        values (Mapping): the values by name.
        is_step (bool): whether the line is a :class:`Step`, and not a measurement of gradients. Default: True.

    Raises:
        TypeError: if a value cannot be written as JSON.
        ValueError: if ``step`` is missing or is no whole number, or a :class:`Step` lacks another required value.

    Examples:
        >>> entry_of({"step": np.int64(3), "overflow": np.bool_(False), "loss_scale": np.float32(8)})
        {'step': 3, 'overflow': False, 'loss_scale': 8.0}
    """
    entry = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    if type(step := entry.get("step")) is not int:
        raise ValueError(f"'step' must be a whole number, but got {with_type(step)}. Give the step's number.")
    if missing := [name for name, field in _BY_NAME.items() if is_step and field.required and name not in entry]:
        raise ValueError(f"Step {step} lacks {missing[0]!r}. Give it to append(), as None if it is unknown.")
    for name, value in entry.items():
        try:
            json_text(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name!r} of step {step} must be a number, text, list, dict or None, but has the type "
                f"{type(value).__name__}. Convert it, for example by float(...)."
            ) from error
    return entry


def step_of(content: Mapping[str, Any]) -> Step | str:
    """Return the step that a JSON object describes, or a message that says why the object is not a step.

    A string such as ``"4"``, ``"nan"`` or ``"inf"`` counts as the number. An optional value that cannot be read counts
    as unknown.

    Args:
        content (Mapping[str, Any]): the JSON object.

    Examples:
        >>> step_of({"step": 3, "overflow": True, "loss_scale": 4.0, "loss": "nan"}).loss
        nan
        >>> step_of({"step": "x", "overflow": True, "loss_scale": 4.0})
        'Expected `int`, got `str` - at `$.step`'
    """
    values = {name: content[name] for name in _BY_NAME if name in content}
    for name in [name for name in values if not _BY_NAME[name].required]:
        try:
            msgspec.convert(values[name], _BY_NAME[name].type, strict=False)
        except msgspec.ValidationError:
            del values[name]
    try:
        return msgspec.convert(values, Step, strict=False)
    except msgspec.ValidationError as error:
        return str(error)
