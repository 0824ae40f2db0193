"""The lines of Megatron-LM, Megatron-DeepSpeed and DeepSpeed: their variants, wrong counts, ranks, and hysteresis."""

import numpy as np
import pytest

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.policies import make_policy

HEAD = "[2023-02-28 20:08:24,113] [INFO] "
ONLY_MEGATRON_DEEPSPEED = " samples per second: 1.886 | TFLOPs: 78.46 |"


def line(step, scale, skipped=0, prefix=" ", middle="", end=""):
    return (
        f"{prefix}iteration {step:8d}/  500000 | consumed samples: {step:8d} | elapsed time per iteration (ms): 1250.0 "
        f"| {middle}learning rate: 1.500E-04 | global batch size:     4 | lm loss: 2.500000E+00 "
        f"| loss scale: {scale:.1f} | grad norm: 16.999 "
        f"| number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |{end}\n"
    )


def attempt(scale, reduced, rank=0, source="loss_scaler.py:181:update_scale"):
    words = f"Attempted loss scale: {scale}, reducing to {reduced}\n"
    return f"{HEAD}[{source}] [deepspeed] OVERFLOW! Rank {rank} Skipping step. {words}"


def tolerated(scale, hysteresis, source="loss_scaler.py:188:update_scale"):
    words = f"Attempted loss scale: {scale}, but hysteresis is {hysteresis}. Reducing hysteresis to {hysteresis - 1}\n"
    return f"{HEAD}[{source}] [deepspeed] OVERFLOW! Rank 0 Skipping step. {words}"


def progress(step, skipped):
    return f"{HEAD}[logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[0.001], mom=[[0.8, 0.999]]\n"


def read(tmp_path, *lines):
    (tmp_path / "run.log").write_text("".join(lines), encoding="utf-8")
    return read_log(tmp_path / "run.log")


@pytest.mark.parametrize(
    "text",
    [
        line(1, 32768.0, 1),
        line(1, 32768.0, 1, prefix=" [2024-09-03 16:02:57] ", middle="throughput per GPU (TFLOP/s/GPU): 878.5 | "),
        line(1, 32768.0, 1, prefix="1: "),
        line(1, 32768.0, 1, prefix="[default7]: ", middle="current time: 1706860208.35 | "),
        line(1, 32768.0, 1, end=ONLY_MEGATRON_DEEPSPEED),
        # Before 2020: no colons, no number of skipped iterations.
        " iteration        1/  200000 | elapsed time per iteration (ms): 1250.0 | learning rate 1.500E-04 | "
        "lm loss 2.500000E+00 | loss scale 32768.0 |\n" + line(2, 16384.0, 1),
    ],
)
def test_the_line_of_each_variant_is_read(tmp_path, text):
    run = read(tmp_path, text)
    assert (run.log_format, run.step[0], run.problems) == ("megatron", 1, ())
    assert (run.loss[0], run.seconds[0]) == (2.5, 1.25)


def test_norms_of_megatron_and_megatron_deepspeed_are_read_and_deepspeed_alone_prints_none(tmp_path):
    run = read(tmp_path, line(1, 32768.0, 1).replace("16.999", "nan"), line(2, 32768.0, end=ONLY_MEGATRON_DEEPSPEED))
    np.testing.assert_array_equal(run.gradient_norm, [np.nan, 16.999])
    assert read(tmp_path, attempt(65536, 32768), progress(10, 1)).gradient_norm is None


def test_one_line_an_iteration_tells_of_each_step(tmp_path):
    # The start of a published run: 2^32 is tolerated once, then halved.
    scales, skips = [2.0**32, 2.0**31, 2.0**30, 2.0**30], [1, 1, 1, 0]
    run = read(tmp_path, *(line(k + 1, s, n) for k, (s, n) in enumerate(zip(scales, skips, strict=True))))
    assert run.overflow.tolist() == [True, True, True, False]
    assert run.loss_scale.tolist() == [2.0**32, 2.0**32, 2.0**31, 2.0**30]
    assert run.position_known.all()


