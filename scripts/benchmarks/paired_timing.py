"""Time several ways of doing the same thing, so that the ratios of their times can be compared.

Two compiled graphs of a cell may differ in speed by some percent, and other programs slow down all graphs. So several
copies of each way are built, in random order. In every round each copy makes one call, in random order again. The
time of a copy is the median over the rounds of its time relative to the median of all copies in the round. The time of
a way is the mean over its copies. The standard error follows from the differences between the copies.
"""

import gc
import math
import random
import time

import numpy as np


def take_turns(ways, copies, rounds):
    """Time several ways of computing the same thing: call equal copies of each way in turns, in random order.

    Args:
        ways (dict[str, Callable]): for each way, by name, a function that builds a copy. A copy is a function that
            takes the number of the round; its calls are timed.
        copies (int): the number of copies of each way.
        rounds (int): the number of timed calls of each copy; two calls before are not timed.

    Returns:
        dict[str, list[list[float]]]: by name of the way, for each copy its time in milliseconds in each round.

    Examples:
        >>> times = take_turns({"nothing": lambda: lambda count: None}, copies=2, rounds=3)
        >>> [len(copy) for copy in times["nothing"]]
        [3, 3]
    """
    order = random.Random(0)
    times = {name: [[] for _ in range(copies)] for name in ways}
    turns = [(name, taken) for name, each in times.items() for taken in each]
    turns = [(ways[name](), taken) for name, taken in order.sample(turns, len(turns))]
    for call, _ in (*turns, *turns):
        call(0)  # compiles the graph, and reaches all memory once
    gc.collect()
    gc.disable()
    try:
        for count in range(rounds):
            for call, taken in order.sample(turns, len(turns)):
                start = time.perf_counter()
                call(count)
                taken.append((time.perf_counter() - start) * 1e3)
    finally:
        gc.enable()
    return times


def typical_times(times):
    """Return, for each way of computing, the time in milliseconds and its standard error, which is NaN for one copy.

    Args:
        times (dict): from :func:`take_turns`.

    Examples:
        >>> typical_times({"one": [[1.0, 2.0], [1.0, 2.0]], "other": [[3.0, 6.0], [3.0, 6.0]]})
        {'one': (1.5, 0.0), 'other': (4.5, 0.0)}
    """
    unit, logarithms = _compared(times)
    typical = {}
    for name, of_copies in logarithms.items():
        value = unit * math.exp(np.mean(of_copies))
        error = float(np.std(of_copies, ddof=1)) / len(of_copies) ** 0.5 if len(of_copies) > 1 else math.nan
        typical[name] = (value, value * error)
    return typical


def compare(ways, copies, rounds):
    """Time several ways of computing the same thing by :func:`take_turns`, and return their :func:`typical_times`."""
    return typical_times(take_turns(ways, copies, rounds))


def ratio(typical, name, base, above=None):
    """Return the ratio of the times of two ways of computing, and the standard error of the ratio.

    Args:
        typical (dict): from :func:`typical_times`.
        name, base (str): the two ways; the time of ``name`` is divided by the time of ``base``.
        above (str, optional): a way, such as an empty call, whose time is subtracted from both times. Default: None.

    Examples:
        >>> ratio({"one": (1.5, 0.0), "other": (4.5, 0.0)}, "other", "one")
        (3.0, 0.0)
    """
    if name == base:
        return 1.0, 0.0
    (value, error), (unit, of_unit) = (time_above(typical, way, above) for way in (name, base))
    return value / unit, math.hypot(error, value / unit * of_unit) / abs(unit)


def time_above(typical, name, above=None):
    """Return the milliseconds of one way of computing, minus the milliseconds of another, and the standard error."""
    value, error = typical[name]
    taken_off, of_taken_off = typical[above] if above is not None else (0.0, 0.0)
    return value - taken_off, math.hypot(error, of_taken_off)


def with_error(value, error, digits):
    """Return a number with its standard error as text, or the number alone if the error is NaN.

    Examples:
        >>> with_error(1.25, 0.5, 1), with_error(1.25, float("nan"), 2)
        ('1.2 ± 0.5', '1.25')
    """
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def _compared(times):
    """Return the median time of a call, and for each way, by name, the logarithms of its copies' relative times.

    The relative time of a copy is its time divided by the median time of all copies in the same round.
    """
    medians = np.median(np.concatenate(list(times.values())), axis=0)
    logarithms = {name: np.median(np.log(copies / medians), axis=1) for name, copies in times.items()}
    return float(np.median(medians)), logarithms
