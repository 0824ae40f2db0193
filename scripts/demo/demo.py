"""Train the same model with FP16 alone, with adaptive and with gradient-guided loss scaling, and compare them.

python scripts/demo/demo.py --corpus output/corpus --output_dir output
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from mindformers_adaptive.plots.canvas import MAIN, SECOND, WARNING, new_figure, save, style_axes
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.table import as_power_of_two

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
RECORD = "loss_scale_record.jsonl"
PICTURE = "demo.png"

STEPS, BATCH_SIZE = 240, 8

# A training with 256 micro-batches divides the loss of each micro-batch by 256 before the backward pass, which makes
# FP16 gradients underflow. A fixed loss scale of 1/256 has the same effect as dividing the loss. So the demo trains
# only one micro-batch a step, which a CPU can do, and FP16 alone has gradients as small as with 256 micro-batches.
MICRO_BATCHES = 256

# The loss scaling of each training, as YAML options. The demo prints and draws each scale as the training applies it,
# because `analyze` reads the same scales from the record.
FP16_ALONE, ADAPTIVE, GUIDED = "FP16 alone", "adaptive scaling", "guided scaling"
START = 2**24
SCALING = {
    FP16_ALONE: f"runner_wrapper.scale_sense={1 / MICRO_BATCHES}",
    ADAPTIVE: f"runner_wrapper.scale_sense.loss_scale_value={START}",
    GUIDED: f"runner_wrapper.scale_sense={{type: GradientGuidedLossScale, loss_scale_value: {START}}}",
}
# The folder of each training, below the folder of the demo's run.
FOLDERS = {FP16_ALONE: "fp16_alone", ADAPTIVE: "", GUIDED: "guided"}
# So many trainings run at the same time, each with one thread.
AT_ONCE = 2

# If the output is no terminal, each training prints up to this number of lines of progress.
LINES = 4

# The demo's report and picture do not show single losses, but the mean of up to this number of losses in a row.
AVERAGED = 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder that prepare_corpus.py wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="where a folder for this run is made")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each training (default: {STEPS})")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="keys of the YAML to change")
    arguments = parser.parse_args()
    run_folder = make_run_folder(arguments.output_dir.resolve())
    print(
        "FP16 alone is for gradients that FP16 can hold, adaptive scaling for a train step that shows only\n"
        "overflows, and guided scaling for any other train step.\n"
        f"Training a 2-layer Llama in the three ways, as one of {MICRO_BATCHES} micro-batches. Both scales start at "
        f"{as_power_of_two(START)}."
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        trainings = {name: pool.submit(train, name, run_folder / FOLDERS[name], arguments) for name in SCALING}
        records = {name: training.result() for name, training in trainings.items()}
    save(draw(records), run_folder / PICTURE)
    print("\n".join(["", *report(records, run_folder)]))


def make_run_folder(output_dir):
    """Make the first of demo_1, demo_2, ... that does not exist, so that no earlier run is overwritten."""
    folders = (output_dir / f"demo_{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir(parents=True)
    return folder


def train(name, folder, arguments):
    """Run a training on a core of its own, with a progress bar that follows its record; return the record."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "launch" / "run_mindformer.py"), "--config", str(CONFIG)]
    command += ["--train_dataset_dir", str(arguments.corpus.resolve()), "--output_dir", str(folder), "--options"]
    command += [f"train_dataset.data_loader.num_samples={BATCH_SIZE * arguments.steps}", SCALING[name]]
    command += arguments.options
    console, position, environment = folder / "console.log", [*SCALING].index(name), {"OMP_NUM_THREADS": "1"}
    with (
        console.open("wb") as log,
        subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
        ) as process,
        # If the output is no terminal, disable=None shows no bar.
        tqdm(
            desc=f"{name:<16}", unit="step", total=arguments.steps, mininterval=1.0, position=position, disable=None
        ) as progress,
    ):
        running, printed = True, 0
        while running:
            time.sleep(1.0)
            # Check for the end of the process before reading the record, so that the last read sees the whole record.
            running = process.poll() is None
            record = read_record(folder / RECORD) if (folder / RECORD).exists() else []
            if record:
                step, scale = record[-1]["step"], as_power_of_two(record[-1]["next_loss_scale"])
                state = f"loss {record[-1]['loss']:.3f}, scale {scale}"
                progress.set_postfix_str(state, refresh=False)
                progress.update(step - progress.n)
                if progress.disable and step >= printed + arguments.steps / LINES:
                    printed = step
                    # One write for the whole line: print writes the line end on its own, and the other training's
                    # line may come between.
                    sys.stderr.write(f"{name:<16}  step {step} of {arguments.steps}, {state}\n")
                    sys.stderr.flush()
    if process.returncode != 0 or not record:
        path = os.path.relpath(console)
        last_lines = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        message = f"The training {name!r} failed with exit code {process.returncode}. Its whole output is in {path}"
        sys.exit("\n".join([*last_lines, "", message]))
    return record


def report(records, run_folder):
    """Return the lines that the demo prints at its end: one for each training, the picture, and the next command."""
    lines = {name: result(record) for name, record in records.items()}
    lines["Picture"] = os.path.relpath(run_folder / PICTURE)
    analyze = f"adaptive-loss-scale analyze {os.path.relpath(run_folder / RECORD)}"
    lines["Next"] = f"source .venv/bin/activate && {analyze}"
    return [f"{name[0].upper()}{name[1:] + ':':<18}{line}" for name, line in lines.items()]


def result(record):
    """Return what came of a training: its loss, its loss scale, and the number of skipped steps."""
    skipped = sum(entry["overflow"] for entry in record)
    first, last = (as_power_of_two(entry["loss_scale"]) for entry in (record[0], record[-1]))
    scale = f"loss scale {first}" if first == last else f"loss scale {first} to {last}"
    return f"loss {final_loss(record):.2f}, {scale}, {skipped} of {len(record)} steps skipped"


def final_loss(record):
    """Return the mean loss of the last applied steps."""
    losses = [entry["loss"] for entry in record if not entry["overflow"]][-AVERAGED:]
    return sum(losses) / len(losses) if losses else float("nan")


def draw(records):
    """Draw the losses of the trainings in ``records`` and, below, their loss scales."""
    figure = new_figure(6, 6)
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for (name, record), colour in zip(records.items(), (WARNING, MAIN, SECOND), strict=True):
        steps = [entry["step"] for entry in record]
        losses.plot(steps, smoothed([entry["loss"] for entry in record]), color=colour, linewidth=2.5, label=name)
        scales.plot(
            steps, [entry["loss_scale"] for entry in record], color=colour, linewidth=2.5, drawstyle="steps-post"
        )
    losses.set_title(f"The demo's Llama, as one of {MICRO_BATCHES} micro-batches", fontsize=15)
    losses.set_ylabel("loss", fontsize=14)
    losses.legend(fontsize=14, frameon=False)
    scales.set_yscale("log", base=2)
    scales.set_ylabel("loss scale", fontsize=14)
    scales.set_xlabel("step", fontsize=14)
    for axes in (losses, scales):
        style_axes(axes)
        axes.tick_params(labelsize=13)
    return figure


def smoothed(losses):
    """Return the running mean of the losses, over up to ``AVERAGED`` steps."""
    windows = (losses[max(0, stop - AVERAGED) : stop] for stop in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    main()
