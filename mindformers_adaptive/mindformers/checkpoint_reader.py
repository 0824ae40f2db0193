"""Read the loss-scaling state from checkpoints of every format, and write it to a sidecar file of a checkpoint.

Weights are not kept in memory. MindSpore is imported only to read a ``.ckpt`` file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindformers_adaptive.rules import RULES
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.fields import Field, form_of, kept_fields
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import all_fields
from mindformers_adaptive.rules.state_dict import FORM
from mindformers_adaptive.text.files import NOT_FINITE, refuse_pipe, write_json
from mindformers_adaptive.text.install_hint import install_hint
from mindformers_adaptive.text.table import counted

__all__ = ["FILE_NAME", "Checkpoint", "newest_state", "read_checkpoints", "read_sidecar", "write_sidecar"]

# The sidecar: a file beside common.json that holds the loss-scaling state. MindFormers' `checkpoint:` format itself
# leaves this state out if the optimizer is not saved.
FILE_NAME = "loss_scale.json"
_FORMAT = 1

# Checkpoint fields that exist whichever loss-scaling rule is used. MindFormers can also save the loss scale as a number
# named loss_scale. The Parameter scale_sense comes last and takes precedence.
_FIELDS = (
    Field("step_num", parameter="step_num"),
    Field("global_step", parameter="global_step"),
    Field("loss_scale", "float32", parameter="loss_scale"),
    Field("loss_scale", "float32", parameter="scale_sense"),
)
# Parameters of this package's adaptive update cell that MindFormers' own adaptive cell lacks.
_NOT_MINDFORMERS = ("skipped_steps", "consecutive_overflows", "hysteresis_budget")

# _Values: a dict from a key of a checkpoint file, or a name in a loss-scaling state, to the value. _Fields: a dict from
# the name of a Parameter to the state field that the Parameter holds.
_Values = dict[str, Any]
_Fields = dict[str, Field]


@dataclass(eq=False)
class Checkpoint:
    """The loss-scaling state in one checkpoint file, or in one folder of MindFormers' ``checkpoint:`` format.

    Attributes:
        path (Path): the file or folder.
        rules (tuple[type, ...]): the rules whose states the checkpoint may hold.
        values (dict[str, int | float | list[float] | None]): steps, loss scale and the state of all rules; None for
            each value that the checkpoint does not have.
        parameters (set[str]): the names of the Parameters in the checkpoint.
        problems (list[str]): which files could not be read, and which values contradict each other.
        unreadable (bool): whether no state was found and a file could not be read.
    """

    path: Path
    rules: tuple[type[Rule], ...]
    values: _Values
    parameters: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    unreadable: bool = False

    @property
    def kind(self) -> str:
        """The kind of loss-scaling state: "none" without such a state, "unreadable" if a damaged file may hide it."""
        if self.unreadable:
            return "unreadable"
        for rule in self.rules:
            if self.parameters & {field.parameter for field in (*kept_fields(rule), *rule.former_fields)}:
                by_mindformers = rule is AdaptiveRule and not self.parameters & set(_NOT_MINDFORMERS)
                return f"{rule.name} (MindFormers' own cell)" if by_mindformers else rule.name
        if any(self.values[name] is not None for name in ("cur_iter", "last_overflow_iter")):
            return "dynamic (no window)"
        return "none" if self.values["loss_scale"] is None else "loss scale only"

    @property
    def holds_state(self) -> bool:
        """Whether the checkpoint has any loss-scaling state."""
        return self.kind not in ("none", "unreadable")

    @property
    def rank(self) -> int | None:
        """The rank of the process that saved the checkpoint: N for a file in a folder ``rank_N``, else None."""
        match = re.fullmatch(r"rank_(\d+)", self.path.parent.name)
        return int(match[1]) if match else None

    @property
    def step(self) -> int | None:
        """The step at which the checkpoint was saved, or None if neither its content nor its name has the step."""
        if self.values["step_num"] is not None:
            return int(self.values["step_num"])
        # The name of a checkpoint file holds the epoch and the step within the epoch. The step within the epoch equals
        # the step of the training only in epoch 1.
        match = re.fullmatch(r"iteration_(\d+)|(?s:.*)-1_(\d+)\.\w+", self.path.name)
        return int(match[1] or match[2]) if match else None


def read_checkpoints(path: str | Path, rules: Sequence[type[Rule]] = ()) -> list[Checkpoint]:
    """Read a checkpoint file, or all checkpoints of a folder.

    A folder may hold checkpoint files, folders ``rank_N`` with such files, and folders ``iteration_N``. The folder may
    also be a folder ``rank_N`` or ``iteration_N`` itself.

    Args:
        path (str): the file or folder.
        rules (Sequence[type]): classes of your own rules whose states the checkpoints may hold. Default: none.

    Returns:
        list[Checkpoint] by age, the newest last. Checkpoints of unknown step come after all others.

    Raises:
        OSError: if there is no such path, or the folder cannot be read.
    """
    all_rules = (*RULES.values(), *rules)
    try:
        root = Path(path).resolve(strict=True)
    except (RuntimeError, ValueError) as error:
        # The path is a link that leads to itself, or a name that no file can have.
        raise FileNotFoundError(f"There is no checkpoint {str(path)!r}: {error}.") from None
    refuse_pipe(root)
    if root.is_file():
        return [_read(root, [root], all_rules)]
    if _is_iteration(root):
        return [_read_iteration(root, all_rules)]
    checkpoints = []
    for folder in (root, *filter(Path.is_dir, root.iterdir())):
        if folder == root or re.fullmatch(r"rank_\d+", folder.name):
            files = [file for file in folder.iterdir() if file.suffix in _READERS and file.is_file()]
            checkpoints += [_read(file, [file], all_rules) for file in files]
        elif _is_iteration(folder):
            checkpoints.append(_read_iteration(folder, all_rules))
    return sorted(checkpoints, key=_age)


def newest_state(path: str | Path, rules: Sequence[type[Rule]] = ()) -> dict[str, Any]:
    """Return the loss-scale state of the newest checkpoint that has such a state.

    Args:
        path (str): as in :func:`read_checkpoints`.
        rules (Sequence[type]): classes of your own rules whose states the checkpoints may hold. Default: none.

    Returns:
        dict with ``file`` (relative to ``path``), ``rank``, ``kind``, the steps and the state by name, None for each
        value that the checkpoint does not have, and ``notes``, a list of str: values that contradict each other, and
        newer checkpoints that cannot be read. If several ranks saved the state, the first rank is taken.

    Raises:
        OSError: if there is no such path, or the folder cannot be read.
        ValueError: if no checkpoint has a loss-scaling state.
    """
    checkpoints = read_checkpoints(path, rules)
    torn = [checkpoint for checkpoint in checkpoints if checkpoint.unreadable]
    with_state = [checkpoint for checkpoint in checkpoints if checkpoint.holds_state]
    notes = [f"{_name_below(path, checkpoint)}: {'; '.join(checkpoint.problems)}" for checkpoint in torn]
    if not with_state:
        reason = "; ".join(notes) or f"{counted(len(checkpoints), 'checkpoint')} read, none with a state"
        raise ValueError(f"There is no loss-scaling state in {str(path)!r}: {reason}. Give another checkpoint.")
    steps = [checkpoint.step for checkpoint in with_state]
    newest = with_state[-1] if steps[-1] is None else with_state[steps.index(steps[-1])]
    newer = checkpoints[checkpoints.index(newest) :]
    notes = [note for checkpoint, note in zip(torn, notes, strict=True) if checkpoint in newer]
    about = {"file": _name_below(path, newest), "rank": newest.rank, "kind": newest.kind}
    return {**about, **newest.values, "notes": [*newest.problems, *notes]}


def _name_below(path: str | Path, checkpoint: Checkpoint) -> str:
    root = Path(path).resolve()
    return checkpoint.path.name if root == checkpoint.path else str(checkpoint.path.relative_to(root))


def _is_iteration(folder: Path) -> bool:
    return bool(re.fullmatch(r"iteration_\d+", folder.name)) or any((folder / name).is_file() for name in _SMALL_FILES)


def _age(checkpoint: Checkpoint) -> tuple[Any, ...]:
    numbers_as_numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", checkpoint.path.name)]
    rank = -1 if checkpoint.rank is None else checkpoint.rank
    return checkpoint.step is None, checkpoint.step or 0, numbers_as_numbers, rank


def _read_iteration(folder: Path, rules: tuple[type[Rule], ...]) -> Checkpoint:
    """Read a folder of MindFormers' ``checkpoint:`` format, beginning with the optimizer's files, as a resume does."""
    files = sorted(folder.glob("*-opt-*.safetensors"))
    return _read(folder, [*files, *(folder / name for name in _SMALL_FILES if (folder / name).is_file())], rules)


def _read(path: Path, files: Sequence[Path], rules: tuple[type[Rule], ...]) -> Checkpoint:
    fields = {field.parameter: field for field in (*_FIELDS, *(field for rule in rules for field in all_fields(rule)))}
    checkpoint = Checkpoint(path, rules, dict.fromkeys(key for field in fields.values() for key in field.keys))
    fields |= {field.parameter: field for rule in rules for field in (*rule.former_fields, Field(FORM, parameter=FORM))}
    origin: dict[str, str] = {}
    any_is_torn = False
    for file in files:
        read = _SMALL_FILES.get(file.name) or _READERS.get(file.suffix, _refuse)
        try:
            content = read(file, fields)
            values = _by_name(content, _fields_of_form(content, fields, checkpoint), checkpoint.problems)
        except Exception as error:  # each library raises its own errors for a torn file
            name = "" if file == path else f"{file.name} "
            checkpoint.problems.append(f"{name}cannot be read: {_one_line(error)}")
            any_is_torn = True
            continue
        checkpoint.parameters |= set(map(_last_part, content))
        for name, value in values.items():
            if name not in origin:
                origin[name], checkpoint.values[name] = file.name, value
            elif str(checkpoint.values[name]) != str(value):
                checkpoint.problems.append(
                    f"{name} is {checkpoint.values[name]} in {origin[name]} but {value} in {file.name}"
                )
    checkpoint.unreadable = any_is_torn and not checkpoint.holds_state
    return checkpoint


def _fields_of_form(content: _Values, fields: _Fields, checkpoint: Checkpoint) -> _Fields:
    """Return the state fields to read. Leave out vectors if the saved rule could order their elements differently."""
    former = {field.parameter for rule in checkpoint.rules for field in rule.former_fields}
    readable = {name: field for name, field in fields.items() if name not in (FORM, *former)}
    by_name = {_last_part(name): value for name, value in content.items()}
    for rule in checkpoint.rules if FORM in by_name else ():
        parts = [field.parameter for field in kept_fields(rule) if field.parts and field.parameter in by_name]
        if parts and abs(by_name[FORM]) != form_of(rule):
            readable = {name: field for name, field in readable.items() if name not in parts}
            checkpoint.problems.append(f"not shown: vectors that do not have the layout of the rule {rule.name}")
    return readable


def _by_name(content: Mapping[str, Any], fields: _Fields, problems: list[str]) -> _Values:
    """Return a file's values by their names in ``state()``. Add to ``problems`` which values contradict each other."""
    values: _Values = {}

    def find(name: str) -> Any:
        # Prefer the key with the fewest parts, at best without a prefix. MindSpore puts a prefix before the name of a
        # Parameter whose cell is a child of another cell.
        keys = sorted((key for key in content if _last_part(key) == name), key=lambda key: (key.count("."), key))
        for other in keys[1:]:
            if other.count(".") == keys[0].count(".") and content[other] != content[keys[0]]:
                problems.append(f"{keys[0]} is {content[keys[0]]} but {other} is {content[other]}; {keys[0]} is shown")
        return content[keys[0]] if keys else None

    for saved_field in fields.values():
        if (value := find(saved_field.parameter)) is None:
            continue
        if saved_field.shape:
            values |= zip(saved_field.parts, value, strict=True) if saved_field.parts else {saved_field.name: value}
        else:
            values[saved_field.name] = float(value) if saved_field.dtype == "float32" else int(value)
    return values


