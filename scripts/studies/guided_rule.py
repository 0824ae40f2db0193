"""Compare gradient-guided loss scaling with other rules, and with other constants, on synthetic traces.

    python -m scripts.studies.guided_rule

Prints Markdown: of each rule the skipped steps in 1000, and the share of applied steps with a loss scale more than
16 bits below the ceiling (the largest loss scale without overflow). A second run prints the same text.
"""

from contextlib import contextmanager

import numpy as np

from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules import Rule, float32
from mindformers_adaptive.rules import guided as guided_module
from scripts.examples.log_max import LogMaxRule
from scripts.studies.reporting import study_parser, with_captions, write_json
from scripts.studies.streams import KINDS, TURNS, replay, too_low
from scripts.studies.synthetic import KINDS as SYNTHETIC_KINDS
from scripts.studies.synthetic import REGIMES, dynamic, random_of, synthetic_trace, with_gradients

# Steps of each trace, and traces of each kind.
STEPS, SEEDS, FIRST_SEED = 1500, 10, 1000


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
            latest = xp.stack((*xp.unstack(ceilings)[1:], newest))
            return {"exponent": xp.int32(xp.take(latest, xp.argmin(latest))) - margin, "ceilings": latest}

        return step


GUIDED, DYNAMIC = "guided", "dynamic 1000"
RULES = {
    GUIDED: start_rule("guided"),
    DYNAMIC: dynamic(1000),
    "dynamic 400 (verl)": dynamic(400),
    "dynamic 1000, hysteresis 2 (DeepSpeed)": dynamic(1000, hysteresis=2),
    "recent maxima (TransformerEngine)": start_rule(RecentMaxima),
    "LogMax (OpenSeq2Seq)": start_rule(LogMaxRule),
}
# Constants of the guided rule, each with the values to try. The first value of each is the present one.
CONSTANTS = {
    "margin": (2, 1, 4),
    "DROP": (10, 5, 20),
    "CLIMB": (10, 5, 20),
    "BELOW": (4, 2, 8),
    "MOST": (15, 8, 24),
    "TOP": (24, 18, 48),
    "OFTEN": (400, 200, 800),
    "SAME_FALL": (4, 2, 8),
    "BACK": (8, 4, 16),
    "PATIENCE": (1000, 500, 2000),
    "HELPS": (8, 4, 16),
}
# Groups of traces for the tables with a column for each group.
MAIN = ("gradients show the ceiling", "regimes", "hidden by 3 bits", "hidden by 8 bits", "a ceiling of its own")
# Kinds of scripts/studies/streams.py.
FROM_STREAMS = ("shows 14 bits too much", "an inf every 50 steps", "every 3 steps 14 bits lower")
FOR_CONSTANTS = (*MAIN[:2], *FROM_STREAMS)

# Trainings in which activation gradients overflow before the gradients of the weights, as four sets of arguments
# (level, offset, spread, memory) for independent_ceiling(). The first set was measured in a LoRA fine-tuning (rank 4,
# all other weights frozen, batch size 64). The second set is the first with memory 0, so consecutive steps are
# independent. The third set was measured with batch size 1, the fourth with only the first of fourteen layers trained.
INDEPENDENT_CEILINGS = ((19.1, 1.4, 0.9, 0.95), (19.1, 1.4, 0.9, 0.0), (13.2, 5.4, 0.7, 0.3), (22.2, 14.4, 0.25, 0.5))

# Standard deviation of the ceilings, in bits. The value is small because the ceilings varied by less than 0.1 bits in
# real trainings in which activation gradients overflow first.
_SPREAD = 0.05

CAPTIONS = {
    "rules": "Skipped steps in 1000 / share of applied steps more than 16 bits below the ceiling:",
    "constants": "The same for the guided rule with half and double of each constant:",
}


