"""Bad input to the commands of the lab gives a message and an exit code, but no traceback."""

import errno
import io
import json
import os
import pathlib
import re
import shutil
import sys

import pytest

from tests.conftest import ROOT

LOG = str(ROOT / "tests" / "record" / "samples" / "mindformers_1_9_cpu.log")
CONFIG = str(ROOT / "configs" / "tiny_llama_cpu_fp16.yaml")
SPIKES = [LOG]
DIGITS = "9" * 5000
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def answer(run_program, *arguments):
    """Run a command of the lab; return its exit code and its error message, which must have no control characters."""
    code, printed, errors = run_program(*arguments)
    assert not CONTROL.search(printed + errors)
    return code, errors.partition("error: ")[2]


def has(said, message):
    """Return whether a text has all parts of a message, which " ... " separates, in this order."""
    return re.search(".*".join(map(re.escape, message.split(" ... "))), said, re.DOTALL) is not None


# Wrong values of a rule's parameters, and the expected error messages.
VALUES = [
    ("loss_scale_value=2^99999", "'2^99999' is too large"),
    ("loss_scale_value=-1", "'loss_scale_value' must be finite and above 0"),
    ("loss_scale_value=.nan", "'loss_scale_value' must be finite and above 0"),
    ("loss_scale_value=nan", "'loss_scale_value' must be a number, .*got 'nan'"),
    ("loss_scale_value=null", "'loss_scale_value' must be a number, .*got None"),
    ("loss_scale_value=1e400", "'loss_scale_value' must be finite"),
    (f"loss_scale_value={DIGITS}", "not a value in YAML, .*the limit"),
    ("loss_scale_value=[", "not a value in YAML, .*while parsing"),
    ("loss_scale_value=" + "[" * 3000, "nested more than 500 levels"),
    ("loss_scale_value=&a [*a]", "YAML text .*more than 100,000 values"),
    ("loss_scale_value=!!python/object:os.system", "could not determine a constructor"),
    ("loss_scale_value=!!bool x", "not a value in YAML"),
    ("loss_scale_value=2020-99-99", "month must be in 1..12"),
    ("loss_scale_value=\x1b[31m", "not a value in YAML, .*#x001b"),
    ("max_scale_window=2^9999999", "'2^9999999' is too large"),
    (f"max_scale_window={'9' * 30}", "'max_scale_window' must be at most 2147483647, but got one of 100 bits"),
    ("hysteresis=4294967296", "'hysteresis' must be at most 2147483647, but got 4294967296"),
    ("scale_window=[20]", "'scale_window' must be an integer"),
    ("\x1b[2J=1", r"no parameter '\\x1b\[2J'"),
]


@pytest.mark.parametrize(("value", "message"), VALUES, ids=[value[:40] for value, _ in VALUES])
def test_a_value_of_a_rule_is_refused(run_program, value, message):
    code, said = answer(run_program, "compare", *SPIKES, "--rules", f"adaptive:{value}")
    assert code == 2
    assert re.search(message, said, re.DOTALL) or message in said


# A user's rule whose error message does not say which argument is wrong.
EVERY = """\
from mindformers_adaptive import rules

class Rule(rules.Rule):
    name = "every"

    def __init__(self, n=2, **bounds):
        super().__init__(**bounds)
        self.share = 100 // int(n)
"""


