"""Compare gradient-guided loss scaling with other rules, and with other constants, on synthetic traces.

    python -m scripts.studies.guided_rule

Prints Markdown: of each rule the skipped steps in 1000, and the share of applied steps with a loss scale more than
16 bits below the ceiling (the largest loss scale without overflow). The same arguments give the same text.
"""

import argparse
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.measures import overflow_flags
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules import Rule, float32, int32
from mindformers_adaptive.rules import guided as guided_module
from mindformers_adaptive.rules.lanes import Lanes
from scripts.examples.log_max import LogMaxRule
from scripts.studies.own_ceilings import INDEPENDENT_CEILINGS, independent_ceiling
from scripts.studies.reporting import add_json_option, positive, with_captions, write_json
from scripts.studies.synthetic import KINDS, REGIMES, random_of, synthetic_trace, with_gradients

# More than FAR bits below the ceiling, FP16 can lose a part of the gradient that matters.
FAR = 16
FIRST_SEED = 1000


class RecentMaxima(Rule):
    """Delayed scaling, as Transformer Engine has it: a margin below the lowest of the ceilings of the last steps."""

    name = "recent_maxima"
    needs_gradients = True

    def __init__(self, margin=6, length=16, **bounds):
        super().__init__(**bounds)
        self.margin, self.length = margin, length
        self.state = {"ceilings": float32[length]}

    def first_state(self, loss_scale):
        return {"ceilings": [float(np.log2(loss_scale)) + self.margin] * self.length}

    def make_step(self, xp):
        one, margin = xp.ints(1, self.margin)

        def step(exponent, overflow, gradient_known, max_safe_exponent, ceilings):
            # After an overflow, remember a ceiling that is one bit lower than the loss scale.
            shown = xp.where(gradient_known, max_safe_exponent, exponent + margin)
            newest = xp.float32(xp.where(overflow, exponent - one, shown))
            kept = xp.stack((*xp.unstack(ceilings)[1:], newest))
            return {"exponent": xp.int32(xp.take(kept, xp.argmin(kept))) - margin, "ceilings": kept}

        return step


class GrowingMargin(Rule):
    """A simpler guided rule: each unexplained overflow enlarges the margin, which begins with 6 bits."""

    name = "growing_margin"
    needs_gradients = True
    state: ClassVar = {"low": float32, **dict.fromkeys(("margin", "clean", "first", "has_begun"), int32)}

    def first_state(self, loss_scale):
        return {"margin": 6, "first": int(np.log2(loss_scale))}

    def make_step(self, xp):
        zero, one, three, six, ten, calm = xp.ints(0, 1, 3, 6, 10, 1000)
        lowest, share = xp.ints(self.min_exponent), xp.floats(0.05)

        def step(
            exponent,
            overflow,
            gradient_known,
            max_safe_exponent,
            consecutive_overflows,
            low,
            margin,
            clean,
            first,
            has_begun,
        ):
            shown = xp.float32(max_safe_exponent)
            climbed = xp.minimum(shown, low + (shown - low) * share + share)
            next_low = xp.where(gradient_known, xp.where(has_begun > zero, climbed, shown), low)
            whole = xp.int32(xp.floor(next_low))
            unexplained = (consecutive_overflows > zero) & gradient_known & (max_safe_exponent >= first)
            enlarged = xp.where(unexplained, xp.maximum(margin, whole - first + three), margin)
            count = xp.where(unexplained, one, clean + one)
            is_calm = count >= calm
            next_margin = xp.where(is_calm, xp.maximum(enlarged - one, six), enlarged)
            begun = xp.maximum(has_begun, xp.int32(gradient_known))
            following = xp.maximum(xp.where(begun > zero, whole - next_margin, exponent), lowest)
            return {
                "exponent": xp.where(overflow, xp.maximum(exponent - ten, lowest), following),
                "low": xp.where(overflow, low, next_low),
                "margin": xp.where(overflow, margin, next_margin),
                "clean": xp.where(overflow, clean, xp.where(is_calm, zero, count)),
                "first": xp.where(overflow, first, following),
                "has_begun": xp.where(overflow, has_begun, begun),
            }

        return step


