"""Train the first task of worth_it.py in FP16 and in simulated 8-bit formats, and print R² by loss scale as Markdown.

python scripts/formats_training.py [--seeds 5] [--json FILE]
"""

import argparse
import functools
import math
import sys
from dataclasses import dataclass, fields

import numpy as np
import reporting
from worth_report import FP32

# What the matrices of a training are in, and what the gradients are in; FP16 is the device's own.
FORMATS = {
    "FP16": ("float16", "float16"),
    "FP8, E4M3 and E5M2": ("float8_e4m3fn", "float8_e5m2"),
    "HiF8": ("hifloat8", "hifloat8"),
}
EXPONENTS = range(0, 29, 4)
ADAPTIVE, GUIDED = "adaptive from {}", "guided from {}"
HIGH, FOUND_START = "2^24", "the found scale"
# The start of a training, in which a good initial scale skips hardly any step.
EARLY = 100


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=reporting.positive, default=5, help="of weights and data (default: 5)")
    reporting.add_json_option(parser)
    arguments = parser.parse_args()
    # What MindSpore and MindFormers print does not belong to the table.
    with reporting.output_to_stderr():
        from worth_training import use_one_thread

        use_one_thread()
        result = {"seeds": arguments.seeds, "formats": {name: measure(name, arguments.seeds) for name in FORMATS}}
    for rows in tables(result).values():
        print("\n".join([*reporting.table(rows), ""]))
    reporting.write_json(arguments.json, result)


def trainings_in(name):
    """Return the trainings of a format, and its methods by name."""
    from mindspore import dtype as mstype
    from worth_tasks import SMALL_TASKS, Regression
    from worth_training import FOUND, METHODS, Method, Trainings, adaptive, fixed

    from mindformers_adaptive import simulate_formats
    from mindformers_adaptive.wrapper import GradientGuidedLossScaleUpdateCell

    forward, gradients = FORMATS[name]

    @dataclass(frozen=True)
    class Simulated(Regression):
        """The task in formats that the device does not have; in FP32 as it is."""

        def network(self, dtype, seed):
            network = super().network(mstype.float32, seed)
            return network if dtype == mstype.float32 else simulate_formats(network, forward, gradients)

    task = SMALL_TASKS["damped"]
    if forward != "float16":
        task = Simulated(**{field.name: getattr(task, field.name) for field in fields(task)})
    guided = functools.partial(GradientGuidedLossScaleUpdateCell, gradient_format=gradients)
    methods = {FP32: METHODS[0], **{f"2^{exponent}": fixed(2.0**exponent) for exponent in EXPONENTS}}
    for start, value in ((HIGH, 2.0**24), (FOUND_START, FOUND)):
        methods[ADAPTIVE.format(start)] = Method(ADAPTIVE, adaptive, value)
        methods[GUIDED.format(start)] = Method(GUIDED, guided, value)
    # Nothing but the quality at the end is looked at.
    return Trainings(task, look_every=task.steps), methods


def measure(name, seeds):
    """Return by method, for each seed: R², the initial scale, and how many steps were skipped early and later."""
    trainings, methods = trainings_in(name)
    runs = {}
    for method in methods:
        print(f"{name}: {method}", file=sys.stderr, flush=True)
        runs[method] = [summary(trainings.run(methods[method], seed)) for seed in range(seeds)]
    return runs


def summary(run):
    early = sum(step < EARLY for step in run["skipped"])
    return {
        "quality": run["quality"],
        "start": run["start"],
        "skipped_early": early,
        "skipped_later": len(run["skipped"]) - early,
    }


def mean_quality(runs):
    """The mean R² of the seeds."""
    return float(np.mean([run["quality"] for run in runs]))


def tables(result):
    """Return the tables of a result by their names, as lists of rows with the columns first."""
    measured = result["formats"]
    quality = [["loss scale", *measured]]
    for method in next(iter(measured.values())):
        quality.append([method, *(f"{mean_quality(runs[method]):.3f}" for runs in measured.values())])
    starts = [["format", "found scales", "skipped by adaptive, steps 1-100", "skipped by guided, steps 1-100"]]
    for name, runs in measured.items():
        of_rules = [runs[rule.format(FOUND_START)] for rule in (ADAPTIVE, GUIDED)]
        found = ", ".join(f"2^{math.log2(run['start']):g}" for run in of_rules[0])
        skipped = (", ".join(str(run["skipped_early"]) for run in of_rule) for of_rule in of_rules)
        starts.append([name, found, *skipped])
    return {"quality": quality, "starts": starts}


if __name__ == "__main__":
    main()
