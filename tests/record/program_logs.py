"""Write the log of a true run as a program does that trains with loss scaling, often in ways that lose something."""

import json
from dataclasses import dataclass, field

import numpy as np

from tests.record.log_writers import STAMP, mindformers_line, overflow_line, progress_line
from tests.record.true_runs import Run, random_run

DEEPSPEED = STAMP + "[{}.py:345:_update_scale] {}\n"


@dataclass
class Log:
    """The log of a run, and what it states.

    Attributes:
        lines (list[str]): the lines of the log.
        options (dict): arguments of ``read_log``.
        counts (bool): whether the lines state how many steps were skipped.
        is_exact (bool): whether the lines also state which steps were skipped.
        mixed (Run, optional): the run of a second engine whose lines are in the log too.
        rounds (bool): whether the log rounds loss scales to one decimal place.
        is_damaged (bool): whether lines were lost.
        first_step (int): the number that the log gives the first step.
    """

    lines: list[str]
    options: dict = field(default_factory=dict)
    counts: bool = False
    is_exact: bool = False
    mixed: Run | None = None
    rounds: bool = False
    is_damaged: bool = False
    first_step: int = 1


def _steps(part, every):
    return [step for step in range(part.first, part.last + 1) if step % every == 0]


def _at(part, step):
    position = step - part.first
    return bool(part.overflow[position]), float(part.after[position]), part.loss[position], part.norm[position]


def mindformers(random, run):
    every, epoch, with_flags = run.every, int(random.choice([7, 100, 10_000])), random.random() < 0.8
    lines = []
    for part in run.parts:
        for step in _steps(part, every):
            flag, scale, loss, norm = _at(part, step)
            line = mindformers_line(
                (step - 1) % epoch + 1,
                flag if with_flags else None,
                np.float32(scale),
                epoch=(step - 1) // epoch + 1,
                steps=epoch,
                loss=f"{loss:.6f}",
                norm=f"[{np.float32(norm)}]",
            )
            lines += [line] * int(random.choice([1, 1, 1, 2]) if random.random() < 0.05 else 1)
    return Log(lines, counts=every == 1 and with_flags, is_exact=every == 1 and with_flags)


def mindspore(random, run):
    every, lines = run.every, []
    for part in run.parts:
        for step in _steps(part, every):
            flag, scale, loss, _ = _at(part, step)
            lines.append(
                f"epoch: 1, step: {step}, outputs are (Tensor(shape=[], dtype=Float32, value= {loss:g}), "
                f"Tensor(shape=[], dtype=Bool, value= {flag}), Tensor(shape=[], dtype=Float32, value= {scale:g}))\n"
            )
    return Log(lines, counts=every == 1, is_exact=every == 1)


def megatron(random, run):
    every, first_line, lines = run.every, random.random() < 0.3, []
    for part in run.parts:
        begin = part.first
        ends = _steps(part, every)
        for step in sorted({*ends, part.first}) if first_line and every > 1 else ends:
            covered = part.between(begin, step)
            lines.append(_megatron_line(part, step, covered))
            # After the line of its first step, the process keeps the sums of that line.
            begin = step + 1 if step in ends else begin
    # The line of a process's first step can look like the line of an interval of one step.
    return Log(lines, counts=not (first_line and len(run.parts) > 1), is_exact=every == 1, rounds=True)


def _megatron_line(part, step, covered, of_deepspeed=False):
    _, scale, _, norm = _at(part, step)
    applied = covered.loss[~covered.overflow]
    loss = f"lm loss: {applied.mean():.6E} | " if len(applied) and not applied.mean() <= 0 else ""
    skipped = 0 if of_deepspeed else int(covered.overflow.sum())
    end = " samples per second: 26.440 | TFLOPs: 59.10 |" if of_deepspeed else ""
    return (
        f" iteration {step:8d}/  500000 | consumed samples: {step:8d} | elapsed time per iteration (ms): 1250.0 "
        f"| learning rate: 1.500E-04 | {loss}loss scale: {scale:.1f} | grad norm: {min(norm, 1e30):.3f} "
        f"| number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |{end}\n"
    )


def deepspeed_zero(random, run):
    """ZeRO prints an overflow with its scales, and no raise."""
    every, ranks = int(random.choice([run.every, 10**9])), int(random.choice([1, 1, 4]))
    return _deepspeed(run, every, lambda part, step: _zero_lines(part, step, ranks))


def _total_every(random, run):
    """Return every how many steps DeepSpeed prints its totals, or more than there are steps.

    Without totals, nothing in the log says which overflow lines are about steps that a restart took again.
    """
    return int(random.choice([run.every] if len(run.parts) > 1 else [run.every, 10**9]))


