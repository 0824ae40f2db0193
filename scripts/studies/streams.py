"""Replay rules on many kinds of made-up streams, and count on which kinds the guided rule skips more than dynamic 1000.

    python -m scripts.studies.streams [--steps N] [--seeds N] [--json FILE]

A stream has, for each step, its *ceiling* (the largest loss scale at which nothing overflows) and the ceiling that the
gradients show, both as log2. Each kind combines how the ceiling moves, which steps have a lower ceiling, and what the
gradients show. *Batches in turn* come from several data sets in a fixed order, such as every third batch with a loss
2^14 times as large. Prints Markdown: the skipped steps in 1,000 by each rule. The same arguments give the same text.
"""

import numpy as np

from mindformers_adaptive.lab.measures import FREE_BITS, overflow_flags
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.rules.lanes import Lanes
from scripts.studies.reporting import positive, study_parser, with_captions, write_json
from scripts.studies.synthetic import dynamic, random_of

GUIDED, DYNAMIC, ADAPTIVE = "guided", "dynamic 1000", "adaptive"
# With the default floor of 1, no rule could train the batches whose ceiling is below 1.
FLOOR = 2.0**-24
RULES = {
    GUIDED: start_rule("guided", min_loss_scale=FLOOR),
    DYNAMIC: dynamic(1000, min_loss_scale=FLOOR),
    ADAPTIVE: start_rule("adaptive", min_loss_scale=FLOOR),
}
STEPS, SEEDS, FIRST_SEED = 4000, 5, 20_000
LEVEL, INF = 18.0, -120.0
# A kind is listed as worse if the guided rule skips more steps in 1,000 than dynamic 1000 by this number.
MORE = 1.5
DEPTHS, PERIODS = (3, 6, 9, 11, 14, 17, 20), (2, 3, 5, 10, 30, 100, 150, 200, 400)
EVERY, RANDOM = "every {} steps", "in 1 of {} steps at random"
# The number of steps in a row, by the name of the kind.
IN_A_ROW = {f"{count} in a row every {{}} steps": count for count in (2, 4)}

CAPTIONS = {
    "groups": "Skipped steps in 1000 / share of applied steps more than 16 bits below the ceiling, by group:",
    "worse": f"Kinds on which the guided rule skips over {MORE} steps in 1000 more than dynamic 1000:",
    "turns": "Batches in turn: the largest share of the lower batches that is skipped in the second half of a stream:",
}


def main():
    parser = study_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"of each stream (default: {STEPS})")
    parser.add_argument("--seeds", type=positive, default=SEEDS, help=f"streams of each kind (default: {SEEDS})")
    arguments = parser.parse_args()
    result = study(arguments.steps, range(FIRST_SEED, FIRST_SEED + arguments.seeds))
    counts = " and ".join(f"{len(kinds)} kinds: {name}" for name, kinds in GROUPS.items())
    print(f"{counts}. {arguments.seeds} seeds from {FIRST_SEED} on, {arguments.steps} steps each, from 2^16.")
    print("\n".join(with_captions(tables(result), CAPTIONS)))
    write_json(arguments.json, result)


# How the ceiling moves: functions of the number of steps and a random generator.
def noise(spread):
    return lambda steps, random: LEVEL + spread * random.standard_normal(steps)


def moved(path):
    """Return a ceiling that follows ``path``, a function of the part of the stream that is over, with little noise."""
    return lambda steps, random: LEVEL + path(np.arange(steps) / steps) + 0.25 * random.standard_normal(steps)


def random_walk(steps, random):
    return LEVEL + 0.1 * random.standard_normal(steps).cumsum()


def heavy_tails(freedom):
    return lambda steps, random: LEVEL + 0.5 * random.standard_t(freedom, steps)