def test_a_falling_scale_outweighs_a_count_of_0_and_no_count_is_relied_on_then(tmp_path):
    run = read(tmp_path, line(10, 1024.0), line(20, 256.0), line(30, 256.0))
    assert run.overflow.tolist() == [False] * 10 + [True] * 2 + [False] * 18
    assert run.loss_scale[10:13].tolist() == [1024.0, 512.0, 256.0]
    assert not run.position_known.any()
    assert [note for note in run.notes if "log:2: the scale fell although no skipped step is counted" in note]


def test_with_right_counts_intervals_without_skips_are_known_to_be_applied(tmp_path):
    run = read(tmp_path, line(10, 1024.0), line(20, 256.0, 2), line(30, 256.0))
    assert run.position_known.tolist() == [True] * 10 + [False] * 10 + [True] * 10


def test_counts_of_the_log_stand_where_the_rule_that_is_named_allows_others(tmp_path):
    # With a hysteresis of 1, one fall in ten steps is one skipped step; the run had one of 2.
    (tmp_path / "run.log").write_text(line(1, 65536.0) + line(11, 32768.0, skipped=2), encoding="utf-8")
    rule = make_policy("megatron", initial_scale=65536.0, hysteresis=1)
    run = read_log(tmp_path / "run.log", rule=rule)
    assert run.skipped_bounds() == (2, 2)
    [note] = [note for note in run.notes if "by the rule" in note]
    assert "run.log:2: by the log 2 steps were skipped up to here, by the rule 'megatron' 1. The log counts" in note
    run = read_log(tmp_path / "run.log", rule=make_policy("megatron", initial_scale=65536.0, hysteresis=2))
    assert not [note for note in run.notes if "by the rule" in note]


def test_the_0_of_megatron_deepspeed_says_nothing(tmp_path):
    # There every step can be skipped at the smallest scale while 0 is printed.
    text = [line(step, 1.0, end=ONLY_MEGATRON_DEEPSPEED) for step in (1, 2, 3)]
    run = read(tmp_path, *text)
    assert not run.position_known.any()
    trace = run.to_trace()
    assert trace.lower_bound.tolist() == [0, 0, 0]


def test_deepspeed_lines_between_iterations_say_how_many_were_skipped(tmp_path):
    first, second, third, last = (
        line(step, scale, end=ONLY_MEGATRON_DEEPSPEED) for step, scale in enumerate((4.0, 4.0, 2.0, 2.0), start=1)
    )
    run = read(tmp_path, first, attempt(4, 4), attempt(4, 4, rank=1), second, attempt(4, 2), third, last)
    assert run.overflow.tolist() == [False, True, True, False]
    assert (run.loss_scale.tolist(), run.position_known.all()) == ([4.0, 4.0, 4.0, 2.0], True)
    assert "1 line(s) of other ranks said the same of a step and were merged." in run.notes
    assert run.lines_used == 7


@pytest.mark.parametrize(
    ("scale", "skips", "used", "overflow"),
    [
        # More skips than drops were tolerated at the scale before.
        (512.0, 3, [1024.0, 1024.0, 1024.0, 512.0], [True, True, True, False]),
        # A skip at an unchanged scale followed a raise.
        (1024.0, 1, [1024.0, 2048.0, 1024.0, 1024.0], [False, True, False, False]),
        # Applied steps around a raise used at least the smaller scale.
        (2048.0, 0, [1024.0] * 10, [False] * 10),
    ],
)
def test_the_scales_between_two_lines_agree_with_both(tmp_path, scale, skips, used, overflow):
    run = read(tmp_path, line(10, 1024.0), line(20, scale, skips))
    assert run.loss_scale[10 : 10 + len(used)].tolist() == used
    assert run.overflow[10 : 10 + len(used)].tolist() == overflow


def test_lines_of_validation_and_checkpoints_are_ignored(tmp_path):
    other = " validation loss at iteration 1 | lm loss value: 4.2E-01 | \n  saving checkpoint at iteration       1\n"
    run = read(tmp_path, line(1, 1024.0), other)
    assert (run.lines_used, run.lines_ignored, run.problems) == (1, 2, ())


def test_a_line_that_is_cut_before_its_count_is_a_problem(tmp_path):
    cut = line(2, 1024.0).partition("| number of skipped")[0]
    run = read(tmp_path, line(1, 1024.0), cut)
    assert (run.step.tolist(), run.lines_ignored) == ([1], 1)
    assert "run.log:2: looks like an iteration's line" in run.problems[0]


