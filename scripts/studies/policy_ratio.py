"""Measure what precision does to the ratio of two policies in reinforcement learning: training against rollout.

    python -m scripts.studies.policy_ratio [--json FILE]

A policy network writes sequences of tokens, one token at a time. A token is rewarded if it follows from the tokens
before it. The rollout, which writes the sequences, and the training have the same weights but different kernels. The
training rounds the inputs of each matrix product to the format and sums in float32. The rollout also rounds four
partial sums and each result. The ratio of the two policies is the probability of a token in the training, divided by
its probability in the rollout; without rounding it is 1. The study trains in FP32, in BF16, and in FP16 without and
with a loss scale. All formats are simulated by rounding float32 numbers. Prints Markdown.
"""

import itertools
import math
import sys

import numpy as np

from mindformers_adaptive.lab.running_rule import start_rule
from scripts.studies.reporting import study_parser, table, versions, write_json

TOKENS, CONTEXT, HIDDEN, PARTS = 16, 4, 128, 4
SEQUENCES, LENGTH, UPDATES, SEEDS = 32, 64, 100, 3
LEARNING_RATE, ADAM_EPSILON = 3e-3, 1e-8
# The loss is the mean over the tokens of a batch, and one batch is one of this number of micro-batches.
MICRO_BATCHES = 256
START = 2.0**16
WAYS = {
    "FP32": {"format": None, "rule": None},
    "BF16": {"format": "bfloat16", "rule": None},
    "FP16, no scaling": {"format": "float16", "rule": None},
    "FP16, adaptive": {"format": "float16", "rule": "adaptive"},
}


def main():
    arguments = study_parser(__doc__).parse_args()
    result = {"ways": {way: [measure(way, seed) for seed in range(SEEDS)] for way in WAYS}}
    print(f"{UPDATES} updates, mean of {SEEDS} seeds")
    for rows in tables(result).values():
        print("\n".join(["", *table(rows)]))
    write_json(arguments.json, {**versions(), **result})


def measure(way, seed, updates=UPDATES):
    """Train a policy, and return its measurements as a dict.

    Returns:
        dict: ``token``, the mean of the size of ratio - 1, over all tokens; ``largest``, the largest of them;
        ``sequence``, the mean for whole sequences; ``error``, the relative error of the first applied gradient;
        ``skipped``, the number of skipped updates; ``reward``, the mean reward of a token over all updates.
    """
    print(f"{way}, seed {seed}", file=sys.stderr, flush=True)
    training = Training(seed=seed, **WAYS[way])
    steps = [training.update() for _ in range(updates)]
    log_ratios = np.concatenate([step["log_ratios"] for step in steps])
    token, sequence = (np.abs(np.expm1(logs)) for logs in (log_ratios, log_ratios.sum(axis=1)))
    return {
        "token": float(token.mean()),
        "largest": float(token.max()),
        "sequence": float(sequence.mean()),
        "error": training.error,
        "skipped": sum(step["skipped"] for step in steps),
        "reward": float(np.mean([step["reward"] for step in steps])),
    }


def tables(result):
    """Return the table of the study, as a list of rows; the first row has the names of the columns."""
    columns = ["training", "ratio of a token: mean distance from 1", "largest distance"]
    columns += ["ratio of a sequence: mean distance", "error of the first gradient", "mean reward"]
    rows = [columns]
    for way, runs in result["ways"].items():
        mean = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        shares = [percent(mean[name]) for name in ("token", "largest", "sequence", "error")]
        rows.append([way, *shares, f"{mean['reward']:.3f}"])
    return {"ratio": rows}


def percent(share):
    if share < 1e-5:
        return "less than 0.001 %"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


