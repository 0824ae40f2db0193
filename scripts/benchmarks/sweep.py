"""Compare the speed of the lab's sweep over configurations with a separate replay of each: ``costs sweep``.

Both ways replay configurations of the adaptive rule on a synthetic trace of all kinds of behaviour, and must agree on
the states, counts and measures of every configuration. On a long trace only the sweep is timed. NumPy uses one core for
all operations of the sweep.
"""

import dataclasses
import math

import numpy as np
from mindformers_adaptive.lab.synthetic import synthetic_traces

from mindformers_adaptive.lab.configuration import grid
from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.replay import replay, sweep
from mindformers_adaptive.record.trace import Trace
from scripts.benchmarks.paired_timing import compare, ratio, with_error

# Three sizes: the number of configurations; the steps of the short trace, which the sweep and separate replays both
# use; and the steps of the long trace, which only the sweep uses.
SIZES, QUICK_SIZES = (1000, 2000, 100_000), (10, 200, 400)
RULE, SWEEP, LONG_SWEEP = "each configuration by itself", "the vectorised sweep", "the vectorised sweep, long trace"


def measure_sweep(arguments):
    """Return the times of the sweep and of the replays, and the number of configurations on which both disagree."""
    count, *steps = QUICK_SIZES if arguments.quick else SIZES
    configurations = make_configurations()[:count]
    trace, long_trace = map(make_trace, steps)
    ways = {
        RULE: lambda: lambda _: [replay(Policy("the rule", each.rule, each.start), trace) for each in configurations],
        SWEEP: lambda: lambda _: sweep(configurations, trace),
        LONG_SWEEP: lambda: lambda _: sweep(configurations, long_trace),
    }
    share = skipped_share(configurations, trace)
    return {
        "configurations": len(configurations),
        "different_configurations": count_different(ways[SWEEP]()(0), ways[RULE]()(0)),
        "steps": {RULE: len(trace), SWEEP: len(trace), LONG_SWEEP: len(long_trace)},
        "skipped_share": {RULE: share, SWEEP: share, LONG_SWEEP: skipped_share(configurations, long_trace)},
        "times": compare(ways, arguments.copies, arguments.rounds),
    }


def skipped_share(configurations, trace):
    return float(sweep(configurations, trace).column("skipped").mean() / len(trace))


def make_configurations():
    """Return 1000 configurations of the adaptive rule. Of its 5 scale factors, 3 have inexact float32 reciprocals."""
    return grid(
        "adaptive",
        loss_scale_value=[2.0**16, 2.0**32],
        scale_factor=[2, 4, 3, 1.5, 10],
        min_scale_window=[5, 10, 20, 50, 100],
        max_scale_window=[100, 200, 500, 1000, 2000],
        hysteresis=[1, 2],
        shrink_from_min_window=[False, True],
    )


def make_trace(steps):
    """Return a trace of all kinds of synthetic ceilings in turn.

    At some steps, every loss scale overflows; at some steps, no loss scale overflows.
    """
    kinds = synthetic_traces(math.ceil(steps / 8), seed=0).values()
    ceiling = np.concatenate([kind.ceiling for kind in kinds])[:steps]
    ceiling[500::1000] = 0.0
    ceiling[750::1000] = np.inf
    seconds = np.random.default_rng(0).uniform(0.5, 1.5, len(ceiling))
    return dataclasses.replace(Trace.exact("all kinds", ceiling), seconds=seconds)


def count_different(swept, replayed):
    """Return for how many configurations the sweep and a separate replay differ in the final state or a measure."""
    states = [state._asdict() for state in swept.final_states]
    by_sweep = list(map(numbers_of, swept.measures, states))
    by_rule = [numbers_of(replay.measures, replay.final_state) for replay in replayed]
    # The sweep and the separate replays add numbers in different orders, so the last digits of a float may differ.
    same = np.isclose(by_sweep, by_rule, rtol=1e-9, atol=0.0, equal_nan=True)
    return int((~same.all(axis=1)).sum())


def numbers_of(measures, final_state):
    return np.array([*measures.as_dict().values(), *(final_state[name] for name in sorted(final_state))], float)


def sweep_tables(result):
    """Return the only table of a measurement, as {name: rows}; the first row has the names of the columns."""
    columns = ["replayed by", "steps", "skipped", "million steps a second", "seconds", "times as fast"]
    rows = [[f"{result['configurations']} configurations {columns[0]}", *columns[1:]]]
    for name, (milliseconds, _) in result["times"].items():
        steps = result["steps"][name]
        # Steps per millisecond, divided by 1000, are millions of steps per second.
        speed = result["configurations"] * steps / milliseconds / 1e3
        faster = with_error(*ratio(result["times"], RULE, name), 1) if name == SWEEP else ""
        taken = [f"{speed:.2f}", f"{milliseconds / 1e3:.2f}", faster]
        rows.append([name, str(steps), f"{result['skipped_share'][name]:.1%}", *taken])
    return {"speeds": rows}
