"""Compare adaptive and gradient-guided loss scaling with fixed windows on synthetic traces.

    python -m scripts.studies.study

Prints Markdown: the steps that each policy skips and the headroom that it loses, when the adaptive rule costs least,
and how both rules use gradients and follow lasting changes of the ceiling (the largest loss scale without overflow).
Also draws docs/images/policy_study.svg. The same arguments give the same text and picture.
"""

import argparse
import math
import os
from pathlib import Path

import numpy as np

from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.gradient_ceilings import INDEPENDENT_CEILINGS, independent_ceiling, with_gradients
from mindformers_adaptive.lab.measures import entry_skips, overflow_flags, recovery_steps
from mindformers_adaptive.lab.replay import replay_side_by_side
from mindformers_adaptive.lab.synthetic import KINDS, REGIMES, regime_levels, synthetic_trace
from mindformers_adaptive.plots.canvas import MAIN, MUTED, WARNING, headline, new_figure, save, style_axes
from mindformers_adaptive.rules.lanes import Lanes
from scripts.studies.reporting import ROOT, add_json_option, positive, with_captions, write_json

PICTURE = "docs/images/policy_study.svg"
WINDOWS = (20, 100, 1000, 2000)
ADAPTIVE = "adaptive 20-1000"
MEAN = "mean"

# All policies begin at the default initial scale, 2^16.
ADAPTIVE_AND_FIXED = {
    ADAPTIVE: Configuration("adaptive"),
    **{f"dynamic {window}": Configuration.dynamic(window) for window in WINDOWS},
}
# The rules of Megatron-LM and PyTorch as Configurations, which can be replayed on many traces side by side.
POLICIES = {
    **ADAPTIVE_AND_FIXED,
    "Megatron": Configuration.dynamic(1000, hysteresis=2),
    "PyTorch": Configuration.dynamic(2000),
}
FIXED_WINDOWS = (20, 100, 200, 500, 1000, 2000)
GUIDED_RATES = (1.0, 5.0)
GUIDED_AND_FIXED = {
    **{f"guided {rate:g}": Configuration("guided") for rate in GUIDED_RATES},
    **{f"{window}": Configuration.dynamic(window) for window in FIXED_WINDOWS},
}
REGIME_POLICIES = {
    **{f"guided, {rate:g} a bit": Configuration("guided") for rate in GUIDED_RATES},
    **ADAPTIVE_AND_FIXED,
}

# Groups of traces. Each group has its kinds of traces, and the error of the ceilings that the gradients imply: by how
# many bits these ceilings are too high, as mean and standard deviation.
EXACT = "show the ceiling"
GROUPS = {
    EXACT: (KINDS, 0.0, 0.0),
    "hidden by 3 bits": (KINDS, 3.0, 0.4),
    "hidden by 8 bits": (KINDS, 8.0, 0.4),
    "2 bits too little": (KINDS, -2.0, 0.0),
    "regimes": (REGIMES, 0.0, 0.0),
    "regimes, hidden by 3 bits": (REGIMES, 3.0, 0.4),
}
OWN = "a ceiling of its own"

# How the ceiling changes between regimes: at once or slowly, with the kinds of traces of each group. Kinds with spikes
# are left out, because the ceiling after a spike is the same as before the spike.
AT_ONCE, SLOWLY = ("one-off regime", "rare regimes", "alternating regimes", "levels"), ("ramped regimes",)
CHANGES = {"at once": AT_ONCE, "over 20 steps": SLOWLY, "either way": AT_ONCE + SLOWLY}

CAPTIONS = {
    "policies": "All from the initial scale 2^16 (the ceilings are about 2^18 in the middle):",
    "prices": "At how many skipped steps in 1000 for a bit of headroom the adaptive rule costs least:",
    "guided": f"""\
Gradient-guided scaling against fixed windows of {", ".join(map(str, FIXED_WINDOWS))}, where the gradients
show the ceiling and where they do not: skipped steps in 1000 / headroom lost in bits. The best window costs
least; the share is the guided rule's cost as a part of that. Means are against the one window that is best
for all kinds together, and 'by kind' is the mean of the shares:""",
    "worse": "Kinds of traces on which it costs more, at 1 a bit, than the best window of the kind:",
    "regimes": """\
Regimes without spikes: how many steps after a rise of the ceiling the scale is within 2 bits of the largest
power of two below it, not in time where the ceiling falls before that; and how many steps a fall costs:""",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=10_000, help="steps of each synthetic trace (default: 10000)")
    parser.add_argument("--seeds", type=positive, default=5, help="synthetic traces of each kind (default: 5)")
    add_json_option(parser)
    parser.add_argument("--picture", type=Path, default=ROOT / PICTURE, help=f"file (default: {PICTURE})")
    arguments = parser.parse_args()
    steps, seeds = arguments.steps, arguments.seeds
    traces = traces_by_place(steps, seeds)
    exact = {key: of_kind for key, of_kind in traces.items() if key[0] == EXACT}
    result = {
        "steps": steps,
        "seeds": seeds,
        "same": study(POLICIES, exact)[EXACT],
        "guided": study(GUIDED_AND_FIXED, traces),
        "regimes": regime_study(steps, seeds),
    }
    print("\n".join(report(result)))
    print(f"\nDrawn: {os.path.relpath(save(draw(result['same']), arguments.picture))}")
    write_json(arguments.json, result)


