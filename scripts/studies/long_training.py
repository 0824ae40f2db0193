"""Compare ways of loss scaling over 5,000 steps of the demo's model, with gradients 256 times smaller than usual.

    python -m scripts.studies.long_training [--seeds N] [--processes N] [--json FILE]

A run is trained in pieces, each in a separate process that continues from a checkpoint of the train-step cell. If this
script is stopped, start it again: unfinished runs continue. The results of a finished run are in
docs/figures/long_training/, and the run is not trained again; ``--results FOLDER`` trains all runs into another folder.
Prints Markdown, and draws docs/images/long_training.svg. Runs of the same seed have the same weights and data.

Gradient accumulation over 256 micro-batches would divide the loss, and so the gradients, by 256. Here the loss scale is
divided by 256 instead, which gives the same gradients. FP32 needs no division. The way "alone" is FP16
without scaling and without division.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mindformers_adaptive.plots import canvas
from scripts.studies.harm import LOST, lost_at
from scripts.studies.reporting import ROOT, output_to_stderr, positive, report, study_parser, use_one_thread, write_json
from scripts.studies.worth_report import interval, mean, mean_and_interval, mean_of, over_looks, skipped_at_the_start

RESULTS = ROOT / "docs" / "figures" / "long_training"
UNFINISHED = ROOT / "output" / "long_training"
PICTURE = "docs/images/long_training.svg"
_COLOURS = (canvas.MUTED, canvas.WARNING, canvas.CONTEXT, canvas.SECOND, canvas.MAIN, "black")

# Ways of scaling the loss: the key of each way in options and results, and its name in the tables.
WAYS = {
    "fp32": "FP32",
    "alone": "FP16, no scaling, one micro-batch",
    "none": "FP16, no scaling",
    "adaptive": "adaptive",
    "dynamic": "MindSpore's dynamic, window 1000",
    "guided": "guided",
    "fixed": "fixed 2^16",
}
# START is the loss scale from which the rules start, and which a fixed loss scale has: 2^16, as usual in MindFormers'
# YAML files. Trainings divide this loss scale by MICRO_BATCHES, the number of micro-batches in a batch.
START, MICRO_BATCHES = 2.0**16, 256
STEPS, SEEDS, PIECE = 5000, 3, 2500
# Train on samples of 32 bytes, not 128 as in the demo, because then a step takes a third of the time.
LLAMA = {"seq_length": 32}
# The training of harm.py that says what is lost below the ceiling.
HARM = "the demo's Llama{}"
LOOK_EVERY, SAVE_EVERY, HELD_OUT_BATCHES = 250, 500, 32


def main():
    arguments = parse_arguments()
    if arguments.piece_of:
        with output_to_stderr():
            train_piece(*arguments.piece_of.split(":"), arguments)
        return
    places = list(itertools.product(range(arguments.seeds), arguments.ways))
    with ThreadPoolExecutor(arguments.processes) as pool:
        # Train by every way of scaling with one seed before the next seed, so that early results can be compared.
        list(pool.map(lambda way_and_seed: finish_run(way_and_seed[1], way_and_seed[0], arguments), places))
    runs = whole_runs(arguments.results, arguments.steps)
    result = {"steps": arguments.steps, "ways": {way: list(map(summary, each)) for way, each in runs.items()}}
    report(arguments, result, tables(result), canvas.save(draw(runs), arguments.picture))


def parse_arguments():
    parser = study_parser(__doc__, PICTURE)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--seeds", type=positive, default=SEEDS, help=f"of weights and data (default: {SEEDS})")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"of each run (default: {STEPS})")
    parser.add_argument("--piece", type=positive, default=PIECE, help=f"steps of a process (default: {PIECE})")
    parser.add_argument("--processes", type=positive, default=1, help="that train at the same time (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where whole runs are kept")
    parser.add_argument("--unfinished", type=Path, default=UNFINISHED, help="where checkpoints are kept")
    parser.add_argument("--piece-of", metavar="WAY:SEED", help="only take the steps of one process in this run")
    return parser.parse_args()


def finish_run(way, seed, arguments):
    """Train the remaining steps of a run, piece by piece, each in a separate process."""
    command = [sys.executable, "-m", "scripts.studies.long_training", "--piece-of", f"{way}:{seed}"]
    command += ["--steps", str(arguments.steps), "--piece", str(arguments.piece)]
    for name in ("results", "unfinished"):
        command += [f"--{name}", str(getattr(arguments, name).absolute())]
    while not file_of(arguments.results, way, seed).exists():
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True)


def file_of(folder, way, seed):
    return folder / f"{way}_{seed}.json"


def train_piece(way, seed, arguments):
    """Train the next ``--piece`` steps of a run; write the results of the run after its last step."""
    use_one_thread()
    seed, file = int(seed), file_of(arguments.unfinished, way, int(seed))
    training = LongTraining(way, seed, arguments.steps, file)
    end = min((training.step // arguments.piece + 1) * arguments.piece, arguments.steps)
    training.go_on(end)
    if end == arguments.steps:
        arguments.results.mkdir(parents=True, exist_ok=True)
        write_json(file_of(arguments.results, way, seed), training.seen)
        training.forget()


class LongTraining:
    """A training run that starts from new weights, or continues from the checkpoint of an earlier process.

    Args:
        way (str): a key of ``WAYS``.
        seed (int): the seed of weights and data.
        steps (int): the number of steps of the whole run, for which the learning rate is planned.
        file (Path): the state of the run, written beside a checkpoint every ``SAVE_EVERY`` steps and after each piece.
        look_every (int): the number of steps between two looks, which measure the present weights.
        **changes: values of the model's section in the YAML file, in addition to ``LLAMA``.

    Attributes:
        seen (dict): the ``way``, the ``seed``, ``steps``; ``skipped``, the numbers of the skipped steps, from 0;
            ``scales``, pairs of a step and log2 of the scale from that step on; ``losses``, the mean losses of the
            applied steps between two looks; and ``looks``, as ``worth_training.Trainings.run`` returns them.
    """

    def __init__(self, way, seed, steps, file, look_every=LOOK_EVERY, **changes):
        from scripts.studies.worth_tasks import Llama
        from scripts.studies.worth_training import Trainings, weights_of

        self.file, self.look_every = file, look_every
        task = Llama(steps, **LLAMA | changes)
        task.held_out_batches = HELD_OUT_BATCHES
        self.method, self.trainings, self.data = method_of(way), Trainings(task, look_every), task.data(seed)
        self.compiled = self.trainings.compiled(self.method.dtype, self.method.cell)
        self.settings = {"way": way, "seed": seed, "steps": steps, **LLAMA, **changes}
        self.seen = {**self.settings, "skipped": [], "scales": [], "losses": [], "looks": []}
        self.step, self.losses = 0, []
        self.compiled.begin(self.method.start, weights_of(task.network(self.method.dtype, seed)))
        if file.exists():
            self._restore()

    def go_on(self, end):
        """Train until the run has taken ``end`` steps."""
        batches = map(self.data.batch, range(self.step, end))
        for row in self.compiled.go_on(map(self._looked, batches)):
            exponent = math.log2(row["loss_scale"])
            if not self.seen["scales"] or self.seen["scales"][-1][1] != exponent:
                self.seen["scales"].append([self.step, exponent])
            if row["overflow"]:
                self.seen["skipped"].append(self.step)
            else:
                self.losses.append(row["loss"])
            self.step += 1
            if self.step == self.settings["steps"]:
                self._looked(self.data.batch(self.step))
            if self.step % SAVE_EVERY == 0 or self.step == end:
                self._keep()

    def _looked(self, batch):
        """Return the next step's batch; if a measurement is due, first measure the present loss and gradients."""
        if self.step % self.look_every == 0 or self.step == self.settings["steps"]:
            look = {"step": self.step, "quality": self.trainings.task.quality(self.compiled.network, self.data)}
            if self.settings["way"] != "fp32":
                look |= self.trainings.look(batch, self.compiled.loss_scale)
            self.seen["looks"].append(look)
            if self.step:
                self.seen["losses"].append(float(np.mean(self.losses)) if self.losses else None)
            self.losses.clear()
        return batch

    def _keep(self):
        """Write a checkpoint, and then the state file, so that the state file never names an incomplete checkpoint."""
        from mindspore import save_checkpoint

        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The file name of a checkpoint contains its step. The state file stores the step of the checkpoint to load.
        checkpoint = self._checkpoint(self.step)
        save_checkpoint(self.compiled.train_step, str(checkpoint))
        state = {"step": self.step, "losses": self.losses, "last_ceiling": self.trainings.last_ceiling}
        write_json(self.file, {**state, "seen": self.seen})
        for other in set(self.file.parent.glob(f"{self.file.stem}-*.ckpt")) - {checkpoint}:
            other.unlink()

    def _restore(self):
        from mindspore import load_checkpoint, load_param_into_net

        state = json.loads(self.file.read_text(encoding="utf-8"))
        recorded = {name: state["seen"].get(name) for name in self.settings}
        if recorded != self.settings:
            raise ValueError(
                f"The unfinished run in {self.file} has the settings {recorded}, but this run has {self.settings}. "
                "Remove the file to begin again, or give another folder with --unfinished."
            )
        self.step, self.losses, self.seen = state["step"], state["losses"], state["seen"]
        self.trainings.last_ceiling = state["last_ceiling"]
        checkpoint = load_checkpoint(str(self._checkpoint(self.step)))
        missing, unknown = load_param_into_net(self.compiled.train_step, checkpoint, strict_load=True)
        if missing or unknown:
            raise ValueError(
                f"The checkpoint {self._checkpoint(self.step)} does not fit the train-step cell: it lacks the "
                f"Parameters {missing}, and has the unknown Parameters {unknown}. Remove {self.file} to begin again."
            )

    def _checkpoint(self, step):
        return self.file.with_name(f"{self.file.stem}-{step}.ckpt")

    def forget(self):
        """Remove the run's checkpoint and state file, which are not needed after its last step."""
        self._checkpoint(self.step).unlink()
        self.file.unlink()


