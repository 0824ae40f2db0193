"""Test ``LossScaleMonitor`` from a MindFormers YAML file in launcher runs, some of them killed and resumed."""

import os
import signal

import pytest

from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from tests.conftest import write_corpus
from tests.mindformers.training_runs import CheckpointSection, LegacyFormat, TrainingRun
from tests.monitor.event_files import read_scalars
from tests.shared.records import assert_follows
from tests.shared.versions import BEFORE_1_7, NEEDS_SECTION

pytestmark = pytest.mark.slow

SAVED_EVERY, LAST = 10, 40
# Pause the runs at a step between two saved checkpoints.
HELD_AFTER = SAVED_EVERY + 4
# Fields of a record line whose value must change at least once within a run.
MOVING = FIELDS[2 : FIELDS.index("skipped_steps") + 1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "samples", samples=400)


def assert_is_what_happened(lines, printed):
    """Compare a record with MindFormers' log lines, and with a replay of the rule on the record's overflow flags."""
    assert [line["step"] for line in lines] == list(range(1, LAST + 1)) == sorted(printed)
    rule = AdaptiveRule(max_scale_window=4, min_scale_window=1)
    assert_follows(rule, rule.start(2.0**20, scale_window=1), lines)
    for line in lines:
        step = printed[line["step"]]
        loss = f"{line['loss']:.{3 if BEFORE_1_7 else 6}f}"
        assert (loss, line["overflow"]) == (step.loss, step.overflow)
        assert line["next_loss_scale"] == step.loss_scale
        # The adaptive cell measures no gradients, so the largest gradient is unknown. MindFormers is not configured to
        # drop steps by gradient norm, so no step is dropped.
        assert (line["largest_gradient"], line["dropped_by_norm"]) == (None, False)
    for name in MOVING:
        assert len({line[name] for line in lines}) > 1, f"{name} has the same value in all lines"


def test_run_killed_and_resumed_has_one_record(corpus, tmp_path):
    output, record, form = tmp_path / "output", tmp_path / "it.jsonl", LegacyFormat("ckpt")
    options = form.save_options(output, SAVED_EVERY, keep=2)
    options["callbacks.2"] = f"{{type: LossScaleMonitor, every_n_steps: 3, record_path: {record}}}"
    options |= {"runner_wrapper.scale_sense.history_size": 3, "context.save_graphs_path": "elsewhere"}

    with TrainingRun(output, corpus, options, hold_after=HELD_AFTER) as killed:
        # The monitor reads the update cell at every third step, and before each save. After the save at step 10, it
        # reads again at step 12. Then it writes the record lines of steps 11 and 12 one after the other, so wait for
        # both.
        killed.wait_until(lambda: record.exists() and len(read_record(record)) >= 12)
    saved, before = form.newest_complete(output), read_record(record)
    assert (saved, [line["step"] for line in before]) == (SAVED_EVERY, list(range(1, 13)))
    # The section ``context`` of the YAML file holds in the run; MindSpore's own default is another mode.
    assert "In the run: mode 0, graphs in elsewhere" in killed.text()

    scalars = tmp_path / "scalars"
    options |= form.resume_options(output) | {"tensorboard.tensorboard_dir": scalars}
    last = TrainingRun(output, corpus, options).wait()
    superseded = f"went on to step {len(before)}: the steps after {saved} were removed"
    assert last.text().count(superseded) == 1
    lines = read_record(record)
    assert_is_what_happened(lines, killed.steps() | last.steps())
    assert read_log(record).steps_where("resumed").tolist() == [saved + 1]
    assert read_log(record).steps_where("saved").tolist() == [*range(SAVED_EVERY, LAST, SAVED_EVERY), LAST]
    # The event file of TensorBoard has the scalars of MindFormers too.
    written = read_scalars(scalars / "rank_0")
    assert written["loss"].keys() == last.steps().keys() == set(range(saved + 1, LAST + 1))
    windows = {line["step"]: line["scale_window"] for line in lines}
    assert written["loss_scaling/scale_window"] == {step: windows[step] for step in last.steps()}
    changes = sum(windows[step] != windows[step - 1] for step in last.steps())
    assert 0 < changes <= last.text().count("Loss scaling: at step")


@NEEDS_SECTION
def test_a_run_that_saves_by_the_checkpoint_section_is_resumed(corpus, tmp_path):
    output, form = tmp_path / "output", CheckpointSection()
    options = {"callbacks.2": "{type: LossScaleMonitor, every_n_steps: 9}", **form.save_options(output, SAVED_EVERY, 2)}
    options |= {"runner_wrapper.scale_sense.history_size": 9}
    with TrainingRun(output, corpus, options, hold_after=HELD_AFTER) as stopped:
        stopped.wait_until_saved(form, output)
        os.kill(stopped.process.pid, signal.SIGTERM)
        assert stopped.process.wait(60) == -signal.SIGTERM
    assert form.newest_complete(output) == SAVED_EVERY
    resumed = TrainingRun(output, corpus, options | form.resume_options(output)).wait()
    assert_is_what_happened(read_record(output / "loss_scale_record.jsonl"), stopped.steps() | resumed.steps())
