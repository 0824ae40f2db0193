"""An overflow counts once however many ranks print it, and what no line states is a range."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_adaptive.lab.analysis import analyze
from tests.record.log_writers import megatron_line, mindformers_line, overflow_line, progress_line, read


def fused(scale, prefix="", time=None):
    """Return what DeepSpeed's fused optimizer prints about an overflow, on each rank and without the rank's number."""
    stamp = "" if time is None else f"[2022-07-05 16:{time // 60:02d}:{time % 60:02d},796] [INFO] "
    source = "[fused_optimizer.py:383:_update_scale] " if stamp else ""
    return f"{prefix}{stamp}{source}Reducing dynamic loss scale from {scale:.1f} to {scale / 2:.1f}\n"


def interleaved(random, texts):
    """Merge the lines of several ranks in a random order; each rank keeps its own order."""
    left = [list(lines) for lines in texts]
    result = []
    while any(left):
        lines = left[random.choice([number for number, lines in enumerate(left) if lines])]
        result.append(lines.pop(0))
    return result


@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("prefix", ["", "[default{}]:", "{}: "])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), ranks=st.sampled_from([2, 4, 8]))
def test_moves_that_several_ranks_print_count_once(tmp_path_factory, stamped, prefix, seed, ranks):
    random = np.random.default_rng(seed)
    scales, times = [2.0**23, 2.0**22, 2.0**21, 2.0**20], (1, 2, 3, 20)
    texts = [
        [
            fused(scale, prefix.format(rank), time if stamped else None)
            for scale, time in zip(scales, times, strict=True)
        ]
        for rank in range(ranks)
    ]
    run = read(tmp_path_factory.getbasetemp(), *interleaved(random, texts))
    assert (run.skipped_bounds[0], [move.before for move in run.moves]) == (4, scales)
    assert run.moves[-1].after == 2.0**19


def test_equal_moves_far_apart_are_several_overflows(tmp_path):
    lines = [fused(2.0**16, time=time) for time in (1, 1, 300, 301, 600) for _ in range(2)]
    assert read(tmp_path, *lines).skipped_bounds[0] == 3
    # Without times, the lines may be of ten ranks and one overflow. The steps between them tell overflows apart.
    assert read(tmp_path, *[fused(2.0**16)] * 10).skipped_bounds[0] == 1
    steps = [megatron_line(step, 2.0**16) for step in range(1, 30)]
    run = read(tmp_path, *[fused(2.0**16)] * 2, *steps, *[fused(2.0**16)] * 2)
    assert run.skipped_bounds[0] == 2


def test_lines_that_name_rank_or_source_are_believed_first(tmp_path):
    lines = [fused(2.0**16), fused(2.0**16), overflow_line(2**16, 2**15), overflow_line(2**16, 2**15)]
    assert read(tmp_path, *lines).skipped_bounds[0] == 2
    # The first overflow is tolerated.
    sources = [overflow_line(2**32, after, 0, name) for after in (2**32, 2**31) for name in ("loss_scaler", "stage2")]
    for several in (lines, sources):
        run = read(tmp_path, *several, progress_line(10, 2))
        assert run.skipped_bounds == (2, 2)
        assert run.notes[0].startswith("Merged: 2 ")
    assert read(tmp_path, *sources).skipped_bounds[0] == 2


@pytest.mark.parametrize("line", [lambda *values: megatron_line(values[0], values[2], values[1]), mindformers_line])
def test_a_line_of_step_0_states_the_first_scale(tmp_path, line):
    lines = [line(step, step <= 5, 2.0 ** max(17 - step, 12)) for step in range(1, 121)]
    run = read(tmp_path, *lines)
    assert (run.first_loss_scales, run.skipped_bounds, np.isnan(run.used[0])) == ((2.0**16, 2.0**17), (5, 5), True)
    assert "2^16 to 2^17 at first" in analyze(run).text(details=True)
    assert read(tmp_path, line(0, False, 2.0**16), *lines).first_loss_scales == (2.0**16, 2.0**16)
    # The first step may have raised the scale.
    assert read(tmp_path, line(1, False, 8.0)).first_loss_scales == (4.0, 8.0)
