"""Train in FP32, and in FP16 by each method of scaling the loss, and compare the results.

    python -m scripts.studies.worth_it

Trains seven tasks on a CPU, with the same data and weights for every method, each task in a separate process, and
prints Markdown. The same seeds give the same results on the same machine. Also draws
docs/images/quality_by_loss_scale.svg, from trainings of the damped task at fixed scales. The handwritten digits come
from scikit-learn, which must be installed.
"""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from mindformers_adaptive.plots.canvas import save
from scripts.studies.reporting import ROOT, output_to_stderr, study_parser, table, use_one_thread, versions, write_json
from scripts.studies.worth_report import (
    EXPONENTS,
    FP32,
    OURS,
    SETTLED,
    UNSCALED,
    draw,
    figures,
    mean_quality,
    over_looks,
    tables,
)

PICTURE = "docs/images/quality_by_loss_scale.svg"
# With --again, the results of all other methods come from this file.
DATA = ROOT / "docs" / "figures" / "worth.json"
PICTURE_SEEDS = 3
QUICK_STEPS, QUICK_EXPONENTS = 30, (0, 9)
# The Llama tasks take long, so these have fewer seeds than other tasks, and shorter samples than the demo.
SEEDS = {"llama": 5, "lora": 5, "moving": 10, "damped": 10, "zero": 10, "auxiliary": 10, "digits": 10}
LLAMA = {"steps": 200, "seq_length": 32}


def main():
    parser = study_parser(__doc__, PICTURE)
    parser.add_argument("--tasks", nargs="+", choices=SEEDS, default=list(SEEDS), help="default: all")
    parser.add_argument("--again", metavar="NAME", help="train only methods that have this in their names")
    parser.add_argument("--quick", action="store_true", help="a few methods, steps and one seed: a test of this script")
    arguments = parser.parse_args()
    # Keep the output of MindSpore and MindFormers out of the report.
    with output_to_stderr():
        measured = measure_all(arguments)
    result = {**versions(), "tasks": {key: task for key, task, _ in measured}}
    if arguments.again:
        result["picture"] = json.loads(DATA.read_text(encoding="utf-8"))["picture"]
    print("\n".join(report(result)))
    for swept in (swept for *_, swept in measured if swept):
        result["picture"] = swept
        print(f"\nDrawn: {os.path.relpath(save(draw(swept), arguments.picture))}")
    write_json(arguments.json, result)


def measure_all(arguments):
    """Measure each task in a process of its own, a single task in this process; return the results of ``measure()``."""
    if len(arguments.tasks) == 1:
        return [measure(*arguments.tasks, arguments)]
    # Start new processes by "spawn", because a process that has loaded MindSpore cannot be forked. A process runs only
    # one task and then exits, which frees the memory of the task.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
        return list(pool.map(partial(measure, arguments=arguments), arguments.tasks))


def measure(name, arguments):
    """Run the trainings of a task; return its key, its result for JSON, and its picture's data (None: no picture)."""
    from scripts.studies.worth_tasks import task_of
    from scripts.studies.worth_training import METHODS, Trainings

    use_one_thread()
    task = task_of(name, LLAMA)
    seeds, steps = (1, QUICK_STEPS) if arguments.quick else (SEEDS[name], None)
    # With --quick, train only the methods that the picture shows.
    methods = [method for method in METHODS if not arguments.quick or method.name in (FP32, UNSCALED, OURS)]
    if arguments.again:
        methods = [method for method in methods if arguments.again in method.name]
    trainings, runs = Trainings(task), {}
    for method in methods:
        for seed in range(seeds):
            print(f"{task.name}: {method.name}, seed {seed}", file=sys.stderr, flush=True)
            runs.setdefault(method.name, []).append(trainings.run(method, seed, steps))
    task_result, swept = about(task, runs, steps), None
    if arguments.again:
        earlier = json.loads(DATA.read_text(encoding="utf-8"))["tasks"][name]["runs"]
        task_result["runs"] = earlier | task_result["runs"]
    elif name == "damped":
        swept = sweep(trainings, runs, QUICK_EXPONENTS if arguments.quick else EXPONENTS, steps)
    return name, task_result, swept


def about(task, runs, steps):
    """Return the description of a task, with the measured values of each run by method and seed."""
    return {
        "name": task.name,
        "about": task.about,
        "steps": steps or task.steps,
        "seeds": len(next(iter(runs.values()))),
        "measure": task.measure,
        "higher_is_better": task.higher_is_better,
        "runs": {name: figures(of_method) for name, of_method in runs.items()},
    }


def sweep(trainings, runs, exponents, steps=None):
    """Train a task at each of several fixed loss scales, with the first ``PICTURE_SEEDS`` seeds of the task.

    Returns:
        dict: ``exponents``, log2 of the fixed scales; by exponent, as means over the seeds, the result ``quality`` and
        the shares ``underflow`` (of gradients) and ``skipped`` (of steps); ``fp32``, ``unscaled`` and ``ours``, the
        results of the runs; ``found``, log2 of the scales that find_loss_scale() recommends.
    """
    from scripts.studies.worth_training import fixed

    names = {"fp32": FP32, "unscaled": UNSCALED, "ours": OURS}
    runs = {key: runs[name][:PICTURE_SEEDS] for key, name in names.items()}
    swept = {"exponents": list(exponents), "quality": [], "underflow": [], "skipped": []}
    for exponent in exponents:
        at_scale = [trainings.run(fixed(2.0**exponent), seed, steps) for seed in range(len(runs["fp32"]))]
        underflow = [over_looks(run, lambda look: look["underflow"]) or 0.0 for run in at_scale]
        swept["quality"].append(mean_quality(at_scale))
        swept["underflow"].append(float(np.mean(underflow)))
        swept["skipped"].append(float(np.mean([len(run["skipped"]) / run["steps"] for run in at_scale])))
    swept["found"] = [float(np.log2(run["start"])) for run in runs["ours"]]
    return swept | {key: mean_quality(each) for key, each in runs.items()}


def report(result):
    """Yield the report as lines of Markdown."""
    yield "MindSpore {mindspore}, MindFormers {mindformers}, CPU, graph mode; means over the seeds.".format(**result)
    yield f"Skipped at the start: before {SETTLED} steps in a row were applied. Bits below: log2(ceiling / loss"
    yield "scale), the ceiling found by bisection on the real backward pass, as means over applied steps. Differences:"
    yield "between runs of one seed, mean ± half of the interval of 95 % confidence; a method is better where the"
    yield "interval does not reach 0."
    shown = tables(result)
    yield from ["", *table(shown["who_wins"])]
    for key, task in result["tasks"].items():
        yield from ["", "### {name}: {about}, {steps} steps, {seeds} seeds".format(**task), ""]
        yield from [*table(shown[key]), "", *table(shown[f"{key}_pairs"])]


if __name__ == "__main__":
    main()
