"""A policy gradient (REINFORCE) in FP16 with value_and_grad and a loss scaler; the rewards spike now and then.

    python scripts/examples/policy_gradient.py
    python scripts/examples/policy_gradient.py --rule guided --record output/loss_scale_record.jsonl

The policy sees one of eight states and has to choose the action that belongs to it. In one step of 50, the
rewards are multiplied by 4096, and so are the gradients. They then overflow at a loss scale that fits all other steps.
"""

import argparse
import math

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive import AdaptiveLossScaler, GradientGuidedLossScaler
from mindformers_adaptive.monitor import RunRecord

STATES, ACTIONS, SAMPLES, STEPS = 8, 4, 64, 200
SPIKE_EVERY, SPIKE = 50, 4096.0


def make_scaler(rule):
    if rule == "guided":
        return GradientGuidedLossScaler(scale_value=2**24)
    # Scale windows of 5 to 40 steps, instead of the usual 20 to 1000, for a training of 200 steps.
    return AdaptiveLossScaler(scale_value=2**24, scale_window=5, max_scale_window=40, min_scale_window=5)


def make_policy():
    """Return the policy network, which computes in FP16."""
    return nn.SequentialCell(nn.Dense(STATES, 32, activation="tanh"), nn.Dense(32, ACTIONS)).to_float(mstype.float16)


def policy_loss(policy, states, actions, advantages):
    """Return the loss of REINFORCE: minus the mean of the actions' log-probabilities, weighted by their advantages."""
    log_probabilities = ops.log_softmax(policy(states).astype(mstype.float32), -1)
    chosen = (log_probabilities * ops.one_hot(actions, ACTIONS, Tensor(1.0), Tensor(0.0))).sum(-1)
    return -(chosen * advantages).mean()


def make_train_step(policy, optimizer, scaler):
    """Return a function that trains a step with states, actions and advantages.

    The function returns the loss, and whether the step was applied.
    """

    def scaled_loss(states, actions, advantages):
        return scaler.scale(policy_loss(policy, states, actions, advantages))

    value_and_grad = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)

    @mindspore.jit
    def train_step(states, actions, advantages):
        scaled, gradients = value_and_grad(states, actions, advantages)
        loss = scaler.unscale([scaled])[0]
        gradients = scaler.unscale(gradients)
        grads_finite = amp.all_finite(gradients)
        if grads_finite:
            # Clip the gradients: a reward spike without overflow must not change the policy network much.
            optimizer(ops.clip_by_global_norm(gradients, 1.0))
        scaler.adjust(grads_finite, gradients)
        return loss, grads_finite

    return train_step


def sampled(policy, random, spikes):
    """Let the policy act in random states; return which actions are right, and the batch: states, actions, advantages.

    If ``spikes``, the rewards are multiplied by ``SPIKE``.
    """
    state = random.integers(STATES, size=SAMPLES)
    states = Tensor(np.eye(STATES, dtype=np.float32)[state])
    # Draw an action by its softmax probability: add Gumbel noise to the logits and take the largest sum.
    action = (policy(states).asnumpy().astype(np.float64) + random.gumbel(size=(SAMPLES, ACTIONS))).argmax(1)
    right = action == state % ACTIONS
    reward = (right + random.normal(0.0, 0.1, SAMPLES)) * (SPIKE if spikes else 1.0)
    return right, states, Tensor(action.astype(np.int32)), Tensor((reward - reward.mean()).astype(np.float32))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("adaptive", "guided"), default="adaptive")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the training (default: {STEPS})")
    parser.add_argument("--record", help="file for the record of the run, which analyze and plot read")
    arguments = parser.parse_args()
    scaler = make_scaler(arguments.rule)
    record = RunRecord(arguments.record) if arguments.record else None
    if record:
        record.resume(last_step=0)
    mindspore.set_seed(0)
    random = np.random.default_rng(0)
    policy = make_policy()
    optimizer = nn.Adam(policy.trainable_params(), learning_rate=1e-2)
    train_step = make_train_step(policy, optimizer, scaler)
    print("step    right  spike  overflow   next loss scale")
    for step in range(1, arguments.steps + 1):
        spikes, used_scale = step % SPIKE_EVERY == 0, scaler.state()["loss_scale"]
        right, *batch = sampled(policy, random, spikes)
        loss, applied = train_step(*batch)
        overflow = not bool(applied)
        state = scaler.state()
        if record:
            line = {"step": step, "loss": float(loss), "overflow": overflow, "loss_scale": used_scale}
            names = {"next_loss_scale": "loss_scale", "skipped_steps": "skipped_steps"}
            record.append([line | {field: state[name] for field, name in names.items()}])
        scale = f"2^{math.log2(state['loss_scale']):g}"
        print(f"{step:4} {right.mean():8.3f} {spikes!s:>6} {overflow!s:>9} {scale:>17}")
    if record:
        record.close()


if __name__ == "__main__":
    main()
