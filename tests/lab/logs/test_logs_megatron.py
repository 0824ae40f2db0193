"""Megatron-LM's and Megatron-DeepSpeed's logs: their lines' variants, wrong counts, and hysteresis."""

import pytest

from mindformers_adaptive.lab.logs import read_log


def line(step, scale, skipped=0, prefix=" ", middle="", end=""):
    return (
        f"{prefix}iteration {step:8d}/  500000 | consumed samples: {step:8d} | elapsed time per iteration (ms): 1250.0 "
        f"| {middle}learning rate: 1.500E-04 | global batch size:     4 | lm loss: 2.500000E+00 "
        f"| loss scale: {scale:.1f} | grad norm: 16.999 "
        f"| number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |{end}\n"
    )


def write(tmp_path, *lines):
    log = tmp_path / "megatron.log"
    log.write_text("".join(lines), encoding="utf-8")
    return log


def attempt(scale, reduced, rank=0, source="stage_1_and_2.py:1769:step"):
    return (
        f"[2023-02-28 20:08:24,113] [INFO] [{source}] [deepspeed] OVERFLOW! Rank {rank} Skipping step. "
        f"Attempted loss scale: {scale}, reducing to {reduced}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        line(1, 32768.0, 1),
        line(1, 32768.0, 1, prefix=" [2024-09-03 16:02:57] ", middle="throughput per GPU (TFLOP/s/GPU): 878.5 | "),
        line(1, 32768.0, 1, prefix="1: "),
        line(1, 32768.0, 1, prefix="[default7]: ", middle="current time: 1706860208.35 | "),
        line(1, 32768.0, 1, end=" samples per second: 1.886 | TFLOPs: 78.46 |"),
        # Before 2020: no colons, no number of skipped iterations.
        " iteration        1/  200000 | elapsed time per iteration (ms): 1250.0 | learning rate 1.500E-04 | "
        "lm loss 2.500000E+00 | loss scale 32768.0 |\n" + line(2, 16384.0, 1),
    ],
)
def test_the_line_of_each_variant_is_read(tmp_path, text):
    run = read_log(write(tmp_path, text))
    assert (run.log_format, run.step[0], run.problems) == ("megatron", 1, ())
    assert (run.loss[0], run.seconds[0]) == (2.5, 1.25)


def test_one_line_an_iteration_tells_of_each_step(tmp_path):
    # The start of a published run: 2^32 is tolerated once, then halved.
    scales, skips = [2.0**32, 2.0**31, 2.0**30, 2.0**30], [1, 1, 1, 0]
    run = read_log(write(tmp_path, *(line(k + 1, s, n) for k, (s, n) in enumerate(zip(scales, skips, strict=True)))))
    assert run.overflow.tolist() == [True, True, True, False]
    assert run.loss_scale.tolist() == [2.0**32, 2.0**32, 2.0**31, 2.0**30]
    assert run.position_known.all()


def test_a_falling_scale_outweighs_a_count_of_0_and_no_count_is_relied_on_then(tmp_path):
    run = read_log(write(tmp_path, line(10, 1024.0), line(20, 256.0), line(30, 256.0)))
    assert run.overflow.tolist() == [False] * 10 + [True] * 2 + [False] * 18
    assert run.loss_scale[10:13].tolist() == [1024.0, 512.0, 256.0]
    assert not run.position_known.any()
    assert [note for note in run.notes if "log:2: the scale fell although no skipped step is counted" in note]


def test_with_right_counts_intervals_without_skips_are_known_to_be_applied(tmp_path):
    run = read_log(write(tmp_path, line(10, 1024.0), line(20, 256.0, 2), line(30, 256.0)))
    assert run.position_known.tolist() == [True] * 10 + [False] * 10 + [True] * 10


def test_the_0_of_megatron_deepspeed_says_nothing(tmp_path):
    # There every step can be skipped at the smallest scale while 0 is printed.
    text = [line(step, 1.0, end=" samples per second: 1.886 | TFLOPs: 78.46 |") for step in (1, 2, 3)]
    run = read_log(write(tmp_path, *text))
    assert not run.position_known.any()
    trace = run.to_trace()
    assert trace.lower_bound.tolist() == [0, 0, 0]


def test_deepspeed_lines_between_iterations_say_how_many_were_skipped(tmp_path):
    end = " samples per second: 1.886 | TFLOPs: 78.46 |"
    run = read_log(
        write(
            tmp_path,
            line(1, 4.0, end=end),
            attempt(4, 4),
            attempt(4, 4, rank=1),
            line(2, 4.0, end=end),
            attempt(4, 2),
            line(3, 2.0, end=end),
            line(4, 2.0, end=end),
        )
    )
    assert run.overflow.tolist() == [False, True, True, False]
    assert (run.loss_scale.tolist(), run.position_known.all()) == ([4.0, 4.0, 4.0, 2.0], True)
    assert "1 line(s) of other ranks said the same of a step and were merged." in run.notes
    assert run.lines_used == 7


def test_more_skips_than_drops_were_tolerated_at_the_scale_before(tmp_path):
    run = read_log(write(tmp_path, line(10, 1024.0), line(20, 512.0, 3)))
    assert run.loss_scale[10:14].tolist() == [1024.0, 1024.0, 1024.0, 512.0]


def test_skips_at_an_unchanged_scale_followed_a_raise(tmp_path):
    run = read_log(write(tmp_path, line(10, 1024.0), line(20, 1024.0, 1)))
    assert run.loss_scale[10:13].tolist() == [1024.0, 2048.0, 1024.0]
    assert run.overflow[10:13].tolist() == [False, True, False]


def test_applied_steps_around_a_raise_used_at_least_the_smaller_scale(tmp_path):
    run = read_log(write(tmp_path, line(10, 1024.0), line(20, 2048.0)))
    assert run.loss_scale[10:].tolist() == [1024.0] * 10


def test_a_restart_supersedes_what_the_earlier_attempt_said(tmp_path):
    run = read_log(
        write(tmp_path, *(line(step, 1024.0) for step in (10, 20, 30, 40)), line(30, 64.0, 3), line(40, 64.0))
    )
    assert run.step.tolist() == list(range(1, 41))
    assert run.loss_scale[[19, 20, 23, 39]].tolist() == [1024.0, 512.0, 64.0, 64.0]
    assert [note for note in run.notes if "log:5: the run goes back from step 40 to step 30; what 2 earlier" in note]


def test_lines_of_validation_and_checkpoints_are_ignored(tmp_path):
    other = " validation loss at iteration 1 | lm loss value: 4.2E-01 | \n  saving checkpoint at iteration       1\n"
    run = read_log(write(tmp_path, line(1, 1024.0), other))
    assert (run.lines_used, run.lines_ignored, run.problems) == (1, 2, ())


def test_a_line_that_is_cut_before_its_count_is_a_problem(tmp_path):
    cut = line(2, 1024.0).partition("| number of skipped")[0]
    run = read_log(write(tmp_path, line(1, 1024.0), cut))
    assert (run.step.tolist(), run.lines_ignored) == ([1], 1)
    assert "megatron.log:2: looks like an iteration's line" in run.problems[0]
