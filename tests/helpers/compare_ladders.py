"""The ladder of windows of MindFormers' own cell, and what a ladder has to be."""

import itertools

from mindformers.wrapper.adaptive_loss_scale import _get_window_list

__all__ = ["is_well_formed", "mindformers_ladder"]


def mindformers_ladder(largest, smallest):
    """Return the ladder of MindFormers' own cell, with its interval of 100 and factor of 2."""
    return tuple(_get_window_list(largest, smallest, 100, 2)[1])


def is_well_formed(ladder, largest, smallest):
    """Return whether a ladder rises strictly from the smallest to the largest window."""
    return (ladder[0], ladder[-1]) == (smallest, largest) and all(a < b for a, b in itertools.pairwise(ladder))
