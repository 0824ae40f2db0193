"""Read the loss-scaling state from one file of a checkpoint, and write the file that holds nothing else.

A state is in a ``.ckpt`` or ``.safetensors`` file among the weights, and in MindFormers' ``checkpoint:`` format in
``common.json`` and ``loss_scale.json`` too. Weights are not kept in memory. MindSpore is imported only to read a
``.ckpt`` file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from mindformers_adaptive.rules.fields import Field
from mindformers_adaptive.text.files import NOT_FINITE, write_json
from mindformers_adaptive.text.install_hint import install_hint

# The sidecar: a file beside common.json that holds the loss-scaling state. MindFormers' `checkpoint:` format itself
# leaves this state out if the optimizer is not saved.
FILE_NAME = "loss_scale.json"
_FORMAT = 1

# JSON has no numbers for infinity and NaN, so these are written as text.
_Number = int | float | Literal["inf", "-inf", "nan"]


class _Sidecar(msgspec.Struct):
    """The content of the sidecar."""

    format: int
    loss_scale: _Number
    state: dict[str, _Number | list[_Number]]


# Values: a dict from a key of a checkpoint file, or a name in a loss-scaling state, to the value. Fields: a dict from
# the name of a Parameter to the state field that the Parameter holds.
Values = dict[str, Any]
Fields = dict[str, Field]


def read_file(file: Path, fields: Fields) -> Values:
    """Return the values of state fields in one file of a checkpoint, by their keys in the file.

    Args:
        file (Path): the file.
        fields (dict[str, Field]): the fields to look for, by the names of their Parameters.

    Raises:
        Exception: of any kind, if the file cannot be read; each library raises its own errors for a torn file.
        ValueError: if the file is of no known format.
    """
    read = _READERS.get(file.name) or _READERS.get(file.suffix)
    if read is None:
        endings = " or ".join(SUFFIXES)
        raise ValueError(f"the name of a checkpoint file must end in {endings}, but is {file.name!r}")
    return read(file, fields)


def write_sidecar(folder: str | Path, loss_scale: float, state: Mapping[str, float | Sequence[float]]) -> None:
    """Write the loss-scaling state to ``loss_scale.json``.

    Args:
        folder (str): the checkpoint of one step.
        loss_scale (float): the loss scale for the next step.
        state (dict): numbers and lists of numbers by name, as ``state()`` of an update cell returns them.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write_sidecar(folder, 1024.0, {"scale_window": 20})
        >>> read_sidecar(folder)
        (1024.0, {'scale_window': 20})
    """
    write_json(Path(folder) / FILE_NAME, {"format": _FORMAT, "loss_scale": loss_scale, "state": state})


def read_sidecar(folder: str | Path) -> tuple[float, dict[str, Any]] | None:
    """Read the loss-scaling state from ``loss_scale.json``.

    Args:
        folder (str): the checkpoint of one step.

    Returns:
        tuple[float, dict], the loss scale and the state, or None where there is no such file.

    Raises:
        ValueError: if the file is not one that :func:`write_sidecar` wrote.
    """
    file = Path(folder) / FILE_NAME
    if not file.is_file():
        return None
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_Sidecar)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} cannot be used: {error}. Give the checkpoint of another step") from error
    if content.format != _FORMAT:
        raise ValueError(
            f"{file} cannot be used: 'format' in the file must be {_FORMAT}, but is {content.format}. Use the version "
            "of mindformers_adaptive that wrote the file"
        )
    state = {name: _with_not_finite(value) for name, value in content.state.items()}
    return float(_with_not_finite(content.loss_scale)), state


def _with_not_finite(value: Any) -> Any:
    return list(map(_with_not_finite, value)) if isinstance(value, list) else NOT_FINITE.get(value, value)


def _read_safetensors(file: Path, fields: Fields) -> Values:
    with install_hint("A .safetensors file"):
        from safetensors import safe_open

    with safe_open(file, "np") as content:
        keys = [key for key in content.keys() if last_part(key) in fields]  # noqa: SIM118 - it is not a dict
        fitting = [key for key in keys if _fits(fields[last_part(key)], content.get_slice(key).get_shape())]
        return {key: content.get_tensor(key).reshape(fields[last_part(key)].shape).tolist() for key in fitting}


def _read_ckpt(file: Path, fields: Fields) -> Values:
    with install_hint("A .ckpt file"):
        from mindspore import load_checkpoint

    keys: list[str] = []

    def choose(key: str) -> bool:
        keys.append(key)
        return last_part(key) in fields

    if file.stat().st_size == 0:
        raise ValueError("the file is empty")
    try:
        parameters = load_checkpoint(str(file), choice_func=choose)
    except ValueError:
        # MindSpore raises ValueError for an intact checkpoint file too, if `choose` has chosen none of its keys.
        if not keys or any(last_part(key) in fields for key in keys):
            raise
        return {}
    # Entries that the user appended to the checkpoint may be text.
    numbers = {key: value for key, value in parameters.items() if not isinstance(value, str)}
    fitting = {key: value for key, value in numbers.items() if _fits(fields[last_part(key)], value.shape)}
    return {key: value.asnumpy().reshape(fields[last_part(key)].shape).tolist() for key, value in fitting.items()}


def _fits(field: Field, shape: Sequence[int]) -> bool:
    """Return whether an array has the shape of a state field. A weight of the same name would have another shape."""
    return tuple(shape) == field.shape if field.shape else set(shape) <= {1}


def _read_common(file: Path, fields: Fields) -> Values:
    content = json.loads(file.read_text(encoding="utf-8"))
    return {key: content[key] for key in ("step_num", "global_step", "loss_scale") if content.get(key) is not None}


def _read_sidecar_values(file: Path, fields: Fields) -> Values:
    loss_scale, state = read_sidecar(file.parent) or (None, {})
    values: Values = {"scale_sense": loss_scale}
    for saved_field in fields.values():
        if all(key in state for key in saved_field.keys):
            values[saved_field.parameter] = saved_field.value_in(state)
    # A state that has scale_window but no list_index is from a rule other than the adaptive rule. Its scale_window may
    # mean something else, so leave it out.
    if "list_index" not in values:
        values.pop("scale_window", None)
    return values


def last_part(key: str) -> str:
    """Return the name of a Parameter without the prefixes of the cells that hold it."""
    return key.rpartition(".")[2]


_READERS: dict[str, Callable[[Path, Fields], Values]] = {
    ".ckpt": _read_ckpt,
    ".safetensors": _read_safetensors,
    "common.json": _read_common,
    FILE_NAME: _read_sidecar_values,
}
SUFFIXES = (".ckpt", ".safetensors")
# The small files of a checkpoint folder iteration_N that can hold the loss scale. The optimizer's large files can hold
# it too. A resume takes the loss scale from the optimizer's files if they hold it. Otherwise, it takes the loss scale
# from the first of the small files that holds it.
SMALL_FILES = ("common.json", FILE_NAME)
