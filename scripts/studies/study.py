"""Compare adaptive and gradient-guided loss scaling with fixed windows on synthetic traces.

    python -m scripts.studies.study

Prints Markdown: the steps that each policy skips, and how far its loss scale is below the ceiling (the largest loss
scale without overflow); and the steps that lasting falls of the ceiling cost each rule. Also draws
docs/images/policy_study.svg. The same arguments give the same text and picture.
"""

import os

import numpy as np

from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.plots.canvas import MAIN, MUTED, WARNING, headline, new_figure, save, style_axes
from mindformers_adaptive.record.trace import consecutive_runs
from scripts.studies.reporting import positive, study_parser, with_captions, write_json
from scripts.studies.streams import replay
from scripts.studies.synthetic import KINDS, dynamic, regime_levels, synthetic_trace

PICTURE = "docs/images/policy_study.svg"
WINDOWS = (20, 100, 1000, 2000)
ADAPTIVE = "adaptive 20-1000"
MEAN = "mean"

# All policies begin at the default initial scale, 2^16.
ADAPTIVE_AND_FIXED = {
    ADAPTIVE: start_rule("adaptive"),
    **{f"dynamic {window}": dynamic(window) for window in WINDOWS},
}
# The rules of Megatron-LM and PyTorch as running rules, which can be replayed on many traces side by side.
POLICIES = {
    **ADAPTIVE_AND_FIXED,
    "Megatron": dynamic(1000, hysteresis=2),
    "PyTorch": dynamic(2000),
}
GUIDED_AND_FIXED = {"guided": start_rule("guided"), **ADAPTIVE_AND_FIXED}

# How the ceiling changes between regimes: at once or slowly, with the kinds of traces of each group. Kinds with spikes
# are left out, because the ceiling after a spike is the same as before the spike.
AT_ONCE, SLOWLY = ("one-off regime", "rare regimes", "alternating regimes", "levels"), ("ramped regimes",)
CHANGES = {"at once": AT_ONCE, "over 20 steps": SLOWLY, "either way": AT_ONCE + SLOWLY}

CAPTIONS = {
    "policies": "All from the initial scale 2^16 (the ceilings are about 2^18 in the middle):",
    "regimes": """\
Regimes without spikes: how many steps are skipped while the ceiling falls, and in the 20 steps after:""",
}


def main():
    parser = study_parser(__doc__, PICTURE)
    parser.add_argument("--steps", type=positive, default=10_000, help="steps of each synthetic trace (default: 10000)")
    parser.add_argument("--seeds", type=positive, default=5, help="synthetic traces of each kind (default: 5)")
    arguments = parser.parse_args()
    steps, seeds = arguments.steps, arguments.seeds
    traces = {kind: [synthetic_trace(kind, steps, seed) for seed in range(seeds)] for kind in KINDS}
    result = {
        "steps": steps,
        "seeds": seeds,
        "same": study(POLICIES, traces),
        "regimes": regime_study(steps, seeds),
    }
    print("\n".join(report(result)))
    print(f"\nDrawn: {os.path.relpath(save(draw(result['same']), arguments.picture))}")
    write_json(arguments.json, result)


def study(policies, traces):
    """Replay policies on traces.

    Args:
        policies (dict[str, RunningRule]): the policies, by name.
        traces (dict[str, list[Trace]]): the traces of all seeds, by kind.

    Returns:
        dict, by policy and kind of trace, with the mean over the kinds last. Each value has the ``skipped`` steps in
        1000 and the bits below the ceiling ``headroom_lost``, as means over the seeds.
    """
    flat = [trace for of_kind in traces.values() for trace in of_kind]
    results = {}
    for policy, running in policies.items():
        # Replay all traces side by side: a step of many traces takes hardly longer than a step of one trace.
        each = map(figures_of, flat, *scales_on(running, flat))
        on_kinds = {kind: means_of([next(each) for _ in of_kind]) for kind, of_kind in traces.items()}
        results[policy] = on_kinds | {MEAN: means_of(on_kinds.values())}
    return results