def _zero_lines(part, step, ranks=1):
    flag, after, *_ = _at(part, step)
    used = float(part.used[step - part.first])
    return [overflow_line(int(used), int(after), rank) for rank in range(ranks)] if flag else []


def deepspeed_fused(random, run):
    """The fused and unfused optimizers count iterations from 0, and print raises too."""
    every, ranks, fused = _total_every(random, run), int(random.choice([1, 1, 4])), random.random() < 0.5

    def lines_of(part, step):
        flag, after, *_ = _at(part, step)
        used = float(part.used[step - part.first])
        source = "fused_optimizer" if fused else "unfused_optimizer"
        if flag:
            text = f"\nGrad overflow on iteration {step - 1}" if fused else f"Grad overflow on iteration: {step - 1}"
            lines = [DEEPSPEED.format(source, text)] * ranks
            lines += [DEEPSPEED.format(source, f"Reducing dynamic loss scale from {used} to {after}")] * ranks
            text = f"[Rank 0] Overflow detected. Skipping step. Attempted loss scale: {used}, reducing to {after}"
            return lines + ([f"{STAMP}[logging.py:96:log_dist] {text}\n"] if fused else [])
        if after > used:
            text = f"Increasing dynamic loss scale from {used} to {after}"
            return [DEEPSPEED.format(source, f"No Grad overflow for {run.window} iterations")] * ranks + [
                DEEPSPEED.format(source, text)
            ] * ranks
        return []

    return _deepspeed(run, every, lines_of)


def _deepspeed(run, every, lines_of):
    lines = []
    for part in run.parts:
        for step in range(part.first, part.last + 1):
            lines += lines_of(part, step)
            lines += _totals(run, part, step, every)
    return Log(in_time(lines), counts=every == 1)


def _totals(run, part, step, every):
    # A restarted process has the number of skipped steps from the checkpoint.
    skipped = run.skipped_before[part.first] + part.skipped[step - part.first + 1]
    return [progress_line(step, int(skipped))] if step % every == 0 else []


def in_time(lines):
    """Give lines with a time stamp increasing times: a second for each line."""
    return [
        line.replace("11:41:27", f"{11 + at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d}")
        for at, line in enumerate(lines)
    ]


def megatron_deepspeed(random, run):
    """Megatron-DeepSpeed counts no skipped iterations, and prints DeepSpeed's lines beside its own."""
    every, lines, interval = _total_every(random, run), [], run.every
    for part in run.parts:
        for step in range(part.first, part.last + 1):
            lines += _zero_lines(part, step)
            lines += _totals(run, part, step, every)
            if step % interval == 0:
                covered = part.between(max(part.first, step - interval + 1), step)
                lines.append(_megatron_line(part, step, covered, of_deepspeed=True))
    return Log(in_time(lines))


def two_engines(random, run):
    """Actor and critic print DeepSpeed's lines into one log."""
    totals, other = run.whole.skipped[::10], run
    # If the totals agree, a log does not show that it has two engines.
    while (other.whole.skipped[::10] != totals).sum() < 5:
        other = random_run(random, **PROGRAMS["two_engines"][1])
    lines = []
    for step in range(1, run.whole.last + 1):
        for part in (run.parts[0], other.parts[0]):
            lines += _zero_lines(part, step)
            if step % 10 == 0:
                lines.append(progress_line(step, int(part.skipped[step])))
    return Log(in_time(lines), mixed=other)


def by_pattern(random, run):
    """An own print, a table in CSV, or apex and fairseq, whose overflow lines name no step."""
    every, kind = run.every, str(random.choice(list(PATTERNS)))
    if kind in ("apex", "fairseq") and len(run.parts) > 1:
        kind = "own"
    pattern, text = PATTERNS[kind]
    lines = []
    for part in run.parts:
        skipped = 0
        for step in range(part.first, part.last + 1):
            flag, scale, loss, norm = _at(part, step)
            skipped += flag
            if flag and kind == "apex":
                moved = f" reducing loss scale to {scale}"
                lines.append(f"Gradient overflow.  Skipping step, loss scaler 0{moved}\n")
            if flag and kind == "fairseq":
                lines.append(f"NOTE: overflow detected, setting loss scale to: {scale}\n")
            if step % every == 0:
                values = {"step": step, "scale": scale, "loss": loss, "flag": flag, "norm": norm, "skipped": skipped}
                lines.append(text.format(**values, index=step - 1) + "\n")
                skipped = 0
    counts = kind in COUNTING and (every == 1 or kind == "since")
    return Log(lines, {"pattern": pattern}, counts=counts, first_step=int(kind != "from_zero"))


