"""Test ``LossScaleMonitor`` with ``mindspore.train.Model``: the run record equals a replay of the loss-scaling rule."""

import functools
import math
import re

import mindspore
import numpy as np
import pytest
from mindformers.trainer import base_trainer
from mindformers.wrapper import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindformers.wrapper import MFTrainOneStepCell as StockMFTrainOneStepCell
from mindspore import Tensor, nn, ops
from mindspore.train import Callback, CheckpointConfig, LambdaCallback, Model, ModelCheckpoint

from mindformers_adaptive.mindformers.callbacks import CheckpointMonitor, CommonInfoWithLossScale, restores_sidecar
from mindformers_adaptive.mindformers.checkpoint_formats import read_sidecar
from mindformers_adaptive.mindformers.registration import register
from mindformers_adaptive.monitor.gradient_range_monitor import GradientRangeMonitor
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.monitor.step_reader import StepReader
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    MFTrainOneStepCell,
    TrainOneStepWithLossScaleCell,
)
from tests.monitor.event_files import read_scalars, read_starts
from tests.shared.networks import Dense, batches, resettable
from tests.shared.records import missing
from tests.shared.versions import NEEDS_SECTION

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graph_mode")]

INITIAL_SCALE = 2.0**10
WINDOWS = {"max_scale_window": 3, "min_scale_window": 1}
# With these overflow flags, the scale window grows and shrinks.
OVERFLOWS = [bool(int(digit)) for digit in "1000000110001110100000000000"]


def adaptive(history_size=0, **arguments):
    return AdaptiveLossScaleUpdateCell(INITIAL_SCALE, 2, 1, history_size=history_size, **{**WINDOWS, **arguments})


def build(update_cell=None, train_step_class=TrainOneStepWithLossScaleCell):
    train_step = Dense().train_step(adaptive() if update_cell is None else update_cell, train_step_class)
    # MindFormers' own train-step cell only runs on a CPU if it takes the branch for Ascend 910B.
    train_step.ascend_910b_target, train_step.enable_allfinite = True, False
    return train_step


def floored(history_size):
    return adaptive(history_size, min_loss_scale=2.0**7)


def dynamic():
    return nn.DynamicLossScaleUpdateCell(INITIAL_SCALE, 2, 3)


def fixed():
    return nn.FixedLossScaleUpdateCell(8.0)


@functools.cache
def compiled_once(make, history_size, number):
    return resettable(build(make(history_size) if history_size else make()))


def build_again(history_size=0, make=adaptive, number=0):
    """Return a train step, reset to its initial state. All calls with equal arguments share one compiled train step.

    A test that needs two train steps at a time gives them different numbers.
    """
    return compiled_once(make, history_size, number)()


def data_of(overflows=OVERFLOWS):
    """Return a dataset with one batch for each overflow flag."""
    return batches(len(overflows), np.flatnonzero(overflows))


def train(network, callbacks, overflows=OVERFLOWS, epochs=1):
    """Train one step for each overflow flag. The flag says whether the step overflows."""
    model = network if isinstance(network, Model) else Model(network)
    model.train(epochs, data_of(overflows), callbacks=callbacks)


def replay(overflows=OVERFLOWS, **arguments):
    """Return the lines that the run record should have according to a replay of the rule, without losses."""
    rule = AdaptiveRule(**{**WINDOWS, **arguments})
    state, lines = rule.start(INITIAL_SCALE), []
    for step, overflow in enumerate(overflows, start=1):
        before, state = state, rule.step(state, overflow)
        line = {"step": step, "overflow": overflow, "loss_scale": before.loss_scale}
        line |= {"next_loss_scale": state.loss_scale, "scale_window": state.scale_window}
        line |= {name: getattr(state, name) for name in ("window_index", "growth_num", "down_num", "skipped_steps")}
        lines.append(line | {"largest_gradient": None, "dropped_by_norm": False, "gradient_norm": None})
    return lines


