"""How fast the lab's sweep replays configurations, against the rule in plain Python: ``benchmark.py sweep``.

Both replay configurations of the adaptive rule on a synthetic trace of all kinds of behaviour, and must agree on the
states, counts and measures of every configuration. On a long trace the sweep alone is timed.
"""

import dataclasses
import math
import resource
import time

import numpy as np
from paired_timing import ratio, take_turns, typical_time, with_error

from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.replay.configuration import grid
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.replay.sweep import sweep
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces
from mindformers_adaptive.lab.traces.trace import Trace

RULE, SWEEP, LONG_SWEEP = "rule in plain Python", "vectorised sweep", "vectorised sweep, long trace"


def measure(arguments):
    """Return the times, and for how many configurations the sweep and the rule disagree."""
    configurations = make_configurations()[: arguments.configurations]
    trace, long_trace = make_trace(arguments.compared_steps), make_trace(arguments.steps)
    processor = time.process_time()
    swept = sweep(configurations, long_trace)
    processor = time.process_time() - processor
    # Linux counts in KiB, and the whole process up to here.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ways = {
        RULE: lambda: lambda _: replay_by_rule(configurations, trace),
        SWEEP: lambda: lambda _: sweep(configurations, trace),
        LONG_SWEEP: lambda: lambda _: sweep(configurations, long_trace),
    }
    return {
        "configurations": len(configurations),
        "compared_steps": len(trace),
        "steps": len(long_trace),
        "different_configurations": count_different(ways[SWEEP]()(0), ways[RULE]()(0)),
        "times": take_turns(ways, arguments.copies, arguments.rounds),
        "skipped_share": float(swept.column("skipped").mean() / len(long_trace)),
        "processor_seconds": processor,
        "peak_gibibytes": peak,
    }


def make_configurations():
    """Return 1000 configurations; three of the five factors have no exact reciprocal or product in float32."""
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
    """Return a trace of all kinds of behaviour, one after the other, with steps of every scale and none overflowing."""
    kinds = synthetic_traces(math.ceil(steps / 8), seed=0).values()
    ceiling = np.concatenate([kind.ceiling for kind in kinds])[:steps]
    ceiling[500::1000] = 0.0
    ceiling[750::1000] = np.inf
    seconds = np.random.default_rng(0).uniform(0.5, 1.5, len(ceiling))
    return dataclasses.replace(Trace.exact("all kinds", ceiling), seconds=seconds)


def replay_by_rule(configurations, trace):
    return [replay(Policy("the rule", each.rule, each.start), trace) for each in configurations]


def count_different(swept, replayed):
    """Return the number of configurations whose final states or measures differ between the sweep and the rule."""
    by_sweep = [
        numbers_of(measures, state._asdict())
        for measures, state in zip(swept.measures, swept.final_states, strict=True)
    ]
    by_rule = [numbers_of(one.measures, one.final_state) for one in replayed]
    # Sums in another order: the last digits of a float may differ.
    same = np.isclose(by_sweep, by_rule, rtol=1e-9, atol=0.0, equal_nan=True)
    return int((~same.all(axis=1)).sum())


def numbers_of(measures, final_state):
    return np.array([*measures.as_dict().values(), *(final_state[name] for name in sorted(final_state))], float)


def report(result):
    """Yield the lines of the report, as plain text."""
    times, configurations = result["times"], result["configurations"]
    steps = {RULE: result["compared_steps"], SWEEP: result["compared_steps"], LONG_SWEEP: result["steps"]}
    # Thousands of steps a millisecond.
    speeds = {name: configurations * steps[name] / typical_time(times, name)[0] / 1e3 for name in times}
    faster = with_error(*ratio(times, RULE, SWEEP), 0)
    yield f"{configurations} configurations on {steps[RULE]} steps, policy-steps a second on one core:"
    yield f"  rule in plain Python  {speeds[RULE]:8.2f} million"
    yield f"  vectorised sweep      {speeds[SWEEP]:8.2f} million, {faster} times as fast"
    yield f"  configurations whose results differ: {result['different_configurations']}"
    skipped, seconds = result["skipped_share"], typical_time(times, LONG_SWEEP)[0] / 1e3
    yield f"{configurations} configurations on {steps[LONG_SWEEP]} steps, of which {skipped:.1%} were skipped:"
    yield f"  vectorised sweep      {speeds[LONG_SWEEP]:8.2f} million policy-steps a second"
    yield f"  {seconds:.1f} s by the clock, " + (
        "{processor_seconds:.1f} s on one core, {peak_gibibytes:.2f} GiB at most".format(**result)
    )
