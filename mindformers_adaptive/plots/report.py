"""Writes one self-contained HTML page about training runs: findings as text, and embedded pictures."""

from __future__ import annotations

import base64
import datetime
import html
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.analysis_text import PASTE, PASTE_IN_PYTHON, without_advice
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.gradient_records import draw_gradient_records
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.files import atomic_write, make_folder_of
from mindformers_adaptive.text.table import counted
from mindformers_adaptive.text.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Pictures for narrow screens have this share of the usual width. Their letters keep the usual size, to stay readable.
_NARROW = 0.48


@dataclass(frozen=True)
class RunTold:
    """The texts of the HTML page about one run. The texts are untrusted, so the page escapes them.

    Attributes:
        name (str): the name of the run on the page.
        source (str): the file from which the run was read.
        analysis (Mapping): what :meth:`mindformers_adaptive.lab.analysis.Analysis.to_dict` returns.
        text (str): the analysis as text, as its method ``text`` returns it.
    """

    name: str
    source: str
    analysis: Mapping[str, Any]
    text: str


def render(runs: Sequence[RunTold], figures: Iterable[str], *, written: str, versions: str) -> str:
    """Return one HTML page about the given training runs.

    Args:
        runs (Sequence[RunTold]): at least one.
        figures (Iterable[str]): what :func:`picture` returned, or a sentence that says why there are no pictures.
        written (str): a phrase that says when the page was written.
        versions (str): the versions of the packages.

    Returns:
        str, HTML in which all text that was read is escaped.
    """
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_escaped(f"Loss scaling of {', '.join(run.name for run in runs)}"),
        written=_escaped(written),
        verdicts="\n".join(_head(run, named=len(runs) > 1) for run in runs),
        figures="\n".join(figures),
        runs="\n".join(map(_card, runs)),
        versions=_escaped(versions),
    )


def picture(draw: Callable[[], Figure], heading: str) -> str:
    """Return the HTML of a figure: the title as text, the picture, and a narrower picture for narrow screens.

    Args:
        draw (Callable): returns the picture, drawn anew at each call.
        heading (str): the heading above the figure.
    """
    wide = draw()
    title = wide.get_suptitle()
    with canvas.narrower(_NARROW):
        narrow = draw()
    caption, alternative = (
        # In the title of a figure a dollar sign in the name of a run is escaped, because it would begin a formula. The
        # caption needs no escape.
        re.sub(r"\$2\^\{(-?[\d.]+)\}\$", power, _escaped(title)).replace(r"\$", "$")
        for power in (r"2<sup>\1</sup>", r"2^\1")
    )
    return (
        f"<h2>{_escaped(heading)}</h2>\n<figure>\n<figcaption>{caption}</figcaption>\n<picture>"
        f'<source media="(max-width: 640px)" srcset="{_data(narrow)}"><img alt="{alternative}" src="{_data(wide)}">'
        "</picture>\n</figure>"
    )


def _data(figure: Figure) -> str:
    """Return a figure as a data URL. Browsers run no scripts in an SVG that is loaded as an image."""
    figure.suptitle("")
    drawn = io.BytesIO()
    canvas.write_svg(figure, drawn)
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode('ascii')}"


def _escaped(text: object) -> str:
    return html.escape(printable(str(text), keep="\n"))


def _head(run: RunTold, named: bool) -> str:
    """Return the head of the page about a run in three lines: the cause, what to do, and what else the log shows."""
    lines, advice = list(run.analysis["verdict"]), run.analysis["advice"]
    if advice:
        # An explanation that lies beside the record names the cause more closely than the steps do.
        lines.insert(1 if " was explained. " in lines[0] else 0, advice[0]["reason"])
        first_sentence = advice[0]["change"].partition("\n")[0].partition(". ")[0]
        lines.insert(1, first_sentence.rstrip(".:") + ".")
    name = f"{run.name}: " if named else ""
    cause, *details = (_escaped(line) for line in (f"{name}{lines[0]}", *lines[1:3]))
    return f"<p>{'<br>'.join((f'<strong>{cause}</strong>', *details))}</p>"


def _card(run: RunTold) -> str:
    """Return the HTML card of a run: what to change, the settings to paste, what happened, and all details."""
    happened = [*run.analysis["verdict"], f"Loss: {_losses(run.analysis['loss'])}."]
    return (
        f'<article class="card">\n<h2>{_escaped(run.name)}</h2>\n<p class="muted">{_escaped(run.source)}</p>\n'
        f"<h3>What to change</h3>\n{_advice(run.analysis)}\n<h3>The run</h3>\n<p>{_escaped(' '.join(happened))}</p>\n"
        f"<details><summary>All details</summary><pre>{_escaped(run.text)}</pre></details>\n</article>"
    )


def _losses(loss: Mapping[str, Any]) -> str:
    """Return a phrase with the first and the last finite loss, and the number of steps with inf or NaN."""
    if loss["last"] is None:
        said = "not known"
    else:
        end = "in the last step with a finite loss" if loss["bad_steps"] else "at the end"
        said = f"{loss['first']:.4g} at first, {loss['last']:.4g} {end}"
    bad = f"; inf or NaN in {counted(loss['bad_steps'], 'step')}, first {loss['first_bad_step']}"
    return said + bad * bool(loss["bad_steps"])


def _advice(analysis: Mapping[str, Any]) -> str:
    if not analysis["advice"]:
        return "".join(f"<p>{_escaped(paragraph)}</p>" for paragraph in without_advice(analysis))
    entries = "".join(
        f'<li>{_change(advice["change"])}<span class="muted">{_escaped(advice["reason"])}</span></li>'
        for advice in analysis["advice"]
    )
    if not analysis["scale_sense"]:
        return f"<ol>{entries}</ol>"
    paste, settings = PASTE, analysis["scale_sense"]
    if analysis["in_python"]:
        paste, settings = PASTE_IN_PYTHON, analysis["update_cell"]
    return f'<ol>{entries}</ol><p class="muted">{_escaped(paste)}</p><pre>{_escaped(settings.rstrip())}</pre>'


def _change(change: str) -> str:
    """Return a piece of advice as HTML. Each command has a block of its own, so that it can be pasted."""
    text, *commands = change.split("\n")
    return _escaped(text) + "".join(f"<pre>{_escaped(command)}</pre>" for command in commands)


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
        figures = [f'<p class="muted">{_escaped(error)}.</p>']
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
