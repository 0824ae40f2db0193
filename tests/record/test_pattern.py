"""A regular expression with named groups reads the log of any program, and says what is wrong with it."""

import os

import pytest

from mindformers_adaptive.gradients.batch_file import read_batch
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.untrusted import read_yaml
from tests.record.log_writers import megatron_line, mindformers_line, read

# For each program a pattern, lines of steps 100, 200 and 300, and the bounds on skipped steps. The loss scale halves
# between steps 100 and 200.
PROGRAMS = {
    "apex, of perhaps two ranks": (
        r"\[ *\d+\] +(?P<step>\d+) \|\||Gradient (?P<overflow>overflow).* (?P<loss_scale>[-+.\de]+)$",
        "[  0]     100 || B: 5.4 | C: 3.5 | T: 17.6 || ETA: 19 days, 23:50:39 || timer: 0.298\n"
        + "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n" * 2
        + "[  0]     200 || B: 5.3 | C: 3.4 | T: 17.5 || ETA: 19 days, 22:16:54 || timer: 1.842\n"
        "[  0]     300 || B: 5.3 | C: 3.3 | T: 17.4 || ETA: 19 days, 22:15:54 || timer: 0.331\n",
        (1, 2),
    ),
    "insightface": (
        r"Loss (?P<loss>\S+) .*Global Step: (?P<step>\d+) +Fp16 Grad Scale: +(?P<loss_scale>\d+)",
        "".join(
            f"Training: 2023-03-14 09:08:43,293-Speed 2178.40 samples/sec   Loss 5.5000   LearningRate 0.001000   "
            f"Epoch: 0   Global Step: {step}   Fp16 Grad Scale: {scale}   Required: 194 hours\n"
            for step, scale in ((100, 65536), (200, 32768), (300, 32768))
        ),
        (0, 300),
    ),
    "yolox": (
        r"step: \[(?P<step>\d+)/\d+\], loss: (?P<loss>[\d.]+), overflow: (?P<overflow>\w+), scale: (?P<loss_scale>\d+)",
        "".join(
            f"2021-12-24 16:16:14,099:INFO:epoch: 0 step: [{step}/1848], loss: 11.5, overflow: {flag}, scale: {scale}, "
            "lr: 0.000044, time: 303.65\n"
            for step, flag, scale in ((100, False, 65536), (200, True, 32768), (300, False, 32768))
        ),
        (1, 298),
    ),
    "own script": (
        r"^(?P<step>[\d,]+)\t(?P<loss_scale>[\d,]+)\t(?P<skipped>\d+)$",
        "100\t65,536\t0\n200\t32,768\t1\n300\t32,768\t0\n",
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_is_read_by_its_pattern(tmp_path, name):
    pattern, text, bounds = PROGRAMS[name]
    run = read(tmp_path, text, pattern=pattern)
    assert (run.log_format, run.last[-1], run.stated_scales[-1]) == ("pattern", 300, 32768.0)
    assert (run.skipped_bounds, run.problems) == (bounds, ())


def test_numbers_that_count_from_the_start_are_named_so(tmp_path):
    lines = [f"{step} 8 {step // 3}\n" for step in range(1, 10)]
    run = read(tmp_path, *lines, pattern=r"(?P<step>\d+) (?P<loss_scale>\d+) (?P<total_skipped>\d+)")
    assert (run.skipped.tolist(), run.notes) == ([step % 3 == 0 for step in range(1, 10)], ())
    run = read(tmp_path, *lines, pattern=r"(?P<step>\d+) (?P<loss_scale>\d+) (?P<skipped>\d+)")
    assert (run.skipped_bounds, run.notes[0].endswith("Name the group 'total_skipped'.")) == ((0, 9), True)


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        ("(?P<step>", ValueError, r"must be a regular expression"),
        (r"(?P<step>\d+)", ValueError, r"at least one of \(\?P<loss_scale>"),
        (r"(?P<loss_scale>\d+)", ValueError, r"must have the group \(\?P<step>"),
        (r"\d+", ValueError, r"has no group\. Add"),
        (r"(?P<step>\d+)(?P<overflow>\d)(?P<lr>\d)", ValueError, r"only the groups .*but has lr"),
        (7, TypeError, r"must be text, but got 7"),
        (r"iter (?P<step>\d+) (?P<overflow>\d)", ValueError, r"No line of .* states a step"),
    ],
)
def test_a_wrong_pattern_is_refused_with_the_remedy(tmp_path, pattern, error, message):
    with pytest.raises(error, match=message):
        read(tmp_path, "x" + "1" * 60 + "\n", pattern=pattern)


def test_a_word_that_is_no_flag_is_a_problem_of_its_line(tmp_path):
    pattern = r"(?P<step>\d+) (?P<overflow>\w+) (?P<loss_scale>\S+)"
    run = read(tmp_path, "1 True 8\n2 maybe 8\n3 no 1e400\n4 no 8\n", pattern=pattern)
    assert (run.skipped_bounds, len(run.problems)) == ((1, 2), 1)
    assert "group 'overflow' must be a word" in run.problems[0]


def test_format_and_pattern_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        read_log(tmp_path / "run.log", "jsonl", r"(?P<step>\d+) (?P<loss_scale>\d+)")


def test_each_command_takes_a_pattern(run_program, tmp_path):
    pattern, log, other = PROGRAMS["yolox"][0], tmp_path / "train.log", tmp_path / "other.log"
    for file in (log, other):
        file.write_text("".join(f"step: [{n}/99], loss: 1.5, overflow: False, scale: 8\n" for n in range(1, 50)))
    commands = [["compare", log], ["analyze", log], ["plot", log, other, tmp_path / "a.png"]]
    for command in [*commands, ["report", log, "--output", tmp_path / "a.html"]]:
        code, _, error = run_program(*map(str, command), "--pattern", pattern)
        assert (code, error) == (0, "")
    code, _, error = run_program("analyze", str(log), "--pattern", "(")
    assert (code, "must be a regular expression" in error) == (2, True)


@pytest.mark.parametrize("name", ["megatron", "mindformers"])
def test_a_scale_beyond_float64_costs_no_more_than_its_line(tmp_path, name):
    line = megatron_line if name == "megatron" else lambda step, scale: mindformers_line(step, False, scale)
    texts = [line(step, 8.0) for step in range(1, 6)]
    texts[2] = texts[2].replace("scale: 8.0", "scale: 1e400")
    assert read(tmp_path, *texts).last.tolist() == [1, 2, 3, 4, 5]


def test_pipes_and_devices_are_refused_at_once(run_program, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for file in (str(tmp_path / "pipe.yaml"), "/dev/zero"):
        commands = [[command, file] for command in ("analyze", "compare", "plot", "report", "inspect")]
        commands += [["diff", file, file], ["why", "--record", file, "--network", "module.build"]]
        commands += [[command, "--config", file] for command in ("find", "why", "train")]
        for arguments in commands:
            code, _, error = run_program(*arguments)
            assert code != 0
            assert ("pipe or a device" in error, "Save its content" in error, file in error) == (True, True, True)
        for reader in (read_batch, read_record, read_yaml):
            with pytest.raises((OSError, ValueError), match="pipe or a device"):
                reader(file)
