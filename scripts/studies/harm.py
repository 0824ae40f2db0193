"""Measure the share of the gradient that FP16 loses at 0, 2, ..., 24 bits below the ceiling, in several trainings.

    python -m scripts.studies.harm [--json FILE]

The ceiling of a batch is the largest power of two that does not overflow as its loss scale. The gradients at the
ceiling are the reference: at every lower scale, FP16 rounds normal numbers in the same way, so a difference comes from
underflow alone. Underflow includes the coarse rounding of subnormal numbers. The mcore models have stand-ins for the
operators that a CPU lacks. Prints Markdown, and draws docs/images/harm.svg. The handwritten digits come from
scikit-learn, which must be installed.
"""

import functools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from mindformers_adaptive.plots import canvas
from scripts.studies import reporting

PICTURE = "docs/images/harm.svg"
DATA = reporting.ROOT / "docs" / "figures" / "harm.json"
BITS = range(0, 25, 2)
# Steps after which the gradients are measured. In step 251, the task "moving ceiling" is in its burst.
STEPS = (0, 50, 250)
BATCHES = 4
# A loss of this share of the gradient, by its norm, counts as no harm.
FREE = 0.001
# The picture shows smaller shares at this height.
LOWEST = 1e-8
# The trainings: a function of harm_trainings.py that builds the training, and its arguments.
TRAININGS = {
    "the demo's Llama": ("of_task", "llama"),
    "the demo's Llama, one of 256 micro-batches": ("of_task", "llama", 256),
    "LoRA of the demo's Llama": ("of_task", "lora"),
    "LoRA of the demo's Llama, one of 256 micro-batches": ("of_task", "lora", 256),
    "DPO of the demo's Llama": ("preferences",),
    "moving ceiling": ("of_task", "moving"),
    "damped output": ("of_task", "damped"),
    "zero-initialised last layer": ("of_task", "zero"),
    "small auxiliary loss": ("of_task", "auxiliary"),
    "handwritten digits": ("of_task", "digits"),
    "LeNet5": ("lenet5",),
    "policy gradient": ("policy_gradient",),
    "Qwen3": ("mcore", "build_qwen3"),
    "DeepSeek-V3 with experts": ("mcore", "build_deepseek"),
}
# The table shows what is lost at these bits below the ceiling.
SHOWN = (12, 16, 20)
EVERY = "every training"
# The header of a column of :func:`lost_at`.
LOST = "gradient lost at most: by norm; worst Parameter"


def main():
    arguments = reporting.study_parser(__doc__, PICTURE).parse_args()
    # Keep the output of MindSpore and MindFormers out of the tables.
    with reporting.output_to_stderr():
        # A process that has loaded MindSpore cannot be forked. A process measures one training and then exits, because
        # mcore models change MindFormers' classes.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
            measured = list(pool.map(measure, TRAININGS))
    result = {"bits": list(BITS), "trainings": dict(zip(TRAININGS, measured, strict=True))}
    reporting.report(arguments, result, tables(result), canvas.save(draw(result), arguments.picture))


def measure(name):
    """Build a training, and return what :func:`losses` measures in it."""
    from scripts.studies import harm_trainings

    reporting.use_one_thread()
    print(name, file=sys.stderr, flush=True)
    build, *arguments = TRAININGS[name]
    return losses(getattr(harm_trainings, build)(*arguments))


def losses(training, steps=STEPS):
    """Train in FP16, and measure after each number of steps what underflows in the gradients of the next batches.

    Returns:
        list[dict]: for each number of steps: ``step``; ``ceilings``, log2 of the ceiling of each batch; ``lost``, the
        lost share of the gradient by its norm, for each number of bits below the ceiling; ``worst``, the same of the
        Parameter that loses most. Of several batches, the shares are the largest.
    """
    from mindformers_adaptive.gradients.ranges import GradientSweep

    sweep, rows, exponent = GradientSweep(training.train_step), [], 20
    for step in range(steps[-1] + 1):
        if step in steps:
            ceilings, measured = [], []
            for batch in map(training.batch, range(step, step + BATCHES)):
                exponent = ceiling(sweep, batch, exponent)
                ceilings.append(exponent)
                measured.append(shares(sweep, batch, exponent))
            lost, worst = np.max(measured, axis=0)
            rows.append({"step": step, "ceilings": ceilings, "lost": rounded(lost), "worst": rounded(worst)})
        training.train_step(*training.batch(step))
    return rows


def rounded(shares):
    return [float(f"{share:.3g}") for share in shares]


def ceiling(sweep, batch, exponent):
    """Return log2 of the largest power of two that does not overflow as loss scale, searched from an exponent on."""

    def overflows(exponent):
        return bool(sweep(batch, [2.0**exponent]).overflowed_batches(2.0**exponent))

    while overflows(exponent):
        exponent -= 1
    while not overflows(exponent + 1):
        exponent += 1
    return exponent