def traces_by_place(steps, seeds):
    """Return the synthetic traces of all seeds, by group and kind."""
    traces = {}
    for group, (kinds, offset, spread) in GROUPS.items():
        for kind in kinds:
            each = [synthetic_trace(kind, steps, seed) for seed in range(seeds)]
            traces[group, kind] = [with_gradients(trace, offset, spread, seed) for seed, trace in enumerate(each)]
    for numbers in INDEPENDENT_CEILINGS:
        name = f"{numbers[1]:g} bits above, memory {numbers[3]:g}"
        traces[OWN, name] = [independent_ceiling(steps, seed, *numbers) for seed in range(seeds)]
    return traces


def study(policies, traces):
    """Replay policies on traces.

    Args:
        policies (dict[str, Configuration]): the policies, by name.
        traces (dict[tuple[str, str], list[Trace]]): the traces of all seeds, by group and kind.

    Returns:
        dict, by group, policy and kind of trace, with the mean over the kinds last. Each value has the ``skipped``
        steps in 1000 and the ``headroom_lost`` in bits, as means over the seeds.
    """
    flat = [trace for of_place in traces.values() for trace in of_place]
    results = {}
    for policy, configuration in policies.items():
        # Replay all traces side by side: a step of many traces takes hardly longer than a step of one trace.
        each = iter(replay_side_by_side([configuration.rule] * len(flat), [configuration.start] * len(flat), flat))
        for (group, kind), of_place in traces.items():
            measures = [next(each)[0] for _ in of_place]
            results.setdefault(group, {}).setdefault(policy, {})[kind] = {
                "skipped": float(np.mean([1000 * run.skipped / run.steps for run in measures])),
                "headroom_lost": float(np.mean([run.headroom_lost for run in measures])),
            }
    for by_policy in results.values():
        for on_kinds in by_policy.values():
            rows = list(on_kinds.values())
            on_kinds[MEAN] = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return results


def regime_study(steps, seeds):
    """Measure how policies follow lasting falls of the ceiling and the rises after them, on traces without spikes.

    Returns:
        dict, by change of the ceiling and policy. ``recovery`` has the median and the 90th percentile of the steps
        until the loss scale is back, None if the next change comes before. ``skips`` has the mean and the largest
        number of steps skipped when a regime begins.
    """
    results = {}
    for change, kinds in CHANGES.items():
        places = [(kind, steps, seed) for kind in kinds for seed in range(seeds)]
        traces = [synthetic_trace(*key) for key in places]
        levels = [regime_levels(*key) for key in places]
        results[change] = {}
        for policy, configuration in REGIME_POLICIES.items():
            scales, overflows = scales_on(configuration, traces)
            recovery = np.concatenate(list(map(recovery_steps, levels, scales)))
            skips = np.concatenate(list(map(entry_skips, levels, overflows)))
            shares = np.percentile(recovery, (50, 90), method="inverted_cdf")
            results[change][policy] = {
                "recovery": [int(steps) if math.isfinite(steps) else None for steps in shares],
                "skips": [float(skips.mean()), int(skips.max())],
            }
    return results


def scales_on(configuration, traces):
    """Replay a configuration on traces; return loss scales and overflow flags, arrays of shape (traces, steps)."""
    count = len(traces)
    lanes = Lanes([configuration.rule] * count, [configuration.start] * count)
    ceilings, gradients = (
        np.stack([getattr(trace, name) for trace in traces]) for name in ("ceiling", "largest_gradient")
    )
    scales = np.empty(ceilings.shape)
    for step in range(ceilings.shape[1]):
        scales[:, step] = lanes.loss_scale
        lanes.step(overflow_flags(scales[:, step], ceilings[:, step]), gradients[:, step])
    return scales, overflow_flags(scales, ceilings)


def report(result):
    """Yield the report as lines of Markdown."""
    steps, seeds = result["steps"], result["seeds"]
    yield f"Synthetic traces: {len(KINDS)} kinds, {seeds} seeds (0 to {seeds - 1}) of {steps} steps each. Means over"
    yield "the seeds: skipped steps in 1000 / headroom lost in bits, log2(ceiling / scale) at the applied steps."
    # The oracle would have to skip a step only if no loss scale were at or below the ceiling. That never happens on
    # synthetic traces, whose ceilings are normal float32 numbers.
    yield "The oracle, which knows the ceilings, skips and loses nothing: both numbers are the regret as well."
    yield from with_captions(tables(result), CAPTIONS)


def tables(result):
    """Return the tables of the page by name, as lists of rows; the first row has the names of the columns."""
    columns, *by_kind = guided_rows(result["guided"])
    return {
        "policies": figures_table(result["same"]),
        "prices": price_table(result["same"]),
        "guided": guided_means(result["guided"]),
        "worse": [columns, *(row for row in by_kind if float(row[4]) > 1)],
        "regimes": regime_table(result["regimes"]),
    }


