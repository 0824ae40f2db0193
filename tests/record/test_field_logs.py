"""Logs with the layouts and values that people reported are read as what is true of them, and advised accordingly."""

import json
import zipfile
from pathlib import Path

import pytest

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots.run_series import series_of
from mindformers_adaptive.record.logs import read_log

LOGS = Path(__file__).parent / "samples" / "field_logs.zip"

# For each log: the fewest and the most skipped steps, None where steps have no number; what `analyze` says; what it
# must not say. "Paste" comes before a YAML section, "Start at" before a single scale.
TRUTH = {
    # Each process prints its first iteration on a line of its own, and counts it again in the next line.
    "L7_first_iter_100.log": ((16, 16), ["16 of 1,000"], ["Paste"]),
    # 64, 8, 4 and 0.125, which is printed as 0.1. No line counts the overflows.
    "L10_rounded_scale.log": ((0, 900), ["at least 9 halvings"], ["Start at", "Paste"]),
    "L10c_per_step_below_one.log": ((6, 6), ["6 of 13"], ["jump", "damaged lines:", "Paste"]),
    # Eight lines say that a step is skipped, and the scale of some cannot be read.
    "L5_broken.log": ((8, None), ["At least 8"], ["Start at", "Paste"]),
    # Each of 23 overflows lowers 65536 to 32768, so applied steps lie between them.
    "M2_hf_no_steps.log": ((23, None), ["At least 23"], ["Start at", "Paste"]),
    # Two source files print each overflow.
    "L1_fp8_two_sources.log": ((18, 18), ["18 of 6,000"], ["Paste"]),
    # `step=0, skipped=0` is the state before the first step.
    "Z1_step0.log": ((6, 6), ["6 of 50", "Steps 1 to 50"], ["resumed"]),
    "Z1b_without_step0.log": ((6, 6), ["6 of 50", "Steps 1 to 50"], ["resumed"]),
    # A line of DeepSpeed in a log of Megatron states the total.
    "L2r_real_excerpt.log": ((1586, 1586), ["1,586 of 2,500"], ["Paste"]),
    # The steps were skipped for their norm, at a fixed scale of 1.
    "skip_norm.log": ((0, 0), ["No step of 2 was skipped", "Dropped 2 without"], ["Start at", "Paste"]),
    # 2^10 overflowed and 2^9 held, although the gradients seem to leave more room.
    "frozen_real.log": ((2, 2), ["settled at 2^9"], ["Start at", "Paste"]),
    "lora_two_drops.log": ((2, 2), ["settled at 2^10"], ["Start at", "Paste"]),
    # 2^14 is the highest scale that is not known to overflow.
    "glm6b_sink4.log": ((2, 17), ["2^14", "at most 17 of 20"], ["Start at", "Paste"]),
    "nan_cond_false.log": ((0, 0), ["from step 40 on", "adaptive-loss-scale why"], ["Start at", "Paste"]),
    "nan_collapse.log": ((81, 81), ["from step 40 on", "adaptive-loss-scale why"], ["Start at", "Paste"]),
    # The start is no power of two, and 4095.94 is the scale at the end.
    "mixtral_65535.log": ((6, 6), ["6 of 300", "loss_scale_value: 2048"], ["Start at 4095.94"]),
    "modelzoo_bert.log": (
        (0, 2440),
        ["At most 2,440 of 2,442", "each line of the log"],
        ["stayed", "Start at", "Paste"],
    ),
    # Two ranks print each move, after the step of its overflow.
    "deepspeed_fused_ranks.log": ((4, 30), ["At least 4", "10-12, 30"], ["rose", "Paste"]),
    # Hysteresis may have tolerated the first overflow.
    "hysteresis_start.log": ((5, 5), ["5 of 120", "instead of 2^16 to 2^17"], []),
    "missing_steps.jsonl": ((5, 50005), ["at most 50,005 of 50,200"], ["Start at", "Paste"]),
    "one_step.log": ((1, 1), ["1 of 1 step"], ["Start at", "Paste"]),
    "late_streak.log": ((8, 8), ["8 of 60"], ["Start at", "Paste"]),
    # Each second step has a line. Between the lines, other steps may have overflowed.
    "sink2_held.log": (
        (1, 31),
        ["was 2^15 on each line", "does not show whether"],
        ["stayed", "No loss scale has held"],
    ),
    # The process started again with the scale of 2^32.
    "restart.log": ((8, 8), ["resuming.md", "2^14 before step 31"], ["Start at", "Paste"]),
    # Each step has a line, and the one overflow too.
    "apex_every_step.log": ((1, 1), ["1 of 40 steps was skipped"], ["No loss scale has held", "Paste"]),
    "scale_zero.log": ((0, 20), ["loss scale was 0"], ["Start at", "Paste"]),
    "far_fall.log": ((0, 1500), ["at least 87 halvings", "2^-74"], ["nothing that should be changed", "Start at"]),
    "espnet.log": ((0, 10), ["65540"], ["Start at", "Paste"]),
}

# Patterns for the logs of other programs.
PATTERNS = {
    "apex_every_step.log": r"\] +(?P<step>\d+) \|\||Gradient (?P<overflow>overflow).* (?P<loss_scale>\S+)$",
    "scale_zero.log": r"Global Step: (?P<step>\d+) +Fp16 Grad Scale: +(?P<loss_scale>\d+)",
    "far_fall.log": r"batch (?P<step>\d+),.*grad_scale: (?P<loss_scale>\S+)",
    "espnet.log": r"train:\d+-(?P<step>\d+)batch.* loss=(?P<loss>\S+),.*loss_scale=(?P<loss_scale>[^,]+)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with zipfile.ZipFile(LOGS) as logs:
        logs.extractall(folder := tmp_path_factory.mktemp("field_logs"))
    return folder


@pytest.mark.parametrize("name", TRUTH)
def test_what_is_true_of_a_log_is_said(folder, name):
    bounds, says, never = TRUTH[name]
    run = read_log(folder / name, pattern=PATTERNS.get(name))
    fewest, most = run.skipped_bounds
    assert (fewest, most if run.is_numbered else None) == bounds
    # The details replay other rules, which takes long for a run of many steps.
    analysis = analyze(run)
    text = " ".join(analysis.text(details=len(run) < 10_000).split())
    # The number that stands for no upper bound is not printed.
    assert str(2**53) not in text + json.dumps(analysis.to_dict())
    assert [part for part in says if part not in text] == []
    assert [part for part in never if part in text] == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("modelzoo_bert.log", "0 to 2,440 of 2,442 steps skipped"),
        ("glm6b_sink4.log", "2 to 17 of 20 steps skipped"),
        ("M2_hf_no_steps.log", "At least 23 steps skipped"),
        ("skip_norm.log", "None of 2 steps skipped"),
    ],
)
def test_a_picture_says_no_more_than_the_log(folder, name, says):
    assert series_of(read_log(folder / name)).finding().startswith(says)


def test_a_wrapped_log_is_refused_with_its_first_line(folder):
    with pytest.raises(ValueError, match=r"(?s)nearly fits .*:1: .*iteration        1/.*cut or wrapped") as error:
        read_log(folder / "L17_wrapped.log")
    assert [line for line in str(error.value).splitlines() if len(line.replace(str(folder), "")) > 100] == []
    assert {file.name for file in folder.iterdir()} == {*TRUTH, "L17_wrapped.log"}