USAGE = [
    ([], "required: COMMAND"),
    (["nonsense"], "invalid choice: 'nonsense'"),
    (["anlyze", "x"], "'anlyze'. Did you mean 'analyze'"),
    (["finde"], "'finde'. Did you mean 'find'"),
    (["Train"], "'Train'. Did you mean 'train'"),
    (["inspekt"], "'inspekt'. Did you mean 'inspect'"),
    (["compare"], "required: LOG"),
    (["find"], "required: --config"),
    (["analyze", LOG, "--policy", "adaptive:loss_scale=1"], "unrecognized arguments: --policy"),
    (["compare", "synthetic:spikes"], "made-up runs are no longer in the program: give a log"),
    (["tune", LOG], "there is no command 'tune' any more. 'analyze' says what to change"),
    (["compare", *SPIKES, "--rules", "torhc"], "'torhc' ... torch"),
    (["compare", *SPIKES, "--rules", "torch:init_scale"], "NAME=VALUE, but got 'init_scale'"),
    (["compare", *SPIKES, "--rules", "torch:foo=1"], "no parameter 'foo'"),
    (["find", "--config", "nothere.yaml"], "there is no file 'nothere.yaml'"),
    (
        ["compare", *SPIKES, "--rules", "guided:max_loss_scale=2^5000"],
        "'max_loss_scale=2^5000': '2^5000' is too large",
    ),
    (
        ["compare", *SPIKES, "--rules", "torch:growth_interval=" + "9" * 22],
        "'growth_interval' must be at most 214748",
    ),
    (["compare", LOG, "--plot", "a.jpg"], "argument --plot: 'path' must name a picture ... .png"),
    (["compare", *SPIKES, "--rules", "fails.Rule"], "cannot be imported: KeyError('x')"),
    (["compare", *SPIKES, "--rules", "syntax.Rule"], "'syntax.Rule' cannot be imported: SyntaxError ... syntax.py"),
    (["inspect", ".", "--rule", "syntax.Rule"], "'syntax.Rule' cannot be imported: SyntaxError ... syntax.py"),
    (["compare", *SPIKES, "--rules", "exits.Rule"], "cannot be imported: SystemExit"),
    (["simulate", *SPIKES], "there is no command 'simulate' any more. Use 'compare --rules NAME'"),
    (["probe", "--config", "my.yaml"], "there is no command 'probe' any more. ... find --loss-scales"),
    (["versions"], "there is no command 'versions' any more. ... --version"),
    (["compare", LOG, "--policis", "torch"], "--policis torch. Did you mean --policies?"),
    (["compare", LOG, "--\x1b[31m"], r"unrecognized arguments: --\x1b[31m"),
    (
        ["compare", *SPIKES, "--rules", "torch:growth_interval=2,growth_interval=3"],
        "'growth_interval' has two values",
    ),
    (["compare", *SPIKES, "--rules", "a..b"], "'module.Class' ... search path for modules, ... got 'a..b'."),
    (["compare", *SPIKES, "--rules", "every.Rule:n=0"], "'every.Rule:n=0': integer division ... by zero"),
    (["plot", LOG, "picture.jpg"], "must name a picture ... .png or .svg, ... 'picture.jpg'"),
    (["plot", LOG, "a.png", "--loss-scales", "2^99999"], "argument --loss-scales: '2^99999' is too large"),
    (["plot", LOG, "a.png", "--loss-scales", "0"], "argument --loss-scales: 'SCALE' must be finite and above 0"),
    (
        ["find", "--config", CONFIG, "--output", "missing/x.json"],
        "argument --output: must name a file ... existing folder",
    ),
    (["find", "--config", CONFIG, "--batches", "0"], "argument --batches: must be an integer from 1"),
    (["find", "--config", CONFIG, "--margin", "9" * 30], "argument --margin: must be an integer from 0"),
    (["compare", ""], "argument LOG: must name a file ... is empty"),
    (["report", "", "--output", "a.html"], "argument RUN: must name a file ... is empty"),
    (["report", ".", "--output", "folder.html"], "argument --output: must name a file, but 'folder.html' is a folder"),
    (["analyze", LOG, "--plot", "folder.png"], "argument --plot: must name a file, but 'folder.png' is a folder"),
    (["inspect", ".", "--policy", "\x00"], r"argument --rule: 'rule' must be"),
    (["megatron", '"--fp16'], "Megatron-LM's arguments cannot be split ... No closing quotation"),
    (
        ["megatron", "--fp16", "--loss-scale-windw", "500"],
        "'--loss-scale-windw' is no argument of Megatron-LM. Did you ",
    ),
    (
        ["megatron", "--fp16", "--loss-scale-window", "1e300"],
        "'--loss-scale-window' must be a whole ... got 1e+300",
    ),
    (["megatron", "--fp16", "--hysteresis", "9" * 30], "'--hysteresis' must be at most 2147483647"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=[" ".join(words)[:60] for words, _ in USAGE])
def test_wrong_usage_is_refused(run_program, in_a_folder_of_its_own, tmp_path, arguments, message):
    modules = {"fails": "raise KeyError('x')", "syntax": "def (", "exits": "raise SystemExit(0)", "every": EVERY}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name in ("folder.html", "folder.png"):
        (tmp_path / name).mkdir()
    code, printed, error = run_program(*arguments)
    assert (code, printed) == (2, "")
    assert not CONTROL.search(error)
    assert has(error.partition("error: ")[2], message)


def line(step, scale, **values):
    return json.dumps({"step": step, "loss": 2.0, "overflow": step == 1, "loss_scale": scale, **values}) + "\n"


def sweep(**tried):
    return json.dumps({"step": 1, "batches": [{"loss_scales": [tried]}], "loss_scales": [{**tried, "overall": {}}]})


# The content of each bad log file, and the error message expected of every command except plot.
FILES = {
    "beyond_float32": (line(1, 1.7e308) + line(2, 1.7e308), "states for 0% ... LossScaleMonitor"),
    "a_huge_integer": (line(1, 10**400) + line(2, 10**400), "states a step. ... nearly fits"),
    "digits": ("9" * 5000, "states a step. ... Looked for"),
    "binary": (bytes(range(256)) * 400, "states a step. ... Looked for"),
    "deep": ("[" * 200_000, "states a step. ... Looked for"),
    "deep_record": ('{"step": 1, "a": ' + "[" * 100_000 + "}\n", "complete JSON object"),
    "empty": ("", "states a step. ... Looked for"),
    "sweep_of_a_huge_scale": (sweep(loss_scale=10**400, overflow=False), "that GradientRangeMonitor wrote (Overflow"),
    "sweep_of_no_scale": (sweep(loss_scale=0, overflow=False), "that GradientRangeMonitor wrote (KeyError"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_log_is_refused(run_program, tmp_path, name):
    content, message = FILES[name]
    file = tmp_path / f"{name}.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, said = answer(run_program, "compare", file)
    assert code == 1
    assert file.name in said
    assert has(said, message)
    for command in (["analyze", file], ["plot", file, tmp_path / "a.png"], ["inspect", file]):
        if (name, command[0]) == ("beyond_float32", "plot"):
            # The plot command can draw the losses of this record.
            continue
        code, said = answer(run_program, *command)
        assert code == 1
        assert has(said, message) if command[0] != "inspect" and name in ("binary", "deep", "empty") else said


READERS = {"analyze": [], "compare": [], "plot": ["a.png"], "report": ["--output", "a.html"]}


@pytest.mark.parametrize("command", READERS)
def test_a_log_that_is_nowhere_is_named(run_program, in_a_folder_of_its_own, command):
    code, said = answer(run_program, command, "nowhere.log", *READERS[command])
    assert code == 1
    assert has(said, "There is no file or folder 'nowhere.log'")


@pytest.mark.parametrize("command", ["analyze", "plot"])
def test_wrong_format_of_gradients_is_refused_with_its_line(run_program, tmp_path, command):
    (tmp_path / "run.jsonl").write_text(line(1, 8.0, gradient_format="float17"))
    code, said = answer(run_program, command, tmp_path / "run.jsonl", *[tmp_path / "a.png"] * (command == "plot"))
    assert (code, bool(re.search("run.jsonl:(1| line 1): 'gradient_format' must be one of", said))) == (1, True)


def test_numbers_that_cannot_be_drawn_are_refused(run_program, tmp_path):
    counts = {"size": 1, "largest": 1.0, "histogram": {"0": 1}}
    at_8 = {"loss_scale": 8.0, "parameters": {"weight": counts}}
    file = tmp_path / "gradients.jsonl"
    file.write_text(json.dumps({"step": 1, "loss_scale": 10**400, "loss_scales": [at_8]}) + "\n")
    code, said = answer(run_program, "plot", file, tmp_path / "a.png")
    assert code == 1
    assert has(said, "gradients.jsonl must hold numbers ... drawing failed: int too large")
    at_8["parameters"]["weight"]["histogram"]["0"] = {}
    file.write_text(json.dumps({"step": 1, "loss_scale": 8.0, "loss_scales": [at_8]}) + "\n")
    code, said = answer(run_program, "plot", file, tmp_path / "a.png")
    assert (code, has(said, "gradients.jsonl must hold numbers ... drawing failed: ")) == (1, True)
    file.write_text(line(1, 8.0, scale_window=0) + line(2, 8.0, scale_window=-20))
    assert answer(run_program, "analyze", file, "--plot", tmp_path / "a.png") == (0, "")


def test_losses_and_norms_beyond_float32_are_drawn_at_its_edge(run_program, tmp_path):
    rows = [line(step, 8.0, loss=loss, gradient_norm=1e308) for step, loss in enumerate((1e308, -1e308, 1.0), start=1)]
    (tmp_path / "run.jsonl").write_text("".join(rows))
    assert answer(run_program, "analyze", tmp_path / "run.jsonl", "--plot", tmp_path / "a.png") == (0, "")
    assert answer(run_program, "report", tmp_path / "run.jsonl", "--output", tmp_path / "a.html") == (0, "")


def test_unforeseen_error_is_named_and_traced_on_request(run_program, in_a_folder_of_its_own, tmp_path):
    rule = """\
from mindformers_adaptive.rules import Rule

class Mine(Rule):
    name = "mine"
    make_step = lambda self, xp: lambda loss_scale: {"loss_scale": loss_scale}
    def start(self, *_, **__):
        raise KeyError("lost")
"""
    (tmp_path / "mine.py").write_text(rule)
    arguments = ("compare", *SPIKES, "--rules", "mine.Mine")
    code, said = answer(run_program, *arguments)
    assert (code, bool(re.fullmatch(r"KeyError: 'lost'\. .*--traceback.*\n", said))) == (1, True), said
    with pytest.raises(KeyError, match="lost"):
        run_program(*arguments, "--traceback")


def test_control_characters_in_file_names_are_escaped(run_program, tmp_path):
    names = ["red\x1b[31m.log", "new\nline.log", "bell\x07\u202e.txt", os.fsdecode(b"latin\xff.log"), "c1\x9b31m.jsonl"]
    for name in names:
        shutil.copy(LOG, tmp_path / name)
    for command in (
        ["compare", "--each-trace"],
        ["compare", "--json"],
    ):
        code, printed, errors = run_program(*command, *(tmp_path / name for name in names))
        assert code == 0
        assert not CONTROL.search(printed + errors)
        assert (r"new\\nline.log" if "--json" in command else r"new\nline.log") in printed
    for name in names:
        assert answer(run_program, "analyze", tmp_path / name) == (0, "")
    assert answer(run_program, "analyze", tmp_path / names[0], "--plot", tmp_path / "a.png") == (0, "")


def test_an_interrupt_in_a_module_of_ones_own_is_no_traceback(run_program, tmp_path, monkeypatch):
    (tmp_path / "impatient.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    code, said = run_program("compare", *SPIKES, "--rules", "impatient.Rule")[::2]
    assert (code, said) == (130, "adaptive-loss-scale: interrupted\n")
    with pytest.raises(KeyboardInterrupt):
        run_program("compare", *SPIKES, "--traceback", "--rules", "impatient.Rule")


def test_interrupt_during_imports_prints_no_traceback(run_python, tmp_path):
    # Python imports these files instead of modules of the same names. They raise KeyboardInterrupt, as Ctrl-C during
    # the import would. The help does not import NumPy.
    for module, arguments in (("argparse", ["--help"]), ("numpy", ["analyze", LOG])):
        (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
        finished = run_python("-m", "mindformers_adaptive", *arguments, expect_exit=130)
        assert (finished.stdout, finished.stderr) == ("", "adaptive-loss-scale: interrupted\n")
        (tmp_path / f"{module}.py").unlink()


def test_results_are_printed_where_standard_error_is_closed(run_program, monkeypatch):
    # Python sets sys.stderr to None if the shell closed it with 2>&-.
    for arguments, expected, start in ((["analyze", LOG], 0, "11 o"), (["analyze", "nowhere"], 1, ""), (["x"], 2, "")):
        monkeypatch.setattr("sys.stderr", None)
        code, printed, _ = run_program(*arguments)
        sys.stderr.close()
        assert (code, printed[:4]) == (expected, start)


def test_what_the_encoding_of_the_output_lacks_is_escaped(run_program, tmp_path, monkeypatch):
    shutil.copy(LOG, tmp_path / "für.log")
    output = io.BytesIO()
    with io.TextIOWrapper(output, encoding="ascii") as ascii_only:
        monkeypatch.setattr("sys.stdout", ascii_only)
        assert answer(run_program, "analyze", "--details", tmp_path / "für.log") == (0, "")
        assert rb"f\xfcr.log" in output.getvalue()


def test_a_file_that_is_read_is_not_replaced(run_program, tmp_path):
    for name in ("run.png", "run.html", "weights.safetensors"):
        shutil.copy(LOG, tmp_path / name)
    picture, page, weights = tmp_path / "run.png", tmp_path / "run.html", tmp_path / "weights.safetensors"
    (tmp_path / "link.png").symlink_to(picture)
    commands = [
        ["plot", picture, tmp_path / "link.png"],
        ["analyze", LOG, picture, "--plot", picture],
        ["report", LOG, page, "--output", page],
        ["find", "--config", CONFIG, "--checkpoint", weights, "--loss-scales", "1", "--gradients", weights],
    ]
    for command in commands:
        code, said = answer(run_program, *command)
        assert code == 2
        assert re.search(r"would be overwritten\. Give another output file", said)
    contents = {path.read_bytes() for path in (picture, page, weights)}
    assert contents == {pathlib.Path(LOG).read_bytes()}


def test_a_name_that_is_too_long_is_refused(run_program, in_a_folder_of_its_own):
    name, config = "a" * 300, ["--config", CONFIG]
    for command in (["report", LOG, "--output", f"{name}.html"], ["analyze", LOG, "--plot", f"{name}.png"]):
        code, said = answer(run_program, *command)
        assert (code, "File name too long" in said) == (1, True)
    for command in (["find", *config, "--output", f"{name}/x"], ["train", *config, "--register-path", name]):
        code, said = answer(run_program, *command)
        assert (code, name in said) == (2, True)


def test_a_full_disk_is_said_of_the_file(run_program, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    code, said = answer(run_program, "analyze", LOG, "--plot", tmp_path / "a.png")
    assert code == 1
    assert re.search(r"file that can be written, .*: No space left on device.*/a\.png'", said)
    assert not list(tmp_path.iterdir())


def test_an_output_that_takes_nothing_is_an_error(run_program, monkeypatch):
    # Python sets sys.stdout to None if the shell closed it with >&-.
    monkeypatch.setattr("sys.stdout", None)
    code, said = answer(run_program, "--version")
    assert (code, bool(re.fullmatch(r".*output must be open, .* to a file.*\n", said))) == (1, True), said
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr("sys.stdout", full)
        assert answer(run_program, "--version") == (1, "[Errno 28] No space left on device\n")


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_an_empty_checkpoint_is_named_by_diff(run_program, tmp_path, kind):
    other = ROOT / "tests" / "mindformers" / "written_before" / "adaptive" / f"train_step.{kind}"
    (tmp_path / f"empty.{kind}").touch()
    code, said = answer(run_program, "diff", str(tmp_path / f"empty.{kind}"), str(other))
    assert code == 1
    assert has(said, f"empty.{kind}' must be a checkpoint, ... is empty")
    code, said = answer(run_program, "diff", str(other), str(other), "--modules", "scale_sens")
    nearest = said.rpartition("nearest names are ")[2].rstrip(".\n").split(", ")
    assert (code, len(nearest)) == (1, len(set(nearest)))


def in_safetensors(header):
    return len(header).to_bytes(8, "little") + header


# Broken checkpoints for which MindSpore's own reader raises misleading errors: about arguments, NumPy or the system.
NO_CHECKPOINTS = {
    "none.safetensors": in_safetensors(b"{}"),
    "odd.safetensors": in_safetensors(b'{"w":{"dtype":"F32","shape":["a"],"data_offsets":[0,4]}}') + bytes(4),
    "short.safetensors": in_safetensors(b'{"w":{"dtype":"F32","shape":[],"data_offsets":[0,400]}}'),
    "junk.safetensors": bytes(range(256)),
    "junk.ckpt": bytes(range(256)),
    "none.npz": b"PK",
}


# Ignore the warnings about open files, because MindSpore does not close checkpoint files that it cannot read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_named_by_diff(run_program, tmp_path, name):
    (tmp_path / name).write_bytes(NO_CHECKPOINTS[name])
    code, said = answer(run_program, "diff", tmp_path / name, tmp_path / name)
    assert code == 1
    why = "its name ends neither" if name.endswith("npz") else "MindSpore finds none"
    assert has(said, f"{name}' must be a checkpoint ... {why}")


@pytest.mark.parametrize("command", ["diff", "inspect"])
def test_a_path_that_cannot_be_is_no_checkpoint(run_program, tmp_path, command):
    (tmp_path / "loop.ckpt").symlink_to(tmp_path / "loop.ckpt")
    for path in (tmp_path / "loop.ckpt", "a\0b"):
        code, said = answer(run_program, command, *[path] * (1 + (command == "diff")))
        assert (code, "There is no checkpoint" in said) == (1, True)
        assert not said.endswith("..\n")
