"""Run the demo: train through the launcher with progress shown, and report what the loss scale did.

python scripts/demo.py --corpus output/corpus --output_dir output
"""

import argparse
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import yaml
from tqdm import tqdm

from mindformers_adaptive.launch_options import parse_arguments
from mindformers_adaptive.rule import AdaptiveRule

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
STEP_LINE = re.compile(
    r"step:\[ *(?P<number>\d+)/ *(?P<total>\d+)\], loss:\[(?P<loss>[^/]+)/.*"
    r"overflow cond: (?P<overflow>True|False), loss_scale: (?P<loss_scale>[^,]+),"
)


class Step(NamedTuple):
    """A line of MindFormers' log; ``loss_scale`` is the scale after the step."""

    number: int
    total: int
    loss: float
    overflow: bool
    loss_scale: float


class Moment(NamedTuple):
    """What the rule says of a step: the scale and window before it and after it."""

    step: Step
    before: tuple
    after: tuple


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder that prepare_corpus.py wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="where a folder for this run is made")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="keys of the YAML to change")
    arguments = parser.parse_args()
    run_folder = make_run_folder(arguments.output_dir.resolve())
    steps = train(run_folder, arguments.corpus.resolve(), arguments.options)
    print("\n".join(report(steps, run_folder, read_scale_sense(arguments.options))))


def make_run_folder(output_dir):
    """Make the first of demo_1, demo_2, ... that is not there, so that no earlier run is written over."""
    folders = (output_dir / f"demo_{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir(parents=True)
    return folder


def train(run_folder, corpus, options):
    """Run the launcher with a progress bar; return the steps that it logged."""
    command = [sys.executable, str(ROOT / "scripts" / "run_mindformer.py"), "--config", str(CONFIG)]
    command += ["--train_dataset_dir", str(corpus), "--output_dir", str(run_folder)]
    if options:
        command += ["--options", *options]
    console = run_folder / "console.log"
    print(f"Training a 2-layer Llama in FP16 from {CONFIG.relative_to(ROOT)}; all it prints goes to {shown(console)}")
    steps = []
    with (
        console.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, cwd=run_folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
        tqdm(desc="compiling", unit="step", mininterval=1.0) as progress,
    ):
        for line in process.stdout:
            log.write(line)
            step = parse_step(line)
            if step is not None:
                steps.append(step)
                progress.total = step.total
                progress.set_description("training", refresh=False)
                progress.set_postfix_str(f"loss {step.loss:.3f}, scale {power(step.loss_scale)}", refresh=False)
                progress.update(step.number - progress.n)
    if process.returncode != 0 or not steps:
        last_lines = "".join(console.read_text(encoding="utf-8").splitlines(keepends=True)[-20:])
        sys.exit(f"{last_lines}\nThe training stopped with exit code {process.returncode}; see {shown(console)}")
    return steps


def parse_step(line):
    match = STEP_LINE.search(line)
    if match is None:
        return None
    return Step(
        int(match["number"]),
        int(match["total"]),
        float(match["loss"]),
        match["overflow"] == "True",
        float(match["loss_scale"]),
    )


def read_scale_sense(options):
    """The scale_sense section of the YAML, with the options that concern it."""
    section = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["runner_wrapper"]["scale_sense"]
    changes = parse_arguments(["--config", str(CONFIG), "--options", *options]).free if options else {}
    for key, value in changes.items():
        if key.startswith("runner_wrapper.scale_sense."):
            section[key.rpartition(".")[2]] = value
    return section


def replay(steps, scale_sense):
    """Replay the rule on the overflows of the log, which has no windows; its scales must come out."""
    arguments = {key: value for key, value in scale_sense.items() if key != "type"}
    initial_scale, window = arguments.pop("loss_scale_value"), arguments.pop("scale_window")
    rule = AdaptiveRule(**arguments)
    state = rule.start(initial_scale, window)
    moments = []
    for step in steps:
        before, state = state, rule.step(state, step.overflow)
        # MindFormers prints eight digits.
        if not math.isclose(state.loss_scale, step.loss_scale, rel_tol=1e-6):
            sys.exit(f"Step {step.number}: the log has loss scale {step.loss_scale}, the rule {state.loss_scale}.")
        moments.append(Moment(step, (before.loss_scale, before.scale_window), (state.loss_scale, state.scale_window)))
    return moments


def report(steps, run_folder, scale_sense):
    """The report, as lines."""
    moments = replay(steps, scale_sense)
    skipped = [step.number for step in steps if step.overflow]
    applied = [step for step in steps if not step.overflow]
    last = applied[-20:]
    checkpoints = sorted(run_folder.glob("checkpoint/rank_0/*.ckpt"), key=lambda file: file.stat().st_mtime)
    return [
        "",
        f"Loss      from {steps[0].loss:.2f} to {sum(step.loss for step in last) / len(last):.2f} "
        f"(first step; mean of the last {len(last)} applied steps)",
        f"Steps     {len(steps)}, of which {len(skipped)} were skipped for an overflow: {ranges(skipped)}",
        "",
        "   steps      what the loss scale did      loss scale        window",
        *path(moments),
        "",
        f"Logs        {shown(run_folder / 'log' / 'rank_0')}",
        f"Checkpoint  {shown(checkpoints[-1]) if checkpoints else 'none was written'}",
    ]


def path(moments):
    """One line for each row of changes in the same direction."""
    changes = [moment for moment in moments if moment.before != moment.after]
    for fell, group in itertools.groupby(changes, key=lambda moment: moment.step.overflow):
        group = list(group)
        first, last = group[0], group[-1]
        what = f"{len(group)} {'drop' if fell else 'raise'}{'s' if len(group) > 1 else ''}"
        windows = list(dict.fromkeys([first.before[1], *(moment.after[1] for moment in group)]))
        scales = f"{power(first.before[0])} -> {power(last.after[0])}"
        numbers = ranges([first.step.number]) if first is last else f"{first.step.number}-{last.step.number}"
        yield f"   {numbers:<10} {what:<28} {scales:<17} {' -> '.join(map(str, windows))}"


def shown(path):
    """A path as short as it can be seen from the working folder."""
    return os.path.relpath(path)


def ranges(numbers):
    """[1, 2, 3, 7] as "1-3, 7"."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts) or "none"


def power(scale):
    """A scale as a power of two where it is one."""
    exponent = round(math.log2(scale))
    return f"2^{exponent}" if math.isclose(scale, 2.0**exponent, rel_tol=1e-6) else f"{scale:g}"


if __name__ == "__main__":
    main()
