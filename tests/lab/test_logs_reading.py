"""What every reader does with damaged, mixed and foreign lines, how the format is found, and the sample logs."""

import os

import numpy as np
import pytest

from mindformers_adaptive.lab.logs import FORMATS, read_log
from tests.conftest import ROOT

LOGS = ROOT / "tests" / "lab" / "samples"
MINDFORMERS = (LOGS / "mindformers_1_9_cpu.log").read_text(encoding="utf-8").splitlines()
MEGATRON = (LOGS / "megatron_gpt2_n4.log").read_text(encoding="utf-8").splitlines()
DEEPSPEED = (LOGS / "deepspeed_overflow.log").read_text(encoding="utf-8").splitlines()


def write(tmp_path, content, name="run.log"):
    log = tmp_path / name
    log.write_bytes(content if isinstance(content, bytes) else "".join(f"{line}\n" for line in content).encode())
    return log


def test_several_ranks_lines_of_a_step_are_one_step(tmp_path):
    # Above and below those of the first rank.
    other_rank = [line.replace("loss:[", f"loss:[{'9-'[n % 2]}") for n, line in enumerate(MINDFORMERS)]
    mixed = [line for pair in zip(MINDFORMERS, other_rank, strict=True) for line in pair]
    run, alone = read_log(write(tmp_path, mixed)), read_log(write(tmp_path, MINDFORMERS))
    assert run.loss_scale.tolist() == alone.loss_scale.tolist()
    assert (run.step.tolist(), run.overflow.tolist()) == (alone.step.tolist(), alone.overflow.tolist())
    assert (run.lines_read, run.lines_used) == (64, 64)
    (note,) = (note for note in run.notes if "were merged" in note)
    assert note.startswith("32 line(s) said the same of a step's overflow and scale as another and were merged")
    assert "32 of them have another loss. If they are of another run, read each run from a file of its own." in note


def test_ranks_that_are_some_steps_apart_are_merged_too(tmp_path):
    mixed = [*MINDFORMERS[:5], *MINDFORMERS[:4], *MINDFORMERS[5:]]
    run = read_log(write(tmp_path, mixed))
    assert (len(run), run.skipped_steps) == (32, 11)
    assert [note for note in run.notes if note.startswith("4 line(s) of other ranks")]


def test_a_restart_supersedes_the_steps_of_the_earlier_attempt(tmp_path):
    # After step 32 the run goes on from step 17, where nothing overflows any more.
    again = [line.replace("cond: True", "cond: False") for line in MINDFORMERS[16:20]]
    run = read_log(write(tmp_path, [*MINDFORMERS, *again]))
    assert run.step.tolist() == list(range(1, 21))
    # Steps 1 to 16 had 8 skips; step 19 no longer counts.
    assert run.skipped_steps == 8
    assert [note for note in run.notes if "run.log:33: the run goes back from step 32 to step 17; what 16" in note]


def test_files_of_one_run_are_read_one_after_the_other(tmp_path):
    first, second = write(tmp_path, MINDFORMERS[:20], "1.log"), write(tmp_path, MINDFORMERS[20:], "2.log")
    run, whole = read_log([first, str(second)]), read_log(LOGS / "mindformers_1_9_cpu.log")
    assert (run.name, run.files) == ("1.log", (str(first), str(second)))
    assert run.loss_scale.tolist() == whole.loss_scale.tolist()


@pytest.mark.parametrize("lines", [MINDFORMERS, MEGATRON, DEEPSPEED], ids=["mindformers", "megatron", "deepspeed"])
def test_colours_line_ends_and_foreign_bytes_change_nothing(tmp_path, lines):
    plain = read_log(write(tmp_path, lines))
    dressed = b"".join(b"\x1b[32m" + line.encode() + b"\x1b[0m\r\n\xff\xfe foreign\r\n\r\n" for line in lines)
    run = read_log(write(tmp_path, dressed))
    assert run.loss_scale.tolist() == plain.loss_scale.tolist()
    assert run.overflow.tolist() == plain.overflow.tolist()
    assert (run.lines_read, run.lines_used, run.lines_ignored) == (3 * len(lines), len(lines), 2 * len(lines))
    assert f"{len(lines)} line(s) have bytes that are not UTF-8." in run.notes


def test_a_torn_line_is_a_problem_with_its_place_and_its_step_is_missing(tmp_path):
    torn = [*MINDFORMERS[:9], MINDFORMERS[9][:-120], *MINDFORMERS[10:]]
    run = read_log(write(tmp_path, torn))
    assert 10 not in run.step
    assert (run.lines_read, run.lines_used, run.lines_ignored, len(run.problems)) == (32, 31, 1, 1)
    assert "run.log:10: looks like a step's line" in run.problems[0]


def test_of_two_lines_written_into_each_other_the_whole_one_is_used(tmp_path):
    mixed = [*MINDFORMERS[:9], MINDFORMERS[9][:-120] + MINDFORMERS[10], *MINDFORMERS[11:]]
    run = read_log(write(tmp_path, mixed))
    assert (10 in run.step, 11 in run.step) == (False, True)
    assert (run.lines_used, len(run.problems)) == (31, 1)
    two = read_log(write(tmp_path, [MEGATRON[0] + MEGATRON[1], *MEGATRON[2:]]))
    assert (two.skipped_steps, two.lines_used, two.problems) == (19, 19, ())


