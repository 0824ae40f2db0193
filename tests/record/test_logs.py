"""The reader of training logs understands the lines of each format, and copes with damaged, mixed and foreign lines."""

import gzip
import json
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.record.log_formats import FORMATS
from mindformers_adaptive.record.logs import read_log, run_of_record
from mindformers_adaptive.record.step import COLUMNS, FIELDS, Step, field_descriptions
from mindformers_adaptive.record.writer import RunRecord
from mindformers_adaptive.text.files import json_text
from tests.conftest import ROOT
from tests.record.log_writers import (
    MEGATRON_DEEPSPEED,
    megatron_line,
    mindformers_line,
    overflow_line,
    progress_line,
    read,
    record_line,
)

LOGS = ROOT / "tests" / "record" / "samples"
SAMPLES = {
    name: (LOGS / file).read_text(encoding="utf-8").splitlines(keepends=True)
    for name, file in (
        ("mindformers", "mindformers_1_9_cpu.log"),
        ("megatron", "megatron_gpt2_n4.log"),
        ("deepspeed", "deepspeed_overflow.log"),
    )
}
SAMPLES["jsonl"] = [record_line(step, step % 3 == 0, 8.0) for step in range(1, 9)]
SAMPLES["jsonl"] += ['{"missing_steps": 2, "first_step": 9, "last_step": 10}\n']


def assert_same(run, expected):
    for name in ("first", "last", "fewest", "most", "used", "after"):
        np.testing.assert_array_equal(getattr(run, name), getattr(expected, name))
    assert run.skipped_bounds == expected.skipped_bounds


# MindFormers' log line of step 3, an overflow with a loss scale of 32768 afterwards, in each version's format.
MINDFORMERS = {
    "0.3 to 0.7": "[INFO] 2023-07-11 10:47:36,427 [/root/mindformers/core/callback/callback.py:269] print_output_info: "
    "Epoch:[  1/  1], step:[    3/  125], loss:[2.500/2.244], time:507.205 ms, lr:[0.], overflow cond: True, "
    "loss_scale: 32768.0\n",
    "1.0 to 1.2": "2024-01-01 00:00:00,000 - mindformers[mindformers/core/callback/callback.py:318] - INFO - "
    "{ Epoch:[  1/  1], step:[    3/  125], loss:[2.500/2.244], per_step_time: 507ms, lr: 1e-05, "
    "overflow cond: True, loss_scale: 32768.0\n",
    "arrays of one element": "- INFO - { Epoch:[  1/  1], step:[    3/  125], loss: 2.500, per_step_time: 507ms, "
    "lr: [1.e-05], overflow cond: [ True], loss_scale: [32768.], global_norm: [nan]\n",
    "1.7 to 2.0, separate losses": "- INFO - { Epoch:[  1/  1], step:[    3/  125], loss:[2.500000/2.244000], "
    "lm_loss: 2.400000, load_balancing_loss: 0.100000, per_step_time: 507ms, lr: 1e-05, overflow cond: True, "
    "loss_scale: 32768.0, global_norm: [inf], train_throughput_per_npu: 2.849T\n",
}


@pytest.mark.parametrize("version", MINDFORMERS)
def test_each_version_of_mindformers_line_is_read(tmp_path, version):
    run = read(tmp_path, MINDFORMERS[version])
    assert (run.log_format, run.last.tolist(), run.skipped[-1]) == ("mindformers", [2, 3], True)
    assert (run.first_loss_scales, run.after[-1], run.column("loss")[-1]) == (None, 32768.0, 2.5)
    # A norm of NaN is read as inf, not as unknown.
    norm = run.column("gradient_norm")
    assert "norm" not in MINDFORMERS[version] if norm is None else norm[-1] == np.inf


def test_a_scale_in_eight_digits_is_the_float32_it_stands_for(tmp_path):
    run = read(
        tmp_path, *(mindformers_line(k, True, scale) for k, scale in ((1, "268435460.0"), (2, "[1.3421773e+08]")))
    )
    assert (run.used[1:].tolist(), run.first_loss_scales) == ([2.0**28], (2.0**28, 2.0**29))


