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
    """Assert that the number of steps skipped so far is within its bounds, and that known overflow flags are right."""
    flags = np.array(truth.flags)[run.step - 1] if run.is_numbered else None
    fewest, most = run.skipped_bounds()
    if flags is None:
        assert fewest <= sum(truth.flags) <= most
        assert not run.position_known[-1]
        return
    counts = np.append(0, np.cumsum(flags))
    for steps in range(0, len(run) + 1, 1 + len(run) // 60):
        fewest, most = run.skipped_bounds(steps)
        assert fewest <= counts[steps] <= most, steps
    known = run.position_known
    assert (run.overflow[known] == flags[known]).all()
    fewest, most = run.skipped_bounds()
    assert fewest <= run.skipped_steps <= most


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), every=st.sampled_from([1, 2, 7, 10, 50]))
def test_the_truth_lies_within_the_bounds(tmp_path_factory, name, seed, every):
    truth = random_run(np.random.default_rng(seed), 200 // every * every)
    # DeepSpeed prints the loss scale only at an overflow. So leave out DeepSpeed logs without an overflow.
    assume(any(truth.flags) or not name.startswith("deepspeed"))
    run = read(tmp_path_factory.getbasetemp(), *WRITERS[name](truth, every))
    assert_within(run, truth)
    if run.is_numbered:
        assert run.step.tolist() == list(range(1, len(truth.flags) + 1))
    if name in EXACT:
        assert run.skipped_bounds() == (sum(truth.flags),) * 2
    if every == 1 and name in ("mindformers", "mindspore", "megatron", "record"):
        assert run.overflow.tolist() == truth.flags
        # Megatron-LM prints both 0.125 and 0.0625 as 0.1, so compare only loss scales of at least 1.
        used = np.array(truth.used)
        assert run.loss_scale[1:][used[1:] >= 1] == pytest.approx(used[1:][used[1:] >= 1])


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
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), every=st.sampled_from([1, 5, 10]))
def test_lines_that_are_cut_or_lost_widen_the_bounds(tmp_path_factory, name, seed, every):
    random = np.random.default_rng(seed)
    truth = random_run(random, 200)
    assume(any(truth.flags))
    lines = WRITERS[name](truth, every)
    assert_within(read(tmp_path_factory.getbasetemp(), *damaged(random, lines)), truth)


@settings(max_examples=20)
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