def shares(sweep, batch, exponent):
    """Return the lost shares of the gradient, and of the Parameter that loses most, by bits below the ceiling."""
    ranges = sweep(batch, [2.0 ** (exponent - bits) for bits in BITS])
    # The scales are in increasing order.
    scales = ranges.loss_scales[::-1]
    lost = [ranges.overall(scale).lost_share for scale in scales]
    # A Parameter whose gradient is 0 at the ceiling loses nothing.
    worst = [max(each.lost_share or 0.0 for each in ranges.parameters(scale).values()) for scale in scales]
    return lost, worst


def most(rows, key):
    """Return the largest share of a training at each number of bits, over all its measurements."""
    return np.max([row[key] for row in rows], axis=0)


def free_bits(bits, lost):
    """Return the largest number of bits down to which at most 0.1 % is lost."""
    return max(below for number, below in enumerate(bits) if np.max(lost[: number + 1]) <= FREE)


def tables(result):
    """Return the table of what each training loses, as a list of rows; the first row has the names of the columns."""
    columns = [f"{bits} bits below" for bits in SHOWN]
    head = ["training", *columns, f"worst Parameter, {SHOWN[1]} bits below", "at most 0.1 % lost, bits"]
    bits, trainings = result["bits"], result["trainings"]
    lost = {name: most(rows, "lost") for name, rows in trainings.items()}
    worst = {name: most(rows, "worst") for name, rows in trainings.items()}
    lost[EVERY], worst[EVERY] = (np.max(list(each.values()), axis=0) for each in (lost, worst))
    columns = [bits.index(below) for below in SHOWN]
    rows = [
        [
            name,
            *(percent(lost[name][column]) for column in columns),
            percent(worst[name][columns[1]]),
            str(free_bits(bits, lost[name])),
        ]
        for name in sorted(trainings, key=lambda name: -lost[name][columns[1]])
    ]
    of_all = [*(percent(lost[EVERY][column]) for column in columns), percent(worst[EVERY][columns[1]])]
    return {"lost": [head, *rows, [EVERY, *of_all, str(free_bits(bits, lost[EVERY]))]]}


def lost_at(name, bits):
    """Return the share of the gradient that a training loses at most at a number of bits below the ceiling, as text.

    The first share is by norm, the second is of the Parameter that loses most. The measurements in
    docs/figures/harm.json are interpolated. ``-`` if they lack the training, or ``bits`` is None.
    """
    measured = _measured()
    if bits is None or name not in measured["trainings"]:
        return "-"
    over = "over " if bits > measured["bits"][-1] else ""
    shares = (np.interp(bits, measured["bits"], most(measured["trainings"][name], key)) for key in ("lost", "worst"))
    return "; ".join(over + percent(share) for share in shares)


@functools.cache
def _measured():
    return json.loads(DATA.read_text(encoding="utf-8"))


def percent(share):
    """Return a share as text with two digits, or how small it is."""
    if share < 1e-6:
        return "below 0.0001 %"
    # A Parameter can lose more than its gradient: numbers near the smallest ones may be rounded up.
    return f"{100 * share:.2g} %" if share < 0.1 else f"{min(100 * share, 100):.0f} %"


def draw(result):
    """Draw the lost share of each training over the number of bits below the ceiling."""
    bits = result["bits"]
    lost = {name: most(rows, "lost") for name, rows in result["trainings"].items()}
    highest = np.max(list(lost.values()), axis=0)
    free = free_bits(bits, highest)
    figure = canvas.new_figure(8, 4.4)
    canvas.headline(figure, f"Down to {free} bits below the ceiling, FP16 loses at most 0.1 % of the gradient")
    axes = figure.subplots()
    axes.axvspan(0, free, color=canvas.CONTEXT, alpha=0.4, linewidth=0)
    axes.axhline(FREE, color=canvas.MUTED, linestyle="--", linewidth=1.2, label="0.1 %")
    for number, share in enumerate(lost.values()):
        label = "a training" if number == 0 else None
        axes.plot(bits, np.maximum(share, LOWEST), color=canvas.SECOND, alpha=0.6, linewidth=1.2, label=label)
    axes.plot(bits, np.maximum(highest, LOWEST), "o-", color=canvas.MAIN, linewidth=2, label="the largest of all")
    axes.set_yscale("log")
    axes.set(xlim=(0, bits[-1]), ylim=(LOWEST, 1.0))
    axes.set_xticks(bits[::2])
    axes.set_yticks([10.0**-power for power in range(8, -1, -2)])
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    canvas.style_axes(axes, x_label="bits below the ceiling", y_label="lost share of the gradient")
    axes.legend(loc="upper left", fontsize=9.5, frameon=True, framealpha=0.9)
    return figure


if __name__ == "__main__":
    main()