PATTERNS = {
    "own": (r"step (?P<step>\d+) scale (?P<loss_scale>\S+)", "step {step} scale {scale}"),
    "flagged": (
        r"it=(?P<step>\d+) loss=(?P<loss>\S+) overflow: (?P<overflow>\S+) scale=(?P<loss_scale>\S+)",
        "it={step:06d} loss={loss:.4f} overflow: {flag:f} scale={scale}",
    ),
    "from_zero": (r"step=(?P<step>\d+),loss_scale=(?P<loss_scale>[^,]+)", "step={index},loss_scale={scale},lr=9e-05"),
    "csv": (r"^(?P<step>\d+),(?P<loss>[^,]*),(?P<loss_scale>[^,]*),(?P<overflow>\w+)$", "{step},{loss},{scale},{flag}"),
    "since": (
        r"step (?P<step>\d+) \| skipped since: (?P<skipped>\d+) \| scale (?P<loss_scale>\S+)",
        "step {step} | skipped since: {skipped} | scale {scale}",
    ),
    "apex": (
        r"\] +(?P<step>\d+) \|\||Gradient (?P<overflow>overflow).* (?P<loss_scale>\S+)$",
        "[  1] {step:6d} || B: {loss:.1f} | C: 4.5",
    ),
    "fairseq": (
        r"epoch \d+: +(?P<step>\d+) / |(?P<overflow>overflow) detected.*loss scale to: (?P<loss_scale>\S+)",
        "epoch 001: {step:6d} / 65470 loss={loss:.3f}, ups=3.1",
    ),
}
COUNTING = ("flagged", "csv", "since")


def record(random, run):
    """The record of this package: every step, or only the last ones of every few steps, with a count of the skips."""
    every, history = run.every, int(random.choice([1, 3, 1000]))
    counted = random.random() < 0.8
    lines, whole = [], run.whole
    for last in [*range(every, whole.last + 1, every)]:
        first = max(last - history, last - every) + 1
        if first > last - every + 1:
            gap = {"missing_steps": first - 1 - last + every, "first_step": last - every + 1, "last_step": first - 1}
            lines.append(json.dumps(gap) + "\n")
        for step in range(first, last + 1):
            flag, after, loss, norm = _at(whole, step)
            values = {"step": step, "loss": float(loss), "overflow": flag, "loss_scale": float(whole.used[step - 1])}
            values |= {"next_loss_scale": after, "skipped_steps": int(whole.skipped[step]) if counted else None}
            values |= {"gradient_norm": float(norm), "resumed": True} if step in run.restarts else {}
            lines.append(json.dumps(values) + "\n")
    return Log(lines, counts=counted or every <= history)


# For each program: its writer, the kinds of rules that it has, and arguments of ``random_run``.
DYNAMIC = {"kinds": ("dynamic",)}
PROGRAMS = {
    "mindformers": (mindformers, {}),
    "mindspore": (mindspore, {}),
    "megatron": (megatron, {"kinds": ("dynamic", "dynamic", "fixed")}),
    "deepspeed_zero": (deepspeed_zero, DYNAMIC | {"smallest": 1.0}),
    "deepspeed_fused": (deepspeed_fused, DYNAMIC | {"hysteresis": 1}),
    "megatron_deepspeed": (megatron_deepspeed, DYNAMIC | {"smallest": 1.0}),
    "two_engines": (two_engines, DYNAMIC | {"steps": 100, "smallest": 1.0, "restarts": False}),
    "by_pattern": (by_pattern, DYNAMIC),
    "record": (record, {}),
}


def random_log(random):
    """Return a random run, the log of a random program about it, and the name of the program."""
    name = str(random.choice(list(PROGRAMS)))
    write, arguments = PROGRAMS[name]
    run = random_run(random, **arguments)
    log = write(random, run)
    # A lost line could hide that a restart took steps again.
    if random.random() < 0.3 and len(run.parts) == 1 < len(log.lines) and name in CUTTABLE:
        log = damaged(random, log)
    return name, run, log


CUTTABLE = ("mindformers", "mindspore", "megatron", "deepspeed_zero", "megatron_deepspeed")


def damaged(random, log):
    """Lose or cut some lines, or the beginning of the log, as if several processes wrote it or the disk was full."""
    lines = []
    for line in log.lines[int(random.choice([0, 0, len(log.lines) // 2])) :]:
        luck = random.random()
        if luck < 0.02:
            lines.append(line[: random.integers(1, len(line))].rstrip("\n") + "\n")
        elif luck > 0.05:
            lines.append(line)
    return Log(lines or log.lines, log.options, rounds=log.rounds, is_damaged=True)
