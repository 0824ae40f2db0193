"""The file beside MindFormers' ``common.json`` that keeps the state of the update cell.

MindFormers' ``checkpoint:`` format keeps network and optimizer, or with ``no_save_optim`` the network alone. The state
of loss scaling is small, so it is written beside them with every checkpoint, whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindformers_adaptive.text.files import NOT_FINITE, atomic_write, json_text

__all__ = ["FILE_NAME", "read_sidecar", "write_sidecar"]

FILE_NAME = "loss_scale.json"
_FORMAT = 1


def write_sidecar(folder: str | Path, loss_scale: float, state: Mapping[str, float | Sequence[float]]) -> None:
    """Write ``loss_scale.json``.

    Args:
        folder (str): the checkpoint of one step.
        loss_scale (float): the loss scale for the next step.
        state (dict): as ``state()`` of an update cell returns it, numbers and lists of numbers.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write_sidecar(folder, 1024.0, {"scale_window": 20})
        >>> read_sidecar(folder)
        (1024.0, {'scale_window': 20})
    """
    text = json_text({"format": _FORMAT, "loss_scale": loss_scale, "state": state}, indent=2) + "\n"
    with atomic_write(Path(folder) / FILE_NAME) as sidecar:
        sidecar.write(text)


def read_sidecar(folder: str | Path) -> tuple[float, dict[str, Any]] | None:
    """Read ``loss_scale.json``.

    Args:
        folder (str): the checkpoint of one step.

    Returns:
        tuple[float, dict], the loss scale and the state, or None where there is no such file.

    Raises:
        ValueError: if the file is not one that :func:`write_sidecar` wrote.
    """
    file = Path(folder) / FILE_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this version reads {_FORMAT}")
        loss_scale, state = float(content["loss_scale"]), content["state"]
        state = {name: _numbers(value) for name, value in state.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be used: {error or type(error).__name__}") from error
    return loss_scale, state


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_numbers, value))
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if type(value) not in (int, float):
        raise ValueError(f"its state must be numbers, but has {value!r}")
    return value