def method_of(way):
    from scripts.studies.worth_training import FP32, METHODS, UNSCALED, divided

    if way in ("fp32", "alone"):
        return next(method for method in METHODS if method.name == (FP32 if way == "fp32" else UNSCALED))
    return divided(way, START, MICRO_BATCHES)


def whole_runs(folder, steps):
    """Return the results of the finished runs in a folder: for each way of scaling, a list in the order of seeds."""
    runs = {}
    for way in WAYS:
        each = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{way}_*.json")))
        if of_way := [run for run in each if run["steps"] == steps]:
            runs[way] = of_way
    return runs


def summary(run):
    """Return the values of a run for its row in the table of results, such as skipped steps and the final loss."""
    at_start = skipped_at_the_start(run["skipped"], run["steps"])
    return {
        "seed": run["seed"],
        "skipped_at_start": at_start,
        "skipped_later": len(run["skipped"]) - at_start,
        "headroom_lost": over_looks(run, lambda look: math.log2(look["ceiling"] / look["loss_scale"])),
        "quality": run["looks"][-1]["quality"],
    }


def tables(result):
    """Return the only table of a result, as {name: rows}; the first row has the names of the columns."""
    columns = ["way of scaling", "skipped at the start + later, each run", "bits below the ceiling", LOST]
    rows = [[*columns, "loss on held-out text", "more than FP32's"]]
    fp32 = {run["seed"]: run["quality"] for run in result["ways"].get("fp32", [])}
    for way, runs in result["ways"].items():
        skipped = ", ".join(f"{run['skipped_at_start']} + {run['skipped_later']}" for run in runs)
        more = [run["quality"] - fp32[run["seed"]] for run in runs if run["seed"] in fp32]
        shown = interval(mean_and_interval(np.array(more)), 4) if len(more) > 1 and way != "fp32" else "-"
        quality = f"{np.mean([run['quality'] for run in runs]):.4f}"
        name = HARM.format(f", one of {MICRO_BATCHES} micro-batches" if way != "alone" else "")
        below, lost = mean(runs, "headroom_lost", 1), lost_at(name, mean_of(runs, "headroom_lost"))
        rows.append([WAYS[way], skipped, below, lost, quality, shown])
    return {"ways": rows}


def draw(runs):
    """Draw the loss on held-out text (above) and the loss scale (below) of the first run by each way of scaling."""
    figure = canvas.new_figure(9, 5.6)
    canvas.headline(figure, "The demo's model as one of 256 micro-batches: loss on held-out text, and loss scale")
    losses, scales = figure.subplots(2, sharex=True)
    for way, color in zip(runs, itertools.cycle(_COLOURS), strict=False):
        run = runs[way][0]
        steps, qualities = zip(*((look["step"], look["quality"]) for look in run["looks"]), strict=True)
        losses.plot(steps, qualities, color=color, label=WAYS[way], linewidth=1.2)
        if way != "fp32":
            starts, exponents = zip(*run["scales"], strict=True)
            ends = [*starts[1:], run["steps"]]
            scales.stairs(exponents, [*starts, ends[-1]], baseline=None, color=color, linewidth=1.2)
    canvas.style_axes(losses, y_label="loss on held-out text")
    canvas.style_axes(scales, x_label="step", y_label="log2 of the loss scale")
    losses.legend(fontsize=9, ncols=2, frameon=False)
    return figure


if __name__ == "__main__":
    main()