def test_a_trainer_that_prints_no_scale_is_refused(tmp_path):
    pynative = (
        "- INFO - { step:[    1/  100], consumed_samples: 8, global_batch_size: 8, loss:   4.155150, "
        "per_step_time:    103ms, lr: 1.000000e-03, grad_norm:   1.500000, throughput:   0.10T }\n"
    )
    for text in (pynative, mindformers_line(1, False, "unavailable")):
        with pytest.raises(ValueError, match=r"must show the loss scale.*run\.log .*lines about steps: 1"):
            read(tmp_path, text)


def test_lines_of_other_monitors_are_no_problems(tmp_path):
    other = "- INFO - Epoch:[  1/  2], step:[    1/  100] local_norm: 0.5000\n"
    bar = "- INFO -    0.0% |      | 0.00600 samples/s/p  25 days, 2:07:47 }\n"
    validation = (
        " validation loss at iteration 1 | lm loss value: 4.2E-01 | \n  saving checkpoint at iteration       1\n"
    )
    for lines in ([mindformers_line(1, False, 8.0), bar, other], [megatron_line(1, 8.0), validation]):
        run = read(tmp_path, *lines)
        assert (run.lines_used, run.lines_ignored, run.problems) == (1, 2, ())


@pytest.mark.parametrize(
    "text",
    [
        megatron_line(1, 32768.0, 1),
        megatron_line(1, 32768.0, 1, prefix=" [2024-09-03 16:02:57] "),
        megatron_line(1, 32768.0, 1, prefix="[default7]: "),
        megatron_line(1, 32768.0, 1, end=MEGATRON_DEEPSPEED),
        # The log format of GPT-NeoX.
        " samples/sec: 16.5 | iteration        1/  320000 | elapsed time per iteration (ms): 1250.0 | learning rate: "
        "3.750E-07 | approx flops per GPU: 50.6TFLOPS | lm_loss: 2.5E+00 | loss scale: 32768.0 | number of skipped "
        "iterations:   1 | number of nan iterations:   0 |\n",
        # Megatron-LM's log format before 2020 has no colons and no number of skipped iterations.
        " iteration        1/  200000 | elapsed time per iteration (ms): 1250.0 | learning rate 1.500E-04 | "
        "lm loss 2.500000E+00 | loss scale 32768.0 |\n" + megatron_line(2, 16384.0, 1),
    ],
)
def test_each_variant_of_megatron_line_is_read(tmp_path, text):
    run = read(tmp_path, text)
    assert (run.log_format, run.last[0], run.problems) == ("megatron", 1, ())
    assert run.column("loss")[0] == 2.5


def test_a_falling_scale_outweighs_a_count_of_0(tmp_path):
    run = read(tmp_path, megatron_line(10, 1024.0), megatron_line(20, 256.0), megatron_line(30, 256.0))
    assert (run.skipped_bounds, (run.skipped | run.applied).any()) == ((0, 30), False)
    assert any(re.search(r"log:2: the scale fell .*no skipped step.* 1 line ", note) for note in run.notes)
    run = read(tmp_path, megatron_line(10, 1024.0), megatron_line(20, 256.0, 2), megatron_line(30, 256.0))
    assert (run.skipped | run.applied).tolist() == [True, False, True]


def test_the_0_of_megatron_deepspeed_says_nothing(tmp_path):
    run = read(tmp_path, *(megatron_line(step, 1.0, end=MEGATRON_DEEPSPEED) for step in (1, 2, 3)))
    assert (run.skipped_bounds, run.known_share) == ((0, 3), 0.0)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("[loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. ", "32768"),
        ("[stage3.py:2323:_overflow_clean_up] [deepscale] OVERFLOW! Rank 0 Skipping step. ", "32768.0"),
        ("[stage2.py:1387:step] [deepspeed] fp16 dynamic loss scale overflow! Rank 4 Skipping step. ", "32768"),
        ("[logging.py:69:log_dist] [Rank 0] Overflow detected. Skipping step. ", "32768.0"),
    ],
)
def test_each_wording_of_an_overflow_is_read(tmp_path, start, end):
    bar = " 14%|#4   | 378/2724 [13:58:09<86:18:35, 132.44s/it]"
    for prefix in ("", bar, bar + "\r"):
        line = f"{prefix}[2023-02-28 20:08:24,113] [INFO] {start}Attempted loss scale: 65536, reducing to {end}\n"
        run = read(tmp_path, line)
        assert (run.log_format, run.moves[0].before, run.skipped_bounds[0]) == ("deepspeed", 65536.0, 1)
        assert (run.moves[0].after, run.is_numbered, run.problems) == (32768.0, False, ())


