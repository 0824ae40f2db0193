"""Where the loss scale of a run went, as far as its log shows: whether it held, settled, collapsed, rose or fell."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import Move, RecordedRun
from mindformers_adaptive.record.thresholds import HELD, STUCK
from mindformers_adaptive.text.table import as_power_of_two

# The loss scale of a run with at least 40 steps has settled if some scale held and two conditions hold in the second
# half of the run: 95 % of the loss scales lie within a factor of 4, and the loss scale either both rises and falls or
# stays constant. Even a settled loss scale rises to the next power of two now and then, overflows, and falls back.
_SETTLED_WITHIN, _SETTLED_SHARE, _SETTLED_FROM = 4.0, 0.95, 40


class Held(NamedTuple):
    """Whether a loss scale held: 20 steps in a row without overflow that used this scale or a larger one.

    Attributes:
        answer (bool, optional): whether a scale held; None if the log does not show it.
        scale (float, optional): the highest scale that held and is below all scales that are known to have overflowed
            earlier; None if there is no such scale or the log does not show it.
        from_step (int, optional): the first step of a series of steps at which that scale held.
        highest (float, optional): the highest scale that is shown to have held, even after it had overflowed.
        before (int): the number of stretches before the first scale that is shown to have held; all if none is.
        shown_before (tuple[int, int]): the fewest and the most steps that were skipped in these stretches.
        skipped_before (tuple[int, int]): the fewest and the most steps that were skipped before the first scale held.
    """

    answer: bool | None
    scale: float | None
    from_step: int | None
    highest: float | None
    before: int
    shown_before: tuple[int, int]
    skipped_before: tuple[int, int]


class ScaleSummary(NamedTuple):
    """Where the loss scale of a run went.

    Attributes:
        held (Held): whether a scale held, and which.
        settled (tuple[float, float], optional): the lowest and the highest scale between which the loss scale settled;
            None if that is not shown.
        stayed (bool, optional): whether the scale was the same in every step; None if the log does not show it.
        path (str): a sentence without its end that says where the loss scale went, such as "The loss scale fell from
            2^16 to 2^9"; "" if no loss scale is stated.
    """

    held: Held
    settled: tuple[float, float] | None
    stayed: bool | None
    path: str


def summary_of(run: RecordedRun) -> ScaleSummary:
    """Return where the loss scale of a run went.

    Examples:
        >>> scale = 2.0 ** np.maximum(32 - np.arange(100), 16)
        >>> summary_of(RecordedRun.of_steps(range(1, 101), scale, np.arange(100) < 16)).held.scale
        65536.0
    """
    start = _held(run)
    within = _settled(run) if start.answer else None
    return ScaleSummary(start, within, _stayed(run), _path_in_words(run, within))


def _held(run: RecordedRun) -> Held:
    """Return whether a loss scale held in a run, and which."""
    lengths, low = run.lengths, np.nan_to_num(run.scale_ranges[0])
    first, sums = _series(run, run.applied)
    is_roomy = (run.most < lengths) & (lengths - run.most >= HELD * (run.most + 1))
    starts = np.concatenate([first[sums >= HELD], np.flatnonzero(is_roomy & ~run.applied) + 1])
    raises = [move for move in run.moves if not move.is_overflow and move.clean_steps >= HELD]
    is_shown, fewest = bool(len(starts) or raises), _fewest_before_held(run)
    before = int(starts.min()) if len(starts) else len(run.first)
    skipped, most = run.skipped_up_to(before)
    # A restart goes on with the number of the step, so that a series of steps may lead over it.
    breaks = ~np.append(True, run.first[1:] == run.last[:-1] + 1)
    # For each stretch, at most 20 places; a place between two stretches that do not follow each other breaks a series.
    copies = np.where(run.applied, np.minimum(lengths, HELD), 1) + (breaks & run.applied)
    index = np.repeat(np.arange(len(copies)), copies)
    scales = np.where(run.applied, low, -1.0)[index]
    scales[(np.cumsum(copies) - copies)[breaks & run.applied]] = -1.0
    windows = np.zeros(0)
    if len(scales) >= HELD:
        windows = np.lib.stride_tricks.sliding_window_view(scales, HELD).min(axis=1)
    from_raises = [each for move in raises if (each := _held_before(run, move)) is not None]
    windows = np.append(np.maximum(windows, 0.0), [move.before for move, _ in from_raises])
    index = np.append(index[: max(len(scales) - HELD + 1, 0)], [move.stretch for move, _ in from_raises]).astype(int)
    steps = np.append(run.first[index[: len(index) - len(from_raises)]], [step for _, step in from_raises])
    overflowed = np.minimum.accumulate(np.where(run.skipped & (low > 0), low, np.inf))
    below = np.where(windows < overflowed[index], windows, 0.0)
    best = float(below.max(initial=0.0))
    return Held(
        answer=True if is_shown else None if fewest is not None else False,
        scale=best or None,
        from_step=int(steps[np.argmax(below)]) if best else None,
        highest=float(windows.max(initial=0.0)) or None,
        before=before,
        shown_before=(skipped, most),
        skipped_before=(skipped if fewest is None else min(fewest, skipped), most),
    )


def _held_before(run: RecordedRun, move: Move) -> tuple[Move, int] | None:
    """Return a raise after steps in a row without overflow, and the first step that is surely one of at least 20."""
    first = int(run.last[move.stretch]) - move.clean_steps + 1
    is_shown = move.before > 0 and first >= run.first[0] and int(run.first[move.stretch]) - first + 1 >= HELD
    return (move, first) if is_shown else None


def _fewest_before_held(run: RecordedRun) -> int | None:
    """Return the fewest steps that can have been skipped before 20 steps in a row without overflow began.

    Return None if there cannot have been 20 such steps in a row.
    """
    if not run.is_numbered:
        return 0
    clean, ends = run.lengths - run.fewest, np.append(run.first - 1, run.last[-1])
    # A series may begin in each stretch, and goes on to the next stretch with an overflow, and into this one.
    mixed = np.append(np.flatnonzero(run.fewest > 0), len(clean))
    following = mixed[np.searchsorted(mixed, np.arange(len(clean)), side="right")]
    series = clean + ends[following] - run.last + np.append(clean, 0)[following]
    skipped = np.append(0, np.asarray(run.so_far)[:, 0])
    # If the stretch is not long enough, the series begins after the overflows of the stretch.
    skipped = np.where((run.fewest > 0) & (clean < HELD), skipped[1:], skipped[:-1])[series >= HELD]
    return int(skipped.min()) if len(skipped) else None


def _series(run: RecordedRun, chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each series of chosen stretches in consecutive steps its first index and its number of steps."""
    goes_on = np.append(False, run.first[1:] == run.last[:-1] + 1)
    first = np.flatnonzero(chosen & ~(goes_on & np.append(False, chosen[:-1])))
    if not len(first):
        return first, first
    return first, np.add.reduceat(np.where(chosen, run.lengths, 0), first)