GUIDED, DYNAMIC, GROWING = "guided", "dynamic 1000", "a margin that always grows"
RULES = {
    GUIDED: Configuration("guided"),
    DYNAMIC: Configuration.dynamic(1000),
    "dynamic 400 (verl)": Configuration.dynamic(400),
    "dynamic 1000, hysteresis 2 (DeepSpeed)": Configuration.dynamic(1000, hysteresis=2),
    "recent maxima (TransformerEngine)": Configuration(RecentMaxima),
    "LogMax (OpenSeq2Seq)": Configuration(LogMaxRule),
    GROWING: Configuration(GrowingMargin),
}
# The rules in the table of hard traces.
ON_HARD = (GUIDED, GROWING, DYNAMIC, "recent maxima (TransformerEngine)")
# Constants of the guided rule, each with the values to try. The first value of each is the present one.
CONSTANTS = {
    "margin": (6, 3, 12),
    "DROP": (10, 5, 20),
    "CLIMB": (10, 5, 20),
    "BELOW": (4, 2, 8),
    "PATIENCE": (1000, 500, 2000),
    "HELPS": (8, 4, 16),
}
# Groups of traces for the tables with a column for each group.
MAIN = ("gradients show the ceiling", "regimes", "hidden by 3 bits", "hidden by 8 bits", "a ceiling of its own")
FOR_CONSTANTS = (*MAIN[:2], "hidden by 8 bits", "hidden by 14 bits", "an inf every 50 steps")

CAPTIONS = {
    "rules": "Skipped steps in 1000 / share of applied steps more than 16 bits below the ceiling:",
    "hard": "The same on traces that are hard for the guided rule:",
    "worse": "Runs in which the guided rule skipped more steps than a window of 1000:",
    "constants": "The same for the guided rule with half and double of each constant:",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=1500, help="steps of each trace (default: 1500)")
    parser.add_argument("--seeds", type=positive, default=10, help="traces of each kind (default: 5)")
    add_json_option(parser)
    arguments = parser.parse_args()
    groups = groups_of_traces(arguments.steps, range(FIRST_SEED, FIRST_SEED + arguments.seeds))
    result = {
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "rules": {name: measure(configuration, groups) for name, configuration in RULES.items()},
        "constants": study_of_constants({name: groups[name] for name in FOR_CONSTANTS}),
    }
    print(f"{arguments.seeds} seeds from {FIRST_SEED} on, {arguments.steps} steps each, from 2^16.")
    print("\n".join(with_captions(tables(result), CAPTIONS)))
    write_json(arguments.json, result)


def groups_of_traces(steps, seeds):
    """Return lists of traces, by the name of their group."""
    kinds = {
        "gradients show the ceiling": (KINDS, 0.0, 0.0),
        "regimes": (REGIMES, 0.0, 0.0),
        "hidden by 3 bits": (KINDS, 3.0, 0.4),
        "regimes, hidden by 3 bits": (REGIMES, 3.0, 0.4),
        "hidden by 8 bits": (KINDS, 8.0, 0.4),
        "2 bits too little": (KINDS, -2.0, 0.0),
    }
    groups = {
        name: [
            with_gradients(synthetic_trace(kind, steps, seed), offset, spread, seed)
            for kind in of_group
            for seed in seeds
        ]
        for name, (of_group, offset, spread) in kinds.items()
    }
    groups["a ceiling of its own"] = [
        independent_ceiling(steps, seed, *numbers) for numbers in INDEPENDENT_CEILINGS for seed in seeds
    ]
    return groups | {name: [make(steps, random_of(seed, name)) for seed in seeds] for name, make in HARD.items()}


def made(ceiling, shown):
    """Return a trace from log2 of its ceilings, and log2 of the ceilings that its gradients show."""
    return with_gradients(Trace.exact("hard", np.exp2(ceiling)), shown - ceiling)


def noise(steps, random, spread=0.25):
    return 18 + spread * random.standard_normal(steps)


def hidden(bits):
    return lambda steps, random: made(ceiling := noise(steps, random, 0.7), ceiling + bits)


def infs(every):
    def make(steps, random):
        shown = noise(steps, random)
        return made(np.where(np.arange(steps) % every == every - 1, -120.0, shown), shown)

    return make


def random_infs(steps, random):
    shown = noise(steps, random)
    return made(np.where(random.random(steps) < 0.01, -120.0, shown), shown)


def silent(steps, random):
    return Trace.exact("silent", np.exp2(noise(steps, random)))


def pairs_of_spikes(steps, random):
    ceiling = noise(steps, random)
    for step in np.flatnonzero(random.random(steps) < 0.005):
        ceiling[step] -= 9
        ceiling[min(step + random.integers(1, 4), steps - 1)] -= 12
    return made(ceiling, ceiling)


def rare_spikes(steps, random):
    shown = noise(steps, random)
    return made(shown - 11.0 * (random.random(steps) < 0.002), shown)


def deep_regimes(steps, random):
    ceiling, begin = noise(steps, random), 0
    while begin < steps:
        end = begin + random.integers(20, 200)
        ceiling[end : end + 100] -= 14
        begin = end + 100
    return made(ceiling, ceiling)


