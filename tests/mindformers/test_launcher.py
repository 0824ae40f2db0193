"""The training launcher: overrides of a YAML file, also by command line, and runs of ``run_mindformer.py``."""

import argparse
import os
import re
import sys

import pytest

from mindformers_adaptive.cli import train
from mindformers_adaptive.cli.program import main
from mindformers_adaptive.mindformers import launcher
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.mindformers.launcher import load_config
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.saved_state import all_fields, to_values
from tests.conftest import ROOT
from tests.mindformers.training_runs import (
    SMALL_MODEL,
    LegacyFormat,
    TrainingRun,
    as_options,
    assert_one_record_has_every_step_once,
)
from tests.shared.records import assert_follows

CONFIG = ROOT / "configs" / "tiny_llama_cpu_fp16.yaml"

pytestmark = pytest.mark.usefixtures("registry_put_back")


def overrides(*arguments):
    """Return a dict of the YAML keys that the launcher's command-line arguments override, each with its new value."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.read_overrides(parser.parse_args(["--config", str(CONFIG), *arguments]))


def load(*arguments):
    return load_config(CONFIG, overrides(*arguments), may_add=train.OPTION_KEYS)


# Each entry: an option of the launcher, the text after the option on the command line, the YAML key that the option
# overrides, and the new value of the key, which differs from the value in the file.
OPTIONS = [
    ("run-mode", "finetune", "run_mode", "finetune"),
    ("mode", "1", "context.mode", 1),
    ("device-target", "GPU", "context.device_target", "GPU"),
    ("device-id", "3", "context.device_id", 3),
    ("use-parallel", "true", "use_parallel", True),
    ("seed", "7", "seed", 7),
    ("output-dir", "elsewhere", "output_dir", "elsewhere"),
    ("epochs", "5", "runner_config.epochs", 5),
    ("batch-size", "4", "runner_config.batch_size", 4),
    ("sink-mode", "True", "runner_config.sink_mode", True),
    ("gradient-accumulation-steps", "2", "runner_config.gradient_accumulation_steps", 2),
    ("train-dataset-dir", "corpus", "train_dataset.data_loader.dataset_dir", "corpus"),
    ("eval-dataset-dir", "corpus", "eval_dataset.data_loader.dataset_dir", "corpus"),
    ("num-samples", "64", "train_dataset.data_loader.num_samples", 64),
    ("do-eval", "true", "do_eval", True),
    ("load-checkpoint", "last.ckpt", "load_checkpoint", "last.ckpt"),
    ("resume-training", "true", "resume_training", True),
    ("resume-training", "last.ckpt", "resume_training", "last.ckpt"),
    ("auto-trans-ckpt", "true", "auto_trans_ckpt", True),
    ("transform-process-num", "2", "transform_process_num", 2),
    ("src-strategy-path-or-dir", "strategy", "src_strategy_path_or_dir", "strategy"),
    ("strategy-load-checkpoint", "s.ckpt", "parallel.strategy_ckpt_load_file", "s.ckpt"),
    ("only-save-strategy", "true", "only_save_strategy", True),
    ("remote-save-url", "obs://x", "remote_save_url", "obs://x"),
    ("profile", "true", "profile", True),
    ("do-sample", "true", "model.model_config.do_sample", True),
    ("trust-remote-code", "true", "trust_remote_code", True),
    ("predict-data", "def main():", "input_data", "def main():"),
    ("predict-batch-size", "2", "predict_batch_size", 2),
]


@pytest.fixture(scope="module")
def unchanged():
    """Return the configuration without any option; no test changes it."""
    return load()


@pytest.mark.parametrize(("option", "text", "key", "expected"), OPTIONS)
def test_an_option_sets_its_key(unchanged, option, text, key, expected):
    after = load(f"--{option}={text}")
    assert value_at(unchanged, key) != expected
    assert value_at(after, key) == expected
    assert type(value_at(after, key)) is type(expected)


def test_resume_training_alone_means_true():
    assert overrides("--resume-training", "--epochs=2") == {"resume_training": True, "runner_config.epochs": 2}


def test_the_table_above_has_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    offered = re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert set(offered) == {option for option, *_ in OPTIONS} | {
        "config",
        "options",
        "register-path",
        "traceback",
        "verbose",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("1e-4", 1e-4),
        ("-2.5E3", -2500.0),
        ("true", True),
        ("null", None),
        ("cosine", "cosine"),
        ("a=b", "a=b"),
        ("2^16", 65536.0),
        ("'1e-4'", "1e-4"),
        ("[]", []),
        ("[0.9, 95e-2]", [0.9, 0.95]),
        ("[a, true]", ["a", True]),
        ("{rate: 1e-4}", {"rate": 1e-4}),
    ],
)
def test_options_take_values_as_in_yaml_and_1e4_as_a_number(text, expected):
    [(key, value)] = overrides("--options", f"some.key={text}").items()
    assert key == "some.key"
    assert value == expected
    assert type(value) is type(expected)


def test_options_set_nested_keys_and_places_in_lists():
    config = load(
        *("--options", "optimizer.betas.1=0.99", "callbacks.1.prefix=mine", "lr_schedule.learning_rate=1e-4"),
        *("--options", "runner_wrapper.use_clip_grad=false", "optimizer.eps=1e-6"),
    )
    assert config.optimizer.betas == [0.9, 0.99]
    assert config.callbacks[1]["prefix"] == "mine"
    assert config.lr_schedule.learning_rate == 1e-4
    assert config.runner_wrapper.use_clip_grad is False
    assert config.optimizer.eps == 1e-6
    # Warnings are errors, and the keys are in the file or in MindFormers' template, so there is no warning.
    config = load("--options", "remote_save_url=obs://x", "runner_wrapper.scale_sense={type: NoLossScaleUpdateCell}")
    assert config.remote_save_url == "obs://x"
    # A section that is set as a whole reads like any other.
    assert config.runner_wrapper.scale_sense.type == "NoLossScaleUpdateCell"
    assert config.runner_wrapper.scale_sense.max_scale_window is None


def test_num_samples_limits_the_evaluation_data_too():
    assert load("--num-samples=64").eval_dataset is None
    config = load("--num-samples=64", "--eval-dataset-dir=corpus")
    assert config.eval_dataset.data_loader == {"dataset_dir": "corpus", "num_samples": 64}


@pytest.mark.parametrize("arguments", [["--run-mode=eval"], ["--run-mode=train", "--options", "run_mode=eval"]])
def test_mindformers_fills_in_what_the_run_mode_needs(unchanged, arguments):
    assert "eval_callbacks" in load(*arguments)
    assert "eval_callbacks" not in unchanged


def test_options_have_the_last_word():
    config = load("--options", "runner_config.epochs=3", "run_mode=finetune", "--epochs", "2", "--run-mode", "train")
    assert (config.runner_config.epochs, config.run_mode) == (3, "finetune")


def test_key_missing_in_the_yaml_file_is_added_with_a_warning():
    key = "lr_schedule.warmup_ratio"
    with pytest.warns(UserWarning, match=rf"'{key}' was not in .*tiny_llama_cpu_fp16.yaml; it is added, as 2\."):
        config = load("--options", f"{key}=2")
    assert config.lr_schedule.warmup_ratio == 2
    # The names of these keys are checked, so no warning is needed.
    config = load("--options", "runner_wrapper.scale_sense.hysteresis=2", "callbacks.2.explain=True")
    assert config.runner_wrapper.scale_sense.hysteresis == 2


@pytest.mark.parametrize(
    "key", ["seed.key", "callbacks.9", "callbacks.9.type", "callbacks.-1.type", "callbacks.one", "optimizer.betas.1.x"]
)
def test_a_way_that_leads_nowhere_is_refused(key):
    with pytest.raises(
        ValueError, match=rf"'{re.escape(key)}' leads to nothing .*: there is no '.+' in .* by its number"
    ):
        load("--options", f"{key}=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --config"),
        (["--config", "missing.yaml"], "argument --config: there is no file 'missing.yaml' (current folder: "),
        (["--config", "notes.txt"], "must end in .yaml or .yml, but got 'notes.txt'"),
        (["--config", "run.yaml", "--options"], "argument --options: expected at least one argument"),
        (["--config", "run.yaml", "--options", "seed"], "'seed' must have the form key.sub=value, as in optimizer"),
        (["--config", "run.yaml", "--options", "a..b=1"], "'a..b=1' must have the form key.sub=value"),
        (["--config", "run.yaml", "--options", "a=[1"], "argument --options: 'a=[1': '[1' is not a value"),
        (
            ["--config", "run.yaml", "--epochs", "two"],
            "argument --epochs: must be ... from 1 to 2147483647, but got 'two'",
        ),
        (["--config", "run.yaml", "--sink-mode", "maybe"], "--sink-mode: must be true or false ... got 'maybe'"),
        (["--config", "run.yaml", "--epochs", "9" * 5000], "argument --epochs: must be ... from 1 to"),
        (["--config", "run.yaml", "--mode", "2"], "argument --mode: must be ... from 0 to 1, but got '2'"),
        (["--config", "run.yaml", "--register-path", "x"], "argument --register-path: there is no folder 'x'"),
        (["--config", "run.yaml", "--options", "a=2^99999"], "--options: 'a=2^99999': '2^99999' is too large"),
        (
            ["--config", "run.yaml", "--options", "a=2020-99-99"],
            "'2020-99-99' is not a value ... month must be in 1..12",
        ),
        (["--config", "run.yaml", "--epoks", "2"], "unrecognized arguments: --epoks 2. Did you mean --epochs"),
        (
            ["--config", "run.yaml", "--train_dataset_dri", "x"],
            "Did you mean --train-dataset-dir or --eval-dataset-dir?",
        ),
        (
            ["--config", "run.yaml", "--loss-scale-windw=9"],
            "mean --options runner_wrapper.scale_sense.scale_window= or ",
        ),
        (["--config", "run.yaml", "--runner_config.epochs", "2"], "is set by --options runner_config.epochs=VALUE"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "notes.txt"):
        (tmp_path / name).write_text("seed: 0\n")
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert all(part in errors for part in message.split(" ... "))


# Wrong contents of run.yaml, and the expected parts of the error messages, joined by dots.
FILES = [
    ("", "run.yaml must hold keys of MindFormers ... holds 'None' ... 'seed: 0'"),
    ("[1, 2]", "must hold keys of MindFormers ... holds '[1, 2]'"),
    ("1: 2\na: 3", "must hold keys of MindFormers"),
    ("a: [", "run.yaml must be ... YAML and UTF-8 ... parsing a flow node"),
    (
        "a: !!python/object/apply:os.getcwd []",
        "run.yaml must be ... YAML and UTF-8 ... constructor for the tag 'tag:yaml.org,2002:python",
    ),
    ("a: !!bool x", "run.yaml must be ... YAML and UTF-8, but: 'x'"),
    ("a: &a {b: *a}", "the YAML text expands to ... 100,000 values"),
    ("a: " + "[" * 20_000, "nested more than 500 levels deep"),
    ("a: " + "[" * 50, "run.yaml must be ... YAML and UTF-8"),
    (b"\xff\xfea: 1", "'utf-8' codec can't decode byte 0xff"),
    ("run_mode: [train]", "'run_mode' must be one of train"),
    ("base_config: run.yaml", "'base_config' must lead to at most 30 files ... from run.yaml"),
    ("base_config: [run.yaml, run.yaml]", "'base_config' must ... of these files leads back"),
    ("base_config: other.yaml", "such as run.yaml"),
    ("base_config: missing.yaml", "there is no file 'missing.yaml'"),
    ("base_config: 5", "'base_config' must name ... got 5"),
    ("base_config: list.yaml", "list.yaml must hold keys of MindFormers"),
    (
        "training: {steps: 3}",
        "graph-mode trainer, but has the section 'training' ... 'context.mode: 1' ... loop of your own",
    ),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[str(content)[:30] for content, _ in FILES])
def test_a_wrong_yaml_file_is_explained(run_program, in_a_folder_of_its_own, tmp_path, monkeypatch, content, message):
    not_runs = {"other": "base_config: run.yaml", "list": "[1]"}
    for name, text in {**not_runs, "run": content}.items():
        (tmp_path / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(launcher, "launch", lambda _: pytest.fail("A wrong YAML file must be rejected before launch()"))
    code, printed, errors = run_program("train", "--config", "run.yaml")
    # Leave out MindFormers' log lines. Its log handler writes to the stdout of the test that logged first, so the
    # output of this test has these lines only if this test logged first.
    assert (code, re.sub(r".* - mindformers.* - (INFO|WARNING) - .*\n", "", printed)) == (1, "")
    error = errors.partition("adaptive-loss-scale train: error: ")[2]
    assert all(part in error for part in message.split(" ... "))


@pytest.mark.parametrize("arguments", [["--run-mode", "trian"], ["--options", "run_mode=trian"]])
def test_a_wrong_run_mode_is_refused(arguments):
    with pytest.raises(ValueError, match=r"'run_mode' must be one of train, .* predict, but got 'trian'.*--run-mode"):
        load(*arguments)


def test_register_path_is_known_to_auto_register_and_to_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGISTER_PATH", "before")
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_config(CONFIG, register_path="mine")
    assert os.environ["REGISTER_PATH"] == str(tmp_path / "mine")
    assert str(tmp_path / "mine") in sys.path


@pytest.mark.slow
def test_pynative_run_follows_the_rule_and_saves_its_state(long_corpus, tmp_path):
    output, form = tmp_path / "output", LegacyFormat("ckpt")
    changes = {"hysteresis": 2, "loss_scale_value": 2**17}
    options = {"context.mode": 1} | {f"runner_wrapper.scale_sense.{key}": value for key, value in changes.items()}
    run = TrainingRun(output, long_corpus, options | form.save_options(output, every=5, keep=1), steps=5).wait()
    assert list(run.steps()) == list(range(1, 6))
    assert {step.overflow for step in run.steps().values()} == {True, False}
    assert_one_record_has_every_step_once(output, run.steps())
    rule = AdaptiveRule(max_scale_window=4, min_scale_window=1, hysteresis=2)
    state = assert_follows(rule, rule.start(2.0**17), read_record(output / "loss_scale_record.jsonl"))
    values = to_values(rule, state, 5)
    expected = {field.parameter: values[field.name] for field in all_fields(rule)} | {"scale_sense": state.loss_scale}
    assert form.last_saved(output).items() >= expected.items()


LATE = [
    (["optimizer.eps=x"], "error: AdamW: For 'AdamW', the type of 'eps' should be", False),
    # In PyNative mode, these few steps need no graph.
    (
        ["callbacks.2.max_consecutive_overflows=2", "callbacks.2.on_collapse=raise", "context.mode=1"],
        "Loss scaling has collapsed",
        True,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "message", "traced"), LATE, ids=["while it is built", "in a step"])
def test_a_traceback_is_printed_where_the_training_itself_fails(run_forked, corpus, changes, message, traced):
    script = ROOT / "scripts" / "launch" / "run_mindformer.py"
    arguments = ["--config", CONFIG, "--train-dataset-dir", corpus, "--num-samples", 64, *as_options(SMALL_MODEL)]
    errors = run_forked(script, *arguments, *changes, expect_exit=1).stderr
    assert message in errors
    assert ("Traceback (most recent call last)" in errors) is traced
