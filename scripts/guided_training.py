"""Train the demo's model with adaptive and with gradient-guided loss scaling, and print the skipped steps as Markdown.

python scripts/guided_training.py [--steps 400] [--seeds 3] [--records FOLDER] [--picture FILE]
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import mindspore
import numpy as np
import reporting
import yaml
from mindformers.tools.logger import get_logger
from mindspore import Tensor
from mindspore import dtype as mstype
from prepare_corpus import cut_into_samples, read_standard_library
from worth_tasks import CONFIG, Llama, without_type
from worth_training import CompiledTraining, weights_of

from mindformers_adaptive.monitor.record import read_record
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell

STARTS = (2**32, 2**10)
LAST = 20


def adaptive_cell(start):
    return AdaptiveLossScaleUpdateCell(start, 2, scale_window=20, max_scale_window=1000, min_scale_window=20)


CELLS = {"guided": GradientGuidedLossScaleUpdateCell, "adaptive": adaptive_cell}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=reporting.positive, default=400, help="of each training (default: 400)")
    parser.add_argument("--seeds", type=reporting.positive, default=3, help="of weights and data (default: 3)")
    parser.add_argument(
        "--records", type=Path, help="folder for the records; a run whose record is there is not repeated"
    )
    parser.add_argument("--picture", help="draw both rules' runs of the first seed from 2^32 to this PNG or SVG file")
    arguments = parser.parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    # Its lines on models that are built would stand between the table and its reader.
    get_logger().setLevel("ERROR")
    runs = trainings(arguments.steps, range(arguments.seeds), arguments.records)
    print("\n".join(table(runs)))
    if arguments.picture:
        drawn = {name: runs[name, STARTS[0]][0] for name in CELLS}
        print(f"Drawn: {save(draw_runs(drawn), arguments.picture)}", file=sys.stderr)


def trainings(steps, seeds, records=None):
    """Train from each start with each cell and seed.

    Args:
        steps (int): of each training.
        seeds (Iterable[int]): of weights and of the order of the samples.
        records (Path, optional): the folder where each record is written to; a run whose record is there is not made
            again. Default: None, nowhere.

    Returns:
        dict, by the name of the cell and the start a list of records, one for each seed.
    """
    sections = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config = without_type(sections["model"]["model_config"])
    samples = cut_into_samples(read_standard_library(), config["seq_length"] + 1)
    runs = defaultdict(list)
    for name, make_cell in CELLS.items():
        training = Training(config, sections, make_cell, steps)
        for start in STARTS:
            for seed in seeds:
                order = np.random.default_rng(seed).permutation(len(samples))[: steps * config["batch_size"]]
                batches = samples[order].reshape(steps, config["batch_size"], -1)
                file = records and records / f"{name}_{start}_{seed}_{steps}.jsonl"
                if file and file.exists():
                    record = read_record(file)
                else:
                    record = training.run(start, seed, batches)
                    write_record(file, record)
                runs[name, start].append(record)
                print(f"{name} from {start}, seed {seed}: {summary(record)}", file=sys.stderr, flush=True)
    return runs


class Training:
    """The demo's training with a model of this size, compiled once and set back before each run."""

    def __init__(self, config, sections, make_cell, steps):
        self.task = Llama(steps, config={**sections, "model": {"model_config": config}})
        self.compiled = CompiledTraining(self.task, self.task.network(mstype.float16, 0), make_cell)

    def run(self, start, seed, batches):
        """Return the record of a run, as ``LossScaleMonitor`` writes it."""
        self.compiled.begin(start, weights_of(self.task.network(mstype.float16, seed)))
        gradient = getattr(self.compiled.train_step.loss_scaling_manager, "largest_gradient", None)
        scale, record = float(start), []
        for step, batch in enumerate(batches, start=1):
            loss, overflow, next_scale = self.compiled.step((Tensor(batch),))
            record.append(
                {"step": step, "loss": loss, "overflow": overflow, "loss_scale": scale, "next_loss_scale": next_scale}
                | {"largest_gradient": None if gradient is None else float(gradient)}
            )
            scale = next_scale
        return record


def write_record(file, record):
    """Write a record to a file, if there is one."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as lines:
            lines.writelines(json_text(row) + "\n" for row in record)


def counts(record):
    """Skipped steps before the first that was applied, those after it, and the mean loss of the last applied steps."""
    flags = [row["overflow"] for row in record]
    before = flags.index(False)
    return before, sum(flags[before:]), float(np.mean([row["loss"] for row in record if not row["overflow"]][-LAST:]))


def summary(record):
    before, after, loss = counts(record)
    return f"{before} skipped before the first applied step, {after} after it, final loss {loss:.3f}"


def table(runs):
    """The rows of the Markdown table."""
    rows = []
    for start in STARTS:
        for name in CELLS:
            before, after, losses = zip(*map(counts, runs[name, start]), strict=True)
            listed = (", ".join(map(str, numbers)) for numbers in (before, after))
            each = ", ".join(f"{loss:.3f}" for loss in losses)
            rows.append([f"2^{start.bit_length() - 1}", name, *listed, each, f"{np.mean(losses):.3f}"])
    columns = ["from", "rule", "skipped before the first applied step", "skipped after it", "final loss", "mean"]
    return reporting.table(columns, rows)


if __name__ == "__main__":
    main()