@pytest.mark.parametrize("lines", [MINDFORMERS, MEGATRON, DEEPSPEED], ids=["mindformers", "megatron", "deepspeed"])
def test_a_log_may_end_anywhere_in_a_line_without_a_wrong_number(tmp_path, lines):
    whole = read_log(write(tmp_path, lines))
    start = "".join(f"{line}\n" for line in lines[:-1]).encode()
    for length in range(1, len(lines[-1])):
        run = read_log(write(tmp_path, start + lines[-1][:length].encode()))
        # What the cut line still told is told as the whole log tells it.
        same = min(len(run), len(whole)) if lines is not DEEPSPEED else 2
        assert run.loss_scale[:same].tolist() == whole.loss_scale[:same].tolist(), length
        assert run.overflow[:same].tolist() == whole.overflow[:same].tolist(), length
        assert [note for note in run.notes if "the log ends in the middle of a line" in note]


def test_a_number_that_a_cut_may_have_shortened_is_not_used(tmp_path):
    shortened = DEEPSPEED[1].removesuffix("8")
    run = read_log(write(tmp_path, (DEEPSPEED[0] + "\n" + shortened).encode()))
    assert (run.skipped_steps, len(run.problems)) == (1, 1)
    scale = "[INFO] Epoch:[  1/  1], step:[    4/  125], loss:[2.2/2.2], time:5.2 ms, overflow cond: True, loss_scale: "
    with pytest.raises(ValueError, match="there is none"):
        read_log(write(tmp_path, (scale + "2684.").encode()), "mindformers")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"no step here\n" * 3, b'{"json": 1}\n'])
def test_a_file_without_steps_is_refused_with_what_was_looked_for(tmp_path, content):
    log = write(tmp_path, content)
    with pytest.raises(
        ValueError, match=r"must have lines of steps, but in .*run\.log \(\d lines?\) there is none"
    ) as error:
        read_log(log)
    assert all(f"{name}: " in str(error.value) for name in FORMATS)
    with pytest.raises(ValueError, match=r"Looked for: megatron: \" iteration N/ M"):
        read_log(log, "megatron")


def test_the_format_may_be_named(tmp_path):
    both = write(tmp_path, [*MEGATRON, *MINDFORMERS])
    assert read_log(both).log_format == "megatron"
    assert read_log(both, "mindformers").skipped_steps == 11


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, r"'path' must be a path or an iterable of paths, but got 3 of type int"),
        (([3],), TypeError, r"'path' must be a path or an iterable of paths, but got 3 of type int"),
        (([],), ValueError, r"'path' must name at least one log, but got none"),
        (("run.log", 3), TypeError, r"'format' must be text, but got 3 of type int"),
        (("run.log", "csv"), ValueError, r"'format' must be one of \('jsonl', .*, but got 'csv'"),
        (("no/such.log",), FileNotFoundError, r"must be a file that can be read, but: No such file .*'no/such.log'"),
        ((os.curdir,), IsADirectoryError, r"must be a file that can be read, but: Is a directory"),
    ],
)
def test_bad_arguments_and_paths_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        read_log(*arguments)


def test_the_format_is_found_in_the_second_of_two_lines_written_into_each_other(tmp_path):
    mixed = MINDFORMERS[0].replace("8388608.0", "0.0") + MINDFORMERS[1]
    assert read_log(write(tmp_path, [mixed])).step.tolist() == [1, 2]


def test_steps_that_go_back_again_and_again_cannot_be_placed(tmp_path):
    again = [line.replace("8388608.0", f"{2**place}.0") for place in range(30) for line in MINDFORMERS[:4]]
    run = read_log(write(tmp_path, again))
    assert (len(run), run.lines_used, run.lines_superseded) == (4, 120, 116)
    assert "The run goes back 29 times in all." in run.notes
    assert [note for note in run.notes if note.startswith("116 step(s) cannot be placed: later lines give their")]
    assert len(run.notes) < 8


def test_lines_of_another_system_are_counted_and_named(tmp_path):
    run = read_log(write(tmp_path, [*MINDFORMERS, *MEGATRON, *DEEPSPEED]))
    assert run.log_format == "mindformers"
    for name, count in (("megatron", len(MEGATRON)), ("deepspeed", len(DEEPSPEED))):
        named = f"{count} line(s) are of another format, {name}, and were ignored; format='{name}' reads them instead."
        assert named in run.notes
    # Megatron-DeepSpeed prints the lines of both.
    assert not [note for note in read_log(write(tmp_path, [*MEGATRON, *DEEPSPEED])).notes if "format" in note]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_log_with_a_byte_order_mark_is_read(tmp_path, encoding):
    text = "".join(f"{line}\r\n" for line in MINDFORMERS)
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    run = read_log(write(tmp_path, mark + text.encode(encoding)))
    plain = read_log(LOGS / "mindformers_1_9_cpu.log")
    assert run.loss_scale.tolist() == plain.loss_scale.tolist()
    assert (run.lines_read, run.lines_used) == (32, 32)
    assert not [note for note in run.notes if "UTF-8" in note]


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