def without_loss(lines):
    return [{key: value for key, value in line.items() if key != "loss"} for line in lines]


class Losses(Callback):
    """Keeps the losses that the network returns."""

    def __init__(self):
        self.seen = []

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        self.seen.append(float((outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy()))


@pytest.mark.parametrize(
    "make", [build_again, lambda: build(adaptive(history_size=1), MFTrainOneStepCell)], ids=["MindSpore", "MindFormers"]
)
def test_record_is_the_rule_step_by_step(path, make):
    losses = Losses()
    train(make(), [LossScaleMonitor(path), losses])
    lines = read_record(path)
    assert without_loss(lines) == replay()
    assert [list(line) for line in lines] == [list(FIELDS)] * len(OVERFLOWS)
    assert str([line["loss"] for line in lines]) == str(losses.seen)
    assert len({line["scale_window"] for line in lines}) == 3
    assert {math.isfinite(loss) for loss in losses.seen} == {True, False}


def test_a_training_shorter_than_its_window_is_warned_of(path, messages):
    for steps in (2, 3):
        train(build_again(make=dynamic), [LossScaleMonitor(path)], [False] * steps)
    [message] = [message for message in messages() if message.startswith("The loss scale cannot rise")]
    assert re.search(r" 2 steps, .* 3 steps .*'adaptive-loss-scale find'.*'min_scale_window' .* 2\.", message)


def test_record_is_the_rule_in_pynative_mode(path):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    train(build(adaptive(history_size=4)), [LossScaleMonitor(path, every_n_steps=4)], OVERFLOWS[:9])
    assert without_loss(read_record(path)) == replay(OVERFLOWS[:9])


def test_looking_every_7th_step_records_every_step(path):
    losses, recorded = Losses(), []
    lines = LambdaCallback(on_train_step_end=lambda _: recorded.append(len(path.read_text().splitlines())))
    train(build_again(9), [LossScaleMonitor(path, every_n_steps=7), losses, lines], OVERFLOWS[:25])
    lines = read_record(path)
    assert without_loss(lines) == replay(OVERFLOWS[:25])
    assert str([line["loss"] for line in lines]) == str(losses.seen)
    assert recorded == [0] * 6 + [7] * 7 + [14] * 7 + [21] * 5


@pytest.mark.parametrize("history_size", [0, 3])
def test_steps_beyond_the_history_are_counted_as_missing(path, history_size):
    train(build_again(history_size), [LossScaleMonitor(path, every_n_steps=7)], OVERFLOWS[:16])
    size, expected = max(history_size, 1), replay(OVERFLOWS[:16])
    lines = [
        *(missing(1, 7 - size), *expected[7 - size : 7]),
        *(missing(8, 14 - size), *expected[14 - size : 14]),
        *(expected[14:] if history_size > 1 else [missing(15, 15), expected[15]]),
    ]
    if not history_size:
        for line in lines:
            # After missing steps, the loss scale of the next step is unknown if the update cell keeps no history.
            line |= {"loss_scale": None} if "step" in line else {}
    assert without_loss(read_record(path)) == lines


class FourSteps(nn.Cell):
    """Takes four steps in one call, as a compiled graph does in data-sink mode on Ascend."""

    def __init__(self, train_step):
        super().__init__(auto_prefix=False)
        self.train_step = train_step

    def construct(self, features, target):
        outputs = self.train_step(features[0], target[0])
        for number in range(1, 4):
            outputs = self.train_step(features[number], target[number])
        return outputs


def test_graph_with_four_steps_a_call_leaves_every_step(path):
    losses, monitor = Losses(), LossScaleMonitor(path, every_n_steps=2)
    network = FourSteps(build(adaptive(history_size=8)))
    Model(network).train(1, data_of(OVERFLOWS[:24]).batch(4), callbacks=[monitor, losses])
    lines = read_record(path)
    assert without_loss(lines) == replay(OVERFLOWS[:24])
    seen = {line["step"]: line["loss"] for line in lines if line["loss"] is not None}
    assert str(seen) == str({step: losses.seen[step // 4 - 1] for step in (8, 16, 24)})


def test_a_new_process_goes_on_from_a_checkpoint(path, tmp_path, messages):
    network = build_again(3)
    train(network, [LossScaleMonitor(path)], OVERFLOWS[:10])
    mindspore.save_checkpoint(network, str(tmp_path / "10.ckpt"))
    train(network, [LossScaleMonitor(path)], OVERFLOWS[10:13])
    assert without_loss(read_record(path)) == replay(OVERFLOWS[:13])

    resumed = build_again(3)
    mindspore.load_checkpoint(str(tmp_path / "10.ckpt"), resumed)
    train(resumed, [LossScaleMonitor(path)], OVERFLOWS[10:])
    assert without_loss(read_record(path)) == replay()
    assert any("the steps after 10 were removed" in message for message in messages())


class RunsAnother(Callback):
    """A callback that runs another training from start to end, after step 3 of the training that has the callback."""

    def __init__(self, run):
        self.run = run

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            self.run()


FORMS = ["ckpt", pytest.param("sidecar", marks=NEEDS_SECTION)]


@pytest.mark.parametrize("form", FORMS)
def test_each_of_two_runs_in_a_folder_goes_on_in_its_own_record(path, tmp_path, form):
    first, second, folder = build_again(), build_again(number=1), tmp_path / "saved"
    folder.mkdir()
    ranges = path.with_name("ranges.jsonl")

    def callbacks():
        # The gradient record goes on in the same way from each form of a checkpoint.
        measuring = [GradientRangeMonitor(every_n_steps=1, record_path=ranges)] if form == "ckpt" else []
        return [LossScaleMonitor(path), *measuring]

    def run_second():
        train(second, callbacks(), OVERFLOWS[:14])
        save(second, folder, form)
        train(second, callbacks(), OVERFLOWS[14:17])

    train(first, [*callbacks(), RunsAnother(run_second)], OVERFLOWS[:24])
    files = [path, ranges] if form == "ckpt" else [path]
    of_first = [file.read_text() for file in files]
    resumed = build_again()
    restore(resumed, folder, form)
    train(resumed, callbacks(), OVERFLOWS[14:20])
    assert [file.read_text() for file in files] == of_first
    assert without_loss(read_record(path)) == replay(OVERFLOWS[:24])
    assert without_loss(read_record(beside(path))) == replay(OVERFLOWS[:20])
    for file in files:
        steps = [[line["step"] for line in read_record(each)] for each in (file, beside(file))]
        assert steps == [[*range(1, 25)], [*range(1, 21)]]
    assert len(list(tmp_path.glob("*.jsonl*"))) == 2 * len(files)


def beside(path):
    """Return the record beside ``path`` whose name is extended by a run's number; there must be exactly one."""
    [file] = path.parent.glob(f"{path.stem}_*{path.suffix}")
    return file


def save(network, folder, form):
    """Save a train step in a MindSpore checkpoint; with "sidecar", save only its loss-scaling state, in JSON files."""
    if form == "sidecar":
        CommonInfoWithLossScale(network).save_common(str(folder / "common.json"))
    else:
        mindspore.save_checkpoint(network, str(folder / f"saved.{form}"), format=form)


def restore(network, folder, form):
    if form == "sidecar":
        network.scale_sense.set_data(Tensor(read_sidecar(folder)[0], mindspore.float32))
        restores_sidecar(lambda checkpoint, network, optimizer: None)(str(folder), network, network.optimizer)
    else:
        saved = mindspore.load_checkpoint(str(folder / f"saved.{form}"), format=form)
        assert mindspore.load_param_into_net(network, saved) == ([], [])


def test_epochs_and_trainings_with_one_monitor_go_on(path):
    network, monitor = build_again(), LossScaleMonitor(path)
    train(network, [monitor], OVERFLOWS[:4], epochs=2)
    train(network, [monitor], OVERFLOWS[:3])
    assert without_loss(read_record(path)) == replay([*OVERFLOWS[:4] * 2, *OVERFLOWS[:3]])
    assert read_log(path).steps_where("resumed").tolist() == []


@pytest.mark.parametrize("history_size", [0, 9])
def test_steps_taken_again_replace_those_before(path, history_size):
    network = build_again(history_size)

    saved = {}

    def set_back(run_context):
        """Keep the state of the update cell after step 3, and restore this state after step 6."""
        if run_context.original_args().cur_step_num == 3:
            saved.update(network.loss_scaling_manager.state_dict())
        if run_context.original_args().cur_step_num == 6:
            network.loss_scaling_manager.load_state_dict(saved)

    flags = [True, False, False, False, True, True, False, True]
    train(network, [LossScaleMonitor(path), LambdaCallback(on_train_step_end=set_back)], flags)
    lines, expected = without_loss(read_record(path)), replay(flags[:3] + flags[6:])
    if not history_size:
        # An update cell without a history does not show that its state was set back. So the loss scale that the next
        # step used is unknown.
        expected[3]["loss_scale"] = None
    assert lines == expected


def test_all_of_mindspores_dynamic_cell_is_recorded(path):
    network = build_again(make=dynamic)
    train(network, [LossScaleMonitor(path)], OVERFLOWS[:10])
    train(network, [LossScaleMonitor(path)], OVERFLOWS[10:])
    expected = replay(max_scale_window=3, min_scale_window=3)
    of_the_ladder = {"window_index": None, "growth_num": None, "down_num": None}
    assert without_loss(read_record(path)) == [line | of_the_ladder for line in expected]


@pytest.mark.parametrize(
    "make", [lambda: build_again(make=fixed), lambda: build(Tensor(8.0, mindspore.float32))], ids=["cell", "Tensor"]
)
def test_with_a_fixed_scale_all_is_recorded_that_there_is(path, make):
    monitor, network = LossScaleMonitor(path, every_n_steps=2), make()
    train(network, [monitor], [True, False])
    train(network, [monitor], [False, False, True])
    unknown = dict.fromkeys(FIELDS[5:])
    common = {"loss_scale": 8.0, "next_loss_scale": 8.0, **unknown, "dropped_by_norm": False}
    assert without_loss(read_record(path)) == [
        missing(1, 1),
        {"step": 2, "overflow": False, **common},
        missing(3, 3),
        {"step": 4, "overflow": False, **common},
        {"step": 5, "overflow": True, **common},
    ]


def test_all_of_mindformers_own_cells_is_recorded(path):
    cell = MindFormersUpdateCell(INITIAL_SCALE, 2, 20, max_scale_window=1000, min_scale_window=20)
    train(build(cell, StockMFTrainOneStepCell), [LossScaleMonitor(path)], OVERFLOWS)
    lines, expected = without_loss(read_record(path)), replay(max_scale_window=1000, min_scale_window=20)
    assert lines[-1]["down_num"] == int(cell.window_down_count)
    for line in (*lines, *expected):
        # MindFormers' own cell also counts raises and drops of the loss scale that cannot change the scale window. So
        # do not compare the counts of raises and drops.
        del line["growth_num"], line["down_num"]
    assert lines == expected


class OwnRule(nn.DynamicLossScaleUpdateCell):
    """A user's update cell that halves the loss scale on overflow, but never advances MindSpore's count of steps."""

    def construct(self, loss_scale, overflow):
        halved = self.select(overflow, loss_scale * self.reciprocal(self.scale_factor), loss_scale)
        ops.assign(loss_scale, halved)
        return overflow


class OwnRuleThatCounts(OwnRule):
    """Like ``OwnRule``, halves the loss scale on overflow; also advances MindSpore's count of steps."""

    def construct(self, loss_scale, overflow):
        ops.assign(self.cur_iter, self.cur_iter + 1)
        return super().construct(loss_scale, overflow)


OWN, COUNTING = (functools.partial(cell, INITIAL_SCALE, 2, 3) for cell in (OwnRule, OwnRuleThatCounts))


@pytest.mark.parametrize(("cell", "every_n_steps"), [(OWN, 1), (OWN, 2), (COUNTING, 1)])
def test_with_a_users_update_cell_every_step_is_recorded(path, cell, every_n_steps):
    flags = [True, False, False, True, False, True]
    monitor, network = LossScaleMonitor(path, every_n_steps), build_again(make=cell)
    train(network, [monitor], flags)
    train(network, [monitor], flags)
    lines = read_record(path)
    recorded = [line for line in lines if "step" in line]
    assert [line["step"] for line in recorded] == list(range(every_n_steps, 13, every_n_steps))
    assert [line["overflow"] for line in recorded] == (flags * 2)[every_n_steps - 1 :: every_n_steps]
    assert recorded[-1]["next_loss_scale"] == INITIAL_SCALE / 2**6
    if every_n_steps == 1:
        assert [line["skipped_steps"] for line in lines] == np.cumsum(flags * 2).tolist()


def test_full_or_damaged_count_leaves_steps_that_go_on(tmp_path):
    network = build_again(make=dynamic)
    for count in (2**31 - 3, 2**31 - 1, 0, -(2**31), -5):
        ops.assign(network.loss_scaling_manager.cur_iter, Tensor(count, mindspore.int32))
        record = tmp_path / f"{count}.jsonl"
        train(network, [LossScaleMonitor(record)], OVERFLOWS[:6])
        steps = [line["step"] for line in read_record(record)]
        first = count if count == 2**31 - 3 else 1
        assert steps == list(range(first, first + 6)), count


@pytest.mark.parametrize("make", [build_again, lambda: build(GradientGuidedLossScaleUpdateCell(INITIAL_SCALE))])
def test_steps_and_collapse_are_seen_after_a_damaged_count(path, messages, make):
    network = make()
    network.loss_scaling_manager.cur_iter.set_data(Tensor(2**31 - 1, mindspore.int32))
    with pytest.warns(UserWarning, match="'current_iterator_step' 2147483647, which must lie between .*: 1 is used"):
        train(network, [LossScaleMonitor(path, max_consecutive_overflows=3)], [False, True, True, True])
    assert [(line["step"], line["skipped_steps"]) for line in read_record(path)] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert [message for message in messages() if re.search(r"collapsed: 3 steps .*overflowed .* to step 4\b", message)]


class SeesRecord(Callback):
    """Notes the last step in the run record at each save of a checkpoint, to check that the record is not behind."""

    def __init__(self, path, saver):
        self.path, self.saver, self.ends = path, saver, []

    def on_train_step_end(self, run_context):
        if self.saver._last_triggered_step == run_context.original_args().cur_step_num:
            self.ends.append(max(line.get("last_step", line.get("step")) for line in read_record(self.path)))


@pytest.mark.parametrize("order", [["monitor", "saver"], ["saver", "monitor"]])
@pytest.mark.parametrize("kind", ["MindSpore", "MindFormers"])
def test_no_checkpoint_is_ahead_of_the_record(path, tmp_path, monkeypatch, kind, order):
    monkeypatch.setenv("LOCAL_DEFAULT_PATH", str(tmp_path))
    if kind == "MindSpore":
        saver = ModelCheckpoint(directory=str(tmp_path), config=CheckpointConfig(save_checkpoint_steps=10))
    else:
        saver = CheckpointMonitor(directory=str(tmp_path), save_checkpoint_steps=10)
    callbacks = {"monitor": LossScaleMonitor(path, every_n_steps=7), "saver": saver}
    seen = SeesRecord(path, saver)
    train(build_again(9), [*(callbacks[name] for name in order), seen], OVERFLOWS[:25])
    assert seen.ends[:2] == [10, 20]
    # The record marks the step of every checkpoint, also of the checkpoint that is saved at the end of the training.
    assert read_log(path).steps_where("saved").tolist() == [10, 20, 25]
    assert without_loss(read_record(path)) == replay(OVERFLOWS[:25])
    assert all(line["loss"] is not None for line in read_record(path))
    assert "_check_save_ckpt" not in vars(saver)


def test_a_training_that_fails_lets_its_record_go(path):
    monitor = LossScaleMonitor(path, max_consecutive_overflows=2, on_collapse="raise")
    with pytest.raises(RuntimeError, match="collapsed"):
        train(build_again(), [monitor], [True] * 3)
    train(build_again(), [LossScaleMonitor(path)], [False])
    assert sorted(path.parent.iterdir()) == sorted([path, beside(path)])


def test_skipped_steps_do_not_fall_when_another_cell_goes_on(path, tmp_path):
    first = build_again(make=dynamic)
    train(first, [LossScaleMonitor(path)], OVERFLOWS[:10])
    mindspore.save_checkpoint(first, str(tmp_path / "10.ckpt"))
    resumed = build_again(3)
    mindspore.load_checkpoint(str(tmp_path / "10.ckpt"), resumed)
    with pytest.warns(UserWarning, match="fresh"):
        train(resumed, [LossScaleMonitor(path)], OVERFLOWS[10:16])
    mindspore.save_checkpoint(resumed, str(tmp_path / "16.ckpt"))
    again = build_again()
    mindspore.load_checkpoint(str(tmp_path / "16.ckpt"), again)
    train(again, [LossScaleMonitor(path)], OVERFLOWS[16:])
    lines = read_record(path)
    assert [line["step"] for line in lines] == list(range(1, len(OVERFLOWS) + 1))
    assert [line["skipped_steps"] for line in lines] == np.cumsum(OVERFLOWS).tolist()


def test_a_network_without_loss_scaling_is_told_and_trains_on(path, messages):
    dense, losses = Dense(), Losses()
    model = Model(dense.layer, dense.loss_fn, dense.optimizer())
    train(model, [LossScaleMonitor(path), losses], [False, False])
    assert (len(losses.seen), path.exists()) == (2, False)
    [message] = messages()
    assert re.match(r"LossScaleMonitor records nothing: .* scale_sense\b", message)


def test_each_window_change_is_one_line_of_the_log(path, messages):
    train(build_again(9), [LossScaleMonitor(path, every_n_steps=9)])
    expected, before = [], {"scale_window": 1, "window_index": 0}
    for line in replay():
        if (before["scale_window"], before["window_index"]) != (line["scale_window"], line["window_index"]):
            expected.append(
                f"Loss scaling: at step {line['step']} the window goes from {before['scale_window']} to "
                f"{line['scale_window']} (index {before['window_index']} to {line['window_index']}), at loss scale "
                f"{line['next_loss_scale']}."
            )
        before = line
    assert len(expected) > 4
    assert [message for message in messages() if "the window goes" in message] == expected


def test_every_number_is_a_scalar_for_tensorboard(path, tmp_path):
    folder = tmp_path / "scalars"
    train(build_again(9), [LossScaleMonitor(path, every_n_steps=5, tensorboard_dir=folder)])
    expected = {
        f"loss_scaling/{field}": {
            line["step"]: float(line[field]) for line in read_record(path) if math.isfinite(line[field])
        }
        for field in FIELDS[1:]
        if field not in ("largest_gradient", "gradient_norm")
    }
    # The event file says that this run starts at step 1, so TensorBoard hides all scalars of earlier runs.
    assert read_starts(folder) == [1]
    scalars = read_scalars(folder)
    assert scalars.keys() == expected.keys()
    for tag, values in expected.items():
        assert scalars[tag] == pytest.approx(values), tag
    assert 0 < len(scalars["loss_scaling/loss"]) < len(OVERFLOWS)


COLLAPSE = [False, False, *[True] * 9]


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_collapse_warns_and_again_when_twice_as_long(path, messages, every_n_steps):
    monitor = LossScaleMonitor(path, max_consecutive_overflows=4, every_n_steps=every_n_steps)
    train(build_again(3, make=floored), [monitor], COLLAPSE)
    collapses = [message for message in messages() if "collapsed" in message]
    [collapse, longer] = collapses
    assert re.search(r"collapsed: 4 steps .*overflowed .* to step 6,", collapse)
    assert re.search(r"collapsed: 8 steps .*overflowed .* to step 10,", longer)
    assert "at a loss scale of 2^9." in collapse
    assert "at a loss scale of 2^7." in longer
    # The whole message is printed once.
    assert ["loss itself is inf" in message for message in collapses] == [True, False]
    assert len(read_record(path)) == len(COLLAPSE)


def test_a_collapse_stops_the_training_if_asked_to(path, messages):
    monitor = LossScaleMonitor(path, max_consecutive_overflows=4, on_collapse="stop")
    train(build_again(), [monitor], COLLAPSE, epochs=2)
    assert without_loss(read_record(path)) == replay(COLLAPSE[:6])
    assert re.search(r"Training stops here\b.* 'on_collapse' is 'stop'\.$", messages()[-1])


@pytest.mark.parametrize("make", [adaptive, fixed])
def test_collapse_raises_if_asked_to_and_is_recorded(path, make):
    monitor = LossScaleMonitor(path, max_consecutive_overflows=4, on_collapse="raise")
    with pytest.raises(RuntimeError, match=r"Loss scaling has collapsed: 4 steps in a row .* to step 6,"):
        train(build_again(make=make), [monitor], COLLAPSE)
    assert [line["overflow"] for line in read_record(path)] == COLLAPSE[:6]


@pytest.mark.parametrize(
    ("rank", "all_ranks", "files"),
    [("0", False, ["record.jsonl"]), ("1", False, []), ("1", True, ["record_rank_1.jsonl"])],
)
def test_only_the_first_rank_writes_unless_told_otherwise(tmp_path, monkeypatch, messages, rank, all_ranks, files):
    monkeypatch.setenv("RANK_ID", rank)
    monitor = LossScaleMonitor(
        tmp_path / "record.jsonl", all_ranks=all_ranks, max_consecutive_overflows=2, on_collapse="stop"
    )
    train(build_again(), [monitor], [True] * 5)
    assert [file.name for file in tmp_path.iterdir()] == files
    assert all(without_loss(read_record(tmp_path / file)) == replay([True] * 2) for file in files)
    assert bool(messages()) == bool(files)


def test_two_monitors_of_one_training_write_both(path, tmp_path, monkeypatch, registry_put_back):
    monkeypatch.setenv("LOCAL_DEFAULT_PATH", str(tmp_path))
    register()
    other, saver = path.with_name("other.jsonl"), CheckpointMonitor(directory=str(tmp_path), save_checkpoint_steps=10)
    monitors = [LossScaleMonitor(path, every_n_steps=7), LossScaleMonitor(other, every_n_steps=9)]
    seen = [SeesRecord(file, saver) for file in (path, other)]
    # Of some callback classes, MindFormers' trainer keeps only one callback. It must keep both LossScaleMonitors.
    callbacks = base_trainer.BaseTrainer.sort_callbacks([*monitors, saver, *seen])
    assert sorted(map(id, callbacks)) == sorted(map(id, [*monitors, saver, *seen]))
    train(build_again(9), callbacks, OVERFLOWS[:25])
    for file, ends in zip((path, other), seen, strict=True):
        assert without_loss(read_record(file)) == replay(OVERFLOWS[:25])
        assert ends.ends[:2] == [10, 20]
    assert "_check_save_ckpt" not in vars(saver)


def test_two_monitors_with_one_path_write_a_file_each(path, tmp_path, messages):
    network = build_again()
    for last, flags in ((0, OVERFLOWS[:5]), (5, OVERFLOWS[5:8])):
        train(network, [LossScaleMonitor(path), LossScaleMonitor(path)], flags)
        for file in (path, beside(path)):
            assert without_loss(read_record(file)) == replay(OVERFLOWS[: last + len(flags)])
    assert len(list(tmp_path.iterdir())) == 2
    [note] = {message for message in messages() if "is being written" in message}
    assert note.startswith(f"{path} is being written")
    assert note.endswith(f" recorded in {file.name}.")


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("record_path", 3, TypeError, "'record_path' must be a path.* got 3 of type int"),
        ("record_path", "", ValueError, "'record_path' must be a path.* got ''"),
        ("tensorboard_dir", True, TypeError, "'tensorboard_dir' must be a path.* got True of type bool"),
        ("every_n_steps", 0, ValueError, "'every_n_steps' must be at least 1, but got 0"),
        ("every_n_steps", True, TypeError, "'every_n_steps' must be an integer.* got True of type bool"),
        ("max_consecutive_overflows", 0, ValueError, "'max_consecutive_overflows' must be at least 1, but got 0"),
        ("max_consecutive_overflows", "5", TypeError, "'max_consecutive_overflows' .* integer.* got '5' of type str"),
        ("on_collapse", "halt", ValueError, "'on_collapse' must be one of 'warn', 'stop', 'raise', but got 'halt'"),
        ("on_write_error", "stop", ValueError, "'on_write_error' must be one of 'warn', 'raise', but got 'stop'"),
        ("all_ranks", 1, TypeError, "'all_ranks' must be True or False.* got 1 of type int"),
    ],
)
def test_bad_arguments_are_refused(argument, value, error, message):
    with pytest.raises(error, match=message):
        LossScaleMonitor(**{argument: value})


@pytest.mark.parametrize(("norm", "dropped"), [(7.5, False), (8.0, True), (math.inf, True), (math.nan, True)])
def test_step_is_dropped_unless_its_norm_is_below_the_threshold(norm, dropped):
    arguments = {"use_clip_grad": True, "use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 8.0}
    reader = StepReader(build(train_step_class=functools.partial(MFTrainOneStepCell, **arguments)))
    assert reader.dropped_by_norm(False, norm) is dropped
    assert reader.dropped_by_norm(True, norm) is False
    assert reader.dropped_by_norm(None, norm) is None


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ((0.5, False, 8.0, 0.1, Tensor([3.0], mindspore.float32)), 3.0),
        ((0.5, False, 8.0, 0.1, Tensor(math.inf, mindspore.float32)), math.inf),
        # Without clipping, MindFormers' cells return only the squared norm of each Parameter's gradient.
        ((0.5, False, 8.0, 0.1, None, Tensor([9.0, 16.0], mindspore.float32), (2, 3)), 5.0),
        # A Tensor of several elements is no norm of all gradients.
        ((0.5, False, 8.0, 0.1, Tensor([3.0, 4.0], mindspore.float32)), None),
        ((0.5, False, 8.0, 0.1, None), None),
        ((0.5, False, 8.0), None),
        (Tensor(0.5), None),
    ],
)
def test_norm_of_the_gradients_is_what_mindformers_cells_return(outputs, expected):
    reader = StepReader(build(train_step_class=MFTrainOneStepCell))
    assert reader.gradient_norm(outputs) == expected
    assert StepReader(build()).gradient_norm(outputs) is None
    # The squared norms of one process are not the norm of all.
    reader.train_step.is_distributed = True
    assert reader.gradient_norm(outputs) == (None if expected == 5.0 else expected)
