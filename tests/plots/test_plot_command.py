"""``adaptive-loss-scale plot`` recognizes the kind of each file, and never draws an empty picture."""

import json

import pytest

import mindformers_adaptive.cli.analyze as analyze_command
import mindformers_adaptive.cli.plot as plot_command
from mindformers_adaptive.plots.gradient_records import draw_gradient_records
from mindformers_adaptive.plots.gradients import draw_sweeps, draw_underflow
from mindformers_adaptive.plots.runs import draw_runs
from tests.plots.drawn import content
from tests.shared.records import gradient_line, record_of

RUNS = {"64": record_of([64.0] * 21), "512": record_of([512.0] * 21, [7])}
GRADIENTS = {
    name: [{**gradient_line(step, float(name), 1024.0), "loss_scale": float(name)} for step in (10, 20)]
    for name in RUNS
}
SWEEP = {key: GRADIENTS["64"][0][key] for key in ("weights", "loss_scales", "batches")}


@pytest.fixture
def plot(tmp_path, monkeypatch, run_program):
    """Return a function that runs a command on files of a folder, and returns what its picture shows.

    Of a command that draws nothing, it returns the exit code and the printed text.
    """
    monkeypatch.chdir(tmp_path)
    saved = []
    for command in (plot_command, analyze_command):
        monkeypatch.setattr(command, "save", lambda figure, path: saved.append((content(figure), path)))

    def run(*arguments, command="plot"):
        code, printed, errors = run_program(command, *arguments)
        if not saved:
            return code, printed + errors
        [(picture, path)] = saved
        saved.clear()
        assert (code, path in arguments, f"written: {path}" in printed) == (0, True, command == "plot")
        return picture

    return run


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path):
    """Write a folder for each run, with the run's record and its record of gradients."""
    for name in RUNS:
        write(tmp_path / name / "loss_scale_record.jsonl", RUNS[name])
        write(tmp_path / name / "gradient_ranges.jsonl", GRADIENTS[name])
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))


RECORDS, OF_GRADIENTS = ([f"{name}/{file}.jsonl" for name in RUNS] for file in ("loss_scale_record", "gradient_ranges"))
OF_WEIGHTS = {"kind": "weights", "modules": ["lm_head"]}
DRAWN = {
    "gradients": (OF_GRADIENTS[:1], [], lambda: draw_gradient_records({"x": GRADIENTS["64"]})),
    "gradients of runs": (OF_GRADIENTS, [], lambda: draw_gradient_records(GRADIENTS)),
    "a run and gradients": (
        [RECORDS[0], OF_GRADIENTS[0]],
        [],
        lambda: draw_runs({"loss_scale_record.jsonl": RUNS["64"]}, {"loss_scale_record.jsonl": GRADIENTS["64"]}),
    ),
    "gradients beside runs": (RECORDS, [], lambda: draw_runs(RUNS, GRADIENTS)),
    "weights of runs": (
        OF_GRADIENTS,
        ["--of", "weights", "--modules", "lm_head"],
        lambda: draw_gradient_records(GRADIENTS, **OF_WEIGHTS),
    ),
    "a sweep": (["sweep.json"], ["--loss-scales", "64"], lambda: draw_sweeps({"": SWEEP}, [64])),
    "underflow of a sweep": (["sweep.json"], ["--underflow"], lambda: draw_underflow(SWEEP)),
    "modules of a sweep": (
        ["sweep.json"],
        ["--modules", "*.wq.weight", "lm_head"],
        lambda: draw_sweeps({"": SWEEP}, modules=["*.wq.weight", "lm_head"]),
    ),
}


@pytest.mark.parametrize("case", DRAWN)
@pytest.mark.usefixtures("runs")
def test_each_kind_of_files_has_its_picture(plot, case):
    files, options, expected = DRAWN[case]
    assert plot(*files, "out.png", *options) == content(expected())


@pytest.mark.usefixtures("runs")
def test_one_run_is_drawn_by_analyze(plot):
    code, printed = plot(RECORDS[0], "out.png")
    assert code == 2
    assert f"adaptive-loss-scale analyze {RECORDS[0]} --plot out.png" in printed
    assert plot(RECORDS[0], "--plot", "out.png", command="analyze") == content(draw_runs({"": RUNS["64"]}))