@pytest.mark.parametrize("scale", [2**12, 2**40])
def test_lines_of_two_optimizers_are_refused_with_the_remedy(tmp_path, scale):
    first, second = ([overflow_line(it >> k, it >> (k + 1)) for k in range(12)] for it in (2**32, scale))
    with pytest.raises(ValueError, match=r"between two loss scales.* lines of one of"):
        read(tmp_path, *(line for pair in zip(first, second, strict=True) for line in pair))
    # One after the other, they are two attempts of a run.
    assert read(tmp_path, *first, *second).skipped_bounds[0] >= 12


def test_a_log_that_begins_late_does_not_count_old_skips(tmp_path):
    lines = progress_line(510, 8), overflow_line(4, 2), progress_line(520, 9)
    run = read(tmp_path, *lines)
    assert (run.first[0], run.last[-1]) == (501, 520)
    assert (run.skipped_up_to(1), run.skipped_bounds) == ((0, 10), (1, 11))


def test_overflows_after_the_last_number_leave_their_count_open(tmp_path):
    run = read(tmp_path, overflow_line(8, 4), progress_line(10, 1), overflow_line(4, 2), overflow_line(2, 1))
    assert (run.skipped_up_to(1), run.skipped_bounds[0], run.is_numbered) == ((1, 1), 3, False)
    assert run.skipped_bounds[1] > len(run)


def test_the_outputs_that_mindspore_prints_are_read(tmp_path):
    line = (
        "epoch: 1, current epoch percent: 1.000, step: {}, outputs are (Tensor(shape=[], dtype=Float32, value= 1.5), "
        "Tensor(shape=[], dtype=Bool, value= {}), Tensor(shape=[], dtype=Float32, value= {}))\n"
    )
    run = read(
        tmp_path, line.format(1, False, "1.67772e+07"), "epoch time: 1 ms\n", line.format(2, True, "8.38861e+06")
    )
    assert (run.log_format, run.skipped.tolist()) == ("mindspore", [False, True])
    assert run.column("loss").tolist() == [1.5, 1.5]
    assert (run.used[1], run.after.tolist()) == (2.0**24, [2.0**24, 2.0**23])
    # A loss scale that is no power of two stays as it is printed, and so does one that cannot be used.
    scales = ["3000", "inf", "0", "..."]
    run = read(tmp_path, *(line.format(step, False, scale) for step, scale in enumerate(scales, start=1)))
    assert run.after[:3].tolist() == [3000, np.inf, 0]
    assert np.isnan(run.after[3])


def test_samples_have_the_skips_of_their_flags_and_counts():
    run = read_log(LOGS / "mindformers_1_9_cpu.log")
    # The expected skipped steps were read by hand from the log lines with "overflow cond: True".
    assert run.last[run.skipped].tolist() == [1, 2, 3, 4, 5, 8, 11, 14, 19, 23, 31]
    assert run.used[1:9].tolist() == [2.0**k for k in (23, 22, 21, 20, 19, 19, 20, 19)]
    # MindFormers' own update cell halves the scale at the first overflow; hysteresis would have kept it.
    assert (np.isnan(run.used[0]), run.first_loss_scales) == (True, (2.0**23, 2.0**24))
    assert (run.lines_read, run.lines_used, run.problems) == (32, 32, ())
    assert run.column("loss")[0] == 4.155150
    run = read_log(LOGS / "megatron_gpt2_n4.log")
    # The log has 20 lines of 10 iterations each, with 10, 8, 1 and then 0 skipped iterations. The run started at 2^32
    # and tolerated its first overflow, but the log does not state this.
    assert run.fewest.tolist() == run.most.tolist() == [10, 8, 1] + [0] * 17
    assert (np.isnan(run.used[:3]).all(), run.first_loss_scales) == (True, (2.0**23, 2.0**33))
    assert run.known_share == 0.85
    run = read_log(LOGS / "deepspeed_overflow.log")
    # The log says "step=10, skipped=6", but has lines for only four of the six skipped steps.
    assert (len(run), run.skipped_bounds, run.known_share) == (10, (6, 6), 0.0)
    assert [move.before for move in run.moves] == [65536, 65536, 32768, 16384]
    assert np.isnan(run.after).all()


