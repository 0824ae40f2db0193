"""What gradient-guided loss scaling costs, as a share of the best fixed window, where gradients show more or less."""

from collections import defaultdict

import numpy as np

from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.sweep import sweep
from mindformers_adaptive.lab.traces.gradients import INDEPENDENT_CEILINGS, independent_ceiling, with_gradients
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces

EXACT = "gradients show the ceiling"
OWN = "a ceiling of its own"
# By what the gradients show, the offset and the spread of it in bits.
OFFSETS = {
    EXACT: (0.0, 0.0),
    "hidden by 3 bits": (3.0, 0.4),
    "hidden by 8 bits": (8.0, 0.4),
    "2 too little": (-2.0, 0.0),
}
FIXED_WINDOWS = (20, 100, 200, 500, 1000, 2000)
RATES = (1.0, 5.0)
START = 2.0**16
MEAN = "mean"


def traces_of(steps, seeds):
    """By what the gradients show and by kind, the traces of all seeds."""
    traces = defaultdict(lambda: defaultdict(list))
    for seed in range(seeds):
        for kind, trace in synthetic_traces(steps, seed).items():
            for group, (offset, spread) in OFFSETS.items():
                traces[group][kind].append(with_gradients(trace, offset, spread, seed))
        for numbers in INDEPENDENT_CEILINGS:
            traces[OWN][f"{numbers[1]:g} bits above, memory {numbers[3]:g}"].append(
                independent_ceiling(steps, seed, *numbers)
            )
    return traces


def guided_study(steps, seeds):
    """By what the gradients show, by kind and by exchange rate: points and costs of the guided rule and the windows.

    A point is (skipped steps in 1000, headroom lost in bits), a mean over the seeds. The row ``MEAN`` has the mean cost
    of all kinds, as a share of that of the one window that costs least in the mean.
    """
    groups = traces_of(steps, seeds)
    lanes = [(group, kind, rate) for group, kinds in groups.items() for kind in kinds for rate in RATES]
    guided = [
        Configuration("guided", loss_scale_value=START, exchange_rate=rate) for *_, rate in lanes for _ in range(seeds)
    ]
    traces = [trace for group, kind, _ in lanes for trace in groups[group][kind]]
    measures = sweep(guided, traces).measures
    configurations = [Configuration.dynamic(window, loss_scale_value=START) for window in FIXED_WINDOWS]
    # The ceilings of a kind are the same whatever the gradients show, and fixed windows do not see gradients.
    windows = {
        kind: np.mean([[point(one) for one in sweep(configurations, trace).measures] for trace in of_kind], axis=0)
        for group in (EXACT, OWN)
        for kind, of_kind in groups[group].items()
    }
    results = defaultdict(lambda: defaultdict(dict))
    for lane, (group, kind, rate) in enumerate(lanes):
        mean = np.mean([point(one) for one in measures[lane * seeds : (lane + 1) * seeds]], axis=0)
        results[group][kind][rate] = compared(mean, windows[kind], rate)
    for kinds in results.values():
        kinds[MEAN] = {rate: mean_of([row[rate] for row in kinds.values()], rate) for rate in RATES}
    return results


def point(measures):
    return 1000 * measures.skipped / measures.steps, measures.headroom_lost


def compared(guided, windows, rate):
    best = int(np.argmin(windows @ (1, rate)))
    return {
        "guided": guided,
        "windows": windows,
        "window": FIXED_WINDOWS[best],
        "share": float(guided @ (1, rate) / (windows[best] @ (1, rate))),
    }


def mean_of(rows, rate):
    mean = compared(np.mean([row["guided"] for row in rows], 0), np.mean([row["windows"] for row in rows], 0), rate)
    return {**mean, "mean share": float(np.mean([row["share"] for row in rows]))}


def guided_rows(results):
    """The rows of a table, the first with its columns."""
    yield ["gradients", "trace", *(f"{what}, {rate:g} a bit" for rate in RATES for what in ("guided", "best", "share"))]
    for group, kinds in results.items():
        for kind, row in kinds.items():
            yield [group, kind, *(cell for rate in RATES for cell in cells(row[rate]))]


def cells(row):
    best = row["windows"][FIXED_WINDOWS.index(row["window"])]
    share = f"{row['share']:.2f}" + (f" (by kind {row['mean share']:.2f})" if "mean share" in row else "")
    return f"{row['guided'][0]:.1f} / {row['guided'][1]:.2f}", f"{row['window']}: {best[0]:.1f} / {best[1]:.2f}", share