def test_a_record_of_gradients_with_one_line_is_no_sweep(plot, tmp_path):
    # The file of a sweep is one JSON object, and so is a record of gradients with only one line.
    write(tmp_path / "gradient_ranges.jsonl", GRADIENTS["64"][:1])
    assert plot("gradient_ranges.jsonl", "out.png") == content(draw_gradient_records({"x": GRADIENTS["64"][:1]}))


@pytest.mark.usefixtures("runs")
def test_a_run_without_whole_gradients_beside_it_is_drawn(plot, tmp_path):
    beside, expected = tmp_path / OF_GRADIENTS[0], content(draw_runs(RUNS, {"512": GRADIENTS["512"]}))
    # A run that ends during its first measurement of gradients leaves half a line in the record; a run that ends
    # earlier leaves no file.
    for remove in (lambda: beside.write_text('{"step": 1, "loss_sca'), beside.unlink):
        remove()
        assert plot(*RECORDS, "out.png") == expected


def test_runs_are_drawn_with_the_gradients_that_are_given(plot, tmp_path):
    for name in RUNS:
        write(tmp_path / f"{name}.jsonl", RUNS[name])
        write(tmp_path / f"gradients_{name}.jsonl", GRADIENTS[name])
    runs = {f"{name}.jsonl": record for name, record in RUNS.items()}
    gradients = {f"{name}.jsonl": record for name, record in GRADIENTS.items()}
    # A record of gradients in a folder with two runs may belong to either run, so it is drawn for neither of them.
    write(tmp_path / "gradient_ranges.jsonl", GRADIENTS["64"])
    assert plot(*runs, "out.png") == content(draw_runs(runs))
    assert plot(*runs, "gradients_64.jsonl", "gradients_512.jsonl", "out.png") == content(draw_runs(runs, gradients))
    code, printed = plot(*runs, "gradients_64.jsonl", "none.png")
    assert (code, all(part in printed for part in ("1 records of gradients", "2 runs", "each run"))) == (2, True)


REFUSED = {
    "a sweep and a run": (["sweep.json", RECORDS[0]], [], ["'find --output'", "with other files", "separately"]),
    "a run and a sweep": ([RECORDS[0], "sweep.json"], [], ["'find --output'", "with other files", "separately"]),
    "underflow of a record": (
        OF_GRADIENTS[:1],
        ["--underflow"],
        ["--loss-scales and --underflow need a file that 'find --output' wrote"],
    ),
    "weights of a run": (RECORDS[:1], ["--of", "weights"], ["--of, --modules and --axis", "leave them out"]),
    "underflow of weights": (["sweep.json"], ["--underflow", "--of", "weights"], ["sweeps and records of gradients"]),
    "underflow of two": (["sweep.json", "other.json"], ["--underflow"], ["--underflow needs a single file"]),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("runs")
def test_what_does_not_fit_together_is_refused(plot, tmp_path, case):
    (tmp_path / "other.json").write_text(json.dumps(SWEEP))
    files, options, parts = REFUSED[case]
    code, printed = plot(*files, "none.png", *options)
    assert (code, [part for part in parts if part not in printed]) == (2, [])


def test_lines_without_scales_and_gradients_are_refused(plot, tmp_path):
    write(tmp_path / "other.jsonl", [{"step": 1, "learning_rate": 0.1}])
    code, printed = plot("other.jsonl", "none.png")
    assert (code, all(part in printed for part in ("other.jsonl:1", "nearly fits", "`overflow`"))) == (1, True)


def test_several_sweeps_are_one_picture_with_a_column_each(plot, tmp_path):
    named = {f"step_{name}.json": {key: GRADIENTS[name][1][key] for key in ("weights", "loss_scales")} for name in RUNS}
    for name, sweep in named.items():
        (tmp_path / name).write_text(json.dumps(sweep))
    options = ["--of", "weights", "--modules", "lm_head", "--axis", "linear"]
    assert plot(*named, "out.png", *options) == content(draw_sweeps(named, **OF_WEIGHTS, axis="linear"))
    assert plot(*named, "out.png") == content(draw_sweeps(named))
