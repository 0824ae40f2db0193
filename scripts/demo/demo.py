"""Run the demo: train through the launcher with a progress bar, report what the loss scale did, and draw it.

python scripts/demo/demo.py --corpus output/corpus --output_dir output
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml
from tqdm import tqdm

from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.lab.scale_path import changes_of, path_lines, phases, ranges
from mindformers_adaptive.monitor.record import read_record
from mindformers_adaptive.text.table import as_power_of_two

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"
RECORD = "loss_scale_record.jsonl"
SWEPT_SCALES = ["1", "4", "16", "64", "512", "2^12", "2^16", "2^20"]
# Pictures and the options that draw them; 64 and 512 are scales that people compare by hand.
PICTURES = {
    "run.png": [RECORD],
    "gradients.png": ["gradients.json", "--loss-scales", "1", "64", "512"],
    "underflow.png": ["gradients.json", "--underflow"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder that prepare_corpus.py wrote")
    parser.add_argument("--output_dir", type=Path, required=True, help="where a folder for this run is made")
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="keys of the YAML to change")
    arguments = parser.parse_args()
    run_folder = make_run_folder(arguments.output_dir.resolve())
    # The same for the training and for the measurement of what it trained.
    config = ["--config", str(CONFIG), "--train_dataset_dir", str(arguments.corpus.resolve())]
    config += ["--options", *arguments.options] if arguments.options else []
    record = train(run_folder, config, total=None if arguments.options else planned_steps())
    print("\n".join(report(record, run_folder)))
    print("Measuring the gradients of the trained model, and drawing ...", file=sys.stderr, flush=True)
    draw(run_folder, config)
    print(f"Pictures    {', '.join(os.path.relpath(run_folder / picture) for picture in sorted(PICTURES))}")
    analyze = f"adaptive-loss-scale analyze {os.path.relpath(run_folder / RECORD)}"
    print(f"Next        source .venv/bin/activate && {analyze}")


def make_run_folder(output_dir):
    """Make the first of demo_1, demo_2, ... that does not exist, so that no earlier run is overwritten."""
    folders = (output_dir / f"demo_{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir(parents=True)
    return folder


def train(run_folder, config, total):
    """Run the launcher with a progress bar that follows the record; return the record."""
    launcher = ROOT / "scripts" / "launch" / "run_mindformer.py"
    command = [sys.executable, str(launcher), *config, "--output_dir", str(run_folder)]
    console = run_folder / "console.log"
    where = os.path.relpath(console)
    print(f"Training a 2-layer Llama in FP16 from {CONFIG.relative_to(ROOT)}; its output goes to {where}")
    with (
        console.open("wb") as log,
        subprocess.Popen(command, cwd=run_folder, stdout=log, stderr=subprocess.STDOUT) as process,
        tqdm(desc="training", unit="step", total=total, mininterval=1.0) as progress,
    ):
        running = True
        while running:
            time.sleep(1.0)
            # Looked up before the record is read, so that the last look sees all of it.
            running = process.poll() is None
            record = read_record(run_folder / RECORD) if (run_folder / RECORD).exists() else []
            if record:
                scale = as_power_of_two(record[-1]["next_loss_scale"])
                progress.set_postfix_str(f"loss {record[-1]['loss']:.3f}, scale {scale}", refresh=False)
                progress.update(record[-1]["step"] - progress.n)
    if process.returncode != 0 or not record:
        last_lines = console.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        sys.exit("\n".join([*last_lines, "", f"The training stopped with exit code {process.returncode}; see {where}"]))
    return record


def planned_steps():
    """The steps of the YAML file as it is."""
    dataset = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["train_dataset"]
    return dataset["data_loader"]["num_samples"] // dataset["batch_size"]


def draw(run_folder, config):
    """Measure the gradients of the trained model at several loss scales, and draw all pictures."""
    program = [sys.executable, "-m", "mindformers_adaptive"]
    probe = ["probe", *config, "--checkpoint", str(run_folder / "checkpoint"), "--loss-scales", *SWEPT_SCALES]
    commands = [[*probe, "--output", "gradients.json"]]
    commands += [["plot", source, picture, *options] for picture, (source, *options) in PICTURES.items()]
    for command in commands:
        finished = subprocess.run(program + command, cwd=run_folder, capture_output=True, text=True, errors="replace")
        if finished.returncode != 0:
            sys.exit(f"{finished.stdout}{finished.stderr[-3000:]}\nThis command failed: {' '.join(program + command)}")


def report(record, run_folder):
    """The report, as lines."""
    skipped = [entry["step"] for entry in record if entry["overflow"]]
    applied = [entry["loss"] for entry in record if not entry["overflow"]]
    last = applied[-20:]
    checkpoints = sorted(run_folder.glob("checkpoint/rank_0/*.ckpt"), key=lambda file: file.stat().st_mtime)
    mean = f"{sum(last) / len(last):.2f}" if last else "unknown"
    return [
        "",
        f"Loss      from {record[0]['loss']:.2f} to {mean} (first step; mean of the last {len(last)} applied steps)",
        f"Steps     {len(record)}, of which {len(skipped)} were skipped for an overflow: {ranges(skipped)}",
        "",
        *path_lines(phases(changes_of(read_log(run_folder / RECORD)))),
        "",
        f"Logs        {os.path.relpath(run_folder / 'log' / 'rank_0')}",
        f"Record      {os.path.relpath(run_folder / RECORD)}",
        f"Checkpoint  {os.path.relpath(checkpoints[-1]) if checkpoints else 'no checkpoint was written'}",
    ]


if __name__ == "__main__":
    main()
