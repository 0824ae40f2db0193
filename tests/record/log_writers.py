"""Write lines of logs in each format, such as Megatron-LM's, and read them."""

import json

from mindformers_adaptive.record.logs import read_log

STAMP = "[2024-11-04 11:41:27,602] [INFO] "
MEGATRON_DEEPSPEED = " samples per second: 26.440 | TFLOPs: 59.10 |"


def read(folder, *lines, **options):
    """Write lines of text or bytes to a log in a folder, and read this log."""
    content = b"".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    (folder / "run.log").write_bytes(content)
    return read_log(folder / "run.log", **options)


def mindformers_line(step, flag, scale, epoch=1, steps=10_000, loss=4.155150, norm="[1.5]"):
    flagged = "" if flag is None else f"overflow cond: {flag}, "
    return (
        f"2026-01-01 00:00:00,000 - [mindformers/core/callback/callback.py:529] - INFO - {{ Epoch:[  {epoch}/  2], "
        f"step:[{step:5d}/{steps:5d}], loss: {loss}, per_step_time: 250ms, lr: 0.001, {flagged}"
        f"loss_scale: {scale}, global_norm: {norm}, train_throughput_per_npu: 0.004T\n"
    )


def megatron_line(step, scale, skipped=0, end="", prefix=" "):
    return (
        f"{prefix}iteration {step:8d}/  500000 | consumed samples: {step:8d} | elapsed time per iteration (ms): 1250.0 "
        f"| learning rate: 1.500E-04 | lm loss: 2.500000E+00 | loss scale: {scale:.1f} | grad norm: 16.999 "
        f"| number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |{end}\n"
    )


def overflow_line(scale, after, rank=0, source="loss_scaler"):
    end = f"reducing to {after}" if after < scale else "but hysteresis is 2. Reducing hysteresis to 1"
    return (
        f"{STAMP}[{source}.py:181:update_scale] [deepspeed] OVERFLOW! Rank {rank} Skipping step. "
        f"Attempted loss scale: {scale}, {end}\n"
    )


def progress_line(step, skipped):
    return f"{STAMP}[logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[0.001], mom=[[0.8, 0.999]]\n"


def record_line(step, overflow=False, loss_scale=1024.0, **changes):
    values = {"step": step, "loss": 2.5, "overflow": overflow, "loss_scale": loss_scale, "skipped_steps": None}
    return json.dumps({**values, "next_loss_scale": loss_scale / (2 if overflow else 1), **changes}) + "\n"
