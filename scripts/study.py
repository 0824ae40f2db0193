"""Compare adaptive and gradient-guided loss scaling with fixed windows on synthetic traces and sample logs.

    python scripts/study.py

Prints Markdown: the steps that each policy skips and the headroom that it loses, which one is best on each kind of
trace, and where and why the adaptive rule does worse. Also draws docs/images/policy_study.svg. The same arguments give
the same text and picture.
"""

import argparse
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
from reporting import positive, table

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay.simulate import compare, replay
from mindformers_adaptive.lab.traces.gradients import INDEPENDENT_CEILINGS, independent_ceiling, with_gradients
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces
from mindformers_adaptive.plots.canvas import MAIN, MUTED, WARNING, headline, new_figure, save, style_axes

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "tests" / "lab" / "samples"
PICTURE = "docs/images/policy_study.svg"
SAME_SCALE = 2.0**16
WINDOWS = (20, 100, 1000, 2000)
ADAPTIVE = "adaptive 20-1000"
MEAN = "mean"


def dynamic(window):
    return partial(make_policy, "dynamic", init_loss_scale=SAME_SCALE, scale_window=window)


# From the same initial scale. PyTorch's rule is then that of the dynamic window 2000, number by number.
SAME_START = {
    ADAPTIVE: partial(make_policy, "adaptive", loss_scale_value=SAME_SCALE),
    **{f"dynamic {window}": dynamic(window) for window in WINDOWS},
    "Megatron": partial(make_policy, "megatron", initial_scale=SAME_SCALE),
    "PyTorch": partial(make_policy, "torch", init_scale=SAME_SCALE),
}
OWN_DEFAULTS = {
    ADAPTIVE: partial(make_policy, "adaptive"),
    "MindSpore dynamic": partial(make_policy, "dynamic"),
    "Megatron": partial(make_policy, "megatron"),
    "PyTorch": partial(make_policy, "torch"),
}

# The traces of guided_study(): by what the gradients show, the offset and the spread of it in bits.
EXACT = "gradients show the ceiling"
OFFSETS = {
    EXACT: (0.0, 0.0),
    "hidden by 3 bits": (3.0, 0.4),
    "hidden by 8 bits": (8.0, 0.4),
    "2 too little": (-2.0, 0.0),
}
OWN = "a ceiling of its own"
FIXED_WINDOWS = (20, 100, 200, 500, 1000, 2000)
# By exchange rate.
GUIDED = {rate: f"guided, {rate:g} a bit" for rate in (1.0, 5.0)}


