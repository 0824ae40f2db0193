"""The program that compiles cases for an Ascend in separate processes, and shows the result of each case."""

import argparse
import collections
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.ascend.cases import CASES, CHIPS, CONTROLS, WAYS
from scripts.ascend.compiler import GRAPHS
from scripts.ascend.stand_ins import CALLED, folder_of_stand_ins, missing
from scripts.studies.reporting import add_json_option, table, versions, write_json

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "output" / "ascend_dry_run"
# The time limit for compiling a case, in seconds.
SECONDS = 900
HCCL = "hccl_kernel"
# The result of a case whose process ended before the case was compiled.
NOTHING = {"kernels": {}, "moved": [], "collectives": {}}


def main(description):
    arguments = parse_arguments(description)
    if reason := missing():
        sys.exit(f"A dry run is not possible on this machine: {reason}.")
    # On SIGTERM, raise SystemExit, so that the clean-up in _compile_group() also ends the process that compiles cases.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    for result in compile_cases(arguments.cases, logs=arguments.logs):
        results.append(result)
        print("  ".join(row_of(result)), file=sys.stderr, flush=True)
    result = {**versions(), "cases": results}
    print("MindSpore {mindspore}, MindFormers {mindformers}, stand-ins for CANN\n".format(**result))
    print("\n".join(table([["case", "kernels", "collectives", "seconds", "problem"], *map(row_of, results)])))
    write_json(arguments.json, result)
    sys.exit(1 if any(problem(result) for result in results if result["case"] not in CONTROLS) else 0)


def parse_arguments(description):
    first, _, details = description.partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="a name, or a pattern of names (default: the small ones)"
    )
    parser.add_argument("--all", action="store_true", help="all cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep MindSpore's logs in this folder")
    add_json_option(parser)
    arguments = parser.parse_args()
    if unknown := [pattern for pattern in arguments.cases if not fnmatch.filter(CASES, pattern)]:
        parser.error(f"no case is called {', '.join(unknown)}; --list prints the names")
    if arguments.list:
        print("\n".join(CASES))
        sys.exit()
    arguments.cases = [
        case
        for name, case in CASES.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.cases)
        or (not arguments.cases and (arguments.all or not case.is_large))
    ]
    return arguments


def compile_cases(cases, cache=CACHE, logs=None):
    """Compile the given cases. Consecutive cases share a process if they simulate the same rank of as many ranks.

    Args:
        cases (Iterable[Case]): what to compile.
        cache (Path): the folder for the stand-ins of CANN's libraries. Default: a folder in ``output/``.
        logs (Path, optional): a folder for MindSpore's logs. Default: None.

    Yields:
        dict for each case, in order: ``case``, the name; ``error``; ``seconds``; ``kernels`` and ``moved`` as
        :func:`scripts.ascend.compiler.kernels_in` returns them; ``collectives`` as
        :func:`scripts.ascend.compiler.collectives_in` does.
    """
    stand_ins = folder_of_stand_ins(cache)
    for group in _in_processes(cases):
        while group:
            finished = _compile_group(group, stand_ins, logs)
            yield from finished
            group = group[len(finished) :]


def _in_processes(cases):
    groups = []
    for case in cases:
        last = groups[-1][-1] if groups else None
        if last is None or case.needs_process or last.needs_process or rank_of(case) != rank_of(last):
            groups.append([])
        groups[-1].append(case)
    return groups


def rank_of(case):
    return case.world.rank, case.world.ranks


