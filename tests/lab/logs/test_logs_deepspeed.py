"""DeepSpeed's logs: the wordings of its overflow lines, all ranks, hysteresis, and the number of skipped steps."""

import pytest

from mindformers_adaptive.lab.logs import read_log

HEAD = "[2023-02-28 20:08:24,113] [INFO] "


def attempt(scale, reduced, rank=0, source="loss_scaler.py:181:update_scale"):
    words = f"Attempted loss scale: {scale}, reducing to {reduced}\n"
    return f"{HEAD}[{source}] [deepspeed] OVERFLOW! Rank {rank} Skipping step. {words}"


def tolerated(scale, hysteresis, source="loss_scaler.py:188:update_scale"):
    words = f"Attempted loss scale: {scale}, but hysteresis is {hysteresis}. Reducing hysteresis to {hysteresis - 1}\n"
    return f"{HEAD}[{source}] [deepspeed] OVERFLOW! Rank 0 Skipping step. {words}"


def progress(step, skipped):
    return f"{HEAD}[logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[0.001], mom=[[0.8, 0.999]]\n"


def write(tmp_path, *lines):
    log = tmp_path / "deepspeed.log"
    log.write_text("".join(lines), encoding="utf-8")
    return log


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
def test_each_wording_is_read(tmp_path, text):
    run = read_log(write(tmp_path, text))
    assert (run.log_format, run.loss_scale.tolist(), run.overflow.tolist()) == ("deepspeed", [65536.0], [True])
    assert (run.position_known.tolist(), run.problems) == ([False], ())


def test_a_tolerated_overflow_is_a_skipped_step_and_leaves_the_scale(tmp_path):
    run = read_log(write(tmp_path, tolerated(8, 2), attempt(8, 4), progress(2, 2)))
    assert (run.overflow.tolist(), run.loss_scale.tolist()) == ([True, True], [8.0, 8.0])
    assert run.position_known.all()


def test_lines_of_all_ranks_are_one_step_and_the_same_rank_again_is_the_next(tmp_path):
    # As in a published log: eight ranks at 2^32, which the first overflow leaves as it is, then the next overflow.
    ranks = (4, 6, 7, 2, 5, 1, 0, 3)
    lines = [attempt(2**32, reduced, rank) for reduced in (2**32, 2**31) for rank in ranks]
    run = read_log(write(tmp_path, *lines, progress(10, 2)))
    assert run.skipped_steps == 2
    assert (run.lines_read, run.lines_used) == (17, 17)
    assert "14 line(s) of other ranks said the same of a step and were merged." in run.notes


def test_one_overflow_printed_from_two_source_files_is_one_step(tmp_path):
    stage = "fp8_stage_1_and_2.py:676:step"
    lines = [tolerated(32768, 2), attempt(32768, 32768, source=stage), attempt(32768, 16384)]
    run = read_log(write(tmp_path, *lines, attempt(32768, "16384.0", source=stage), progress(10, 2)))
    assert run.skipped_steps == 2


def test_one_rank_that_stays_at_the_smallest_scale_skips_a_step_a_line(tmp_path):
    run = read_log(write(tmp_path, attempt(1, 1), attempt(1, 1), attempt(1, 1), progress(10, 3)))
    assert (run.skipped_steps, run.loss_scale[:3].tolist()) == (3, [1.0, 1.0, 1.0])


def test_skipped_steps_are_counted_between_lines(tmp_path):
    lines = [attempt(8, 4), progress(10, 1), progress(20, 1), attempt(4, 2), attempt(2, 1), progress(30, 3)]
    run = read_log(write(tmp_path, *lines))
    assert [int(run.overflow[start : start + 10].sum()) for start in (0, 10, 20)] == [1, 0, 2]
    assert run.position_known.tolist() == [False] * 10 + [True] * 10 + [False] * 10
    assert run.loss_scale[[0, 1, 10, 20, 21, 22]].tolist() == [8.0, 4.0, 4.0, 4.0, 2.0, 1.0]


def test_a_log_that_begins_in_the_middle_does_not_give_old_skips_to_its_first_steps(tmp_path):
    run = read_log(write(tmp_path, progress(510, 8), attempt(4, 2), progress(520, 9)))
    assert (run.step[0], run.step[-1], run.skipped_steps) == (501, 520, 1)


def test_overflows_after_the_last_count_follow_it(tmp_path):
    run = read_log(write(tmp_path, attempt(8, 4), progress(10, 1), attempt(4, 2), attempt(2, 1)))
    assert run.step[run.overflow].tolist() == [1, 11, 12]
    assert [note for note in run.notes if "log:4: 2 overflow(s) up to here follow no line that names a step" in note]


def test_a_count_that_a_cut_may_have_shortened_is_not_used(tmp_path):
    cut = progress(20, 12).partition("2, lr")[0]
    run = read_log(write(tmp_path, attempt(8, 4), progress(10, 1), cut))
    assert (len(run), run.lines_ignored, len(run.problems)) == (10, 1, 1)