def _stayed(run: RecordedRun) -> bool | None:
    """Return whether the scale was the same in every step of the run; None if the log does not show it."""
    scales = run.stated_scales
    if not len(scales) or scales.min() < scales.max():
        return False if len(scales) else None
    return None if run.is_rounded or np.isnan(run.scale_ranges[0]).any() else True


def _settled(run: RecordedRun) -> tuple[float, float] | None:
    """Return the lowest and the highest scale between which the loss scale settled; None if that is not shown."""
    if len(run) < _SETTLED_FROM:
        return None
    half = len(run) - len(run) // 2
    low, high = (np.repeat(scale, run.lengths)[-half:] for scale in run.scale_ranges)
    is_known = ~np.isnan(low)
    outside = int((half * (1 - _SETTLED_SHARE) - (~is_known).sum()) / 2)
    low, high = low[is_known], high[is_known]
    if outside < 0 or (half * (1 - _SETTLED_SHARE) - (~is_known).sum()) < 0 or not len(low):
        return None
    scales = np.column_stack([low, high]).ravel()
    if (scales[1:] > scales[:-1]).any() != (scales[1:] < scales[:-1]).any():
        return None
    lowest, highest = float(np.sort(low)[outside]), float(np.sort(high)[-1 - outside])
    return (lowest, highest) if 0 < highest <= _SETTLED_WITHIN * lowest < np.inf else None


def _skipped_at_end(run: RecordedRun) -> int:
    """Return how many steps at the end of the run were all skipped, as far as the log states it."""
    starts = np.flatnonzero(~(run.skipped & run.follows))
    start = int(starts[-1]) if len(starts) else 0
    return int(run.lengths[start if run.skipped[start] else start + 1 :].sum())


def _path_in_words(run: RecordedRun, within: tuple[float, float] | None) -> str:
    """Return a sentence without its end that says where the loss scale went; ``within`` is where it settled."""
    scales, named = run.stated_scales, as_power_of_two
    if not len(scales):
        return ""
    lowest, highest, last = float(scales.min()), float(scales.max()), float(scales[-1])
    low, high = run.scale_ranges
    is_shown = not np.isnan(low).any() and run.is_numbered
    count = _skipped_at_end(run)
    at_end = f": the last {count:,} steps were all skipped" * (count >= STUCK)
    # A scale that no overflow moves is a fixed scale: it has not collapsed.
    if lowest == highest:
        if run.is_rounded:
            return f"The log states a loss scale of {named(last)}; it rounds others"
        stayed = "stayed at {}" if is_shown else "was {} on each line of the log"
        return f"The loss scale {stayed.format(named(last))}{at_end * is_shown}"
    if at_end and (np.repeat(high, run.lengths)[-STUCK:] == lowest).all():
        return f"The loss scale collapsed to {named(lowest)}{at_end}"
    if within is not None:
        between = f"at {named(within[0])}" if within[0] == within[1] else f"between {' and '.join(map(named, within))}"
        return f"The loss scale settled {between}"
    first, final = run.first_loss_scales, float(run.after[-1])
    is_between = first is not None and first[0] == first[1] and run.is_numbered and 0 < first[0] != final > 0
    bits = np.log2(scales[(scales > 0) & np.isfinite(scales)])
    if first is not None and is_between:
        # If the scale went up and down, and still moves that far, its first and last value do not say where it went.
        net, late = abs(np.log2(final) - np.log2(first[0])), np.ptp(bits[len(bits) // 2 :])
        if net > late or 2 * net >= np.abs(np.diff(bits)).sum():
            return f"The loss scale {'rose' if final > first[0] else 'fell'} from {named(first[0])} to {named(final)}"
    if is_shown and not np.isnan(final):
        return f"The loss scale moved between {named(lowest)} and {named(highest)}"
    end = "it rounds others" if run.is_rounded else f"the last is {named(last)}"
    return f"The log states loss scales between {named(lowest)} and {named(highest)}; {end}"


def bounds_in_words(fewest: int, most: int | None) -> str:
    """Return bounds on a number of skipped steps as text; without an upper bound if ``most`` is None.

    Examples:
        >>> bounds_in_words(6, 6), bounds_in_words(2, 17), bounds_in_words(23, None)
        ('6', '2 to 17', 'at least 23')
    """
    if most is None:
        return f"at least {fewest:,}"
    return f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
