"""Find the checkpoints in a folder, and read the loss-scaling state of each of them."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
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
    checkpoints = (_read(checkpoint, files, all_rules) for checkpoint, files in _find_checkpoints(root))
    return sorted(checkpoints, key=_age)


def _find_checkpoints(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each checkpoint of a file or folder, with the files that may hold its loss-scaling state."""
    if root.is_file():
        yield root, [root]
        return
    folders = [root, *checkpoint_folders(root)]
    inner_folders = [inner for folder in folders for inner in folder.iterdir() if inner.is_dir()]
    for folder in dict.fromkeys([*folders, *inner_folders]):
        if re.fullmatch(r"iteration_\d+", folder.name) or any((folder / name).is_file() for name in SMALL_FILES):
            # A resume takes the state from the optimizer's files, if they have it.
            small_files = [folder / name for name in SMALL_FILES if (folder / name).is_file()]
            yield folder, [*sorted(folder.glob("*-opt-*.safetensors")), *small_files]
        elif folder in folders or re.fullmatch(r"rank_\d+", folder.name):
            yield from ((file, [file]) for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())


def _age(checkpoint: Checkpoint) -> tuple[Any, ...]:
    numbers_as_numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", checkpoint.path.name)]
    rank = -1 if checkpoint.rank is None else checkpoint.rank
    return checkpoint.step is None, checkpoint.step or 0, numbers_as_numbers, rank


def _read(path: Path, files: Sequence[Path], rules: tuple[type[Rule], ...]) -> Checkpoint:
    """Read the loss-scaling state of a checkpoint. If several files have a value, the first file counts."""
    fields = {field.parameter: field for field in (*_FIELDS, *(field for rule in rules for field in all_fields(rule)))}
    checkpoint = Checkpoint(path, rules, dict.fromkeys(key for field in fields.values() for key in field.keys))
    origin: dict[str, str] = {}
    any_is_torn = False
    for file in files:
        try:
            values = _read_values(file, fields, checkpoint)
        except Exception as error:  # each library raises its own errors for a torn file
            name = "" if file == path else f"{file.name} "
            reason = " ".join(str(error).split()) or type(error).__name__
            checkpoint.problems.append(f"{name}cannot be read: {reason}")
            any_is_torn = True
            continue
        for name, value in values.items():
            if name not in origin:
                origin[name], checkpoint.values[name] = file.name, value
            elif str(checkpoint.values[name]) != str(value):
                checkpoint.problems.append(
                    f"{name} is {checkpoint.values[name]} in {origin[name]} but {value} in {file.name}"
                )
    checkpoint.unreadable = any_is_torn and not checkpoint.holds_state
    return checkpoint


def _read_values(file: Path, fields: Fields, checkpoint: Checkpoint) -> Values:
    """Return the values in one file of a checkpoint by their names in ``state()``."""
    # These further fields only tell which rule saved the state.
    further = (Field(FORM, parameter=FORM), *(field for rule in checkpoint.rules for field in rule.former_fields))
    content = _by_parameter(
        read_file(file, fields | {field.parameter: field for field in further}), checkpoint.problems
    )
    checkpoint.parameters |= content.keys()
    left_out = {field.parameter for field in further}
    for rule in checkpoint.rules if FORM in content else ():
        vectors = {field.parameter for field in kept_fields(rule) if field.parts} & content.keys()
        if vectors and abs(content[FORM]) != form_of(rule):
            # The rule that saved the vectors could order their elements differently.
            left_out |= vectors
            checkpoint.problems.append(f"not shown: vectors that do not have the layout of the rule {rule.name}")
    values: Values = {}
    for parameter, saved_field in fields.items():
        if parameter not in content or parameter in left_out:
            continue
        value = content[parameter]
        if saved_field.parts:
            values |= zip(saved_field.parts, value, strict=True)
        elif saved_field.shape:
            values[saved_field.name] = value
        else:
            values[saved_field.name] = float(value) if saved_field.dtype == "float32" else int(value)
    return values


def _by_parameter(content: Values, problems: list[str]) -> Values:
    """Return a file's values by Parameter without a prefix. Add to ``problems`` which values contradict each other.

    MindSpore puts a prefix before the name of a Parameter whose cell is a child of another cell.
    """
    # Prefer the key with the fewest parts, at best without a prefix.
    chosen: dict[str, str] = {}
    for key in sorted(content, key=lambda key: (key.count("."), key)):
        first = chosen.setdefault(last_part(key), key)
        if key != first and key.count(".") == first.count(".") and content[key] != content[first]:
            problems.append(f"{first} is {content[first]} but {key} is {content[key]}; {first} is shown")
    return {name: content[key] for name, key in chosen.items()}
