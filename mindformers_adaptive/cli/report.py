"""Write one HTML page for a run, or for several side by side: what happened, pictures, what to change, versions.

The page is a single file: nothing is loaded from elsewhere. It follows the browser's dark or light mode. Gradients
are drawn too if their record lies beside the run's record.

examples:
  adaptive-loss-scale report output
  adaptive-loss-scale report run_64 run_512 --output both.html
"""

import argparse

from mindformers_adaptive.cli.output import UsageError, add_pattern_argument, print_text, read_source, require_file
from mindformers_adaptive.cli.plot import tell_apart
from mindformers_adaptive.cli.versions import short
from mindformers_adaptive.plots.report import write_report
from mindformers_adaptive.record.run_folder import record_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``report``."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=read_source,
        metavar="RUN",
        help="the output folder of a run, its loss_scale_record.jsonl, or its log",
    )
    add_pattern_argument(parser)
    text = "the .html file to write; default: report.html"
    parser.add_argument("--output", type=_page, default="report.html", metavar="FILE", help=text)


def run(options: argparse.Namespace) -> None:
    """Write an HTML page about the given runs."""
    files = list(dict.fromkeys(options.runs))
    names = tell_apart(files)
    records = {names[source]: record_in(source) for source in files}
    write_report(records, options.output, short(), options.pattern)
    print_text(f"written: {options.output}")


def _page(text: str) -> str:
    if not text.lower().endswith((".html", ".htm")):
        raise UsageError(f"must name a file that ends in .html, but got {text!r}")
    return require_file(text)
