"""``LossScaleMonitor`` hands each step to another logger, by a function of a dict and a step as loggers have it."""

import math
import re
import sys

import pytest

# Under this name pytest imports the file: both files then share their compiled train steps.
from test_loss_scale_monitor import OVERFLOWS, build_again, train

from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.writer import read_record

pytestmark = pytest.mark.usefixtures("graph_mode")


class Logger:
    """Stores its calls; it has the parameters of wandb.log, mlflow.log_metrics and swanlab.log."""

    def __init__(self, fails=lambda step: False):
        self.fails, self.steps = fails, {}

    def log(self, data, step=None):
        if self.fails(step):
            raise ConnectionError("the server is down")
        self.steps[step] = data


def numbers_of(line):
    numbers = {key: value for key, value in line.items() if key != "step" and isinstance(value, int | float)}
    return {f"loss_scaling/{key}": float(value) for key, value in numbers.items() if math.isfinite(value)}


def test_each_step_is_handed_over_as_finite_floats(path):
    logger = Logger()
    train(build_again(9), [LossScaleMonitor(path, every_n_steps=7, log=logger.log)])
    record = read_record(path)
    assert [*logger.steps] == list(range(1, len(OVERFLOWS) + 1))
    assert logger.steps == {line["step"]: numbers_of(line) for line in record}
    assert [logger.steps[step]["loss_scaling/overflow"] for step in logger.steps] == [float(flag) for flag in OVERFLOWS]
    assert {type(value) for data in logger.steps.values() for value in data.values()} == {float}
    # The batches that overflow have a loss of inf, which a curve cannot show.
    assert {"loss_scaling/loss_scale", "loss_scaling/skipped_steps"} <= set.intersection(
        *map(set, logger.steps.values())
    )


def test_a_logger_that_fails_stops_no_training(path, caplog):
    logger = Logger(fails=lambda step: step in (2, 3, 9))
    train(build_again(), [LossScaleMonitor(path, log=logger.log)])
    assert [line["step"] for line in read_record(path)] == list(range(1, len(OVERFLOWS) + 1))
    assert set(range(1, len(OVERFLOWS) + 1)) - set(logger.steps) == {2, 3, 9}
    warned = [record.getMessage() for record in caplog.records if "LossScaleMonitor failed" in record.getMessage()]
    # Steps 2 and 3 fail in a row, so step 3 has no warning.
    assert [re.search(r"at step (\d+)", message)[1] for message in warned] == ["2", "9"]


def test_a_logger_that_fails_stops_a_training_if_asked(path):
    logger = Logger(fails=lambda step: step == 3)
    with pytest.raises(ConnectionError, match="the server is down"):
        train(build_again(), [LossScaleMonitor(path, on_write_error="raise", log=logger.log)])
    assert [*logger.steps] == [1, 2]


def test_a_yaml_file_names_the_function(tmp_path, monkeypatch, path):
    (tmp_path / "my_logger.py").write_text("steps = {}\n\ndef log(data, step):\n    steps[step] = data\n")
    monkeypatch.chdir(tmp_path)
    train(build_again(), [LossScaleMonitor(path, log="my_logger.log")], OVERFLOWS[:3])
    assert [*sys.modules.pop("my_logger").steps] == [1, 2, 3]


@pytest.mark.parametrize("name", ["log", "no_such_module.log", "math.no_such_function", "a b.log", ""])
def test_a_name_that_cannot_be_imported_is_refused(name):
    with pytest.raises(ValueError, match="'log' must be a function"):
        LossScaleMonitor(log=name)


@pytest.mark.parametrize("value", [3, {"a": 1}, "math.pi"])
def test_what_cannot_be_called_is_refused(value):
    with pytest.raises(TypeError, match="takes a dict of numbers"):
        LossScaleMonitor(log=value)
