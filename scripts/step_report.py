"""What ``bench_step.py`` says of the times that it has measured, as Markdown."""

import itertools
import math
import statistics

DYNAMIC = "MindSpore's dynamic"
GRADIENTS, LOOK_EVERY = "adaptive, GradientRangeMonitor every 100 steps", 100
# Update cells by their names in bench_update_cell.py; whole steps differ by more than these cost, so they are also
# measured alone.
UPDATES = {
    "mindspore_dynamic": DYNAMIC,
    "mindformers_adaptive": "MindFormers' adaptive",
    "ours": "adaptive",
    "guided": "guided",
}


def report(result):
    """The report, as lines of Markdown."""
    # It imports MindSpore, which takes seconds.
    from bench_detection import detection_table

    copies = len(result["modes"]["graph"][DYNAMIC])
    rounds = {mode: len(taken[DYNAMIC][0]) for mode, taken in result["modes"].items()}
    yield f"MindSpore {result['mindspore']}, MindFormers {result['mindformers']}, CPU; the demo's model, samples of"
    yield f"{result['seq_length']} bytes. Extra cost of a step against {DYNAMIC} cell, in percent of that step: mean of"
    counts = " and ".join(f"{count} steps each in {mode} mode" for mode, count in rounds.items())
    yield f"{copies} train steps, compiled in random order, ± its standard error; {counts}:"
    yield ""
    yield "| way of scaling | " + " | ".join(f"{mode} mode" for mode in rounds) + " |"
    yield "|" + "---|" * (len(rounds) + 1)
    for name in next(iter(result["modes"].values())):
        cells = []
        for taken in result["modes"].values():
            extra, error = extra_percent(taken, name)
            cells.append("0" if name == DYNAMIC else f"{extra:+.1f}" + f" ± {error:.1f}" * (copies > 1))
        yield f"| {name} | " + " | ".join(cells) + " |"
    if copies > 1:
        spreads = " and ".join(
            f"{spread_percent(taken):.1f}% in {mode} mode" for mode, taken in result["modes"].items()
        )
        yield ""
        yield f"The figures of train steps with the same cell differ by {spreads} (standard deviation)."
    if "parts" not in result:
        return
    whole = result["parts"]["whole step, dynamic"]
    yield ""
    yield "Where the time of a step goes in graph mode, as a share of the whole step:"
    yield ""
    yield "| part | share |"
    yield "|---|---|"
    before = 0.0
    for name, taken in result["parts"].items():
        label = {"forward and backward": "backward", "whole step, dynamic": "detection, clipping, optimizer, scaling"}
        yield f"| {label.get(name, name)} | {(taken - before) / whole:.0%} |"
        before = taken
    yield ""
    yield f"An update alone above one of {DYNAMIC} cell, as a share of the whole step:"
    yield ""
    yield "| update cell | " + " | ".join(f"{mode} mode" for mode in rounds) + " |"
    yield "|" + "---|" * (len(rounds) + 1)
    shares = {mode: update_shares(result, mode) for mode in rounds}
    for name in UPDATES.values():
        if name != DYNAMIC:
            yield f"| {name} | " + " | ".join(f"{shares[mode][name]:.2%}" for mode in rounds) + " |"
    yield ""
    yield from detection_table(result["detection"], result["elements"])


def update_shares(result, mode):
    """Return what an update takes above one of the dynamic cell, as a share of the whole step, by way of scaling."""
    # In microseconds; a step in milliseconds.
    taken = {label: result["updates"][mode][name] / 1e3 for name, label in UPDATES.items()}
    whole = statistics.median(itertools.chain(*result["modes"][mode][DYNAMIC]))
    return {label: (time - taken[DYNAMIC]) / whole for label, time in taken.items() if label != DYNAMIC}


def extra_percent(taken, name):
    """Return how much longer a way's steps take than the dynamic cell's, and the standard error, in percent."""
    if name == GRADIENTS:
        share = statistics.median(taken[name][0]) / LOOK_EVERY / statistics.median(itertools.chain(*taken[DYNAMIC]))
        others = extra_percent(taken, "adaptive")
        return others[0] + 100.0 * share, others[1]
    extra, error = mean_and_error(logarithms(taken, name))
    of_dynamic, error_of_dynamic = mean_and_error(logarithms(taken, DYNAMIC))
    return 100.0 * math.expm1(extra - of_dynamic), 100.0 * math.hypot(error, error_of_dynamic)


def logarithms(taken, name):
    """Return for each copy of a way the logarithm of its steps' times against all others of the same rounds."""
    copies = [times for way, each in taken.items() if way != GRADIENTS for times in each]
    of_rounds = [statistics.median(times) for times in zip(*copies, strict=True)]
    return [
        statistics.median(math.log(time / of_round) for time, of_round in zip(times, of_rounds, strict=True))
        for times in taken[name]
    ]


def spread_percent(taken):
    """Return by how much the figures of copies of a way differ, as a standard deviation over all ways, in percent."""
    variances = [statistics.variance(logarithms(taken, name)) for name in taken if name != GRADIENTS]
    return 100.0 * statistics.mean(variances) ** 0.5


def mean_and_error(values):
    """Return the mean and its standard error, which one value alone does not tell."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error