def figures_table(results):
    rows = [[kind, *(point(row[kind]) for row in results.values())] for kind in results[ADAPTIVE]]
    return [["trace", *results], *rows]


def price_table(results):
    """Return a table of the prices per lost bit of headroom at which the adaptive rule is cheapest, by kind of trace.

    The price is the number of skipped steps in 1000 that count as much as a lost bit of headroom.
    """
    rows = [["trace", "adaptive costs least from", "to"]]
    for kind in results[ADAPTIVE]:
        if rates := cheapest_rates({policy: row[kind] for policy, row in results.items()}):
            rows.append([kind, *(f"{rate:.1f}" for rate in rates)])
    return rows


def cheapest_rates(on_kind):
    """Return the lowest and the highest price of headroom at which the adaptive rule costs least of all policies.

    The price is the number of skipped steps in 1000 that count as much as a lost bit of headroom. Return None if there
    is no such price.
    """
    adaptive = on_kind[ADAPTIVE]
    pairs = [
        (adaptive["skipped"] - row["skipped"], row["headroom_lost"] - adaptive["headroom_lost"])
        for row in on_kind.values()
    ]
    low = max([0.0, *(skipped / bits for skipped, bits in pairs if bits > 0)])
    high = min([math.inf, *(skipped / bits for skipped, bits in pairs if bits < 0)])
    always_dearer = any(skipped > 0 for skipped, bits in pairs if bits == 0)
    return None if always_dearer or low > high else (low, high)


def guided_rows(results):
    """Return a table, header first, that compares the guided rule with the best scale window for each kind of trace."""
    rows = [["gradients", "trace", *columns_of_rates("guided", "best", "share")]]
    for group, by_policy in results.items():
        for kind in by_policy["20"]:
            if kind != MEAN:
                rows.append([group, kind])
                for rate in GUIDED_RATES:
                    rows[-1] += against_best(by_policy, kind, rate)[0]
    return rows


def guided_means(results):
    """Return a table, header first, that compares the guided rule with the best window for all kinds together."""
    rows = [["gradients", *columns_of_rates("guided", "best", "share", "by kind")]]
    for group, by_policy in results.items():
        rows.append([group])
        for rate in GUIDED_RATES:
            shares = [against_best(by_policy, kind, rate)[1] for kind in by_policy["20"] if kind != MEAN]
            rows[-1] += [*against_best(by_policy, MEAN, rate)[0], f"{np.mean(shares):.2f}"]
    return rows


def columns_of_rates(*names):
    return [f"{name}, {rate:g} a bit" for rate in GUIDED_RATES for name in names]


def against_best(by_policy, kind, rate):
    """Return three table cells (guided rule, best scale window, ratio of their costs), and the ratio as a number."""
    guided = by_policy[f"guided {rate:g}"][kind]
    windows = {str(window): by_policy[str(window)][kind] for window in FIXED_WINDOWS}
    best = cheapest(windows, rate)
    share = cost(guided, rate) / cost(windows[best], rate)
    return [point(guided), f"{best}: {point(windows[best])}", f"{share:.2f}"], share


def cheapest(on_kind, rate):
    return min(on_kind, key=lambda policy: cost(on_kind[policy], rate))


def cost(row, rate):
    """Return the cost of the mean skipped steps and the mean lost headroom, as the lab's measures define it."""
    return row["skipped"] + rate * row["headroom_lost"]


def point(row):
    return f"{row['skipped']:.1f} / {row['headroom_lost']:.2f}"


def regime_table(results):
    rows = [["the ceiling changes", "policy", "steps until back, median", "90 %", "skipped an entry, mean", "most"]]
    for change, by_policy in results.items():
        for policy, row in by_policy.items():
            recovery = ["not in time" if steps is None else str(steps) for steps in row["recovery"]]
            rows.append([change, policy, *recovery, f"{row['skips'][0]:.1f}", str(row["skips"][1])])
    return rows


def draw(same):
    """Draw a panel for each kind of trace, and a panel for the mean of all kinds; a point stands for a policy."""
    figure = new_figure(9, 8.4)
    fixed = [f"dynamic {window}" for window in WINDOWS]
    mean = same[ADAPTIVE][MEAN]
    lost = f"{mean['skipped']:.1f} of 1000 steps skipped and {mean['headroom_lost']:.1f} bits of headroom lost"
    headline(figure, f"Adaptive: {lost} in the mean")
    panels = figure.subplots(3, 3, sharex=True).flat
    for axes, kind in zip(panels, same[ADAPTIVE], strict=True):
        points = {policy: (row[kind]["skipped"], row[kind]["headroom_lost"]) for policy, row in same.items()}
        line = list(zip(*(points[policy] for policy in fixed), strict=True))
        axes.plot(*line, "o-", color=MUTED, label="fixed windows")
        for policy, window in zip(fixed, WINDOWS, strict=True):
            axes.annotate(str(window), points[policy], (4, 4), textcoords="offset points", fontsize=7, color=MUTED)
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
