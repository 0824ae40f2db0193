"""``adaptive-loss-scale plot`` recognizes the kind of each file, and never draws an empty picture."""

import json

import pytest

from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.gradient_records import draw_gradient_records
from mindformers_adaptive.plots.gradients import draw_histograms, draw_sweeps
from mindformers_adaptive.plots.runs import draw_runs
from tests.shared.records import gradient_line, record_of

RUNS = {"64": record_of([64.0] * 21), "512": record_of([512.0] * 21, [7])}
GRADIENTS = {
    name: [{**gradient_line(step, float(name), 1024.0), "loss_scale": float(name)} for step in (10, 20)]
    for name in RUNS
}


@pytest.fixture
def plot(tmp_path, monkeypatch, run_program):
    """Return a function that plots files of a folder and returns the exit code, the picture and the printed text."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code, printed, errors = run_program("plot", *arguments)
        file = tmp_path / next(word for word in arguments[::-1] if word.endswith(".png"))
        return code, file.read_bytes() if file.exists() else None, printed + errors

    return run


@pytest.fixture
def picture_of(tmp_path):
    """Return a function that draws a matplotlib figure and returns the bytes of the picture file."""
    return lambda figure: save(figure, tmp_path / "expected.png").read_bytes()


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_runs(folder):
    for name in RUNS:
        write(folder / name / "loss_scale_record.jsonl", RUNS[name])
        write(folder / name / "gradient_ranges.jsonl", GRADIENTS[name])


def test_record_of_gradients_is_drawn(plot, tmp_path, picture_of):
    write(tmp_path / "gradient_ranges.jsonl", GRADIENTS["64"])
    code, picture, printed = plot("gradient_ranges.jsonl", "out.png")
    assert (code, printed) == (0, "written: out.png\n")
    assert picture == picture_of(draw_gradient_records({"gradient_ranges.jsonl": GRADIENTS["64"]}))
    # The file of a gradient sweep is one JSON object, and so is a gradient record with only one line. Such a record
    # must still be drawn as a gradient record.
    write(tmp_path / "gradient_ranges.jsonl", GRADIENTS["64"][:1])
    picture = plot("gradient_ranges.jsonl", "out.png")[1]
    assert picture == picture_of(draw_gradient_records({"x": GRADIENTS["64"][:1]}))


def test_records_of_gradients_are_drawn_side_by_side(plot, tmp_path, picture_of):
    write_runs(tmp_path)
    code, picture, _ = plot("64/gradient_ranges.jsonl", "512/gradient_ranges.jsonl", "out.png")
    assert code == 0
    assert picture == picture_of(draw_gradient_records(GRADIENTS))


def test_one_run_is_drawn_with_the_gradients_that_are_passed(plot, tmp_path, picture_of):
    write_runs(tmp_path)
    name = "loss_scale_record.jsonl"
    picture = plot(f"64/{name}", "64/gradient_ranges.jsonl", "out.png")[1]
    assert picture == picture_of(draw_runs({name: RUNS["64"]}, {name: GRADIENTS["64"]}))


def test_one_run_is_drawn_by_analyze(plot, tmp_path, picture_of, run_program):
    write_runs(tmp_path)
    file = "64/loss_scale_record.jsonl"
    code, picture, printed = plot(file, "out.png")
    assert (code, picture) == (2, None)
    assert f"adaptive-loss-scale analyze {file} --plot out.png" in printed
    assert run_program("analyze", file, "--plot", "out.png")[0] == 0
    assert (tmp_path / "out.png").read_bytes() == picture_of(draw_runs({"": RUNS["64"]}))


def test_runs_are_drawn_with_the_gradients_beside_them(plot, tmp_path, picture_of):
    write_runs(tmp_path / "runs")
    files = ["runs/64/loss_scale_record.jsonl", "runs/512/loss_scale_record.jsonl"]
    code, picture, _ = plot(*files, "out.png")
    assert code == 0
    assert picture == picture_of(draw_runs(RUNS, GRADIENTS))
    beside = tmp_path / "runs" / "64" / "gradient_ranges.jsonl"
    # A run that ends during its first measurement of gradients leaves half a line in the record; a run that ends
    # earlier leaves no file.
    expected = picture_of(draw_runs(RUNS, {"512": GRADIENTS["512"]}))
    for remove in (lambda: beside.write_text('{"step": 1, "loss_sca'), beside.unlink):
        remove()
        assert plot(*files, "out.png")[1] == expected


def test_runs_are_drawn_with_the_gradients_that_are_given(plot, tmp_path, picture_of):
    for name in RUNS:
        write(tmp_path / f"{name}.jsonl", RUNS[name])
        write(tmp_path / f"gradients_{name}.jsonl", GRADIENTS[name])
    runs = {f"{name}.jsonl": record for name, record in RUNS.items()}
    gradients = {f"{name}.jsonl": record for name, record in GRADIENTS.items()}
    # A record of gradients in a folder with two runs may belong to either run, so it is drawn for neither of them.
    write(tmp_path / "gradient_ranges.jsonl", GRADIENTS["64"])
    assert plot("64.jsonl", "512.jsonl", "out.png")[1] == picture_of(draw_runs(runs))
    code, picture, _ = plot("64.jsonl", "512.jsonl", "gradients_64.jsonl", "gradients_512.jsonl", "out.png")
    assert code == 0
    assert picture == picture_of(draw_runs(runs, gradients))
    code, picture, printed = plot("64.jsonl", "512.jsonl", "gradients_64.jsonl", "none.png")
    assert (code, picture) == (2, None)
    assert all(part in printed for part in ("1 records of gradients", "2 runs", "each run"))


def test_sweep_is_drawn_alone(plot, tmp_path):
    sweep = {key: GRADIENTS["64"][0][key] for key in ("weights", "loss_scales", "batches")}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    write_runs(tmp_path)
    assert plot("sweep.json", "out.png", "--underflow")[0] == 0
    for files in (["sweep.json", "64/loss_scale_record.jsonl"], ["64/loss_scale_record.jsonl", "sweep.json"]):
        code, picture, printed = plot(*files, "none.png")
        assert (code, picture) == (2, None)
        assert all(part in printed for part in ("'find --output'", "with other files", "separately"))
    code, _, printed = plot("64/gradient_ranges.jsonl", "none.png", "--underflow")
    assert code == 2
    assert "--loss-scales and --underflow need a file that 'find --output' wrote" in printed


def test_lines_without_scales_and_gradients_are_refused(plot, tmp_path):
    write(tmp_path / "other.jsonl", [{"step": 1, "learning_rate": 0.1}])
    code, picture, printed = plot("other.jsonl", "none.png")
    assert (code, picture) == (1, None)
    assert all(part in printed for part in ("other.jsonl:1", "nearly fits", "`overflow`"))


def test_weights_outputs_and_modules_are_drawn(plot, tmp_path, picture_of):
    write_runs(tmp_path)
    expected = draw_gradient_records(GRADIENTS, kind="weights", modules=["lm_head"])
    files = ["64/gradient_ranges.jsonl", "512/gradient_ranges.jsonl"]
    code, picture, _ = plot(*files, "out.png", "--of", "weights", "--modules", "lm_head")
    assert (code, picture) == (0, picture_of(expected))
    sweep = {key: GRADIENTS["64"][0][key] for key in ("weights", "loss_scales", "batches")}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    picture = plot("sweep.json", "out.png", "--modules", "*.wq.weight", "lm_head")[1]
    assert picture == picture_of(draw_histograms(sweep, modules=["*.wq.weight", "lm_head"]))
    for arguments in (["64/loss_scale_record.jsonl"], ["sweep.json", "--underflow"]):
        code, picture, printed = plot(*arguments, "none.png", "--of", "weights")
        assert (code, picture) == (2, None)
        parts = ("--of, --modules and --axis", "sweeps and records of gradients", "leave them out")
        assert all(part in printed for part in parts)


def test_several_sweeps_are_one_picture_with_a_column_each(plot, tmp_path, picture_of):
    sweeps = {name: {key: GRADIENTS[name][1][key] for key in ("weights", "loss_scales")} for name in RUNS}
    for name, sweep in sweeps.items():
        (tmp_path / f"step_{name}.json").write_text(json.dumps(sweep))
    files = ["step_64.json", "step_512.json"]
    named = {f"step_{name}.json": sweep for name, sweep in sweeps.items()}
    code, picture, _ = plot(*files, "out.png", "--of", "weights", "--modules", "lm_head", "--axis", "linear")
    assert (code, picture) == (0, picture_of(draw_sweeps(named, kind="weights", modules=["lm_head"], axis="linear")))
    assert plot(*files, "all.png")[:2] == (0, picture_of(draw_sweeps(named)))
    code, picture, printed = plot(*files, "none.png", "--underflow")
    assert (code, picture) == (2, None)
    assert "--underflow needs a single file" in printed
