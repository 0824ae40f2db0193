"""The message about a log of an unknown program has a pattern that reads this log, or none."""

import gzip
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.pattern import suggest_pattern
from tests.record.log_writers import mindformers_line, read

# Lines as programs print them; the loss scale is 2^17 in the first three steps, and 2^16 from step 4 on. With overflow
# flags, step 4 is skipped.
UNKNOWN = {
    "InternLM": "tflops=54.3,step={step},loss=11.5,tgs (tokens/gpu/second)=491.55,loss_scale={scale},grad_norm=7.8",
    "Megatron-DeepSpeed": " -  iteration={step:8d}/  317892 | consumed_samples= 256 | loss_scale={scale} | T=1 |",
    "MAE": "Epoch: [0]  [{step:4d}/3065]  eta: 3:59:19  lr: 0.00  loss_scale: {scale:.4f} ({scale:.4f})  time: 4.7",
    "tqdm": "  1%|# | {step}/9999 [00:10<01:30,  9.9it/s, loss=2.5, scale={scale}]",
    "own": "it={step:06d} loss=2.5 scale={scale:.0f}",
    "arcface": "Speed 2178.40   Loss 5.5   Epoch: 0   Global Step: {step}   Fp16 Grad Scale: {scale:5.0f}   Re",
    "swin": "Train: [0/300 ({step}/1251)]  eta 0:10:00 lr 0.000000  grad_norm 1.2 (1.3) loss_scale {scale:.4f} (2.0)",
}
WITH_FLAGS = {
    "fasterrcnn": "rank_id:0, step: {step}, avg loss: 4.3, time: 438.8, overflow: {flag:f}, scaling_sens: {scale:f}",
    "yolov5": "Epoch 1/10, step {step}/1000, loss: 2.5, cond: {flag}, scaling_sens: {scale}, cur_lr: 0.0010",
    "csv": "{step},2.5,{scale},{flag}",
}


def lines_of(layout):
    """Return 40 lines of a layout after a line that names no number, or the names of the columns of a table."""
    lines = [layout.format(step=step, scale=2.0 ** (16 + (step < 4)), flag=step == 4) for step in range(1, 41)]
    heading = "step,loss,loss_scale,overflow" if layout[0] == "{" else "no number here: scale"
    return [f"{line}\n" for line in (heading, *lines)]


def suggested(tmp_path, lines):
    """Return the pattern in the message about a log, None if it has none."""
    with pytest.raises(ValueError, match="--pattern") as error:
        read(tmp_path, "".join(lines))
    pattern = re.search(r"--pattern (.+)\n", str(error.value))
    return pattern and shlex.split(pattern[1])[0]


@pytest.mark.parametrize("name", [*UNKNOWN, *WITH_FLAGS])
def test_a_suggested_pattern_reads_the_log(tmp_path, name):
    lines = lines_of({**UNKNOWN, **WITH_FLAGS}[name])
    run = read(tmp_path, "".join(lines), pattern=suggested(tmp_path, lines))
    assert len(run) == 40
    assert run.problems == ()
    assert run.skipped_bounds == ((1, 1) if name in WITH_FLAGS else (0, 40))


FAIRSEQ = "| INFO | train_inner | epoch 001:  {step} / 6547 loss=0.5, num_updates={step}, gnorm=3.9, loss_scale={scale}"
NOTE = "| INFO | fairseq.trainer | NOTE: overflow detected, setting loss scale to: 65536.0"


def test_fairseqs_counter_of_updates_is_no_step(tmp_path):
    lines = lines_of(FAIRSEQ)
    assert suggested(tmp_path, lines) is None
    assert "num_updates" not in suggested(tmp_path, [*lines, NOTE])


@pytest.mark.parametrize(
    "line",
    [
        # ESPnet's step is within a range, and the number after "iter" is a time.
        "(trainer:720) INFO: 1epoch:train:1-10batch: iter_time=0.104, loss=100.1, clip=100.000, loss_scale=6.554e+04",
        "the scale of step 7 is large",
        "step,scale",
    ],
)
def test_no_pattern_is_suggested_that_reads_nothing(tmp_path, line):
    assert suggested(tmp_path, [f"{line}\n"]) is None


@settings(max_examples=40)
@given(text=st.text(max_size=60) | st.from_regex(r"(step|iter) ?[:=]? ?\d+.{0,9}(loss_)?scale ?[:=] ?[\d.]+"))
def test_a_suggested_pattern_matches_its_line(text):
    if (pattern := suggest_pattern([text])) is not None:
        assert re.search(pattern, text) is not None


def test_a_compressed_log_is_read(tmp_path):
    lines = "".join(mindformers_line(step, step == 2, 2.0**15) for step in range(1, 21))
    (tmp_path / "run.log.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_log(tmp_path / "run.log.gz").skipped_bounds == (1, 1)
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(lines.encode())[:60])
    with pytest.raises(OSError, match=r"can be read.*cut\.log\.gz"):
        read_log(tmp_path / "cut.log.gz")
