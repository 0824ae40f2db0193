"""Find the checkpoints in a folder, and read the loss-scaling state of each of them."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindformers_adaptive.mindformers.checkpoint_formats import (
    SMALL_FILES,
    SUFFIXES,
    Fields,
    Values,
    last_part,
    read_file,
)
from mindformers_adaptive.record.run_folder import checkpoint_folders
from mindformers_adaptive.rules import RULES
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.fields import Field, form_of, kept_fields
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import all_fields
from mindformers_adaptive.rules.state_dict import FORM
from mindformers_adaptive.text.files import refuse_pipe
from mindformers_adaptive.text.table import counted

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
    values: Values
    parameters: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    unreadable: bool = False

    @property
    def kind(self) -> str:
        """The kind of loss-scaling state.

        The name of a rule; "adaptive (MindFormers' own cell)"; "dynamic (no window)"; "loss scale only"; "none" without
        such a state; or "unreadable" if a damaged file may hide it.
        """
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
    also be a folder ``rank_N`` or ``iteration_N`` itself, or the output folder of a training.

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
    roots = dict.fromkeys([root, *checkpoint_folders(root)])
    for folder in dict.fromkeys([*roots, *(inner for outer in roots for inner in outer.iterdir() if inner.is_dir())]):
        if folder in roots or re.fullmatch(r"rank_\d+", folder.name):
            files = [file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file()]
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
    if not with_state:
        raise ValueError(f"There is no loss-scaling state in {str(path)!r}: {_why_no_state(path, checkpoints, torn)}")
    steps = [checkpoint.step for checkpoint in with_state]
    newest = with_state[-1] if steps[-1] is None else with_state[steps.index(steps[-1])]
    newer = checkpoints[checkpoints.index(newest) :]
    notes = [*newest.problems, *_what_is_torn(path, [checkpoint for checkpoint in torn if checkpoint in newer])]
    about = {"file": _name_below(path, newest), "rank": newest.rank, "kind": newest.kind}
    return {**about, **newest.values, "notes": notes}


def _why_no_state(path: str | Path, checkpoints: list[Checkpoint], torn: list[Checkpoint]) -> str:
    if torn:
        return f"{'; '.join(_what_is_torn(path, torn)).rstrip('.')}. Give another checkpoint."
    if not checkpoints:
        return "it has no .ckpt or .safetensors file. Give a checkpoint, a folder of them, or the folder of a run."
    return (
        f"{counted(len(checkpoints), 'checkpoint')} read, none with a loss scale, as of weights that were saved alone. "
        "Save the train step, not its network: mindspore.save_checkpoint(train_step, FILE)."
    )


def _what_is_torn(path: str | Path, torn: Iterable[Checkpoint]) -> list[str]:
    """Return a note for each problem of unreadable checkpoints, which names all files that have the problem."""
    files: dict[str, list[str]] = {}
    for checkpoint in torn:
        # Some errors name the file by its full path, which the note has already.
        problem = "; ".join(checkpoint.problems).replace(f" {checkpoint.path}", "")
        files.setdefault(problem, []).append(_name_below(path, checkpoint))
    return [f"{', '.join(names)}: {problem}" for problem, names in files.items()]


def _name_below(path: str | Path, checkpoint: Checkpoint) -> str:
    root = Path(path).resolve()
    return checkpoint.path.name if root == checkpoint.path else os.path.relpath(checkpoint.path, root)


def _is_iteration(folder: Path) -> bool:
    return bool(re.fullmatch(r"iteration_\d+", folder.name)) or any((folder / name).is_file() for name in SMALL_FILES)


def _age(checkpoint: Checkpoint) -> tuple[Any, ...]:
    numbers_as_numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", checkpoint.path.name)]
    rank = -1 if checkpoint.rank is None else checkpoint.rank
    return checkpoint.step is None, checkpoint.step or 0, numbers_as_numbers, rank


def _read_iteration(folder: Path, rules: tuple[type[Rule], ...]) -> Checkpoint:
    """Read a folder of MindFormers' ``checkpoint:`` format, beginning with the optimizer's files, as a resume does."""
    files = sorted(folder.glob("*-opt-*.safetensors"))
    return _read(folder, [*files, *(folder / name for name in SMALL_FILES if (folder / name).is_file())], rules)


def _read(path: Path, files: Sequence[Path], rules: tuple[type[Rule], ...]) -> Checkpoint:
    fields = {field.parameter: field for field in (*_FIELDS, *(field for rule in rules for field in all_fields(rule)))}
    checkpoint = Checkpoint(path, rules, dict.fromkeys(key for field in fields.values() for key in field.keys))
    fields |= {field.parameter: field for rule in rules for field in (*rule.former_fields, Field(FORM, parameter=FORM))}
    origin: dict[str, str] = {}
    any_is_torn = False
    for file in files:
        try:
            content = read_file(file, fields)
            values = _by_name(content, _fields_of_form(content, fields, checkpoint), checkpoint.problems)
        except Exception as error:  # each library raises its own errors for a torn file
            name = "" if file == path else f"{file.name} "
            checkpoint.problems.append(f"{name}cannot be read: {_one_line(error)}")
            any_is_torn = True
            continue
        checkpoint.parameters |= set(map(last_part, content))
        for name, value in values.items():
            if name not in origin:
                origin[name], checkpoint.values[name] = file.name, value
            elif str(checkpoint.values[name]) != str(value):
                checkpoint.problems.append(
                    f"{name} is {checkpoint.values[name]} in {origin[name]} but {value} in {file.name}"
                )
    checkpoint.unreadable = any_is_torn and not checkpoint.holds_state
    return checkpoint


def _fields_of_form(content: Values, fields: Fields, checkpoint: Checkpoint) -> Fields:
    """Return the state fields to read. Leave out vectors if the saved rule could order their elements differently."""
    former = {field.parameter for rule in checkpoint.rules for field in rule.former_fields}
    readable = {name: field for name, field in fields.items() if name not in (FORM, *former)}
    by_name = {last_part(name): value for name, value in content.items()}
    for rule in checkpoint.rules if FORM in by_name else ():
        parts = [field.parameter for field in kept_fields(rule) if field.parts and field.parameter in by_name]
        if parts and abs(by_name[FORM]) != form_of(rule):
            readable = {name: field for name, field in readable.items() if name not in parts}
            checkpoint.problems.append(f"not shown: vectors that do not have the layout of the rule {rule.name}")
    return readable


def _by_name(content: Mapping[str, Any], fields: Fields, problems: list[str]) -> Values:
    """Return a file's values by their names in ``state()``. Add to ``problems`` which values contradict each other."""
    values: Values = {}

    def find(name: str) -> Any:
        # Prefer the key with the fewest parts, at best without a prefix. MindSpore puts a prefix before the name of a
        # Parameter whose cell is a child of another cell.
        keys = sorted((key for key in content if last_part(key) == name), key=lambda key: (key.count("."), key))
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


def _one_line(error: Exception) -> str:
    """Return the message of an error without line breaks, or the name of the error's class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
