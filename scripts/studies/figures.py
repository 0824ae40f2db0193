"""Repeat the measurements for the tables of the docs, and write the tables into the pages.

    python -m scripts.studies.figures                       # measure all: takes hours, and installs other versions
    python -m scripts.studies.figures low_start step          # measure these two
    python -m scripts.studies.figures worth --again guided  # train only what has this in its name
    python -m scripts.studies.figures --render              # measure nothing: only write the tables into the pages

docs/figures/NAME.json holds the results of a script, with its command and the versions. A page has each table between
``<!-- figures: NAME/TABLE -->`` and ``<!-- end of figures -->``, where this script writes it. On a Chinese page, cells
that docs/figures/chinese.json translates are in Chinese, all other cells in English.
"""

import argparse
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mindformers_adaptive.text.files import atomic_write
from scripts.studies.reporting import ROOT, table, versions, write_json

DATA = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", ROOT / "README_CN.md", *sorted((ROOT / "docs").glob("*/*.md"))]


@dataclass(frozen=True)
class Figure:
    """A measurement: a command, and how its output becomes tables.

    Attributes:
        command (str): the command, which runs in the top folder of the project.
        module (str): the module whose ``tables(result)`` makes the tables from the file of ``--json``. Default: "", for
            a command without ``--json``, whose printed lines are the table ``printed``.
        begins (str): the beginning of the first printed line to keep. Default: "", every line is kept.
    """

    command: str
    module: str = ""
    begins: str = ""


# A line of MindFormers' logger begins with the time, and a line of MindSpore with its level in brackets.
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - |\[(DEBUG|INFO|WARNING|ERROR|CRITICAL)\] ")
FIND = "adaptive-loss-scale find --config configs/tiny_llama_cpu_fp16.yaml --train-dataset-dir output/corpus"
COSTS, STUDY = "scripts.benchmarks.costs", "scripts.studies.study"
LONG = "scripts.studies.long_training"
MICRO_BATCHES = "scripts.studies.micro_batches"
POLICY_RATIO = "scripts.studies.policy_ratio"
FORMATS = "scripts.studies.formats_training"
FIGURES = {
    "study": Figure(f"python -m {STUDY}", STUDY),
    "guided_rule": Figure("python -m scripts.studies.guided_rule", "scripts.studies.guided_rule"),
    "worth": Figure("python -m scripts.studies.worth_it", "scripts.studies.worth_report"),
    "micro_batches": Figure(f"python -m {MICRO_BATCHES}", MICRO_BATCHES),
    "three_rules": Figure("python -m scripts.studies.three_rules", "scripts.studies.three_rules"),
    "low_start": Figure("python -m scripts.studies.low_start", "scripts.studies.low_start"),
    "batches_in_turn": Figure("python -m scripts.studies.batches_in_turn", "scripts.studies.batches_in_turn"),
    "streams": Figure("python -m scripts.studies.streams", "scripts.studies.streams"),
    "harm": Figure("python -m scripts.studies.harm", "scripts.studies.harm"),
    "policy_ratio": Figure(f"python -m {POLICY_RATIO}", POLICY_RATIO),
    # This command does not repeat a run that docs/figures/long_training/ already holds.
    "long_training": Figure(f"python -m {LONG}", LONG),
    "formats": Figure(f"python -m {FORMATS}", FORMATS),
    "update": Figure(f"python -m {COSTS} update", COSTS),
    "update_pynative": Figure(f"python -m {COSTS} update --mode PyNative --rounds 20 --calls 20", COSTS),
    "step": Figure(f"python -m {COSTS} step --copies 8", COSTS),
    "detection": Figure(f"python -m {COSTS} detection", COSTS),
    "long_records": Figure("python -m scripts.benchmarks.long_records", "scripts.benchmarks.long_records"),
    "ascend_dry_run": Figure("python -m scripts.ascend.compile_for_ascend --all", "scripts.ascend.program"),
    "versions": Figure("bash scripts/versions/version_table.sh"),
    "lenet5": Figure("python scripts/examples/lenet5_managers.py", begins="LeNet5"),
    "demo": Figure("bash scripts/demo.sh", begins="FP16 alone: "),
    # This command must come after the demo, which writes the corpus.
    "find": Figure(FIND, begins="Start at"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (default: all)")
    parser.add_argument(
        "--again", metavar="NAME", help="passed on to the scripts: train only what has this in its name"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}. The figures are: {', '.join(FIGURES)}")
    for name in [] if arguments.render else arguments.names or FIGURES:
        print(f"{name}: {FIGURES[name].command}", file=sys.stderr, flush=True)
        start = time.monotonic()
        measure(FIGURES[name], DATA / f"{name}.json", arguments.again)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := rendered(text, page)) != text:
            with atomic_write(page) as file:
                file.write(new)
            print(f"Written: {page.relative_to(ROOT)}")


def measure(figure, file, again=None):
    """Run a figure's command and write the results to the figure's file; a failed command leaves the file as it was.

    ``again`` is given to the command as ``--again``: the command then takes the other runs from the file.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    command = shlex.split(figure.command)
    command += ["--again", again] if again else []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command += ["--json", str(result)] if figure.module else []
        finished = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        if figure.module:
            measured = json.loads(result.read_text(encoding="utf-8"))
        else:
            measured = {"printed": kept(finished.stdout, figure.begins)}
    write_json(file, {"command": figure.command, **versions(), **measured})


def kept(printed, begins):
    """Return the printed lines of a command from the first line that begins with ``begins``, without lines of a log."""
    # MindFormers' logger writes to standard output too, between the lines of a script.
    lines = [line for line in printed.rstrip().splitlines() if not LOG_LINE.match(line)]
    first = next(number for number, line in enumerate(lines) if line.startswith(begins))
    # The demo writes to demo_1, demo_2, ..., the first free folder. Always show demo_1, as at a user's first run.
    return [re.sub(r"\bdemo_\d+", "demo_1", line) for line in lines[first:]]


def rendered(text, page):
    """Return the text of a page with its tables made from the present data in docs/figures."""
    is_chinese = page.parent.parts[-2:] == ("docs", "zh") or page.name == "README_CN.md"
    words = json.loads((DATA / "chinese.json").read_text(encoding="utf-8")) if is_chinese else {}

    def shown(block):
        lines = lines_of(tables_of(block["name"])[block["table"]], words)
        return "\n".join([block["begin"], *lines, block["end"]])

    begin, end = r"(?P<begin><!-- figures: (?P<name>\w+)/(?P<table>\w+) -->)", r"(?P<end><!-- end of figures -->)"
    # If a page lacks the end mark of a table, the match must not extend into the next table of the page.
    between = r"(?:(?!<!-- figures: ).)*?"
    return re.sub(rf"^{begin}${between}^{end}$", shown, text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def tables_of(name):
    """Return the tables of the measurement ``FIGURES[name]``, as a dict from a table's name to its list of rows.

    If the figure's command prints plain text, the table "printed" is a list of its lines, which pages show unchanged.
    """
    data = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    if module := FIGURES[name].module:
        return importlib.import_module(module).tables(data)
    lines = data["printed"]
    if lines[0].startswith("|"):
        lines = [line.strip("| ").split(" | ") for line in lines if not line.startswith("|-")]
    return {"printed": lines}


def lines_of(rows, words):
    """Return a table as Markdown lines, with the text of its cells translated by the dict ``words``."""
    if isinstance(rows[0], str):
        return ["```text", *rows, "```"]
    return list(table([[translated(cell, words) for cell in row] for row in rows]))


def translated(cell, words):
    """Return a table cell with its text translated. Parts between semicolons are translated separately.

    In a key of ``words``, ``#`` stands for any number. The translation has the numbers as {0}, {1}, ...

    Examples:
        >>> translated("2 of 3 seeds", {"# of # seeds": "{1}个种子中的{0}个"})
        '3个种子中的2个'
    """
    if "; " in cell and "; " in words:
        return words["; "].join(translated(part, words) for part in cell.split("; "))
    if cell in words:
        return words[cell]
    number = r"\d+(?:\.\d+)?"
    pattern = words.get(re.sub(number, "#", cell))
    return cell if pattern is None else pattern.format(*re.findall(number, cell))


if __name__ == "__main__":
    main()
