"""Train in FP32, and in FP16 with each way of scaling the loss, and say what each comes to.

    python scripts/worth_it.py

Trains five tasks on a CPU, the same data and weights for every way, and prints Markdown. The same seeds give the same
figures on the same machine. Also draws docs/images/quality_by_loss_scale.svg, from trainings of the first task at fixed
scales.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from argument_types import positive

from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "docs/images/quality_by_loss_scale.svg"
LLAMA = "llama"
QUICK_STEPS, QUICK_EXPONENTS = 30, (0, 9)
TASKS = ("damped", "zero", "auxiliary", "moving", LLAMA)


def main():
    arguments = parse_arguments()
    # What MindSpore and MindFormers print does not belong to the report.
    with output_to_stderr():
        result, figure = measure(arguments)
        from worth_report import report
    print("\n".join(report(result)))
    if arguments.json is not None:
        with atomic_write(arguments.json) as file:
            file.write(json_text(result, indent=1) + "\n")
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
    parser.add_argument("--quick", action="store_true", help="a few ways, steps and one seed: a test of this script")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    parser.add_argument("--picture", type=Path, default=ROOT / PICTURE, help=f"file (default: {PICTURE})")
    arguments = parser.parse_args()
    if arguments.json is not None and not Path(arguments.json).absolute().parent.is_dir():
        parser.error(f"argument --json: there is no folder {str(Path(arguments.json).parent)!r}")
    return arguments


def measure(arguments):
    """Run the trainings; return the result as JSON can hold it, and the picture, None without the first task."""
    import mindformers
    import mindspore
    from worth_picture import EXPONENTS, OURS, draw, sweep
    from worth_tasks import SMALL_TASKS
    from worth_training import FP32, UNSCALED, WAYS, Trainings, use_one_thread

    use_one_thread()
    seeds, steps = (1, QUICK_STEPS) if arguments.quick else (arguments.seeds, None)
    # The picture is of the same ways, which compile nothing more.
    ways = [way for way in WAYS if not arguments.quick or way.name in (FP32, UNSCALED, OURS)]
    result = {
        "mindspore": mindspore.__version__,
        "mindformers": mindformers.__version__,
        "seeds": seeds,
        "tasks": [],
    }
    figure = None
    for name, task in zip(TASKS[:-1], SMALL_TASKS, strict=True):
        if name in arguments.tasks:
            trainings = Trainings(task)
            result["tasks"].append(train(trainings, ways, seeds, steps))
            if name == TASKS[0]:
                result["picture"] = sweep(trainings, seeds, QUICK_EXPONENTS if arguments.quick else EXPONENTS, steps)
                figure = draw(result["picture"])
    if LLAMA in arguments.tasks:
        from worth_llama import Llama

        llama = Llama(arguments.llama_steps, arguments.llama_seq_length)
        result["tasks"].append(train(Trainings(llama), ways, seeds, steps))
    return result, figure


def train(trainings, ways, seeds, steps):
    """Return what came of a task in each way, for each seed."""
    task = trainings.task
    runs = {}
    for way in ways:
        runs[way.name] = []
        for seed in range(seeds):
            print(f"{task.name}: {way.name}, seed {seed}", file=sys.stderr, flush=True)
            runs[way.name].append(trainings.run(way, seed, steps))
    return {
        "name": task.name,
        "about": task.about,
        "steps": steps or task.steps,
        "measure": task.measure,
        "higher_is_better": task.higher_is_better,
        "look_every": trainings.look_every,
        "ways": runs,
    }


@contextlib.contextmanager
def output_to_stderr():
    """Send all that is written to the standard output, by C++ too, to the standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()
