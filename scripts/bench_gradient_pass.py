"""Measure what the gradient-guided cell adds to a training step: one pass over the gradients of the demo's model.

    python scripts/bench_gradient_pass.py

On a CPU this pass takes the place of the one that looks for inf and NaN. Both are measured, and whole training steps
with the adaptive and with the guided cell; they take turns. Machines differ and
are noisy, so compare the shares, not the milliseconds.
"""

import argparse
import contextlib
import gc
import statistics
import sys
import time
from pathlib import Path

from argument_types import positive

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "tiny_llama_cpu_fp16.yaml"
LABELS = {
    "step": "training step of the demo, adaptive cell",
    "overflow": "of that, looking for inf and NaN",
    "largest": "finding the largest gradient, and inf and NaN",
    "each": "the same, with track_per_parameter",
    "guided": "training step of the demo, guided cell",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=50, help="rounds to take medians of (default: 50)")
    rounds = parser.parse_args().rounds
    # MindFormers logs to standard output, which belongs to the result.
    with contextlib.redirect_stdout(sys.stderr):
        times, parameters, elements = measure(rounds)
    print(f"{parameters} gradients with {elements} elements; medians of {rounds} rounds")
    print()
    print(f"{'':<46} {'time':>10} {'share of the step':>18}")
    for name, label in LABELS.items():
        print(f"{label:<46} {times[name] * 1e3:>7.2f} ms {times[name] / times['step']:>17.2%}")
    print()
    added = {name: (times[name] - times["overflow"]) / times["step"] for name in ("largest", "each")}
    print(f"added to the step on a CPU: {added['largest']:.2%}, with track_per_parameter {added['each']:.2%}")


def measure(rounds):
    """Return the median times in seconds by the names of ``LABELS``, the number of gradients, and of their elements."""
    import mindspore
    import numpy as np
    from mindspore import Tensor

    from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    train_step, batch = build_train_step(AdaptiveLossScaleUpdateCell(2**10, 2, 20))
    guided_step, _ = build_train_step(GradientGuidedLossScaleUpdateCell(2**10))
    numbers = np.random.default_rng(0)
    gradients = tuple(Tensor(numbers.normal(0, 1e-4, weight.shape).astype(np.float32)) for weight in train_step.weights)
    calls = {"step": lambda: train_step(batch)[1], "guided": lambda: guided_step(batch)[1]}
    calls |= {name: lambda cell=cell: cell(gradients) for name, cell in passes(gradients)}
    times = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles the graph
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call().asnumpy()
                times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians, len(gradients), sum(gradient.size for gradient in gradients)


def passes(gradients):
    """Yield the names and the cells that take the gradients and return whether they have an inf or a NaN."""
    from mindformers_adaptive.cells.guided_update_cell import GradientGuidedLossScaleUpdateCell
    from mindspore import nn

    from mindformers_adaptive.cells.largest_gradient import LargestGradient
    from mindformers_adaptive.cells.overflow_on_cpu import has_inf_or_nan

    class Overflow(nn.Cell):
        def construct(self, gradients):
            return has_inf_or_nan(gradients)

    yield "overflow", Overflow()
    for name, keep in (("largest", False), ("each", True)):
        update_cell = GradientGuidedLossScaleUpdateCell(2**16, track_per_parameter=keep)
        update_cell.declare_signal([str(place) for place in range(len(gradients))])
        yield name, LargestGradient(update_cell)


def build_train_step(update_cell):
    """Return the demo's train-step cell, and a batch of random bytes."""
    import numpy as np
    from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
    from mindformers.tools.register import MindFormerConfig
    from mindspore import Tensor, nn

    from mindformers_adaptive.wrapper import MFTrainOneStepCell

    config = MindFormerConfig(str(CONFIG))
    model_config = {key: value for key, value in config.model.model_config.items() if key != "type"}
    model = LlamaForCausalLM(LlamaConfig(**model_config)).set_train()
    optimizer = nn.AdamWeightDecay(model.trainable_params(), learning_rate=1e-3)
    train_step = MFTrainOneStepCell(model, optimizer, use_clip_grad=True, scale_sense=update_cell).set_train()
    shape = config.runner_config.batch_size, config.model.model_config.seq_length + 1
    return train_step, Tensor(np.random.default_rng(0).integers(0, 256, shape).astype(np.int32))


if __name__ == "__main__":
    main()
