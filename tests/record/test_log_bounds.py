"""The true number of skipped steps lies within the bounds read from a log, for random runs in each program's format."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.record.log_writers import WRITERS, mindformers, random_run, read

# Logs in these formats count or state every skipped step, so the number of skipped steps is exact.
EXACT = ("megatron", "megatron with its first step", "deepspeed", "deepspeed of three ranks", "record")


def assert_within(run, truth):
    """Assert that the skipped steps of each stretch and up to its end are within their bounds, and each scale right."""
    if not run.is_numbered:
        fewest, most = run.skipped_bounds
        assert fewest <= sum(truth.flags) <= most
        return
    counts = np.append(0, np.cumsum(truth.flags))
    of_stretch = counts[run.last] - counts[run.first - 1]
    assert ((run.fewest <= of_stretch) & (of_stretch <= run.most)).all()
    in_log = np.cumsum(of_stretch)
    assert ((run.so_far[:, 0] <= in_log) & (in_log <= run.so_far[:, 1])).all()
    # MindSpore prints six digits.
    for stated, scales in ((run.used, truth.used), (run.after, truth.after)):
        known = ~np.isnan(stated)
        assert stated[known] == pytest.approx(np.array(scales)[run.last[known] - 1], rel=1e-4)
    low, high = run.scale_ranges
    for stretch in np.flatnonzero(~np.isnan(low)).tolist():
        used = truth.used[run.first[stretch] - 1 : run.last[stretch]]
        assert low[stretch] <= min(used) * 1.0001
        assert max(used) <= high[stretch] * 1.0001


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), every=st.sampled_from([1, 2, 7, 10, 50]))
def test_the_truth_lies_within_the_bounds(tmp_path_factory, name, seed, every):
    truth = random_run(np.random.default_rng(seed), 200 // every * every)
    # DeepSpeed prints the loss scale only at an overflow. So leave out DeepSpeed logs without an overflow.
    assume(any(truth.flags) or not name.startswith("deepspeed"))
    run = read(tmp_path_factory.getbasetemp(), *WRITERS[name](truth, every))
    assert_within(run, truth)
    if run.is_numbered:
        assert len(run) == run.last[-1] == len(truth.flags)
    if name in EXACT:
        assert run.skipped_bounds == (sum(truth.flags),) * 2
    if every == 1 and name in ("mindformers", "mindspore", "megatron", "record"):
        assert run.skipped.tolist() == truth.flags


def damaged(random, lines):
    """Drop, cut or repeat log lines, as if several ranks wrote one log; keep the first and the last numbered lines."""
    start = next((number for number, line in enumerate(lines) if "OVERFLOW" not in line), 0) + 1
    result, lines, end = lines[:start], lines[start:-2], lines[-2:]
    for line in lines:
        luck = random.random()
        if luck < 0.03:
            result.append(line[: random.integers(1, len(line))].rstrip("\n") + "\n")
        elif luck > 0.03:
            # Do not repeat a line that reports an overflow, because a second line from a rank means another overflow.
            result += [line] * (1 + (luck > 0.95 and "OVERFLOW" not in line))
    return result + end


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if "deepspeed" not in name or name == "deepspeed of three ranks"]
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), every=st.sampled_from([1, 5, 10]))
def test_lines_that_are_cut_or_lost_widen_the_bounds(tmp_path_factory, name, seed, every):
    random = np.random.default_rng(seed)
    truth = random_run(random, 200)
    assume(any(truth.flags))
    lines = WRITERS[name](truth, every)
    assert_within(read(tmp_path_factory.getbasetemp(), *damaged(random, lines)), truth)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), every=st.sampled_from([1, 5]))
def test_a_restart_supersedes_what_came_after_its_checkpoint(tmp_path_factory, seed, every):
    random = np.random.default_rng(seed)
    whole = random_run(random, 150, smallest=1.0)
    reached, checkpoint = 100, int(random.integers(1, 80 // every)) * every
    first = [values[:reached] for values in whole]
    # The log of a restarted run: until the restart it has steps of ``whole``, and after the restart it has steps of
    # another random run.
    other = random_run(random, 150, smallest=1.0)
    second = [values[checkpoint:] for values in other]
    truth = whole._make([*old[:checkpoint], *new] for old, new in zip(first, second, strict=True))
    lines = mindformers(whole._make(first), every) + mindformers(truth, every)[checkpoint // every :]
    folder = tmp_path_factory.getbasetemp()
    if all(a == b for a, b in itertools.pairwise(truth.after[checkpoint - 1 : checkpoint + 1])):
        assert_within(read(folder, *lines), truth)
