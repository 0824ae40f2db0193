"""Train with MindFormers' PyNative trainer in two processes, started by ``msrun`` with a folder as the argument.

Only the second process gets an inf, in step 3. This script adds two stand-ins to ``hyper_parallel_stand_in``. First,
the processes form a communication group on the CPU, which MindFormers does not do. Second, the gradients are
either summed by an all-reduce, as in the backward pass of hyper-parallel, or stay in their process, like gradients of
sharded weights.
"""

import pickle
import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import communication, dataset, ops
from mindspore.mint.distributed import all_reduce, get_rank

from mindformers_adaptive.mindformers.pynative_trainer import stock_trainer, trainer_class
from tests.mindformers import pynative_runs

STEPS, LOCAL = 6, 4


def make_trainer_class(adds_up):
    """Return a trainer class with loss scaling; ``adds_up`` says whether gradients are summed over the processes."""

    class Trainer(trainer_class()):
        def _apply_parallelism(self, model, parallelism):
            """Leave the model as it is, without parallelism."""

        def _create_built_in_callbacks(self):
            return []

        def _optimizer_update(self):
            for parameter in self.optimizer.parameters if adds_up else ():
                all_reduce(parameter.grad, op=ops.ReduceOp.SUM)
            return super()._optimizer_update()

    return Trainer


def make_data():
    """Return a dataset with the samples of this process."""
    generator = np.random.default_rng(get_rank())
    features = generator.normal(size=(STEPS * LOCAL, pynative_runs.FEATURES)).astype(np.float32)
    target = features[:, :1] * (2 + get_rank())
    if get_rank() == 1:
        features[2 * LOCAL, 0] = np.inf
    pairs = list(zip(features, target, strict=True))
    return dataset.GeneratorDataset(pairs, ["features", "target"], shuffle=False).batch(LOCAL)


def train(folder, section, adds_up):
    """Train, and return the steps, the state of the scaler and the weights in this process."""
    folder.mkdir(exist_ok=True)
    model, seen = pynative_runs.Model(mindspore.float32), pynative_runs.Seen()
    optimizer, schedule = pynative_runs.make_optimizer(model)
    config = pynative_runs.make_config(folder, section, accumulation=2, steps=STEPS)
    trainer = make_trainer_class(adds_up)(
        config=config,
        model=model,
        train_dataset=make_data(),
        optimizer=optimizer,
        lr_scheduler=schedule,
        callbacks=[seen],
    )
    trainer.train()
    state = trainer.scaler.state()
    return {"steps": np.array(seen.steps), "state": state, **pynative_runs.weights_of(model)}


def main(folder):
    """Run all trainings, and write the results of this process to FOLDER/rank_N.pickle."""
    stock = stock_trainer()
    communication.init()
    stock.init_process_group = stock.destroy_process_group = lambda: None
    folder = Path(folder)
    results = {
        f"{kind} {'added up' if adds_up else 'own'}": train(folder / f"{kind}{adds_up}", section, adds_up)
        for kind, section in (("adaptive", pynative_runs.ADAPTIVE), ("guided", pynative_runs.GUIDED))
        for adds_up in (True, False)
    }
    (folder / f"rank_{get_rank()}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