def main():
    arguments = study_parser(__doc__).parse_args()
    groups = groups_of_traces(STEPS, range(FIRST_SEED, FIRST_SEED + SEEDS))
    result = {
        "steps": STEPS,
        "seeds": SEEDS,
        "rules": {name: measure(running, groups) for name, running in RULES.items()},
        "constants": study_of_constants({name: groups[name] for name in FOR_CONSTANTS}),
    }
    print(f"{SEEDS} seeds from {FIRST_SEED} on, {STEPS} steps each, from 2^16.")
    print("\n".join(with_captions(tables(result), CAPTIONS)))
    write_json(arguments.json, result)


def groups_of_traces(steps, seeds):
    """Return lists of traces, by the name of their group."""
    kinds = {
        "gradients show the ceiling": (SYNTHETIC_KINDS, 0.0, 0.0),
        "regimes": (REGIMES, 0.0, 0.0),
        "hidden by 3 bits": (SYNTHETIC_KINDS, 3.0, 0.4),
        "hidden by 8 bits": (SYNTHETIC_KINDS, 8.0, 0.4),
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
    for name in FROM_STREAMS:
        groups[name] = [made(*(KINDS | TURNS)[name](steps, random_of(seed, name))) for seed in seeds]
    return groups


def independent_ceiling(steps, seed, level, offset, spread, memory):
    """Return a trace with a nearly constant ceiling, below the ceilings that the largest gradients imply.

    log2 of the ceiling is ``level``, with a little noise. The ceilings that the gradients imply are too high by
    ``offset`` bits in the mean, with the standard deviation ``spread``, and with the correlation ``memory`` (0 to 1)
    between consecutive steps.
    """
    ceiling = level + _SPREAD * random_of(seed, "ceiling").standard_normal(steps)
    wander = random_of(seed, "shown").standard_normal(steps)
    wander[1:] *= np.sqrt(1 - memory**2)
    for step in range(1, steps):
        wander[step] += memory * wander[step - 1]
    return made(ceiling, level + offset + spread * wander)


def made(ceiling, shown):
    """Return a trace from log2 of its ceilings, and log2 of the ceilings that its gradients show."""
    return with_gradients(Trace.exact("made", np.exp2(ceiling)), shown - ceiling)


def measure(running, groups):
    """Replay a rule on groups of traces.

    Returns:
        dict by group, with ``skipped``, the skipped steps in 1,000, and ``far``, the mean share of applied steps whose
        loss scale is more than ``FREE_BITS`` below the ceiling.
    """
    traces = [trace for of_group in groups.values() for trace in of_group]
    ceilings = np.stack([trace.ceiling for trace in traces], 1)
    scales, overflows = replay(running, ceilings, np.stack([trace.largest_gradient for trace in traces], 1))
    skipped = overflows.sum(0)
    shares = too_low(scales, overflows, ceilings).sum(0) / np.maximum(len(overflows) - skipped, 1)
    ends = np.cumsum([len(of_group) for of_group in groups.values()])[:-1]
    return {
        name: {"skipped": 1000 * float(counts.mean()) / len(overflows), "far": float(of_group.mean())}
        for name, counts, of_group in zip(groups, np.split(skipped, ends), np.split(shares, ends), strict=True)
    }


@contextmanager
def changed(name, value):
    """Change a constant of the guided rule while rules are made."""
    present = getattr(guided_module, name)
    setattr(guided_module, name, value)
    try:
        yield
    finally:
        setattr(guided_module, name, present)


def study_of_constants(groups):
    results = {}
    for name, values in CONSTANTS.items():
        for value in values:
            if name == "margin":
                results[f"{name} {value}"] = measure(start_rule("guided", margin=value), groups)
            else:
                with changed(name, value):
                    results[f"{name} {value}"] = measure(start_rule("guided"), groups)
    return results


def tables(result):
    """Return the tables by name, as lists of rows; the first row has the names of the columns."""
    groups = {"rules": MAIN, "constants": FOR_CONSTANTS}
    return {
        table: [
            [table.removesuffix("s"), *names],
            *([name, *(point(row[group]) for group in names)] for name, row in result[table].items()),
        ]
        for table, names in groups.items()
    }


def point(row):
    return f"{row['skipped']:.2f} / {100 * row['far']:.1f} %"


if __name__ == "__main__":
    main()
