"""Writes an HTML page about training runs: reads, analyzes and draws the records in the runs' folders."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots.gradient_records import draw_gradient_records
from mindformers_adaptive.plots.report_page import RunTold, picture, render
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.files import atomic_write, make_folder_of
from mindformers_adaptive.text.table import counted

__all__ = ["GRADIENTS", "RECORD", "gradients_beside", "record_in", "write_report"]

# The names of the files that LossScaleMonitor and GradientRangeMonitor write. The names are repeated here, because the
# modules of these callbacks need MindSpore.
RECORD, GRADIENTS = "loss_scale_record.jsonl", "gradient_ranges.jsonl"


def record_in(source: str | os.PathLike[str]) -> Path:
    """Return the path of a run's record: the given file, or the record in the given folder.

    Raises:
        FileNotFoundError: if there is no such file or folder, or no record in the folder.
        ValueError: if the folder has several records.
    """
    path = Path(source)
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"There is no file or folder {str(path)!r}. Check the path; the current folder is {Path.cwd()}."
            )
        return path
    records = [path / RECORD] if (path / RECORD).is_file() else sorted(path.rglob(RECORD))
    if not records:
        raise FileNotFoundError(
            f"The folder {str(path)!r} must hold {RECORD}, which LossScaleMonitor writes, but holds none. Add the "
            "monitor to the callbacks, or give the log of the training itself."
        )
    if len(records) > 1:
        listed = ", ".join(str(file.relative_to(path)) for file in records[:3])
        raise ValueError(f"The folder {str(path)!r} must hold one {RECORD}, but holds {listed}. Name one run's folder.")
    return records[0]


def write_report(records: Mapping[str, str | os.PathLike[str]], output: str | os.PathLike[str], versions: str) -> Path:
    """Write an HTML page about the given runs. If writing fails, no partial file is left.

    Args:
        records (Mapping): the path of each run's record or log, by the name of the run; at least one. Records of
            gradients in the same folders are drawn too.
        output (str): the file.
        versions (str): text about the versions of the packages.

    Returns:
        Path, the file.

    Raises:
        ImportError: if matplotlib is missing.
        OSError: if a file cannot be read or written.
        ValueError: if a file is no record or log, or has no step.
    """
    runs = {name: read_log(path) for name, path in records.items()}
    gradients = gradients_beside(records)
    drawn = dict(zip([""] if len(runs) == 1 else runs, runs.values(), strict=True))
    figures = [picture(lambda: draw_runs(drawn), "Loss and loss scale")]
    if gradients:
        figures.append(picture(lambda: draw_gradient_records(gradients), "Gradients by group of Parameters"))
    analysed = [_told(name, str(records[name]), run) for name, run in runs.items()]
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    page = render(analysed, figures, written=f"Written {now}", versions=versions)
    target = Path(output)
    make_folder_of(target)
    with atomic_write(target) as file:
        file.write(page)
    return target


def gradients_beside(records: Mapping[str, str | os.PathLike[str]]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of gradients in the same folders as the runs' records, by the names of the runs."""
    beside = {name: Path(path).with_name(GRADIENTS) for name, path in records.items()}
    # If the records of several runs lie in one folder, it is not known to which run the record of gradients belongs.
    unambiguous = {
        name: path for name, path in beside.items() if [*beside.values()].count(path) == 1 and path.is_file()
    }
    return {name: record for name, path in unambiguous.items() if (record := read_record(path))}


def _told(name: str, source: str, run: RecordedRun) -> RunTold:
    analysis = analyze(run)
    return RunTold(name, source, analysis.to_dict(), analysis.text(details=True), _losses(run))


def _losses(run: RecordedRun) -> str:
    """Return a phrase with the first and the last finite loss, and the number of steps with inf or NaN."""
    loss: Any = np.array([math.nan]) if run.loss is None else run.loss
    finite, broken = loss[np.isfinite(loss)], run.step[np.isinf(loss)] if run.loss is not None else []
    said = f"{finite[0]:.4g} at first, {finite[-1]:.4g} at the end" if len(finite) else "not known"
    return f"{said}; inf or NaN in {counted(len(broken), 'step')}, first {broken[0]}" if len(broken) else said
