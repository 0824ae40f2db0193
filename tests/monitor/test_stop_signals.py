"""A signal that stops a run is reported with its step, and does what it did before."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from mindformers_adaptive.monitor.reports import StopSignals

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def received():
    """Handlers that note the signals instead of ending the test."""
    received, before = [], {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_report_comes_first_and_then_the_previous_handler(received, number):
    handler, reports = signal.getsignal(number), []
    signals = StopSignals(lambda name: reports.append((name, list(received))))
    signals.install()
    signals.install()
    signal.raise_signal(number)
    assert (reports, received) == ([(signal.Signals(number).name, [])], [number])
    signals.restore()
    signals.restore()
    assert signal.getsignal(number) is handler


def test_a_handler_that_came_later_stays(received):
    signals, later = StopSignals(lambda name: None), lambda number, frame: None
    signals.install()
    signal.signal(signal.SIGTERM, later)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is later


def test_a_signal_that_is_ignored_stays_ignored(received):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = StopSignals(lambda name: pytest.fail("reported"))
    signals.install()
    signal.raise_signal(signal.SIGINT)
    signals.restore()


def test_other_threads_have_no_handlers(received):
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=StopSignals(lambda name: None).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_was_forked_reports_nothing(received):
    reading, writing = os.pipe()
    signals = StopSignals(lambda name: os.write(writing, b"reported"))
    signals.install()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0 if received == [signal.SIGTERM] else 1)
    signals.restore()
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 100) == b""
    os.close(reading)


TRAINING = """
import sys, time
import numpy as np
from mindspore import dataset, nn
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint
from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, TrainOneStepWithLossScaleCell

class Slow(Callback):
    def on_train_step_end(self, run_context):
        time.sleep(0.05)

net = nn.Dense(3, 2)
cell = AdaptiveLossScaleUpdateCell(2**10, 2, 20)
step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params()), cell)
data = dataset.NumpySlicesDataset((np.ones((2000, 3), np.float32), np.zeros((2000, 2), np.float32))).batch(1)
callbacks = [LossScaleMonitor("record.jsonl"), Slow()]
if "save" in sys.argv:
    callbacks.append(ModelCheckpoint("x", "saved", CheckpointConfig(save_checkpoint_steps=3)))
Model(step).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
"""


@pytest.mark.parametrize(
    ("number", "arguments", "remedy"),
    [
        (signal.SIGTERM, ["save"], "To resume, load the newest checkpoint in {folder}/saved before"),
        # MindSpore answers to SIGINT by sending SIGTERM to itself.
        (signal.SIGINT, [], "It cannot be resumed, because it saves no checkpoint"),
    ],
)
def test_a_stopped_training_says_at_which_step_and_how_to_resume(tmp_path, number, arguments, remedy):
    script, output = tmp_path / "training.py", tmp_path / "output.txt"
    script.write_text(TRAINING)
    record = tmp_path / "record.jsonl"
    with output.open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    end = time.monotonic() + 120
    while not record.exists() or record.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == -signal.SIGTERM
    last = record.read_bytes().count(b"\n")
    lines = [line for line in output.read_text().splitlines() if "Training was stopped" in line]
    # MindFormers prints each line of its log once.
    assert len(lines) == 1, output.read_text()[-3000:]
    assert f"Training was stopped by SIGTERM after step {last}. " in lines[0]
    assert remedy.format(folder=tmp_path) in lines[0]