@pytest.mark.parametrize(
    "text",
    [
        attempt(65536, 32768),
        attempt("65536.0", "32768.0", source="stage_1_and_2.py:1769:step"),
        HEAD + "[stage3.py:2323:_overflow_clean_up] [deepscale] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 65536, reducing to 32768.0\n",
        HEAD + "[stage2.py:1387:step] [deepspeed] fp16 dynamic loss scale overflow! Rank 4 Skipping step. "
        "Attempted loss scale: 65536, reducing to 32768\n",
        HEAD + "[logging.py:69:log_dist] [Rank 0] Overflow detected. Skipping step. "
        "Attempted loss scale: 65536, reducing to 32768.0\n",
        " 14%|#4   | 378/2724 [13:58:09<86:18:35, 132.44s/it]" + attempt(65536, 32768),
    ],
)
def test_each_wording_of_an_overflow_is_read(tmp_path, text):
    run = read(tmp_path, text)
    assert (run.log_format, run.loss_scale.tolist(), run.overflow.tolist()) == ("deepspeed", [65536.0], [True])
    assert (run.position_known.tolist(), run.problems) == ([False], ())


def test_a_tolerated_overflow_is_a_skipped_step_and_leaves_the_scale(tmp_path):
    run = read(tmp_path, tolerated(8, 2), attempt(8, 4), progress(2, 2))
    assert (run.overflow.tolist(), run.loss_scale.tolist()) == ([True, True], [8.0, 8.0])
    assert run.position_known.all()


def test_lines_of_all_ranks_are_one_step_and_the_same_rank_again_is_the_next(tmp_path):
    # As in a published log: eight ranks at 2^32, which the first overflow leaves as it is, then the next overflow.
    ranks = (4, 6, 7, 2, 5, 1, 0, 3)
    lines = [attempt(2**32, reduced, rank) for reduced in (2**32, 2**31) for rank in ranks]
    run = read(tmp_path, *lines, progress(10, 2))
    assert run.skipped_steps == 2
    assert (run.lines_read, run.lines_used) == (17, 17)
    assert "14 line(s) of other ranks said the same of a step and were merged." in run.notes


def test_one_overflow_printed_from_two_source_files_is_one_step(tmp_path):
    stage = "fp8_stage_1_and_2.py:676:step"
    lines = [tolerated(32768, 2), attempt(32768, 32768, source=stage), attempt(32768, 16384)]
    run = read(tmp_path, *lines, attempt(32768, "16384.0", source=stage), progress(10, 2))
    assert run.skipped_steps == 2


def test_one_rank_that_stays_at_the_smallest_scale_skips_a_step_a_line(tmp_path):
    run = read(tmp_path, attempt(1, 1), attempt(1, 1), attempt(1, 1), progress(10, 3))
    assert (run.skipped_steps, run.loss_scale[:3].tolist()) == (3, [1.0, 1.0, 1.0])


def test_skipped_steps_are_counted_between_lines(tmp_path):
    lines = [attempt(8, 4), progress(10, 1), progress(20, 1), attempt(4, 2), attempt(2, 1), progress(30, 3)]
    run = read(tmp_path, *lines)
    assert [int(run.overflow[start : start + 10].sum()) for start in (0, 10, 20)] == [1, 0, 2]
    assert run.position_known.tolist() == [False] * 10 + [True] * 10 + [False] * 10
    assert run.loss_scale[[0, 1, 10, 20, 21, 22]].tolist() == [8.0, 4.0, 4.0, 4.0, 2.0, 1.0]


def test_a_log_that_begins_in_the_middle_does_not_give_old_skips_to_its_first_steps(tmp_path):
    run = read(tmp_path, progress(510, 8), attempt(4, 2), progress(520, 9))
    assert (run.step[0], run.step[-1], run.skipped_steps) == (501, 520, 1)


def test_overflows_after_the_last_count_follow_it(tmp_path):
    run = read(tmp_path, attempt(8, 4), progress(10, 1), attempt(4, 2), attempt(2, 1))
    assert run.step[run.overflow].tolist() == [1, 11, 12]
    assert [note for note in run.notes if "log:4: 2 overflow(s) up to here follow no line that names a step" in note]