def test_lines_of_several_ranks_are_one_step(tmp_path):
    lines = SAMPLES["mindformers"]
    other = [line.replace("loss:[", f"loss:[{'9-'[n % 2]}") for n, line in enumerate(lines)]
    mixed = [line for pair in zip(lines, other, strict=True) for line in pair]
    late = [*lines[:5], *lines[:4], *lines[5:]]
    for text, merged in ((mixed, "Merged: 32 lines .* 32 .* another loss"), (late, "Merged: 4 lines ")):
        run = read(tmp_path, *text)
        assert_same(run, read(tmp_path, *lines))
        assert any(re.match(merged, note) for note in run.notes)


def test_a_restart_supersedes_the_steps_of_the_earlier_attempt(tmp_path):
    lines = SAMPLES["mindformers"]
    again = [line.replace("cond: True", "cond: False") for line in lines[16:20]]
    run = read(tmp_path, *lines, *again)
    # Steps 1 to 16 have 8 skips. Later lines supersede the skip at step 19, so it no longer counts.
    assert (run.last.tolist(), int(run.skipped.sum()), run.lines_superseded) == (list(range(1, 21)), 8, 16)
    assert [note for note in run.notes if "run.log:33: the run restarts at step 17 (it had reached 32)" in note]
    many = [line.replace("8388608.0", f"{2**k}.0") for k in range(30) for line in lines[:4]]
    run = read(tmp_path, *many)
    assert (len(run), run.lines_superseded, len(run.notes) < 9) == (4, 116, True)
    assert "The run restarts 29 times in all." in run.notes


def test_long_log_is_restarted_where_lines_were_put_away(tmp_path):
    lines = [record_line(step) for step in range(1, 10_001)]
    again = [record_line(step, step == 300, 4.0) for step in range(300, 310)]
    run = read(tmp_path, *lines, *again)
    assert (len(run), run.skipped_bounds, run.used[298:301].tolist()) == (309, (1, 1), [1024.0, 4.0, 4.0])


def test_files_of_one_run_are_read_one_after_the_other(tmp_path):
    names = [tmp_path / "1.log", tmp_path / "2.log"]
    for name, part in zip(names, (SAMPLES["mindformers"][:20], SAMPLES["mindformers"][20:-1]), strict=True):
        name.write_text("".join(part))
    with open(names[1], "a") as file:
        file.write("Epoch:[ 1/ 1], step:[ 32/ 32], loss: torn\n")
    run = read_log([names[0], str(names[1])])
    assert (run.name, run.files, run.last[-1]) == ("1.log", tuple(map(str, names)), 31)
    assert run.problems[0].startswith(f"{names[1]}:12: looks like a step's line")


@pytest.mark.parametrize("name", ["mindformers", "megatron", "deepspeed"])
def test_colours_line_ends_and_foreign_bytes_change_nothing(tmp_path, name):
    lines = SAMPLES[name]
    for end in (b"\r\n", b"\n", b"\r"):
        dressed = [
            b"\x1b[32m" + line.strip("\n").encode() + b"\x1b[0m" + end + b"\xff\xfe foreign" + end for line in lines
        ]
        run = read(tmp_path, b"first" + end, *dressed)
        assert_same(run, read(tmp_path, *lines))
        assert (run.lines_used, run.lines_ignored) == (len(lines), len(lines) + 1)
        assert any(f"{len(lines)} line" in note and "not UTF-8" in note for note in run.notes)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_log_with_a_byte_order_mark_is_read(tmp_path, encoding):
    text = "".join(SAMPLES["mindformers"]).replace("\n", "\r\n")
    run = read(tmp_path, (b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding))
    assert_same(run, read(tmp_path, *SAMPLES["mindformers"]))