def regimes(length, depth, ramp=1):
    """Return a ceiling with regimes, periods of a lower ceiling: up to ``length`` steps, up to ``depth`` bits lower."""

    def make(steps, random):
        lower, begin = np.zeros(steps + ramp), 0
        while begin < steps:
            begin += random.integers(length // 4, length)
            end = begin + random.integers(length // 4, length)
            lower[begin:end], begin = random.uniform(depth / 2, depth), end
        lower = np.convolve(lower, np.full(ramp, 1 / ramp))[:steps]
        return LEVEL - lower + 0.25 * random.standard_normal(steps)

    return make


MOVES = {
    **{f"noise of {spread} bits": noise(spread) for spread in (0.1, 0.25, 0.5, 1.0, 2.0)},
    "a random walk": random_walk,
    **{f"Student's t, {freedom} degrees": heavy_tails(freedom) for freedom in (2, 3, 5)},
    **{f"moves by {bits:+} bits": moved(lambda part, bits=bits: bits * (part - 0.5)) for bits in (12, -12, 40, -30)},
    **{f"jumps by {bits:+} bits": moved(lambda part, bits=bits: bits * (part >= 0.5)) for bits in (10, -6, -12, -16)},
    **{
        f"waves of {bits} bits, {count} a stream": moved(
            lambda part, bits=bits, count=count: bits / 2 * np.sin(2 * np.pi * count * part)
        )
        for bits in (4, 12)
        for count in (2, 10, 60)
    },
    **{
        f"regimes of up to {length} steps and {depth} bits": regimes(length, depth)
        for length in (30, 200, 1000)
        for depth in (6, 12, 18)
    },
    **{f"slow regimes of {depth} bits": regimes(400, depth, ramp=20) for depth in (6, 14)},
}


def lowered(steps, random, how, period, depth):
    """Return the steps that have a lower ceiling, as bools."""
    if how == RANDOM:
        return random.random(steps) < 1 / period
    return np.arange(steps) % period >= period - IN_A_ROW.get(how, 1)


def with_spikes(how, period, depth, spread=0.25):
    def make(steps, random):
        ceiling = noise(spread)(steps, random) - depth * lowered(steps, random, how, period, depth)
        return ceiling, ceiling

    return make


def shown_as(move, show):
    """Return a stream whose gradients show ``show(ceiling, random)``."""

    def make(steps, random):
        ceiling = move(steps, random)
        return ceiling, show(ceiling, random)

    return make


def infs(how, period):
    """Return a stream with infs in the data, which overflow at every loss scale, and which gradients do not show."""

    def make(steps, random):
        shown = noise(0.25)(steps, random)
        return np.where(lowered(steps, random, how, period, None), INF, shown), shown

    return make


def unknown(when):
    """Return a stream with gradients that are unknown in the steps that ``when(numbers, random)`` selects."""

    def show(ceiling, random):
        return np.where(when(np.arange(len(ceiling)), random), np.nan, ceiling)

    return shown_as(noise(0.5), show)


def hidden(bits, spread):
    return lambda ceiling, random: ceiling + bits + spread * random.standard_normal(len(ceiling))


def exact(ceiling, _):
    return ceiling


SHOWN = {
    **{f"{bits} bits too much": hidden(bits, 0.4) for bits in (1, 3, 5, 8, 11, 14, 18, 22)},
    **{f"{bits} bits too much, with noise": hidden(bits, 2.0) for bits in (3, 8, 14)},
    "2 bits too little": hidden(-2, 0.0),
    "6 bits too little": hidden(-6, 0.4),
}
KINDS = {
    **{name: shown_as(move, exact) for name, move in MOVES.items()},
    **{f"shows {name}": shown_as(noise(0.5), show) for name, show in SHOWN.items()},
    **{f"regimes, shows {name}": shown_as(regimes(200, 12), show) for name, show in SHOWN.items()},
    **{
        f"spikes of {depth} bits {how.format(period)}": with_spikes(how, period, depth)
        for how, periods in ((RANDOM, (10, 40, 150, 500)), *((how, (4, 10, 40, 150, 500)) for how in IN_A_ROW))
        for period in periods
        for depth in (3, 6, 9, 12, 15)
        if period > IN_A_ROW.get(how, 1)
    },
    **{
        f"an inf {how.format(period)}": infs(how, period)
        for how in (EVERY, RANDOM)
        for period in (3, 10, 50, 150, 1000)
    },
    "gradients unknown": unknown(lambda numbers, _: numbers >= 0),
    "gradients unknown in 1 of 2 steps": unknown(lambda numbers, _: numbers % 2 == 0),
    "gradients unknown in 9 of 10 steps at random": unknown(lambda numbers, random: random.random(len(numbers)) < 0.9),
    "gradients known after 1000 steps": unknown(lambda numbers, _: numbers < 1000),
    "gradients unknown after 1000 steps": unknown(lambda numbers, _: numbers >= 1000),
}
TURNS = {
    f"every {period} steps {depth} bits lower": with_spikes(EVERY, period, depth)
    for period in PERIODS
    for depth in DEPTHS
} | {
    f"every {period} steps {depth} bits lower, noise of 1 bit": with_spikes(EVERY, period, depth, spread=1.0)
    for period in (2, 3, 30, 200)
    for depth in (6, 11, 14, 17)
}
GROUPS = {"all sorts": KINDS, "batches in turn": TURNS}


def study(steps, seeds):
    """Replay the rules on all kinds.

    Returns:
        dict by rule, group and kind, with means over the seeds: ``skipped``, the skipped steps in 1,000; ``far``, the
        share of applied steps more than ``FREE_BITS`` below the ceiling; in "batches in turn", also ``untrained``, the
        share of the lower batches that is skipped in the second half.
    """
    kinds = [(group, name) for group, of_group in GROUPS.items() for name in of_group]
    streams = [GROUPS[group][name](steps, random_of(seed, name)) for group, name in kinds for seed in seeds]
    ceilings = np.exp2(np.stack([ceiling for ceiling, _ in streams], 1))
    gradients = FLOAT16.largest / np.exp2(np.stack([shown for _, shown in streams], 1))
    results = {rule: {group: {} for group in GROUPS} for rule in RULES}
    for rule, running in RULES.items():
        scales, overflows = replay(running, ceilings, gradients)
        far = too_low(scales, overflows, ceilings)
        for position, (group, name) in enumerate(kinds):
            lanes = slice(position * len(seeds), (position + 1) * len(seeds))
            row = {"skipped": 1000 * float(overflows[:, lanes].mean()), "far": float(far[:, lanes].mean())}
            if group == "batches in turn":
                period = int(name.split()[1])
                lower = np.arange(steps) % period == period - 1
                row["untrained"] = float(overflows[steps // 2 :, lanes][lower[steps // 2 :]].mean())
            results[rule][group][name] = {key: round(value, 4) for key, value in row.items()}
    return {"steps": steps, "seeds": len(seeds), "rules": results}


def replay(running, ceilings, gradients):
    """Return a rule's loss scales, and whether they overflow: arrays of shape (steps, streams), as the arguments."""
    lanes = Lanes(running.rule, [running.current] * ceilings.shape[1])
    scales = np.empty(ceilings.shape)
    for step, gradient in enumerate(gradients):
        scales[step] = lanes.loss_scale
        lanes.step(overflow_flags(scales[step], ceilings[step]), gradient)
    return scales, overflow_flags(scales, ceilings)


def too_low(scales, overflows, ceilings):
    """Return which applied steps are so far below the ceiling that FP16 can lose gradients that matter."""
    return ~overflows & (scales * 2.0**FREE_BITS < ceilings)


def tables(result):
    """Return the tables of a result by name, as lists of rows; the first row has the names of the columns."""
    rules = result["rules"]
    groups = [["streams", "kinds", *rules]]
    for group, kinds in rules[GUIDED].items():
        groups.append([group, str(len(kinds)), *(point(of_rule[group].values()) for of_rule in rules.values())])
    worse = [["stream", "kind", *rules]]
    for group, kinds in rules[GUIDED].items():
        for name, row in kinds.items():
            if row["skipped"] > rules[DYNAMIC][group][name]["skipped"] + MORE:
                worse.append([group, name, *(point([of_rule[group][name]]) for of_rule in rules.values())])
    turns = [["lower", *rules]]
    for depth in DEPTHS:
        names = [name for name in TURNS if f" {depth} bits lower" in name]
        shares = [max(of_rule["batches in turn"][name]["untrained"] for name in names) for of_rule in rules.values()]
        turns.append([f"{depth} bits", *(f"{100 * share:.0f} %" for share in shares)])
    return {"groups": groups, "worse": worse, "turns": turns}


def point(rows):
    skipped, far = (np.mean([row[key] for row in rows]) for key in ("skipped", "far"))
    return f"{skipped:.2f} / {100 * far:.1f} %"


if __name__ == "__main__":
    main()
