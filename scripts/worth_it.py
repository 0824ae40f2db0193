"""Train in FP32, and in FP16 by each method of scaling the loss, and compare the results.

    python scripts/worth_it.py

Trains five tasks on a CPU, with the same data and weights for every method, and prints Markdown. The same seeds give
the same figures on the same machine. Also draws docs/images/quality_by_loss_scale.svg, from trainings of the first task
at fixed scales.
"""

import argparse
import os
import sys
from pathlib import Path

from reporting import add_json_option, output_to_stderr, positive, versions, write_json

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "docs/images/quality_by_loss_scale.svg"
QUICK_STEPS, QUICK_EXPONENTS = 30, (0, 9)
TASKS = ("damped", "zero", "auxiliary", "moving", "llama")


def main():
    arguments = parse_arguments()
    # What MindSpore and MindFormers print does not belong to the report.
    with output_to_stderr():
        result, figure = measure(arguments)
        from worth_report import report
    print("\n".join(report(result)))
    write_json(arguments.json, result)
    if figure is not None:
        from mindformers_adaptive.plots.canvas import save

        print(f"\nDrawn: {os.path.relpath(save(figure, arguments.picture))}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=positive, default=3, help="of weights and data (default: 3)")
    parser.add_argument("--llama-steps", type=positive, default=600, help="default: 600")
    parser.add_argument(
        "--llama-seq-length", type=positive, default=32, help="bytes a sample (default: 32; the demo has 128)"
    )
    parser.add_argument("--quick", action="store_true", help="a few methods, steps and one seed: a test of this script")
    add_json_option(parser)
    parser.add_argument("--picture", type=Path, default=ROOT / PICTURE, help=f"file (default: {PICTURE})")
    return parser.parse_args()


def measure(arguments):
    """Run the trainings; return the result as JSON can hold it, and the picture, None without the first task."""
    from worth_report import EXPONENTS, OURS, draw, sweep
    from worth_tasks import SMALL_TASKS, Llama
    from worth_training import FP32, METHODS, UNSCALED, Trainings, use_one_thread

    use_one_thread()
    seeds, steps = (1, QUICK_STEPS) if arguments.quick else (arguments.seeds, None)
    # The picture is of the same methods, which compile nothing more.
    methods = [method for method in METHODS if not arguments.quick or method.name in (FP32, UNSCALED, OURS)]
    result = {**versions(), "seeds": seeds, "tasks": []}
    figure = None
    llama = Llama(arguments.llama_steps, arguments.llama_seq_length)
    for name, task in zip(TASKS, (*SMALL_TASKS, llama), strict=True):
        if name in arguments.tasks:
            trainings = Trainings(task)
            result["tasks"].append(train(trainings, methods, seeds, steps))
            if name == TASKS[0]:
                result["picture"] = sweep(trainings, seeds, QUICK_EXPONENTS if arguments.quick else EXPONENTS, steps)
                figure = draw(result["picture"])
    return result, figure


def train(trainings, methods, seeds, steps):
    """Return the results of a task by method, one for each seed."""
    task = trainings.task
    runs = {method.name: [] for method in methods}
    for method in methods:
        for seed in range(seeds):
            print(f"{task.name}: {method.name}, seed {seed}", file=sys.stderr, flush=True)
            runs[method.name].append(trainings.run(method, seed, steps))
    return {
        "name": task.name,
        "about": task.about,
        "steps": steps or task.steps,
        "measure": task.measure,
        "higher_is_better": task.higher_is_better,
        "look_every": trainings.look_every,
        "ways": runs,
    }


if __name__ == "__main__":
    main()