def _read_safetensors(file: Path, fields: _Fields) -> _Values:
    with install_hint("A .safetensors file"):
        from safetensors import safe_open

    with safe_open(file, "np") as content:
        keys = [key for key in content.keys() if _last_part(key) in fields]  # noqa: SIM118 - it is not a dict
        fitting = [key for key in keys if _fits(fields[_last_part(key)], content.get_slice(key).get_shape())]
        return {key: content.get_tensor(key).reshape(fields[_last_part(key)].shape).tolist() for key in fitting}


def _read_ckpt(file: Path, fields: _Fields) -> _Values:
    with install_hint("A .ckpt file"):
        from mindspore import load_checkpoint

    keys: list[str] = []

    def choose(key: str) -> bool:
        keys.append(key)
        return _last_part(key) in fields

    if file.stat().st_size == 0:
        raise ValueError("the file is empty")
    try:
        parameters = load_checkpoint(str(file), choice_func=choose)
    except ValueError:
        # MindSpore raises ValueError for an intact checkpoint file too, if `choose` has chosen none of its keys.
        if not keys or any(_last_part(key) in fields for key in keys):
            raise
        return {}
    # Entries that the user appended to the checkpoint may be text.
    numbers = {key: value for key, value in parameters.items() if not isinstance(value, str)}
    fitting = {key: value for key, value in numbers.items() if _fits(fields[_last_part(key)], value.shape)}
    return {key: value.asnumpy().reshape(fields[_last_part(key)].shape).tolist() for key, value in fitting.items()}


