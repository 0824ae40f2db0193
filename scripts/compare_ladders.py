"""Compare the ladders of windows with those of MindFormers' own cell, for all bounds up to a limit.

    python scripts/compare_ladders.py

A ladder is well formed if it rises strictly from the minimum to the maximum window.
"""

import argparse
import itertools

from mindformers.wrapper.adaptive_loss_scale import _get_window_list

from mindformers_adaptive.rules.ladder import window_ladder

EXAMPLES = ((1000, 20), (150, 20), (1000, 30), (21, 20), (5, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest_minimum", type=int, default=200)
    parser.add_argument("--largest_maximum", type=int, default=3000)
    arguments = parser.parse_args()
    print(f"{'max, min':<10} {'MindFormers':<42} this package")
    for largest, smallest in EXAMPLES:
        theirs, ours = mindformers_ladder(largest, smallest), window_ladder(largest, smallest)
        print(f"{f'{largest}, {smallest}':<10} {show(theirs):<42} {show(ours)}")
    pairs, well_formed, same = count(arguments.largest_minimum, arguments.largest_maximum)
    print(
        f"\n{pairs} pairs of bounds; MindFormers' ladder is well formed for {well_formed} and equal to ours for {same}"
    )


def count(largest_minimum, largest_maximum):
    """Return the number of pairs, of well-formed ladders of MindFormers, and of those that equal ours."""
    minima = range(1, largest_minimum + 1)
    pairs = [(largest, smallest) for smallest in minima for largest in range(smallest, largest_maximum + 1)]
    well_formed = [pair for pair in pairs if is_well_formed(mindformers_ladder(*pair), *pair)]
    return len(pairs), len(well_formed), sum(mindformers_ladder(*pair) == window_ladder(*pair) for pair in well_formed)


def mindformers_ladder(largest, smallest):
    """The ladder of MindFormers' own cell, with its interval of 100 and factor of 2."""
    return tuple(_get_window_list(largest, smallest, 100, 2)[1])


def is_well_formed(ladder, largest, smallest):
    return (ladder[0], ladder[-1]) == (smallest, largest) and all(a < b for a, b in itertools.pairwise(ladder))


def show(ladder):
    return " ".join(map(str, ladder))


if __name__ == "__main__":
    main()
