"""Random runs of loss scaling as they truly happened, from which logs are written and by which sentences are judged."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

LARGEST = 65504.0
ARRAYS = ("overflow", "used", "after", "loss", "norm", "ceiling")


@dataclass
class Part:
    """Consecutive steps in one process: the arrays have an element for each step, and the first step is ``first``.

    Attributes:
        overflow: whether the step was skipped.
        used, after: the loss scale of the step, and the loss scale after the step.
        loss, norm, ceiling: the loss, the norm of all gradients, and the largest loss scale that does not overflow.
    """

    first: int
    overflow: np.ndarray
    used: np.ndarray
    after: np.ndarray
    loss: np.ndarray
    norm: np.ndarray
    ceiling: np.ndarray

    def __len__(self):
        return len(self.used)

    @property
    def last(self):
        return self.first + len(self) - 1

    @cached_property
    def skipped(self):
        """How many steps were skipped before each step, and in total."""
        return np.append(0, np.cumsum(self.overflow))

    def between(self, first, last):
        """Return the steps from ``first`` to ``last`` as a part of their own."""
        steps = slice(first - self.first, last + 1 - self.first)
        return Part(first, *(getattr(self, name)[steps] for name in ARRAYS))

    def then(self, other):
        """Return these steps up to the first step of another part, and then the other part."""
        if other.first == self.first:
            return other
        before = self.between(self.first, other.first - 1)
        return Part(self.first, *(np.append(getattr(before, name), getattr(other, name)) for name in ARRAYS))


@dataclass
class Run:
    """A run in one or several parts: each later part restarts from a checkpoint, and replaces the steps after it.

    Attributes:
        parts (list[Part]): in the order in which they ran.
        every (int): every how many steps a program may write a line.
        window (int): after how many steps in a row without overflow the scale rises.
        lost (bool): whether a restart began with the first loss scale again, not with the scale of the checkpoint.
    """

    parts: list[Part]
    every: int = 1
    window: int = 1
    lost: bool = False

    @cached_property
    def whole(self):
        """The steps that lead to the end of the run."""
        whole = self.parts[0]
        for part in self.parts[1:]:
            whole = whole.then(part)
        return whole

    @cached_property
    def skipped_before(self):
        """How many steps were skipped before each first step of a part: a checkpoint has this number."""
        numbers, whole = {self.parts[0].first: 0}, self.parts[0]
        for part in self.parts[1:]:
            numbers[part.first] = int(whole.skipped[part.first - 1])
            whole = whole.then(part)
        return numbers

    @property
    def restarts(self):
        return [part.first for part in self.parts[1:]]

    def halvings(self):
        """Return by how many factors of two the scale fell, in all steps that were ever taken and between them."""
        scales = np.concatenate([np.column_stack([part.used, part.after]).ravel() for part in self.parts])
        return float(np.log2(scales[:-1] / scales[1:]).clip(0).sum())


class Rule:
    """A rule of loss scaling with random settings; ``kind`` is "dynamic", "fixed" or "guided".

    A guided rule moves the scale without an overflow.
    """

    def __init__(self, random, kind):
        self.random, self.kind = random, kind
        self.factor = 2.0
        self.window = int(random.choice([1, 2, 5, 20, 50, 100, 1000]))
        self.hysteresis, self.refills = int(random.choice([1, 1, 2, 3])), bool(random.random() < 0.3)
        self.floor, self.cap = 2.0 ** random.choice([-40, -6, 0, 0, 10]), 2.0 ** random.choice([24, 40, 100])
        self.start = 2.0 ** random.choice([0, 8, 12, 16, 16, 24, 32])
        if random.random() < 0.05:
            self.start = 65535.0
        self.start = max(self.start, self.floor)
        self.restart(self.start)

    def restart(self, scale):
        self.scale, self.clean, self.budget = scale, 0, self.hysteresis

    def step(self, overflow, ceiling):
        if self.kind == "fixed":
            return
        if self.kind == "guided" and self.random.random() < 0.05:
            self.scale = float(np.clip(2.0 ** np.floor(np.log2(max(ceiling, 1e-9)) - 2), max(self.floor, 1), self.cap))
        elif overflow:
            self.clean, self.budget = 0, self.budget - 1
            if self.budget <= 0:
                # With hysteresis as in DeepSpeed, each further overflow lowers the scale until it rises again.
                self.scale, self.budget = max(self.scale / self.factor, self.floor), 1
        else:
            self.clean += 1
            self.budget = self.hysteresis if self.refills else self.budget
            if self.clean == self.window:
                self.scale, self.clean, self.budget = min(self.scale * self.factor, self.cap), 0, self.hysteresis


KINDS = ("dynamic",) * 8 + ("fixed", "guided")


def ceilings_of(random, steps):
    """Return a ceiling in bits for each step: constant, noisy, a random walk, falls, spikes, or a collapse."""
    bits = np.full(steps, random.choice([3.0, 9.0, 13.0, 16.0, 20.0])) + 0.5
    kind = random.choice(["constant", "noise", "walk", "fall", "spikes", "collapse", "late"])
    if kind == "noise":
        bits += random.choice([0.3, 2]) * random.standard_normal(steps)
    elif kind == "walk":
        bits += np.cumsum(random.normal(0, 0.2, steps))
    elif kind in ("fall", "late", "collapse"):
        first = int(random.integers(steps // 2, steps + 1))
        length = {"fall": steps, "late": int(random.integers(3, 15)), "collapse": steps}[kind]
        bits[first : first + length] -= {"fall": 5, "late": 300, "collapse": 300}[kind]
    elif kind == "spikes":
        bits[random.random(steps) < 0.04] -= random.choice([3, 12, 300])
    return bits.clip(-300, 120)


def random_run(random, steps=0, restarts=True, smallest=0.0, hysteresis=None, kinds=KINDS):
    """Return a random run: by a random rule, on random ceilings, perhaps restarted once or twice.

    A restart begins at a step that has a line, so that no line of the log is about a step that was taken again later
    without a line.
    """
    steps = steps or int(random.choice([1, 2, 5, 19, 20, 21, 40, 100, 200, 300]))
    rule = Rule(random, str(random.choice(kinds)))
    rule.hysteresis = hysteresis or rule.hysteresis
    rule.floor = max(rule.floor, smallest)
    rule.start = max(rule.start, rule.floor)
    if smallest:
        # DeepSpeed prints whole numbers.
        rule.start = 2.0 ** round(np.log2(rule.start))
    every = int(random.choice([each for each in (1, 1, 2, 3, 10, 50, 100) if each <= steps]))
    bad_loss = random.random() < 0.15
    jump = int(random.integers(1, steps + 1)) if random.random() < 0.1 else steps + 1
    times = int(random.choice([0, 0, 0, 1, 2])) if restarts else 0
    run, first, scale = Run([], every, rule.window), 1, rule.start
    for stop in [*sorted(random.integers(1, steps + 1, times).tolist()), steps]:
        if stop < first + every - 1:
            continue
        rule.restart(scale)
        run = Run([*run.parts, _part(random, rule, first, stop, bad_loss, jump)], every, rule.window, run.lost)
        first = int(random.choice([stop, random.integers(0, stop + 1)])) // every * every + 1
        scale = rule.start if first == 1 else float(run.whole.after[first - 2])
        if first > 1 and random.random() < 0.4:
            run.lost, scale = run.lost or (scale != rule.start and steps >= first + every - 1), rule.start
    return run


def _part(random, rule, first, last, bad_loss, jump):
    steps = last - first + 1
    bits, is_bad, rows = ceilings_of(random, steps), np.zeros(steps, bool), []
    if bad_loss:
        position = int(random.integers(0, steps))
        is_bad[position : position + int(random.choice([1, 4, steps]))] = True
        # Mostly, a loss of NaN makes the gradients NaN, but a loss can also be masked.
        bits[is_bad & (random.random() < 0.7)] = -300
    for ceiling in 2.0**bits:
        used = rule.scale
        overflow = bool(used > ceiling)
        rule.step(overflow, ceiling)
        rows.append((overflow, used, rule.scale))
    overflow, used, after = (np.array(column) for column in zip(*rows, strict=True))
    loss = 4.0 * np.exp(-np.arange(first, last + 1) / 100) + 0.01 * random.random(steps)
    loss[max(jump - first, 0) :] *= 1000.0
    loss[is_bad] = np.nan
    norm = np.where(overflow, np.inf, LARGEST / 2.0**bits * random.choice([1, 30]))
    return Part(first, overflow, used, after, loss, norm, 2.0**bits)
