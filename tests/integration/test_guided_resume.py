"""Runs with the gradient-guided cell that are killed and resumed take the steps of one that never stopped."""

import dataclasses
import functools
import shutil

import numpy as np
import pytest
from mindformers_adaptive.rules.guided_names import COUNTERS, PARAMETER_NAMES
from test_resume import assert_one_record_has_every_step_once
from training_runs import CheckpointSection, LegacyFormat, TrainingRun
from versions import NEEDS_SECTION

from mindformers_adaptive.monitor.record import read_record
from mindformers_adaptive.rules.guided import GuidedRule

# One worker, because the runs that never stopped are shared.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("guided resume")]

# A rate at which the scale is so near to the ceiling that the run overflows before and after it was saved.
EXCHANGE_RATE = 200
SAVED_AT, LAST = 8, 20
GUIDED = {
    "runner_wrapper.scale_sense": "{type: GradientGuidedLossScaleUpdateCell, loss_scale_value: 1048576, "
    f"exchange_rate: {EXCHANGE_RATE}}}"
}
CARRIED = {"scale_sense", *PARAMETER_NAMES.values()}


@dataclasses.dataclass(frozen=True)
class FromFile(LegacyFormat):
    """Resumes from the file of the first save."""

    def resume_options(self, output):
        return super().resume_options(output, resume_training=f"tiny_llama_rank_0-1_{SAVED_AT}.ckpt")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function that returns where the compiled graph of runs is kept."""

    @functools.cache
    def folder(optimizer_state, processes):
        return tmp_path_factory.mktemp("compiled")

    return folder


@pytest.fixture(scope="module")
def uninterrupted(long_corpus, compiled, tmp_path_factory):
    """Return a function that returns an uninterrupted run and its output folder; each runs once."""

    @functools.cache
    def run(form, processes):
        output = tmp_path_factory.mktemp("uninterrupted") / "output"
        options = form.save_options(output, every=SAVED_AT, keep=5) | GUIDED
        graph = compiled(form.optimizer_state, processes)
        return TrainingRun(output, long_corpus, options, LAST, processes, compiled=graph).wait(), output

    return run


def stopped(form, output, long_corpus, graph):
    """Leave in ``output`` what a run leaves that was killed after the first save; return its steps."""
    options = form.save_options(output, every=SAVED_AT, keep=5) | GUIDED
    with TrainingRun(output, long_corpus, options, LAST, compiled=graph) as run:
        run.wait_until_saved(form, output)
    return run.steps()


def cut_back(output):
    """Leave of a whole run in the `checkpoint:` format what it had saved by then."""
    (output / "saved" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    for folder in (output / "saved").glob("iteration_*"):
        if int(folder.name[-8:]) > SAVED_AT:
            shutil.rmtree(folder)


def replay(record):
    """The states of the rule before the first step and after each, by the gradients that the record has."""
    rule = GuidedRule(EXCHANGE_RATE)
    states = [rule.start(2.0**20)]
    for line in record:
        states.append(rule.step(states[-1], line["overflow"], line["largest_gradient"]))
    return states


WITHOUT_OPTIMIZER = CheckpointSection(optimizer_state=False)


@pytest.mark.parametrize(
    ("form", "processes"),
    [
        pytest.param(FromFile("ckpt"), 1, id="ckpt"),
        pytest.param(LegacyFormat("safetensors", async_save=True), 1, id="safetensors, async"),
        pytest.param(CheckpointSection(), 1, id="checkpoint section", marks=NEEDS_SECTION),
        pytest.param(WITHOUT_OPTIMIZER, 1, id="checkpoint section without optimizer state", marks=NEEDS_SECTION),
        pytest.param(FromFile("ckpt"), 2, id="ckpt, two processes"),
    ],
)
def test_a_stopped_and_resumed_run_takes_the_steps_of_one_that_never_stopped(
    uninterrupted, long_corpus, compiled, tmp_path, form, processes
):
    shared = form if form in (FromFile("ckpt"), WITHOUT_OPTIMIZER) else FromFile("ckpt")
    reference, reference_output = uninterrupted(shared, processes)
    graph = compiled(form.optimizer_state, processes)
    expected, output = reference.steps(), tmp_path / "output"
    if form is not shared:
        before = stopped(form, output, long_corpus, graph)
        assert before == {step: expected[step] for step in before}
    else:
        shutil.copytree(reference_output, output)
        if form == WITHOUT_OPTIMIZER:
            cut_back(output)
    options = form.save_options(output, every=SAVED_AT, keep=5) | form.resume_options(output) | GUIDED
    resumed = TrainingRun(output, long_corpus, options, LAST, processes, compiled=graph).wait()
    for rank in range(processes):
        steps = reference.steps(rank)
        assert resumed.steps(rank) == {step: steps[step] for step in range(SAVED_AT + 1, LAST + 1)}
        saved, saved_by_reference = form.last_saved(output, rank), shared.last_saved(reference_output, rank)
        assert saved.keys() >= CARRIED
        both = saved.keys() & saved_by_reference.keys() - {"global_batch_size"}
        assert len(both) > 20
        assert {name for name in both if saved[name] != saved_by_reference[name]} == set()
    assert {expected[step].overflow for step in resumed.steps()} == {True, False}

    # The record has all that the rule needs to tell the state.
    assert_one_record_has_every_step_once(output, expected)
    record = read_record(output / "loss_scale_record.jsonl")
    assert record == read_record(reference_output / "loss_scale_record.jsonl")
    states = replay(record)
    assert [state.loss_scale for state in states[1:]] == [step.loss_scale for step in expected.values()]
    for rank in range(processes):
        restored = resumed.restored_state(rank)
        assert {name: restored[name] for name in (*COUNTERS, "level")} == {
            name: getattr(states[SAVED_AT], name) for name in (*COUNTERS, "level")
        }
    assert saved["guided_counters"] == np.int32([getattr(states[LAST], name) for name in COUNTERS]).tobytes()
    assert saved["guided_overflow_rate"] == np.float32(states[LAST].overflow_rate).tobytes()
    assert len({state.overflow_rate for state in states[SAVED_AT:]}) > 5