def _compile_group(cases, stand_ins, logs):
    """Compile test cases in a new process; return a result for each compiled case, and an error for a case that failed.

    If a case ends the process, the case's error is the last result, and the later cases have no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results.jsonl"), Path(folder, "log")
        results.touch()
        command = [
            sys.executable,
            "-m",
            "scripts.ascend.compiler",
            str(log),
            str(results),
            *(case.name for case in cases),
        ]
        with open(log, "a") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(stand_ins, cases[0]),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(SECONDS * len(cases))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = log.read_text(errors="replace")
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / (cases[0].name.replace("/", "_") + ".log")).write_text(text)
        outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    if len(outcomes) < len(cases):
        error = why_ended(code, text)
        outcomes.append({"case": cases[len(outcomes)].name, "error": error, "seconds": None, **NOTHING})
    return outcomes


def environment(stand_ins, case):
    """Return the environment variables of a dry run."""
    cann = stand_ins / "latest"
    modules = (cann / "python", ROOT, ROOT / "scripts" / "examples")
    return {
        **os.environ,
        # At this level, MindSpore selects kernels.
        "MS_SIMULATION_LEVEL": "1",
        "RANK_SIZE": str(case.world.ranks),
        "RANK_ID": str(case.world.rank),
        "PYTHONPATH": _prepended("PYTHONPATH", modules),
        "LD_LIBRARY_PATH": _prepended("LD_LIBRARY_PATH", [cann / "lib64"]),
        "LD_PRELOAD": _prepended("LD_PRELOAD", [stand_ins / "replaced.so"]),
        "DRY_RUN_CHIP": CHIPS[case.chip],
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        # Log errors, and for the module that selects kernels also the kernels that it selects.
        "GLOG_v": "3",
        "MS_SUBMODULE_LOG_v": "{DEVICE:1}",
        # Save the graph from which MindSpore makes the kernels.
        "MS_DEV_SAVE_GRAPHS": "1",
        "MS_DEV_DUMP_IR_PASSES": "graph_build",
        "MS_DEV_SAVE_GRAPHS_PATH": GRAPHS,
    }


def _prepended(name, folders):
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(name)])])


def why_ended(code, log):
    """Return why a process ended before all of its cases were compiled."""
    if called := re.search(rf"{CALLED}(\w+)", log):
        return f"the stand-ins need an update for this MindSpore: {called[1]} was called"
    if code is None:
        return f"the process took longer than {SECONDS} seconds for each case"
    last = log.strip().splitlines()[-1:] or [""]
    return f"the process ended with exit code {code}: {last[0][:300]}"


def problem(result):
    """Return what is wrong with a compiled case (an error, an operator on the CPU, or no kernel), or an empty text."""
    if result["error"]:
        # MindSpore prints its own call stack below the error message, so cut the text there.
        return re.sub(r"\s+", " ", re.split(r"\n-{5,}", result["error"])[0])[:300]
    if result["moved"]:
        return f"on the CPU: {', '.join(result['moved'])}"
    return "" if kernels_of(result) else "no kernel was selected"


def kernels_of(result):
    """Return the number of kernels of a compiled case, without the communication kernels."""
    return sum(sum(counts.values()) for kind, counts in result["kernels"].items() if kind != HCCL)


def row_of(result):
    names = ", ".join(f"{count} {name}" for name, count in result["kernels"].get(HCCL, {}).items())
    seconds = "" if result["seconds"] is None else f"{result['seconds']:.1f}"
    return [result["case"], str(kernels_of(result)), names, seconds, problem(result)]


# Tables for the pages of the documentation


def tables(data):
    """Return tables, by name, of the results that ``--json`` saved; each is a list of rows with the header first."""
    results = {result["case"]: result for result in data["cases"]}
    cells = {name: result for name, result in results.items() if name.startswith("cell/")}
    steps, models = {}, {}
    for name, result in results.items():
        if name not in CONTROLS and name not in cells:
            setting, _, way = name.rpartition("/")
            (models if is_of_a_model(result) else steps).setdefault(setting, {})[way] = result
    return {
        "controls": [["case", "what became of it"], *([f"`{name}`", verdict(results[name])] for name in CONTROLS)],
        "cells": [["case", "kernels"], *([f"`{name}`", shown(result)] for name, result in cells.items())],
        "steps": rows_of_ways(steps),
        "models": rows_of_ways(models),
    }


def is_of_a_model(result):
    return CASES[result["case"]].function in ("launched", "mcore_step")


def verdict(result):
    """Return what the dry run did with the operator of a control case: "refused", "moved to the CPU" or "compiled"."""
    if result["error"]:
        return "refused"
    return "moved to the CPU" if result["moved"] else "compiled"


def shown(result):
    return problem(result) or str(kernels_of(result))


def rows_of_ways(settings):
    """Return the table of kernel counts: a row for each train step, and a column for each method of loss scaling.

    The column "collectives" counts the collectives of the first method. The last column names the collectives that the
    other methods add.
    """
    ways = [way for way in WAYS if any(way in results for results in settings.values())]
    rows = [["case", *(WAYS[way] for way in ways), "collectives", "added to them"]]
    for setting, results in settings.items():
        kernels = [shown(results[way]) if way in results else "" for way in ways]
        first, *with_rules = (collections.Counter(result["collectives"]) for result in results.values())
        added = dict.fromkeys(text for other in with_rules for text in described(other - first))
        rows.append([f"`{setting}`", *kernels, str(first.total()), "; ".join(added)])
    return rows


def described(collectives):
    return [f"{count} {text.partition(' by ')[0]}" for text, count in sorted(collectives.items())]