def test_a_compressed_log_is_read(tmp_path):
    content = gzip.compress("".join(SAMPLES["mindformers"]).encode())
    assert_same(read(tmp_path, content), read(tmp_path, *SAMPLES["mindformers"]))
    with pytest.raises(OSError, match=r"can be read.*run\.log"):
        read(tmp_path, content[:60])


def test_a_torn_line_leaves_a_step_of_which_nothing_is_known(tmp_path):
    lines = SAMPLES["mindformers"]
    for torn in ([lines[9][:-140] + "\n"], [lines[9][:-140] + lines[10]]):
        run = read(tmp_path, *lines[:9], *torn, *lines[9 + len(torn[0].split("Epoch")) - 1 :])
        assert (run.last.tolist(), run.skipped_bounds) == (list(range(1, 33)), (11, 12))
        assert np.flatnonzero(~(run.skipped | run.applied)).tolist() == [9]
        assert "run.log:10: looks like a step's line" in run.problems[0]
    two = read(tmp_path, SAMPLES["megatron"][0].strip("\n") + SAMPLES["megatron"][1], *SAMPLES["megatron"][2:])
    assert (two.skipped_bounds, two.lines_used, two.problems) == ((19, 19), 19, ())


@pytest.mark.parametrize("name", ["mindformers", "megatron", "deepspeed"])
def test_a_log_may_end_anywhere_in_a_line(tmp_path, name):
    *lines, last = SAMPLES[name]
    whole = read(tmp_path, *lines, last)
    for length in range(1, len(last) - 1, 5):
        run = read(tmp_path, *lines, last[:length])
        same = min(len(run.last), len(whole.last)) - 1 if name != "deepspeed" else 0
        np.testing.assert_array_equal(run.used[:same], whole.used[:same], str(length))
        assert run.fewest[:same].tolist() == whole.fewest[:same].tolist(), length
        assert any(re.search(rf"run\.log:{len(lines) + 1}: .* ends .*middle of a line", note) for note in run.notes)


@pytest.mark.parametrize("content", ["", "\n\n", "no step here\n" * 3, '{"json": 1}\n'])
def test_file_without_steps_is_refused_with_what_was_looked_for(tmp_path, content):
    with pytest.raises(ValueError, match=r"No line of .*run\.log \(\d lines?\)") as error:
        read(tmp_path, content)
    assert all(f"{name}: " in str(error.value) for name in FORMATS)
    with pytest.raises(ValueError, match=r"Looked for:\n  megatron: .* iteration N/ M"):
        read(tmp_path, content, format="megatron")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("megatron", megatron_line(7, 8.0).replace("lm loss", "lm \nloss")),
        ("mindformers", mindformers_line(7, True, 8.0).replace("lr", "\nlr")),
        ("jsonl", '{"step": 7, "overflow": "?", "loss_scale": 8}\n'),
        ("deepspeed", progress_line(7, 8)),
    ],
)
def test_a_refusal_quotes_the_first_line_that_nearly_fits(tmp_path, name, line):
    for format in (None, name):
        with pytest.raises(ValueError, match=r"(?s)nearly fits .*run\.log:2: .*7"):
            read(tmp_path, "nothing\n", line, format=format)


def test_the_format_may_be_named(tmp_path):
    both = [*SAMPLES["megatron"], *SAMPLES["mindformers"]]
    assert read(tmp_path, *both).log_format == "megatron"
    assert read(tmp_path, *both, format="mindformers").skipped_bounds == (11, 11)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, r"'path' must be a path .*got 3 of type int"),
        (([3],), TypeError, r"'path' must be a path .*got 3 of type int"),
        (([],), ValueError, r"'path' must name .*got none"),
        (("run.log", 3), TypeError, r"'format' must be one of 'jsonl', .*got 3 of type int"),
        (("run.log", "csv"), ValueError, r"'format' must be one of 'jsonl', .*, but got 'csv'"),
        (("no/such.log",), FileNotFoundError, r"must be a file .*: No such file .*'no/such\.log'"),
        ((os.curdir,), IsADirectoryError, r"must be a file .*: Is a directory.*'\.'"),
    ],
)
def test_bad_arguments_and_paths_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        read_log(*arguments)


