"""Writes an HTML page about training runs: reads, analyzes and draws the records in the runs' folders."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots.gradient_records import draw_gradient_records
from mindformers_adaptive.plots.report_page import RunTold, picture, render, without_pictures
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.files import atomic_write, make_folder_of

__all__ = ["GRADIENTS", "gradients_beside", "write_report"]

# The record of GradientRangeMonitor. The name is repeated here, because the module of the callback needs MindSpore.
GRADIENTS = "gradient_ranges.jsonl"


def write_report(
    records: Mapping[str, str | os.PathLike[str]],
    output: str | os.PathLike[str],
    versions: str,
    pattern: str | None = None,
) -> Path:
    """Write an HTML page about the given runs. If writing fails, no partial file is left.

    Without matplotlib, the page has no pictures, and says how to install it.

    Args:
        records (Mapping): the path of each run's record or log, by the name of the run; at least one. Records of
            gradients in the same folders are drawn too.
        output (str): the file.
        versions (str): text about the versions of the packages.
        pattern (str, optional): the pattern of the logs' lines; see :func:`mindformers_adaptive.record.logs.read_log`.

    Returns:
        Path, the file.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if a file is no record or log, or has no step.
    """
    runs = {name: read_log(path, pattern=pattern) for name, path in records.items()}
    gradients = gradients_beside(records)
    drawn = dict(zip([""] if len(runs) == 1 else runs, runs.values(), strict=True))
    try:
        figures = [picture(lambda: draw_runs(drawn), "Loss and loss scale")]
        if gradients:
            figures.append(picture(lambda: draw_gradient_records(gradients), "Gradients by group of Parameters"))
    except ImportError as error:
        # The page is worth reading without pictures, and a plain installation has no matplotlib.
        figures = [without_pictures(error)]
    analyses = {name: analyze(run) for name, run in runs.items()}
    analysed = [
        RunTold(name, str(records[name]), analysis.to_dict(), analysis.text(details=True))
        for name, analysis in analyses.items()
    ]
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
