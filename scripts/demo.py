"""Run the demo: train through the launcher with progress shown, report what the loss scale did, and draw it.

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

from mindformers_adaptive.cli.yaml_arguments import read_options
from mindformers_adaptive.lab.analysis.scale_path import PATH_HEADING, Change, path_line, phases, ranges
from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule
from mindformers_adaptive.text.power_of_two import as_power_of_two

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
SWEPT_SCALES = ["1", "4", "16", "64", "512", "2^12", "2^16", "2^20"]
# Files and what they show; 64 and 512 are what people compare by hand.
HISTOGRAMS = ("gradients.png", ["--loss-scales", "1", "64", "512"])
UNDERFLOW = ("underflow.png", ["--underflow"])
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
    print("Measuring the gradients of the trained model, and drawing ...", file=sys.stderr, flush=True)
    draw(run_folder, arguments.corpus.resolve())
    print(f"Pictures    {', '.join(shown(picture) for picture in sorted(run_folder.glob('*.png')))}")


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
                progress.set_postfix_str(
                    f"loss {step.loss:.3f}, scale {as_power_of_two(step.loss_scale)}", refresh=False
                )
                progress.update(step.number - progress.n)
    if process.returncode != 0 or not steps:
        last_lines = "".join(console.read_text(encoding="utf-8").splitlines(keepends=True)[-20:])
        sys.exit(f"{last_lines}\nThe training stopped with exit code {process.returncode}; see {shown(console)}")
    return steps


def draw(run_folder, corpus):
    """Draw the record of the run, and the gradients of the trained model at several loss scales."""
    program = [sys.executable, "-m", "mindformers_adaptive"]
    record = run_folder / "loss_scale_record.jsonl"
    run_quietly([*program, "plot", str(record), "run.png"], run_folder)
    probe = [*program, "probe", "--config", str(CONFIG), "--train_dataset_dir", str(corpus)]
    probe += ["--checkpoint", str(run_folder / "checkpoint"), "--loss-scales", *SWEPT_SCALES]
    run_quietly([*probe, "--output", "gradients.json"], run_folder)
    for file, options in (HISTOGRAMS, UNDERFLOW):
        run_quietly([*program, "plot", "gradients.json", file, *options], run_folder)


def run_quietly(command, run_folder):
    """Run a command; what it prints is shown only if it fails."""
    finished = subprocess.run(command, cwd=run_folder, capture_output=True, text=True, errors="replace")
    if finished.returncode != 0:
        sys.exit(f"{finished.stdout}{finished.stderr[-3000:]}\nThis failed: {' '.join(command)}")


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
    for key, value in read_options(options).items():
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
        PATH_HEADING,
        *path(moments),
        "",
        f"Logs        {shown(run_folder / 'log' / 'rank_0')}",
        f"Record      {shown(run_folder / 'loss_scale_record.jsonl')}",
        f"Checkpoint  {shown(checkpoints[-1]) if checkpoints else 'none was written'}",
    ]


def path(moments):
    """One line for each row of changes in the same direction."""
    changes = [
        Change(moment.step.number, "drop" if moment.step.overflow else "raise", moment.before, moment.after)
        for moment in moments
        if moment.before != moment.after
    ]
    return map(path_line, phases(changes))


def shown(path):
    """A path as short as it can be seen from the working folder."""
    return os.path.relpath(path)


if __name__ == "__main__":
    main()