def test_steps_that_are_missing_are_named(tmp_path):
    run = read(tmp_path, *(mindformers_line(step, False, 1024.0) for step in (1, 2, 3, 7, 8)))
    assert run.last.tolist() == [1, 2, 3, 7, 8]
    assert [note for note in run.notes if "log:4: the log lacks 3 steps" in note and "4 to 6" in note]


def test_a_scale_that_no_step_can_reach_is_inferred_anew(tmp_path):
    for scale, said in ((64.0, "64"), (2.0**20, "1.04858e\\+06")):
        run = read(tmp_path, mindformers_line(1, False, 1024.0), mindformers_line(2, False, scale))
        assert np.isnan(run.used).all()
        assert re.search(rf"log:2: an applied step .*scale 1024 .*to {said}\. ", run.notes[0])
    lines = [mindformers_line(4 * k, False, scale) for k, scale in ((1, 2.0**10), (2, 2.0**11), (3, 2.0**20))]
    # No rule raises a loss scale from 2^11 to 2^20 in four steps, so this rise does not show which of these steps were
    # skipped. The overflow flag of the last step shows that it was applied. So at most three of the steps were skipped.
    assert read(tmp_path, *lines).so_far[1::2].tolist() == [[0, 3], [0, 6], [0, 9]]


# The run record that this package writes.


def test_what_the_package_writes_is_read(tmp_path):
    written = RunRecord(tmp_path / "record.jsonl")
    written.resume(last_step=0)
    values = {"overflow": True, "loss_scale": float("inf"), "next_loss_scale": float("inf"), "loss": float("nan")}
    written.append([{"step": 1, **values}, {"step": 4, **values, "loss_scale": 8.0, "next_loss_scale": 4.0}])
    run = read_log(written.path)
    assert (run.first.tolist(), run.last.tolist()) == ([1, 2, 4], [1, 3, 4])
    assert (run.used[[0, 2]].tolist(), run.problems) == ([float("inf"), 8.0], ())
    # The record has no count of skipped steps, so it does not show whether the two missing steps were skipped.
    assert run.skipped_bounds == (2, 4)
    assert run.column("loss")[0] == np.inf


def test_every_field_of_the_schema_has_a_meaning(tmp_path):
    descriptions = field_descriptions()
    assert list(descriptions) == list(Step.__struct_fields__)
    assert all(descriptions.values())
    flags = {"dropped_by_norm", "resumed", "saved", "applied_bad_loss"}
    values = dict.fromkeys(FIELDS, 3) | {"step": 1, "overflow": False} | dict.fromkeys(flags, True)
    run = read(tmp_path, json_text({"run": 7, **values, "novelty": {"step": [1]}}) + "\n")
    assert {name: column.tolist() for name, column in run.columns.items()} == {
        name: [1.0 if name in flags else 3.0] for name in COLUMNS
    }
    assert [run.steps_where(flag).tolist() for flag in flags] == [[1]] * 4
    assert (run.skipped_bounds, run.notes) == ((0, 0), ())
    for content in ([values], [{**values, "run": 7}]):
        assert run_of_record(content).column("loss").tolist() == [3.0]


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "loss": 2.5, "overfl\n',
        '{"step": "x", "overflow": false, "loss_scale": 1.0}\n',
        '{"step": 2, "overflow": "no flag", "loss_scale": 1.0}\n',
        '{"step": 2, "overflow": false}\n',
        '{"step": -2, "overflow": false, "loss_scale": 1.0}\n',
        '{"step": 1' + "0" * 5000 + ', "overflow": false, "loss_scale": 1.0}\n',
        '{"missing_steps": 3, "first_step": 2, "last_step": 2}\n',
        '{"missing_steps": "1", "first_step": 2, "last_step": 2}\n',
    ],
)
def test_a_line_that_is_no_record_is_a_problem_with_its_place(tmp_path, torn):
    run = read(tmp_path, record_line(1), torn, record_line(3))
    assert (run.last.tolist(), run.skipped_bounds, run.lines_ignored) == ([1, 2, 3], (0, 1), 1)
    assert len(run.problems) == 1
    assert "run.log:2: looks like a step's line" in run.problems[0]