class Training:
    """A policy network and its training by policy gradient, in a format and with or without a loss scale.

    ``weights`` has, for each layer, a weight of shape (inputs, outputs) and a bias of shape (outputs,), in float32.
    """

    def __init__(self, seed, format, rule):
        self.random, self.format = np.random.default_rng(seed), format
        sizes = [CONTEXT * TOKENS, HIDDEN, HIDDEN, TOKENS]
        self.weights = []
        for inputs, outputs in itertools.pairwise(sizes):
            weight = self.random.uniform(-1.0, 1.0, (inputs, outputs)) / math.sqrt(inputs)
            self.weights += [weight.astype(np.float32), np.zeros(outputs, np.float32)]
        self.moments = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in self.weights]
        self.applied, self.error = 0, None
        self.scaling = None if rule is None else start_rule(rule, loss_scale_value=START)

    def update(self):
        """Write sequences, train on them, and return what is measured in this update."""
        contexts, actions, rollout = self.write()
        target = (contexts[:, :TOKENS].argmax(1) + 1) % TOKENS
        rewards = (actions == target).astype(np.float32)
        arguments = contexts, actions, (rewards - rewards.mean()) / len(rewards) / MICRO_BATCHES
        scale = 1.0 if self.scaling is None else self.scaling.loss_scale
        chosen, gradients = gradients_of(self.weights, *arguments, scale, self.format)
        is_finite = all(np.isfinite(gradient).all() for gradient in gradients)
        if is_finite:
            # The reported error is the error of the first applied update.
            self.error = self.error_of(gradients, arguments) if self.error is None else self.error
            self.apply(gradients)
        if self.scaling is not None:
            largest = max(float(np.abs(gradient).max()) for gradient in gradients) if is_finite else None
            self.scaling.step(not is_finite, largest)
        log_ratios = (chosen - rollout).reshape(LENGTH, SEQUENCES).T
        return {"log_ratios": log_ratios, "skipped": not is_finite, "reward": float(rewards.mean())}

    def apply(self, gradients):
        """Take a step of Adam."""
        self.applied += 1
        for weight, gradient, (mean, square) in zip(self.weights, gradients, self.moments, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            size = np.sqrt(square / (1 - 0.999**self.applied)) + ADAM_EPSILON
            weight -= LEARNING_RATE * mean / (1 - 0.9**self.applied) / size

    def error_of(self, gradients, arguments):
        """Return the relative error of gradients: the norm of the difference from FP32, divided by the norm in FP32."""
        _, expected = gradients_of(self.weights, *arguments, 1.0, None)
        error, norm = (
            math.sqrt(sum(float(np.sum(array.astype(np.float64) ** 2)) for array in arrays))
            for arrays in ([got - right for got, right in zip(gradients, expected, strict=True)], expected)
        )
        return error / norm

    def write(self):
        """Write sequences with the rollout's kernels.

        Returns:
            tuple, one row for each token: the contexts, one-hot, float32 of shape (tokens, CONTEXT * TOKENS); the
            actions, int of shape (tokens,); their log-probabilities in the rollout, float64 of shape (tokens,).
        """
        tokens = self.random.integers(TOKENS, size=(SEQUENCES, CONTEXT))
        contexts, actions, logs = [], [], []
        for _ in range(LENGTH):
            context = np.eye(TOKENS, dtype=np.float32)[tokens].reshape(SEQUENCES, -1)
            log = log_softmax(rollout_logits(context, self.weights, self.format))
            # Draw an action by its probability: add Gumbel noise to the logits and take the largest sum.
            action = (log + self.random.gumbel(size=log.shape)).argmax(axis=1)
            contexts.append(context)
            actions.append(action)
            logs.append(log[np.arange(SEQUENCES), action])
            tokens = np.concatenate([tokens[:, 1:], action[:, None]], axis=1)
        return np.concatenate(contexts), np.concatenate(actions), np.concatenate(logs)


def gradients_of(weights, contexts, actions, advantages, scale, format):
    """Return the log-probabilities of the actions, and the gradients of the weights, with the kernels of the training.

    The loss is -(log-probability * advantage), summed over the actions, and is multiplied by the scale. Inputs of
    products, and gradients that leave a layer, are rounded to the format. The returned gradients are unscaled.
    """
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    inputs = [rounded(contexts, format)]
    for weight, bias in layers:
        outputs = inputs[-1] @ rounded(weight, format) + bias
        inputs.append(rounded(np.tanh(outputs), format))
    log, rows = log_softmax(outputs), np.arange(len(actions))
    gradient = np.exp(log)
    gradient[rows, actions] -= 1.0
    gradient = rounded((gradient * advantages[:, None] * scale).astype(np.float32), format)
    gradients = []
    for number in reversed(range(len(layers))):
        gradients[:0] = [rounded(inputs[number].T @ gradient, format) / scale, rounded(gradient.sum(0), format) / scale]
        if number:
            slope = 1.0 - inputs[number] ** 2
            gradient = rounded(rounded(gradient @ rounded(layers[number][0], format).T, format) * slope, format)
    return log[rows, actions], gradients


def rollout_logits(inputs, weights, format):
    """Return the logits of the policy network, computed with the kernels of the rollout.

    Args:
        inputs (NDArray): float32 of shape (samples, inputs).
        weights (list[NDArray]): for each layer, a weight of shape (inputs, outputs) and a bias of shape (outputs,).
        format (str, optional): the format to which inputs, partial sums and results are rounded; None for float32.
    """
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        parts = zip(np.split(rounded(inputs, format), PARTS, 1), np.split(rounded(weight, format), PARTS), strict=True)
        total = sum(rounded(columns @ rows, format) for columns, rows in parts)
        outputs = rounded(rounded(total, format) + bias, format)
        inputs = np.tanh(outputs)
    return outputs


def log_softmax(logits):
    """Return the log-probabilities of shape (samples, TOKENS), computed in float64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def rounded(array, format):
    """Return float32 numbers rounded to a format: to float16 by a cast, to bfloat16 by its bits, half to even."""
    if format is None:
        return array
    if format == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


if __name__ == "__main__":
    main()
