"""The sample logs give the skips that a person counts by hand in them."""

import numpy as np
import pytest
from conftest import ROOT

from mindformers_adaptive.lab.logs import read_log

LOGS = ROOT / "tests" / "lab" / "samples"


def test_mindformers_sample_has_the_11_skips_of_its_true_flags():
    run = read_log(LOGS / "mindformers_1_9_cpu.log")
    assert (run.log_format, len(run)) == ("mindformers", 32)
    # The lines that say "overflow cond: True", read one by one.
    assert run.step[run.overflow].tolist() == [1, 2, 3, 4, 5, 8, 11, 14, 19, 23, 31]
    assert run.position_known.all()
    # Line 1 prints 2^23 after the overflow, so 2^24 was used; every other step used what the line before printed.
    assert run.loss_scale[:9].tolist() == [2.0**k for k in (24, 23, 22, 21, 20, 19, 19, 20, 19)]
    assert run.loss_scale[-3:].tolist() == [2.0**20, 2.0**21, 2.0**20]
    assert (run.loss[0], run.seconds[0]) == (4.155150, 4.705)
    assert (run.lines_read, run.lines_used, run.lines_ignored, run.problems) == (32, 32, 0, ())
    assert [note for note in run.notes if "log:1: the scale used in step 1 is inferred" in note]


def test_megatron_sample_has_the_19_skips_of_its_counts():
    run = read_log(LOGS / "megatron_gpt2_n4.log")
    # 20 lines for 10 iterations each, with 10, 8 and 1 skipped, and 0 on the other 17.
    assert (run.log_format, len(run), run.skipped_steps) == ("megatron", 200, 19)
    assert [int(run.overflow[start : start + 10].sum()) for start in range(0, 200, 10)] == [10, 8, 1] + [0] * 17
    # Ten skips lead to 2^23. From 2^32, where Megatron starts, nine drops do: the first skip was tolerated.
    assert run.loss_scale[:10].tolist() == [2.0**k for k in (32, 32, 31, 30, 29, 28, 27, 26, 25, 24)]
    # Eight skips from 2^23 to 2^15, and one to 2^14.
    assert run.loss_scale[run.overflow][10:].tolist() == [2.0**k for k in range(23, 14, -1)]
    # Which of ten were skipped is known where all or none were: not for iterations 11 to 30.
    assert np.flatnonzero(~run.position_known).tolist() == list(range(10, 30))
    assert (run.lines_read, run.lines_used, run.lines_ignored, run.problems) == (20, 20, 0, ())


def test_deepspeed_sample_has_the_6_skips_of_its_count_of_which_4_have_lines():
    run = read_log(LOGS / "deepspeed_overflow.log")
    # "step=10, skipped=6", after one tolerated overflow at 65536 and drops from 65536, 32768 and 16384.
    assert (run.log_format, len(run), run.skipped_steps) == ("deepspeed", 10, 6)
    assert run.loss_scale[run.overflow].tolist() == [65536, 65536, 32768, 16384, 8192, 4096]
    assert (run.loss_scale[~run.overflow] == 2048).all()
    assert not run.position_known.any()
    assert (run.lines_read, run.lines_used, run.lines_ignored, run.problems) == (5, 5, 0, ())
    assert [note for note in run.notes if "log:5: 2 of 6 skipped steps have no line of their own" in note]


@pytest.mark.parametrize("name", ["mindformers_1_9_cpu.log", "megatron_gpt2_n4.log", "deepspeed_overflow.log"])
def test_bounds_of_a_sample_come_from_the_steps_whose_place_is_known(name):
    run = read_log(LOGS / name)
    for assume in ("interpolated", "lower_bound", "upper_bound"):
        trace = run.to_trace(assume)
        applied, skipped = run.position_known & ~run.overflow, run.position_known & run.overflow
        assert (trace.lower_bound[applied] == run.loss_scale[applied]).all()
        assert (trace.upper_bound[skipped] == run.loss_scale[skipped]).all()
        assert (trace.lower_bound[~applied] == 0).all()
        assert np.isinf(trace.upper_bound[~skipped]).all()
