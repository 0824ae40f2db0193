"""What the trainings of worth_it.py came to, as Markdown: means over the seeds and their standard deviations."""

import numpy as np
from worth_training import FP32, REACHED_AT, SETTLED

__all__ = ["at_the_start", "report", "summary"]

COLUMNS = (
    "way of scaling",
    "start",
    "skipped at the start",
    "skipped later",
    "headroom lost, bits",
    "gradients that underflow",
)


def report(result):
    """The report, as lines of Markdown."""
    means = f"{result['seeds']} seed{'' if result['seeds'] == 1 else 's'}"
    yield f"MindSpore {result['mindspore']}, MindFormers {result['mindformers']}, CPU, graph mode; means over {means} ±"
    yield f"standard deviations. Skipped at the start: before {SETTLED} steps in a row were applied. Headroom lost:"
    yield "log2(ceiling / loss scale), the ceiling found by bisection on the real backward pass. Underflow: gradients"
    yield "that are 0, and not at the ceiling. Both are means over applied steps, every 10th, and every 30th of the"
    yield "Llama. Less FP32's: the difference to FP32 from the same weights and data. The last column: steps until the"
    yield f"result that FP32 has after {REACHED_AT:.0%} of its steps."
    for task in result["tasks"]:
        yield ""
        yield f"### {task['name']}: {task['about']}, {task['steps']} steps"
        yield ""
        yield from table(task)


def table(task):
    """The table of one task, as lines of Markdown."""
    columns = [*COLUMNS, f"{task['measure']} on data not trained on", "less FP32's", "steps to FP32's result"]
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for name, row in summary(task).items():
        yield "| " + " | ".join([name, *cells(row, len(task["ways"][name]))]) + " |"


def cells(row, seeds):
    starts = sorted({f"2^{np.log2(start):g}" for start in row["start"]}, key=lambda text: float(text[2:]))
    reached = [step for step in row["reached"] if step is not None]
    until = spread(reached, 0) if reached else "never"
    return [
        "-" if row["headroom_lost"] is None else ", ".join(starts),
        spread(row["skipped_at_start"], 1),
        spread(row["skipped_later"], 1),
        "-" if row["headroom_lost"] is None else spread(row["headroom_lost"], 1),
        "-" if row["underflow"] is None else spread([100.0 * share for share in row["underflow"]], 2, " %"),
        spread(row["quality"], 4),
        spread(row["less_fp32"], 4),
        until if len(reached) in (0, seeds) else f"{until} ({len(reached)} of {seeds} seeds)",
    ]


def spread(values, digits, unit=""):
    mean, deviation = np.mean(values), np.std(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}{unit}"


def summary(task):
    """By way of scaling the figures of the table, each a list with a value a seed; None where there is none."""
    targets = [target(run, task["look_every"]) for run in task["ways"][FP32]]
    rows = {}
    for name, runs in task["ways"].items():
        starts = [at_the_start(run["skipped"], run["steps"]) for run in runs]
        rows[name] = {
            "start": [run["start"] for run in runs],
            "skipped_at_start": starts,
            "skipped_later": [len(run["skipped"]) - start for run, start in zip(runs, starts, strict=True)],
            "headroom_lost": over_looks(runs, lambda look: np.log2(look["ceiling"] / look["loss_scale"])),
            "underflow": over_looks(runs, lambda look: look["underflow"]),
            "quality": [run["quality"] for run in runs],
            "less_fp32": [run["quality"] - one["quality"] for run, one in zip(runs, task["ways"][FP32], strict=True)],
            "reached": [reached(run, goal, task["higher_is_better"]) for run, goal in zip(runs, targets, strict=True)],
        }
    return rows


def at_the_start(skipped, steps):
    """Return how many steps were skipped before ``SETTLED`` in a row were applied."""
    last = -1
    for count, step in enumerate([*skipped, steps + SETTLED]):
        if step - last > SETTLED:
            return count
        last = step
    return len(skipped)


def target(run, look_every):
    """Return the quality of a run of FP32 that the others have to reach."""
    step = int(REACHED_AT * run["steps"] / look_every) * look_every
    return next(look["quality"] for look in run["looks"] if look["step"] == step)


def reached(run, goal, higher_is_better):
    good_enough = np.greater_equal if higher_is_better else np.less_equal
    return next((look["step"] for look in run["looks"] if good_enough(look["quality"], goal)), None)


def over_looks(runs, figure):
    """Return the mean over the applied steps that were looked at, for each run; None without any."""
    means = []
    for run in runs:
        seen = [figure(look) for look in run["looks"] if not look["skipped"] and look.get("underflow") is not None]
        means += [float(np.mean(seen))] if seen else []
    return means or None
