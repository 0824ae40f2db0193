"""A ladder (list of scale windows) rises from the smallest to the largest; a smallest window of 0 is refused."""

import itertools

import pytest
from mindformers.wrapper.adaptive_loss_scale import _get_window_list

from mindformers_adaptive.rules.ladder import window_ladder


@pytest.mark.parametrize(
    ("bounds", "ladder"),
    [
        ((1000, 20), (20, 30, 40, 50, 100, 200, 500, 1000)),
        # For these bounds, the list of windows that MindFormers generates exceeds the bounds or repeats windows.
        ((150, 20), (20, 30, 40, 50, 100, 150)),
        ((1000, 30), (30, 35, 50, 100, 200, 500, 1000)),
        ((1000, 150), (150, 200, 500, 1000)),
        ((21, 20), (20, 21)),
        ((6, 1), (1, 2, 3, 4, 5, 6)),
    ],
)
def test_ladder_follows_the_recipe(bounds, ladder):
    assert window_ladder(*bounds) == ladder


def is_well_formed(ladder, largest, smallest):
    """Return whether a ladder rises strictly from the smallest to the largest window."""
    return (ladder[0], ladder[-1]) == (smallest, largest) and all(a < b for a, b in itertools.pairwise(ladder))


def test_ladder_is_well_formed_also_where_mindformers_is_not():
    same = compared = 0
    for smallest in range(1, 201):
        # Largest windows to try: the smallest window, each of the next 119 numbers, and a sample of larger numbers,
        # some of them multiples of 100.
        for largest in {*range(smallest, smallest + 120), *range(smallest + 120, 3001, 37), *range(500, 3001, 100)}:
            ours = window_ladder(largest, smallest)
            compared += 1
            assert is_well_formed(ours, largest, smallest), (largest, smallest, ours)
            assert all(type(window) is int for window in ours)
            # MindFormers' update cell generates its list of scale windows with an interval of 100 and a factor of 2.
            theirs = tuple(_get_window_list(largest, smallest, 100, 2)[1])
            if is_well_formed(theirs, largest, smallest):
                assert ours == theirs, (largest, smallest)
                same += 1
    # The page migrating.md (in both languages) states how many lists of scale windows were compared with MindFormers'
    # lists, and how many were equal. If a number changes, change the page too.
    assert (compared, same) == (44184, 1534)


@pytest.mark.parametrize("smallest", range(1, 201, 7))
def test_maximum_below_minimum_warns_and_uses_1000(smallest):
    for largest in {-5, 0, smallest - 1}:
        with pytest.warns(UserWarning, match=rf"'max_scale_window' .* but got {largest}: 1000 is used"):
            assert window_ladder(largest, smallest) == window_ladder(1000, smallest)


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ((10, 1001), ValueError, r"'max_scale_window' must be at least 'min_scale_window' \(1001\), but got 10"),
        ((1000, 0), ValueError, r"'min_scale_window' must be at least 1, but got 0"),
        ((1000.0, 20), TypeError, r"'max_scale_window' must be an integer .* got 1000\.0 of type float"),
        ((1000, "20"), TypeError, r"'min_scale_window' must be an integer .* got '20' of type str"),
        ((True, 20), TypeError, r"'max_scale_window' must be an integer .* got True of type bool"),
    ],
)
def test_bad_bounds_are_refused(bounds, error, message):
    with pytest.raises(error, match=message):
        window_ladder(*bounds)