def falling(steps, random):
    ceiling = noise(steps, random) - np.arange(steps) / 100
    return made(ceiling, ceiling)


# Traces that are hard for the guided rule, by group.
HARD = {
    "no gradients": silent,
    "hidden by 14 bits": hidden(14),
    "hidden by 20 bits": hidden(20),
    "an inf every 20 steps": infs(20),
    "an inf every 50 steps": infs(50),
    "an inf every 200 steps": infs(200),
    "an inf every 1000 steps": infs(1000),
    "an inf in 1 % of the steps": random_infs,
    "pairs of spikes": pairs_of_spikes,
    "spikes in 1 of 500 steps": rare_spikes,
    "regimes 14 bits deep": deep_regimes,
    "a ceiling that falls for ever": falling,
}


def measure(configuration, groups):
    """Replay a configuration on groups of traces.

    Returns:
        dict by group, with ``skipped``, the skipped steps of each trace, and ``far``, the mean share of applied steps
        whose loss scale is more than ``FAR`` bits below the ceiling.
    """
    traces = [trace for of_group in groups.values() for trace in of_group]
    lanes = Lanes([configuration.rule] * len(traces), [configuration.start] * len(traces))
    ceilings = np.stack([trace.ceiling for trace in traces], 1)
    gradients = np.stack([gradients_of(trace) for trace in traces], 1)
    overflows, far = (np.zeros(ceilings.shape, bool) for _ in range(2))
    for step, (ceiling, gradient) in enumerate(zip(ceilings, gradients, strict=True)):
        overflows[step] = overflow_flags(lanes.loss_scale, ceiling)
        far[step] = ~overflows[step] & (lanes.loss_scale * 2.0**FAR < ceiling)
        lanes.step(overflows[step], gradient)
    skipped = overflows.sum(0)
    shares = far.sum(0) / np.maximum(len(far) - skipped, 1)
    ends = np.cumsum([len(of_group) for of_group in groups.values()])[:-1]
    return {
        name: {"skipped": counts.tolist(), "far": float(of_group.mean())}
        for name, counts, of_group in zip(groups, np.split(skipped, ends), np.split(shares, ends), strict=True)
    }


def gradients_of(trace):
    return np.full(len(trace), np.nan) if trace.largest_gradient is None else trace.largest_gradient


@contextmanager
def changed(name, value):
    """Change a constant of the guided rule while rules are made."""
    present = getattr(guided_module, name)
    setattr(guided_module, name, value)
    try:
        yield
    finally:
        setattr(guided_module, name, present)


class Started(NamedTuple):
    """The guided rule and its first state, as a configuration has them."""

    rule: guided_module.GuidedRule
    start: Any

    @classmethod
    def anew(cls):
        # Equal configurations share one rule, which would still have the constants of before.
        rule = guided_module.GuidedRule()
        return cls(rule, rule.start(2.0**16))


def study_of_constants(groups):
    results = {}
    for name, values in CONSTANTS.items():
        for value in values:
            if name == "margin":
                results[f"{name} {value}"] = measure(Configuration("guided", margin=value), groups)
            else:
                with changed(name, value):
                    results[f"{name} {value}"] = measure(Started.anew(), groups)
    return results


def tables(result):
    """Return the tables by name, as lists of rows; the first row has the names of the columns."""
    steps, rules = result["steps"], result["rules"]
    hard = [group for group in rules[GUIDED] if group not in MAIN]
    shown = {
        "rules": [
            ["rule", *MAIN],
            *([name, *(point(row[group], steps) for group in MAIN)] for name, row in rules.items()),
        ],
        "hard": [
            ["traces", *ON_HARD],
            *([group, *(point(rules[name][group], steps) for name in ON_HARD)] for group in hard),
        ],
    }
    shown["worse"] = [["traces", "worse runs", "of"]]
    for group, row in rules[GUIDED].items():
        pairs = list(zip(row["skipped"], rules[DYNAMIC][group]["skipped"], strict=True))
        if worse := sum(guided > dynamic for guided, dynamic in pairs):
            shown["worse"].append([group, str(worse), str(len(pairs))])
    shown["constants"] = [
        ["constant", *FOR_CONSTANTS],
        *([name, *(point(row[group], steps) for group in FOR_CONSTANTS)] for name, row in result["constants"].items()),
    ]
    return shown


def point(row, steps):
    return f"{1000 * np.mean(row['skipped']) / steps:.2f} / {100 * row['far']:.1f} %"


if __name__ == "__main__":
    main()