def test_flags_are_of_the_steps_on_whose_lines_they_stand(tmp_path):
    run = read(tmp_path, *(record_line(step, saved=step in (0, 4)) for step in (0, 1, 4, 5)), record_line(5, True))
    # A line of step 0 is about no step of the run. The two lines of step 5 disagree, so the run restarted there.
    assert run.last.tolist() == [1, 4, 5]
    assert [run.steps_where(flag).tolist() for flag in ("saved", "resumed", "applied_bad_loss")] == [[4], [5], []]
    assert run.column("applied_bad_loss") is None


def test_a_log_of_step_0_alone_has_no_step(tmp_path):
    with pytest.raises(ValueError, match=r"No line of .*run\.log \(1 line\) states a step"):
        read(tmp_path, record_line(0))
    with pytest.raises(ValueError, match="at least 1 step"):
        run_of_record([{"step": 0, "overflow": False, "loss_scale": 4.0}])


def test_a_value_that_cannot_be_is_unknown(tmp_path):
    line = {"step": 1, "overflow": True, "loss_scale": 0, "next_loss_scale": 8.0, "loss": "nan"}
    line |= {"largest_gradient": "many", "scale_window": 0}
    run = read(tmp_path, json.dumps(line) + "\n", record_line(2, True, 8.0, gradient_norm="inf"))
    assert (run.skipped_bounds, run.used[1], run.column("loss")[0]) == ((2, 2), 8.0, np.inf)
    assert (run.columns.keys(), run.column("gradient_norm")[1]) == (
        {"loss", "next_loss_scale", "gradient_norm"},
        np.inf,
    )


def test_a_flag_that_no_line_names_follows_from_the_counts(tmp_path):
    flags = (np.random.default_rng(3).random(100) < 0.3).tolist()
    counts = np.cumsum(flags).tolist()
    for scale in ("null", "8.0"):
        lines = [
            record_line(step, skipped_steps=count, next_loss_scale=512.0).replace("1024.0", scale)
            for step, count in enumerate(counts, start=1)
        ]
        run = read(tmp_path, *(line.replace("false", "null") for line in lines))
        assert (run.skipped.tolist(), run.skipped_bounds) == (flags, (counts[-1],) * 2)


@pytest.mark.parametrize(
    ("counts", "bounds"),
    # Each case has the counter of skipped steps after step 1 and after step 6. In the first three cases the counter is
    # wrong: it decreases, exceeds the number of steps, or leaves out the skipped step 6. The last case is right.
    [((5, 2), (1, 5)), ((0, 9), (1, 5)), ((3, 3), (1, 5)), ((0, 3), (3, 3))],
)
def test_a_count_that_cannot_be_is_not_relied_on(tmp_path, counts, bounds):
    first = record_line(1, False, 8.0, skipped_steps=counts[0])
    last = record_line(6, True, 8.0, skipped_steps=counts[1], next_loss_scale=8.0)
    gap = json.dumps({"missing_steps": 4, "first_step": 2, "last_step": 5}) + "\n"
    run = read(tmp_path, first, gap, last)
    assert (len(run), run.skipped_bounds) == (6, bounds)


def test_record_begins_at_a_resume_and_ends_in_a_gap(tmp_path):
    late = '{"missing_steps": 6, "first_step": 101, "last_step": 106}\n', record_line(107, skipped_steps=12)
    run = read(tmp_path, *late)
    # The number of skipped steps before step 101 is not known.
    assert (run.first.tolist(), run.last.tolist(), run.skipped_bounds) == ([101, 107], [106, 107], (0, 6))
    run = read(tmp_path, record_line(1), '{"missing_steps": 3, "first_step": 2, "last_step": 4}\n')
    assert (run.last.tolist(), run.skipped_bounds) == ([1, 4], (0, 3))