def figures_of(trace, scales, overflows):
    """Return the results of a policy on a trace, from its loss scales and overflow flags, as :func:`study` does."""
    below = np.log2(trace.ceiling / scales)[~overflows]
    return {"skipped": 1000 * float(overflows.mean()), "headroom_lost": float(below.mean())}


def means_of(rows):
    rows = list(rows)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def regime_study(steps, seeds):
    """Measure how many steps policies skip when the ceiling falls for long, on traces without spikes.

    Returns:
        dict, by change of the ceiling and policy: the mean and the largest number of steps skipped when a regime
        begins.
    """
    results = {}
    for change, kinds in CHANGES.items():
        places = [(kind, steps, seed) for kind in kinds for seed in range(seeds)]
        traces = [synthetic_trace(*key) for key in places]
        levels = [regime_levels(*key) for key in places]
        results[change] = {}
        for policy, running in GUIDED_AND_FIXED.items():
            _, overflows = scales_on(running, traces)
            skips = np.concatenate(list(map(entry_skips, levels, overflows)))
            results[change][policy] = [float(skips.mean()), int(skips.max())]
    return results


def entry_skips(levels, overflow):
    """Return, for each fall of the ceilings, how many steps are skipped in the fall and in the next 20 steps.

    ``levels`` are log2 of the ceilings without noise, and ``overflow`` says for each step whether it was skipped.
    """
    falls = consecutive_runs(np.flatnonzero(np.diff(levels) < 0) + 1).tolist()
    return np.array([overflow[first : last + 20].sum() for first, last in falls], np.int64)


def scales_on(running, traces):
    """Replay a rule on traces; return loss scales and overflow flags, arrays of shape (traces, steps)."""
    ceilings, gradients = (
        np.stack([getattr(trace, name) for trace in traces], 1) for name in ("ceiling", "largest_gradient")
    )
    scales, overflows = replay(running, ceilings, gradients)
    return scales.T, overflows.T


def report(result):
    """Yield the report as lines of Markdown."""
    steps, seeds = result["steps"], result["seeds"]
    yield f"Synthetic traces: {len(KINDS)} kinds, {seeds} seeds (0 to {seeds - 1}) of {steps} steps each. Means over"
    yield "the seeds: skipped steps in 1000 / bits below the ceiling, log2(ceiling / scale) at the applied steps."
    # The oracle would have to skip a step only if no loss scale were at or below the ceiling. That never happens on
    # synthetic traces, whose ceilings are normal float32 numbers.
    yield "The oracle, which knows the ceilings, skips and loses nothing: both numbers are the regret as well."
    yield from with_captions(tables(result), CAPTIONS)


def tables(result):
    """Return the tables of the page by name, as lists of rows; the first row has the names of the columns."""
    return {
        "policies": figures_table(result["same"]),
        "regimes": regime_table(result["regimes"]),
    }


def figures_table(results):
    rows = [[kind, *(point(row[kind]) for row in results.values())] for kind in results[ADAPTIVE]]
    return [["trace", *results], *rows]


def point(row):
    return f"{row['skipped']:.1f} / {row['headroom_lost']:.2f}"


def regime_table(results):
    rows = [["the ceiling changes", "rule", "skipped an entry, mean", "most"]]
    for change, by_policy in results.items():
        rows += [[change, policy, f"{mean:.1f}", str(most)] for policy, (mean, most) in by_policy.items()]
    return rows


def draw(same):
    """Draw a panel for each kind of trace, and a panel for the mean of all kinds; a point stands for a policy."""
    figure = new_figure(9, 8.4)
    fixed = [f"dynamic {window}" for window in WINDOWS]
    mean = same[ADAPTIVE][MEAN]
    lost = f"{mean['skipped']:.1f} of 1000 steps skipped and {mean['headroom_lost']:.1f} bits below the ceiling"
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
            axes.set_ylabel("bits below the ceiling")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