def main():
    arguments = parse_arguments()
    same = study(SAME_START, arguments.steps, arguments.seeds)
    own = study(OWN_DEFAULTS, arguments.steps, arguments.seeds)
    print("\n".join(report(same, own, arguments.steps, arguments.seeds)))
    print("\n".join(guided_report(guided_study(arguments.steps, arguments.seeds))))
    print(f"\nDrawn: {os.path.relpath(save(draw(same), arguments.picture))}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=10_000, help="steps of each synthetic trace (default: 10000)")
    parser.add_argument("--seeds", type=positive, default=5, help="synthetic traces of each kind (default: 5)")
    parser.add_argument("--picture", type=Path, default=ROOT / PICTURE, help=f"file (default: {PICTURE})")
    return parser.parse_args()


def study(policies, steps, seeds):
    """By policy and kind of trace the means over the seeds: skipped steps in 1000 and headroom lost."""
    return with_means(replay_on(policies, made_traces(steps, seeds)))


def made_traces(steps, seeds):
    """By kind, the traces of all seeds."""
    seeded = [synthetic_traces(steps, seed) for seed in range(seeds)]
    return {kind: [traces[kind] for traces in seeded] for kind in seeded[0]}


def replay_on(policies, traces):
    """By policy and kind the figures of study(), without the means over the kinds."""
    compared = compare(policies, [trace for of_kind in traces.values() for trace in of_kind])
    results = {}
    for policy, measures in compared.measures.items():
        each = iter(measures)
        results[policy] = {kind: figures([next(each) for _ in of_kind]) for kind, of_kind in traces.items()}
    return results


def guided_study(steps, seeds, kinds=None):
    """By what the gradients show, as study(): the guided rule by exchange rate, and fixed windows.

    Args:
        steps, seeds (int): of the traces.
        kinds (Collection[str], optional): of traces. Default: None, all.
    """
    traces = {
        place: each for place, each in traces_with_gradients(steps, seeds).items() if not kinds or place[1] in kinds
    }
    start = {"loss_scale_value": SAME_SCALE}
    guided = {name: partial(make_policy, "guided", exchange_rate=rate, **start) for rate, name in GUIDED.items()}
    windows = {window: dynamic(window) for window in FIXED_WINDOWS}
    replayed = replay_on(guided, traces)
    # The ceilings of a kind are the same whatever the gradients show, and fixed windows do not see gradients.
    by_kind = replay_on(windows, {kind: of_kind for (_, kind), of_kind in traces.items()})
    for window, on_kinds in by_kind.items():
        replayed[window] = {(group, kind): on_kinds[kind] for group, kind in traces}
    results = {group: {policy: {} for policy in replayed} for group, _ in traces}
    for policy, on_places in replayed.items():
        for (group, kind), row in on_places.items():
            results[group][policy][kind] = row
    return {group: with_means(by_policy) for group, by_policy in results.items()}


def traces_with_gradients(steps, seeds):
    """By what the gradients show and by kind, the traces of all seeds."""
    traces = {
        (group, kind): [with_gradients(trace, *offset_and_spread, seed) for seed, trace in enumerate(of_kind)]
        for group, offset_and_spread in OFFSETS.items()
        for kind, of_kind in made_traces(steps, seeds).items()
    }
    for numbers in INDEPENDENT_CEILINGS:
        name = f"{numbers[1]:g} bits above, memory {numbers[3]:g}"
        traces[OWN, name] = [independent_ceiling(steps, seed, *numbers) for seed in range(seeds)]
    return traces


def with_means(results):
    """Add to each policy the mean over its kinds of trace."""
    for on_kinds in results.values():
        rows = list(on_kinds.values())
        on_kinds[MEAN] = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return results


def figures(measures):
    return {
        "skipped": float(np.mean([1000 * one.skipped / one.steps for one in measures])),
        "headroom_lost": float(np.mean([one.headroom_lost for one in measures])),
    }


def report(same, own, steps, seeds):
    """The report, as lines of Markdown."""
    kinds = [kind for kind in same[ADAPTIVE] if kind != MEAN]
    start = f"2^{math.log2(SAME_SCALE):g}"
    yield f"Synthetic traces: {len(kinds)} kinds, {seeds} seeds (0 to {seeds - 1}) of {steps} steps each. Means over"
    yield "the seeds: skipped steps in 1000 / headroom lost in bits, log2(ceiling / scale) at the applied steps."
    # The ceilings of synthetic traces stay within normal float32 numbers, so no skip is unavoidable.
    yield "The oracle, which knows the ceilings, skips and loses nothing: both numbers are the regret as well."
    yield from section(
        figures_table(same), f"All from the initial scale {start} (the ceilings are about 2^18 in the middle):"
    )
    yield from section(
        figures_table(own),
        "Each with its system's own initial scale and window (2^16; 2^24 and 2000; 2^32 and 1000; 2^16 and 2000):",
    )
    yield from section(
        best_table({policy: row for policy, row in same.items() if policy != "PyTorch"}),
        f"Who is best from {start} (PyTorch is dynamic {WINDOWS[-1]} there). Cost: skipped steps in 1000, and so many",
        "more for a bit of headroom. The last column: at which of these prices the adaptive rule costs least.",
    )
    yield from section(
        reason_table(same, steps, seeds),
        "Where the adaptive rule is worse, and why, from its replays (means over the seeds):",
    )
    yield from section(
        logs_table(SAME_START),
        "Sample logs: skipped steps / headroom lost in bits / share of steps whose outcome the log knows; that of the",
        "others is assumed, with ceilings interpolated. Logs this short show the start, and say nothing about windows.",
        "",
        f"From {start}:",
    )
    yield from section(logs_table(OWN_DEFAULTS), "Each with its own defaults:")


def section(rows, *lines):
    yield from ["", *lines, "", *rows]


def guided_report(results):
    """The report on gradient-guided scaling, as lines of Markdown."""
    rates = " and ".join(f"{rate:g}" for rate in GUIDED)
    columns, *rows = guided_rows(results)
    return section(
        table(columns, rows),
        "Gradient-guided scaling against fixed windows of 20, 100, 200, 500, 1000 and 2000, where the gradients show",
        "the ceiling and where they do not: skipped steps in 1000 / headroom lost in bits, at exchange rates of",
        f"{rates} skipped steps in 1000 for a bit. The best window costs least; the share is the guided rule's cost",
        "as a part of that. A mean is against the one window that is best for all kinds together, and 'by kind' the",
        "mean of the shares above it.",
    )


def guided_rows(results):
    """Yield the rows of the table on gradient-guided scaling, the first with its columns."""
    yield [
        "gradients",
        "trace",
        *(f"{what}, {rate:g} a bit" for rate in GUIDED for what in ("guided", "best", "share")),
    ]
    for group, by_policy in results.items():
        shares = {rate: [] for rate in GUIDED}
        for kind in by_policy[FIXED_WINDOWS[0]]:
            on_kind, cells = {policy: row[kind] for policy, row in by_policy.items()}, []
            for rate, guided in GUIDED.items():
                best = cheapest({window: on_kind[window] for window in FIXED_WINDOWS}, rate)
                share = cost(on_kind[guided], rate) / cost(on_kind[best], rate)
                by_kind = f" (by kind {np.mean(shares[rate]):.2f})" if kind == MEAN else ""
                shares[rate].append(share)
                cells += [point(on_kind[guided]), f"{best}: {point(on_kind[best])}", f"{share:.2f}{by_kind}"]
            yield [group, kind, *cells]


def point(row):
    return f"{row['skipped']:.1f} / {row['headroom_lost']:.2f}"


def figures_table(results):
    rows = [[kind, *(point(row[kind]) for row in results.values())] for kind in next(iter(results.values()))]
    return table(["trace", *results], rows)


def best_table(results):
    rows = []
    for kind in results[ADAPTIVE]:
        on_kind = {policy: row[kind] for policy, row in results.items()}
        beaten_by = [policy for policy, row in on_kind.items() if beats(row, on_kind[ADAPTIVE])]
        rates = cheapest_rates(on_kind)
        rows.append(
            [
                kind,
                cheapest(on_kind, 0.0),
                min(on_kind, key=lambda policy: on_kind[policy]["headroom_lost"]),
                cheapest(on_kind, 1.0),
                cheapest(on_kind, 10.0),
                ", ".join(beaten_by) or "none",
                "none" if rates is None else f"{rates[0]:.1f} to {rates[1]:.1f}",
            ]
        )
    columns = ["trace", "fewest skipped", "least headroom lost", "least cost, 1 a bit", "least cost, 10 a bit"]
    return table([*columns, "better than adaptive in both", "adaptive costs least at"], rows)


def beats(row, other):
    pairs = [(row[name], other[name]) for name in ("skipped", "headroom_lost")]
    return all(one <= two for one, two in pairs) and any(one < two for one, two in pairs)


def cheapest(on_kind, rate):
    return min(on_kind, key=lambda policy: cost(on_kind[policy], rate))


def cost(row, rate):
    """Return the cost of mean figures, as lab.replay.measures.cost defines it."""
    return row["skipped"] + rate * row["headroom_lost"]


def cheapest_rates(on_kind):
    """The smallest and the largest price of a bit at which no policy costs less than the adaptive rule, or None."""
    low, high = 0.0, math.inf
    for row in on_kind.values():
        skipped = on_kind[ADAPTIVE]["skipped"] - row["skipped"]
        bits = row["headroom_lost"] - on_kind[ADAPTIVE]["headroom_lost"]
        if bits > 0:
            low = max(low, skipped / bits)
        elif bits < 0:
            high = min(high, skipped / bits)
        elif skipped > 0:
            return None
    return (low, high) if low <= high else None


def reason_table(same, steps, seeds):
    rows = []
    for kind, traces in made_traces(steps, seeds).items():
        looks = list(map(look, traces))
        mean = {name: float(np.mean([one[name] for one in looks])) for name in looks[0]}
        on_kind = {policy: row[kind] for policy, row in same.items()}
        rows.append(
            [kind, f"{mean['window']:.0f}", *(worse(on_kind, name) for name in reasons(mean)), *reasons(mean).values()]
        )
    columns = ["trace", "mean window", "skips more than", "loses more headroom than", "why it skips"]
    return table([*columns, "why it loses headroom"], rows)


def worse(on_kind, name):
    """The policies that the adaptive rule is behind in one measure, PyTorch left out, and by how much at most."""
    behind = {p: on_kind[ADAPTIVE][name] - row[name] for p, row in on_kind.items() if p not in (ADAPTIVE, "PyTorch")}
    behind = {policy: by for policy, by in behind.items() if by > 0}
    return f"{', '.join(behind)} (by up to {max(behind.values()):.1f})" if behind else "none"


def look(trace):
    """Figures of what the adaptive rule did on a trace."""
    replayed = replay(SAME_START[ADAPTIVE](), trace)
    window, overflow = replayed.scale_window, replayed.overflow
    bits = np.where(overflow, 0.0, np.log2(trace.ceiling / replayed.loss_scale))
    changes = np.append(0.0, np.diff(replayed.loss_scale))
    # The last change before each step: above 0 after a raise that nothing has taken back yet.
    last = np.maximum.accumulate(np.where(changes != 0, np.arange(len(trace)), 0))
    after_raise = overflow & (changes[last] > 0) & (np.arange(len(trace)) - last < window)
    return {
        "window": window.mean(),
        "throws": ((window[1:] == 1) & (window[:-1] > 1)).sum(),
        "after_raise": share(after_raise.sum(), overflow.sum()),
        "below_500": share((overflow & (window < 500)).sum(), overflow.sum()),
        "bits_at_500": share(bits[window >= 500].sum(), bits.sum()),
    }


def share(part, whole):
    return float(part / whole) if whole else 0.0


def reasons(mean):
    """Explain the skipped steps and the lost headroom, from the figures of look()."""
    climbs = "once" if mean["throws"] == 0 else f"{1 + mean['throws']:.1f} times, thrown back to window 1 by drops"
    small = f"it climbs the ladder {climbs}: {mean['below_500']:.0%} of the skips are at windows below 500"
    skipped = f"{small}, {mean['after_raise']:.0%} of all are raises that failed"
    if mean["bits_at_500"] >= 0.5:
        headroom = f"{mean['bits_at_500']:.0%} is lost at windows from 500, which clean steps never make smaller"
    else:
        headroom = f"{1 - mean['bits_at_500']:.0%} is lost at windows below 500, on the way back up after drops"
    return {"skipped": skipped, "headroom_lost": headroom}


def logs_table(policies):
    rows = []
    for file in sorted(LOGS.glob("*.log")):
        trace = read_log(file).to_trace()
        measures = [one for (one,) in compare(policies, [trace]).measures.values()]
        cells = [
            f"{one.skipped} / {one.headroom_lost:.2f} / {one.known_share:.0%}".replace("nan", "-") for one in measures
        ]
        rows.append([f"{file.stem} ({len(trace)} steps)", *cells])
    return table(["log", *policies], rows)


def draw(same):
    """A panel for each kind of trace and one for the mean, with a point for each policy."""
    figure = new_figure(9, 8.4)
    fixed = [f"dynamic {window}" for window in WINDOWS]
    mean = same[ADAPTIVE][MEAN]
    headline(
        figure,
        f"Adaptive: {mean['skipped']:.1f} of 1000 steps skipped and {mean['headroom_lost']:.1f} bits of headroom lost "
        "in the mean",
    )
    panels = figure.subplots(3, 3, sharex=True).flat
    for axes, kind in zip(panels, same[ADAPTIVE], strict=True):
        points = {policy: (row[kind]["skipped"], row[kind]["headroom_lost"]) for policy, row in same.items()}
        line = list(zip(*(points[policy] for policy in fixed), strict=True))
        axes.plot(*line, "o-", color=MUTED, label="fixed windows")
        for policy, window in zip(fixed, WINDOWS, strict=True):
            axes.annotate(
                f"{window}", points[policy], textcoords="offset points", xytext=(4, 4), fontsize=7, color=MUTED
            )
        axes.plot(*points["Megatron"], "s", color=WARNING, label="Megatron: window 1000, hysteresis 2")
        axes.plot(*points[ADAPTIVE], "D", color=MAIN, markersize=7, label=ADAPTIVE)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.15 * max(y for _, y in points.values()) or 1)
        axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.minorticks_off()
        style_axes(axes, title="mean of the eight" if kind == MEAN else kind)
        if kind == "random walk":
            axes.set_xlabel("skipped steps in 1000, less is better")
        if kind == "sudden drop":
            axes.set_ylabel("headroom lost in bits, less is better")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
