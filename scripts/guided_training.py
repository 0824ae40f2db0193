"""Train the demo's model with adaptive and with gradient-guided loss scaling, and print what each skipped, as Markdown.

python scripts/guided_training.py [--steps 400] [--seeds 3] [--records FOLDER] [--picture FILE]
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import mindspore
import numpy as np
import yaml
from mindformers.core import AdamW
from mindformers.core.lr import CosineWithWarmUpLR
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindformers.tools.logger import get_logger
from mindspore import Tensor, ops
from prepare_corpus import cut_into_samples, read_standard_library

from mindformers_adaptive.monitor.record import read_record
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    MFTrainOneStepCell,
)

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "tiny_llama_cpu_fp16.yaml"
STARTS = (2**32, 2**10)
LAST = 20


def adaptive_cell(start):
    return AdaptiveLossScaleUpdateCell(start, 2, scale_window=20, max_scale_window=1000, min_scale_window=20)


CELLS = {"guided": GradientGuidedLossScaleUpdateCell, "adaptive": adaptive_cell}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
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
    config = sections["model"]["model_config"]
    del config["type"]
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
                    if file:
                        write_record(file, record)
                runs[name, start].append(record)
                print(f"{name} from {start}, seed {seed}: {summary(record)}", file=sys.stderr, flush=True)
    return runs


class Training:
    """A train step that is compiled once, and set back before each run."""

    def __init__(self, config, sections, make_cell, steps):
        self.config, self.make_cell = config, make_cell
        network = self.new_network(0)
        schedule = {key: value for key, value in sections["lr_schedule"].items() if key != "type"}
        options = {key: value for key, value in sections["optimizer"].items() if key != "type"}
        rate = CosineWithWarmUpLR(**{**schedule, "total_steps": steps})
        optimizer = AdamW(network.trainable_params(), learning_rate=rate, **options)
        wrapper = sections["runner_wrapper"]
        clip = {key: wrapper[key] for key in ("use_clip_grad", "max_grad_norm")}
        self.train_step = MFTrainOneStepCell(network, optimizer, scale_sense=make_cell(STARTS[0]), **clip)
        self.train_step.set_train()
        self.initial = {weight.name: weight.asnumpy().copy() for weight in optimizer.get_parameters()}

    def new_network(self, seed):
        mindspore.set_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**self.config)).set_train()

    def set_back(self, start, seed):
        weights = {weight.name: weight.asnumpy() for weight in self.new_network(seed).get_parameters()}
        cell = {weight.name: weight.asnumpy() for weight in self.make_cell(start).get_parameters()}
        values = {**self.initial, **weights, **cell, self.train_step.scale_sense.name: np.float32(start)}
        for weight in self.train_step.get_parameters():
            if weight.name in values:
                # After set_data MindSpore 2.7 would train in memory that is no longer its own.
                value = Tensor(np.array(values[weight.name]).reshape(weight.shape), weight.dtype)
                ops.assign(weight, value)

    def run(self, start, seed, batches):
        """Return the record of a run, as ``LossScaleMonitor`` writes it."""
        self.set_back(start, seed)
        gradient = getattr(self.train_step.loss_scaling_manager, "largest_gradient", None)
        scale, record = float(start), []
        for step, batch in enumerate(batches, start=1):
            loss, overflow, next_scale = (output.asnumpy().item() for output in self.train_step(Tensor(batch))[:3])
            record.append(
                {"step": step, "loss": loss, "overflow": bool(overflow), "loss_scale": scale}
                | {"next_loss_scale": next_scale}
                | {"largest_gradient": None if gradient is None else float(gradient)}
            )
            scale = next_scale
        return record


def write_record(file, record):
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
    yield "| from | rule | skipped before the first applied step | skipped after it | final loss | mean |"
    yield "|---|---|---|---|---|---|"
    for start in STARTS:
        for name in CELLS:
            before, after, losses = zip(*map(counts, runs[name, start]), strict=True)
            listed = (", ".join(map(str, numbers)) for numbers in (before, after))
            exponent = start.bit_length() - 1
            each = ", ".join(f"{loss:.3f}" for loss in losses)
            yield f"| 2^{exponent} | {name} | {' | '.join(listed)} | {each} | {np.mean(losses):.3f} |"


if __name__ == "__main__":
    main()
