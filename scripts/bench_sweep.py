"""Measure how fast the vectorised sweep replays configurations, against the rule in plain Python.

    python scripts/bench_sweep.py

Two measurements, each on a made trace of all kinds of behaviour and with 1000 configurations of the adaptive rule:

1. On a short trace the rule replays every configuration step by step and so does the sweep; states, counts and measures
   of every configuration must agree.
2. On 100,000 steps the sweep alone is timed.

The sweep must reach 10 million policy-steps a second of processor time on one core in the second, which must end within
30 seconds and 2 GiB. The script ends with 1 where that is missed or a result differs. NumPy is kept to one thread.
Processor time leaves out what other programs took of the core; the 30 seconds are by the clock.
"""

import os

# Before NumPy is imported, which reads them only then.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import argparse
import dataclasses
import json
import math
import resource
import sys
import time

import numpy as np
from argument_types import positive

from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.replay.configuration import grid
from mindformers_adaptive.lab.replay.measures import overflows
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.replay.sweep import sweep
from mindformers_adaptive.lab.traces.synthetic import synthetic_traces
from mindformers_adaptive.lab.traces.trace import Trace

REQUIRED_STEPS_A_SECOND = 1e7
REQUIRED_SECONDS = 30.0
REQUIRED_GIBIBYTES = 2.0

# Sums in another order: their last digits may differ.
INEXACT = {"headroom_lost", "headroom_regret", "seconds_lost"}


def main():
    arguments = parse_arguments()
    configurations = make_configurations()[: arguments.configurations]
    result = {
        "configurations": len(configurations),
        "against_the_rule": compare_with_rule(configurations, arguments.compared_steps),
        "large": time_large(configurations, arguments.steps),
    }
    result["missed"] = missed(result)
    print(json.dumps(result, indent=2) if arguments.json else as_text(result))
    sys.exit(1 if result["missed"] else 0)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=100_000, help="steps of the large run (default: 100000)")
    parser.add_argument(
        "--compared_steps", type=positive, default=5_000, help="steps that the rule replays too (default: 5000)"
    )
    parser.add_argument(
        "--configurations", type=positive, default=1_000, help="how many of the 1000 are used (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


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


def compare_with_rule(configurations, steps):
    """Replay with the rule and with the sweep, and count the configurations whose results differ."""
    trace = make_trace(steps)
    started = time.process_time()
    swept = sweep(configurations, trace)
    sweep_seconds = time.process_time() - started

    started = time.process_time()
    for configuration in configurations:
        rule, state = configuration.rule, configuration.start
        for ceiling in trace.ceiling.tolist():
            state = rule.step(state, overflows(state.loss_scale, ceiling))
    rule_seconds = time.process_time() - started

    different = 0
    for configuration, measures, final_state in zip(configurations, swept.measures, swept.final_states, strict=True):
        expected = replay(Policy("the rule", configuration.rule, configuration.start), trace)
        same_state = final_state._asdict() == expected.final_state
        different += not (same_state and same_measures(measures.as_dict(), expected.measures.as_dict()))
    policy_steps = len(configurations) * len(trace)
    return {
        "steps": len(trace),
        "rule_steps_a_second": policy_steps / rule_seconds,
        "sweep_steps_a_second": policy_steps / sweep_seconds,
        "times_faster": rule_seconds / sweep_seconds,
        "different_configurations": different,
    }


def same_measures(measured, expected):
    return measured.keys() == expected.keys() and all(
        measured[name] == expected[name]
        or (
            name in INEXACT
            and None not in (measured[name], expected[name])
            and math.isclose(measured[name], expected[name])
        )
        for name in expected
    )


def time_large(configurations, steps):
    trace = make_trace(steps)
    processor, clock = time.process_time(), time.perf_counter()
    swept = sweep(configurations, trace)
    processor, clock = time.process_time() - processor, time.perf_counter() - clock
    return {
        "steps": len(trace),
        "skipped_share": float(swept.column("skipped").mean() / len(trace)),
        "sweep_steps_a_second": len(configurations) * len(trace) / processor,
        "processor_seconds": processor,
        "seconds": clock,
        # Linux counts in KiB, and the whole process up to here.
        "peak_gibibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def missed(result):
    """Return what is required and was not reached."""
    large = result["large"]
    checks = {
        "every configuration agrees with the rule": result["against_the_rule"]["different_configurations"] == 0,
        "10 million policy-steps a second on one core": large["sweep_steps_a_second"] >= REQUIRED_STEPS_A_SECOND,
        "the large run within 30 seconds": large["seconds"] <= REQUIRED_SECONDS,
        "within 2 GiB": large["peak_gibibytes"] <= REQUIRED_GIBIBYTES,
    }
    return [name for name, reached in checks.items() if not reached]


def as_text(result):
    compared, large = result["against_the_rule"], result["large"]
    lines = [
        f"{result['configurations']} configurations on {compared['steps']} steps, policy-steps a second on one core:",
        f"  rule in plain Python  {compared['rule_steps_a_second'] / 1e6:8.2f} million",
        f"  vectorised sweep      {compared['sweep_steps_a_second'] / 1e6:8.2f} million, "
        f"{compared['times_faster']:.0f} times as fast",
        f"  configurations whose results differ: {compared['different_configurations']}",
        f"{result['configurations']} configurations on {large['steps']} steps, of which "
        f"{large['skipped_share']:.1%} were skipped:",
        f"  vectorised sweep      {large['sweep_steps_a_second'] / 1e6:8.2f} million policy-steps a second",
        f"  {large['seconds']:.1f} s by the clock, {large['processor_seconds']:.1f} s on one core, "
        f"{large['peak_gibibytes']:.2f} GiB at most",
        *(f"MISSED: {name}" for name in result["missed"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