def _fits(field: Field, shape: Sequence[int]) -> bool:
    """Return whether an array has the shape of a state field. A weight of the same name would have another shape."""
    return tuple(shape) == field.shape if field.shape else set(shape) <= {1}


def _read_common(file: Path, fields: _Fields) -> _Values:
    content = json.loads(file.read_text(encoding="utf-8"))
    return {key: content[key] for key in ("step_num", "global_step", "loss_scale") if content.get(key) is not None}


def _read_sidecar(file: Path, fields: _Fields) -> _Values:
    loss_scale, state = read_sidecar(file.parent) or (None, {})
    values: _Values = {"scale_sense": loss_scale}
    for saved_field in fields.values():
        if all(key in state for key in saved_field.keys):
            values[saved_field.parameter] = saved_field.value_in(state)
    # A state that has scale_window but no list_index is from a rule other than the adaptive rule. Its scale_window may
    # mean something else, so leave it out.
    if "list_index" not in values:
        values.pop("scale_window", None)
    return values


def _refuse(file: Path, fields: _Fields) -> _Values:
    raise ValueError(f"the name of a checkpoint file must end in {' or '.join(_READERS)}, but is {file.name!r}")


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _one_line(error: Exception) -> str:
    """Return the message of an error without line breaks, or the name of the error's class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


_Reader = Callable[[Path, _Fields], _Values]
_READERS: dict[str, _Reader] = {".ckpt": _read_ckpt, ".safetensors": _read_safetensors}
# The small files of a checkpoint folder iteration_N that can hold the loss scale. The optimizer's large files can hold
# it too. A resume takes the loss scale from the optimizer's files if they hold it. Otherwise, it takes the loss scale
# from the first of the small files that holds it.
_SMALL_FILES: dict[str, _Reader] = {"common.json": _read_common, FILE_NAME: _read_sidecar}


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
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or {"format", "loss_scale", "state"} - content.keys():
            raise ValueError("it must have the keys 'format', 'loss_scale' and 'state'. Give the file of another step")
        if content["format"] != _FORMAT:
            raise ValueError(
                f"'format' in the file must be {_FORMAT}, but is {content['format']!r}. Use the version of "
                "mindformers_adaptive that wrote the file"
            )
        if not isinstance(content["state"], dict):
            raise ValueError(f"'state' in the file must hold numbers by name, but holds {content['state']!r}")
        loss_scale = float(_number(content["loss_scale"], "loss_scale"))
        state = {name: _numbers(value) for name, value in content["state"].items()}
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
    return loss_scale, state


def _numbers(value: Any) -> Any:
    return list(map(_numbers, value)) if isinstance(value, list) else _number(value, "state")


def _number(value: Any, name: str) -> Any:
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if type(value) not in (int, float):
        raise ValueError(f"{name!r} in the file must hold only numbers, but holds {value!r}")
    return value