def test_no_number_fills_the_memory(tmp_path):
    first = record_line(1, skipped_steps=0)
    for step, length in ((50_000, 50_000), (2**50, 2)):
        gap = json.dumps({"missing_steps": step - 2, "first_step": 2, "last_step": step - 1}) + "\n"
        for gaps in ([gap], []):
            run = read(tmp_path, first, *gaps, record_line(step, True, skipped_steps=300))
            assert len(run) in (length, 3)
            assert (run.skipped_bounds == (300, 300)) == (step < 2**50)


def test_of_several_formats_the_first_is_taken_and_named(tmp_path):
    lines = [record_line(step, gradient_format=name) for step, name in ((1, None), (2, "bfloat16"), (3, "float16"))]
    assert (read(tmp_path, *lines[:2]).gradient_format.name, read(tmp_path, *lines[:2]).notes) == ("bfloat16", ())
    assert "several formats of gradients, bfloat16, float16: the first one is taken" in read(tmp_path, *lines).notes[0]
    for wrong in ("float17", {"largest": 2}, [16]):
        with pytest.raises(ValueError, match=r"run\.log:2: 'gradient_format' must"):
            read(tmp_path, record_line(1), record_line(2, gradient_format=wrong))


# Whatever a log contains, the reader raises only the documented error and counts every line.

PIECES = st.sampled_from(
    ["", "9" * 25, "999999", "0", "-1", "nan", "inf", "1e400", "\x1b[31m", "\r", "|", "step:[", "iteration 7/ 9 |", "{"]
)


@st.composite
def mutilated(draw, lines):
    """Drop, repeat, move and cut log lines at random, and replace parts of the lines by random text or bytes."""
    result = []
    for line in draw(st.lists(st.sampled_from(lines), min_size=1, max_size=20)):
        line = line.strip("\n")
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, len(line)))
            end = draw(st.integers(start, min(start + 12, len(line))))
            line = line[:start] + draw(PIECES | st.text(max_size=3)) + line[end:]
        end = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"", b"\xff\n"]))
        result.append(line.encode("utf-8", "surrogatepass") + end)
    return b"".join(result)


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=50)
@given(data=st.data())
def test_mutilated_logs_raise_only_value_errors(name, data, tmp_path_factory):
    log = tmp_path_factory.getbasetemp() / f"mutilated_{name}.log"
    log.write_bytes(data.draw(mutilated(SAMPLES[name][:12])))
    for chosen in (None, name):
        try:
            run = read_log(log, chosen)
        except ValueError as error:
            assert str(error).startswith(("The log must", "No line of"))  # noqa: PT017
            continue
        assert run.lines_read == run.lines_used + run.lines_ignored
        assert all(f"mutilated_{name}.log:" in problem for problem in run.problems)
        assert not (run.used < 0).any()
        fewest, most = run.skipped_bounds
        assert 0 <= fewest <= most
        assert (run.fewest <= run.most).all()
        assert run.is_numbered is False or most <= len(run)
        if len(run.stated_scales) or run.is_rounded:
            analyze(run).text(details=True)


def test_a_rounded_scale_is_known_if_one_power_of_two_fits(tmp_path):
    stated = [(0.5, 0), (0.25, 1), (0.125, 1), (0.0625, 1), (0.03125, 1), (0.0625, 0), (0.25, 0)]
    lines = [megatron_line(step, scale, skipped) for step, (scale, skipped) in enumerate(stated, start=1)]
    printed = [line.partition("loss scale: ")[2][:3] for line in lines]
    assert printed == ["0.5", "0.2", "0.1", "0.1", "0.0", "0.1", "0.2"]
    run = read(tmp_path, *lines)
    np.testing.assert_array_equal(run.after, [0.5, 0.25, np.nan, np.nan, np.nan, np.nan, 0.25])
    # From 0.5 to 0.25, from there to at most 0.125, and from at least 0.0625 to less than 0.05.
    assert (run.skipped_bounds, run.halvings) == ((4, 4), 3.0)
    # Without a power of two as an exact scale, no rounded scale is known.
    run = read(tmp_path, megatron_line(1, 1000.0), megatron_line(2, 0.25, 1), megatron_line(3, 9.5))
    np.testing.assert_array_equal(run.after, [1000.0, np.nan, np.nan])
    assert "1000; it rounds others." in analyze(run).text()
