"""Read the state of loss scaling from checkpoints of every format, without keeping weights in memory.

MindSpore is imported only to read a ``.ckpt``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindformers_adaptive.checkpoint.sidecar import FILE_NAME as SIDECAR
from mindformers_adaptive.checkpoint.sidecar import read_sidecar
from mindformers_adaptive.rules import guided_names
from mindformers_adaptive.rules.guided_names import COUNTERS, PLACES
from mindformers_adaptive.rules.restored_state import PARAMETER_NAMES
from mindformers_adaptive.text.install_hint import install_hint

__all__ = [
    "FIELDS",
    "GUIDED_FIELDS",
    "STATE_FIELDS",
    "Checkpoint",
    "differences_between_ranks",
    "latest_iteration",
    "read_checkpoints",
]

COMMON = "common.json"
TRACKER = "latest_checkpointed_iteration.txt"

# What only gradient-guided scaling has; it has a window too.
GUIDED_FIELDS = (*(name for name in COUNTERS if name != "scale_window"), "level", "overflow_rate", "largest_gradient")
STATE_FIELDS = ("loss_scale", *PARAMETER_NAMES, *GUIDED_FIELDS)
FIELDS = ("step_num", "global_step", *STATE_FIELDS)

# What a file holds, by key in the file or by field.
_Values = dict[str, Any]
# A file, and the function that reads it.
_Source = tuple[Path, Callable[[Path], _Values]]

# Each field's names in a file, the better one first: MindFormers writes `loss_scale` beside the Parameter itself.
_NAMES: dict[str, tuple[str, ...]] = {name: (PARAMETER_NAMES.get(name, name),) for name in FIELDS}
_NAMES["loss_scale"] = ("scale_sense", "loss_scale")
_NAMES |= {name: (guided_names.PARAMETER_NAMES[name],) for name in ("level", "overflow_rate", "largest_gradient")}
# An array that holds several fields.
_COUNTERS_NAME = guided_names.PARAMETER_NAMES["counters"]
_NAMES |= {name: () for name in GUIDED_FIELDS if name in COUNTERS}
_SIZES = {_COUNTERS_NAME: len(COUNTERS), guided_names.PARAMETER_NAMES["overflow_rate"]: PLACES}
_WANTED = frozenset(name for names in _NAMES.values() for name in names) | {_COUNTERS_NAME}
_FLOATS = ("loss_scale", "level", "largest_gradient")


@dataclass(eq=False)
class Checkpoint:
    """The state of loss scaling in one file, or in one folder of MindFormers' ``checkpoint:`` format.

    Attributes:
        path (Path): the file or folder.
        values (dict[str, int | float | list[float] | None]): by the names in ``FIELDS``; None where there is no such
            value.
        problems (list[str]): what could not be read, and what contradicts itself.
        unreadable (bool): whether there is no state, and something could not be read.
    """

    path: Path
    values: _Values = field(default_factory=lambda: dict.fromkeys(FIELDS))
    problems: list[str] = field(default_factory=list)
    unreadable: bool = False

    @property
    def kind(self) -> str:
        """The kind of state: "none" if the checkpoint has no state, "unreadable" if that cannot be known."""
        if self.unreadable:
            return "unreadable"
        if self._has("level", "overflow_rate"):
            return "guided"
        if self._has("scale_window", "window_index", "growth_num", "down_num"):
            of_this_package = self._has("skipped_steps", "consecutive_overflows", "hysteresis_budget")
            return "adaptive" if of_this_package else "adaptive (MindFormers' own cell)"
        if self._has("cur_iter", "last_overflow_iter"):
            return "dynamic (no window)"
        return "loss scale only" if self._has("loss_scale") else "none"

    @property
    def holds_state(self) -> bool:
        """Whether there is any state of loss scaling."""
        return self.kind not in ("none", "unreadable")

    @property
    def rank(self) -> int | None:
        """The rank whose folder the file lies in."""
        match = re.fullmatch(r"rank_(\d+)", self.path.parent.name)
        return int(match[1]) if match else None

    @property
    def step(self) -> int | None:
        """The step it was saved at, or None if neither the content nor the name has it."""
        if self.values["step_num"] is not None:
            return int(self.values["step_num"])
        # A file is named by epoch and step within the epoch, which is the step itself only in the first epoch.
        match = re.fullmatch(r"iteration_(\d+)|(?s:.*)-1_(\d+)\.\w+", self.path.name)
        return int(match[1] or match[2]) if match else None

    def _has(self, *names: str) -> bool:
        return any(self.values[name] is not None for name in names)


def read_checkpoints(path: str | Path) -> list[Checkpoint]:
    """Read a checkpoint file, or all checkpoints of a folder.

    A folder may hold files, folders ``rank_N`` with files, folders ``iteration_N``, or be such a folder itself.

    Args:
        path (str): the file or folder.

    Returns:
        list[Checkpoint], the newest last, with those of unknown step after all others. Empty if the folder has no
        checkpoints.

    Raises:
        OSError: if there is no such path, or the folder cannot be read.
    """
    root = Path(path).resolve(strict=True)
    if root.is_file():
        return [_read_file(root)]
    if _is_iteration(root):
        return [_read_iteration(root)]
    checkpoints = [_read_file(file) for file in _checkpoint_files(root)]
    for folder in filter(Path.is_dir, root.iterdir()):
        if re.fullmatch(r"rank_\d+", folder.name):
            checkpoints += [_read_file(file) for file in _checkpoint_files(folder)]
        elif _is_iteration(folder):
            checkpoints.append(_read_iteration(folder))
    return sorted(checkpoints, key=_age)


def latest_iteration(path: str | Path) -> int | None:
    """Return which iteration MindFormers would resume from.

    Args:
        path (str): a folder with folders ``iteration_N``.

    Returns:
        int, or None if the folder has no ``latest_checkpointed_iteration.txt``.

    Raises:
        ValueError: if ``latest_checkpointed_iteration.txt`` does not hold a number.
    """
    file = Path(path) / TRACKER
    if not file.is_file():
        return None
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{TRACKER} cannot be used: {_one_line(error)}") from error


def differences_between_ranks(
    checkpoints: list[Checkpoint],
) -> list[tuple[Checkpoint, Checkpoint, dict[str, tuple[Any, Any]]]]:
    """Compare what several ranks saved at the same step.

    Args:
        checkpoints (list[Checkpoint]): as :func:`read_checkpoints` returns them.

    Returns:
        list[tuple[Checkpoint, Checkpoint, dict]]: each readable checkpoint of a rank, that of the first rank at the
        same step, and the values in which they differ, as {field: (value, first rank's value)}; {} where they agree.
    """
    first_of: dict[str | int, Checkpoint] = {}
    compared = []
    for checkpoint in checkpoints:
        if checkpoint.rank is None or checkpoint.unreadable:
            continue
        name = re.sub(r"rank_\d+", "rank", checkpoint.path.name)
        first = first_of.setdefault(name if checkpoint.step is None else checkpoint.step, checkpoint)
        if first.rank != checkpoint.rank:
            pairs = {name: (checkpoint.values[name], first.values[name]) for name in STATE_FIELDS}
            # By text, because NaN is not equal to itself.
            compared.append((checkpoint, first, {k: pair for k, pair in pairs.items() if str(pair[0]) != str(pair[1])}))
    return compared


def _checkpoint_files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix in _READERS and file.is_file()]


def _is_iteration(folder: Path) -> bool:
    return bool(re.fullmatch(r"iteration_\d+", folder.name)) or any((folder / name).is_file() for name in _SMALL_FILES)


def _age(checkpoint: Checkpoint) -> tuple[Any, ...]:
    numbers_as_numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", checkpoint.path.name)]
    rank = -1 if checkpoint.rank is None else checkpoint.rank
    return checkpoint.step is None, checkpoint.step or 0, numbers_as_numbers, rank


def _read_file(file: Path) -> Checkpoint:
    return _read(file, [(file, _READERS.get(file.suffix, _refuse))])


def _read_iteration(folder: Path) -> Checkpoint:
    """Read a folder of MindFormers' ``checkpoint:`` format; the file that a resume reads comes first."""
    sources: list[_Source] = [(file, _read_safetensors) for file in sorted(folder.glob("*-opt-*.safetensors"))]
    sources += [(folder / name, read) for name, read in _SMALL_FILES.items() if (folder / name).exists()]
    return _read(folder, sources)


def _read(path: Path, sources: list[_Source]) -> Checkpoint:
    checkpoint = Checkpoint(path)
    origin: dict[str, str] = {}
    any_is_torn = False
    for file, read in sources:
        try:
            values, problems = _by_field(read(file))
        except Exception as error:  # for a torn file every library has errors of its own
            name = "" if file == path else f"{file.name} "
            checkpoint.problems.append(f"{name}cannot be read: {_one_line(error)}")
            any_is_torn = True
            continue
        checkpoint.problems += problems
        for name in (name for name in FIELDS if values[name] is not None):
            if name not in origin:
                origin[name], checkpoint.values[name] = file.name, values[name]
            elif str(checkpoint.values[name]) != str(values[name]):
                checkpoint.problems.append(
                    f"{name} is {checkpoint.values[name]} in {origin[name]} but {values[name]} in {file.name}"
                )
    checkpoint.unreadable = any_is_torn and not checkpoint.holds_state
    return checkpoint


def _by_field(content: Mapping[str, Any]) -> tuple[_Values, list[str]]:
    values: _Values = dict.fromkeys(FIELDS)
    problems = []
    for name in FIELDS:
        # A bare name before one with a prefix, which a cell gets as a child of another.
        places = sorted(
            (_NAMES[name].index(_last_part(key)), key.count("."), key)
            for key in content
            if _last_part(key) in _NAMES[name]
        )
        if not places:
            continue
        key = places[0][2]
        value = content[key]
        values[name] = value if isinstance(value, list) else float(value) if name in _FLOATS else int(value)
        problems += [
            f"{key} is {content[key]} but {other} is {content[other]}; {key} is shown"
            for *like, other in places[1:]
            if like == list(places[0][:2]) and content[other] != content[key]
        ]
    for counters in (content[key] for key in sorted(content) if _last_part(key) == _COUNTERS_NAME):
        values |= zip(COUNTERS, counters, strict=True)
    return values, problems


def _read_safetensors(file: Path) -> _Values:
    with install_hint("A .safetensors file"):
        from safetensors import safe_open

    with safe_open(file, "np") as content:
        keys = [key for key in content.keys() if _is_wanted(key)]  # noqa: SIM118 - it is not a dict
        arrays = {key: content.get_tensor(key) for key in keys if _fits(key, content.get_slice(key).get_shape())}
        return {key: _to_python(key, array) for key, array in arrays.items()}


def _read_ckpt(file: Path) -> _Values:
    with install_hint("A .ckpt file"):
        from mindspore import load_checkpoint

    keys: list[str] = []

    def choose(key: str) -> bool:
        keys.append(key)
        return _is_wanted(key)

    if file.stat().st_size == 0:
        raise ValueError("the file is empty")
    try:
        parameters = load_checkpoint(str(file), choice_func=choose)
    except ValueError:
        # MindSpore's answer also to a sound file in which nothing was chosen.
        if not keys or any(map(_is_wanted, keys)):
            raise
        return {}
    # What the user appended may be text.
    numbers = {key: value for key, value in parameters.items() if not isinstance(value, str)}
    return {key: _to_python(key, value.asnumpy()) for key, value in numbers.items() if _fits(key, value.shape)}


def _read_common(file: Path) -> _Values:
    content = json.loads(file.read_text(encoding="utf-8"))
    return {key: content[key] for key in ("step_num", "global_step", "loss_scale") if content.get(key) is not None}


def _read_sidecar(file: Path) -> _Values:
    loss_scale, state = read_sidecar(file.parent) or (None, {})
    values: _Values = {"scale_sense": loss_scale}
    if set(COUNTERS) <= state.keys():
        values[_COUNTERS_NAME] = [state.pop(name) for name in COUNTERS]
    names = guided_names.PARAMETER_NAMES | PARAMETER_NAMES
    return values | {names[name]: state[name] for name in names if name in state}


def _refuse(file: Path) -> _Values:
    raise ValueError(f"the name of a checkpoint ends in {' or '.join(_READERS)}")


def _is_wanted(key: str) -> bool:
    return _last_part(key) in _WANTED


def _fits(key: str, shape: Sequence[int]) -> bool:
    """Whether an array of a wanted name has the shape that it has in a state of loss scaling."""
    size = _SIZES.get(_last_part(key))
    return set(shape) <= {1} if size is None else list(shape) == [size]


def _to_python(key: str, array: Any) -> Any:
    return array.tolist() if _last_part(key) in _SIZES else array.item()


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_READERS = {".ckpt": _read_ckpt, ".safetensors": _read_safetensors}
# In the order in which a resume prefers them, after the optimizer's file.
_SMALL_FILES = {COMMON: _read_common, SIDECAR: _read_sidecar}
