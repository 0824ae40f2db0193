"""Two machines (network namespaces) train together. A cut network cable ends both processes; then both resume."""

import contextlib
import os
import shutil
import subprocess

import pytest

from tests.mindformers.training_runs import LegacyFormat, Machine, TrainingRun

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several processes")]

FORM = LegacyFormat("ckpt")
SAVED_EVERY = 4
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Yield two network namespaces, which simulate machines, with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("The command 'ip' is missing. Install the package iproute2.")
    names = [f"machine{number}-{os.getpid()}" for number in (0, 1)]
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"Creating a network namespace failed: {error.stderr.strip()}. Run with CAP_SYS_ADMIN.")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield [Machine(name, number, ADDRESSES[0]) for number, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def training(machines, output, corpus, compiled, options, hold_after=None):
    """Train in two processes, one on each simulated machine, with one output folder; kill both processes at the end."""
    options = {**FORM.save_options(output, SAVED_EVERY, keep=2), **options}
    # Let MindSpore give up an unreachable machine after 20 seconds. By default this takes half a minute or more.
    soon = {"MS_NODE_TIMEOUT": "20", "MS_HEARTBEAT_RETRY_TIMEOUT": "20"}
    how = {"processes": 2, "by_msrun": True, "environment": soon, "hold_after": hold_after}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                TrainingRun(
                    output, corpus, options, 200, machine=machine, compiled=compiled / str(machine.number), **how
                )
            )
            for machine in machines
        ]


def steps_of(runs):
    """Return, for each machine, the training steps that it has printed."""
    return [run.steps(rank) for rank, run in enumerate(runs)]


def test_cut_cable_ends_both_and_both_resume(machines, long_corpus, tmp_path):
    output, compiled = tmp_path / "output", tmp_path / "compiled"
    # Disconnect the machines some steps after the last checkpoint, so that the resumed run repeats these steps.
    cut_after = SAVED_EVERY + 3
    with training(machines, output, long_corpus, compiled, {}, hold_after=cut_after) as runs:
        runs[0].wait_until(lambda: all(len(steps) == cut_after for steps in steps_of(runs)))
        ip("-n", machines[1].namespace, "link", "set", "cable", "down")
        assert [run.process.wait(120) for run in runs] == [1, 1]
        before = steps_of(runs)
    ip("-n", machines[1].namespace, "link", "set", "cable", "up")
    saved = FORM.newest_complete(output)
    assert saved == FORM.newest_complete(output, rank=1)
    with training(machines, output, long_corpus, compiled, FORM.resume_options(output)) as resumed:
        resumed[0].wait_until(lambda: all(len(steps) >= SAVED_EVERY for steps in steps_of(resumed)))
        after = steps_of(resumed)
    for own_before, own_after in zip(before, after, strict=True):
        assert next(iter(own_after)) == saved + 1
        again = own_before.keys() & own_after.keys()
        assert set(range(saved + 1, cut_after + 1)) == again
        assert {step: own_after[step] for step in again} == {step: own_before[step] for step in again}
    # Each machine has its own data, so the losses differ. The gradient norms and loss scales are the same.
    for first, second in (before, after):
        both = first.keys() & second.keys()
        assert len(both) >= SAVED_EVERY
        assert [first[step][1:] for step in both] == [second[step][1:] for step in both]
        assert [first[step].loss for step in both] != [second[step].loss for step in both]
