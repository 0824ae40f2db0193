"""What analyze, report, plot and compare say of the same log agrees."""

import html
import json
import re
import zipfile
from pathlib import Path

import pytest

from mindformers_adaptive.cli import analyze as analyze_command
from mindformers_adaptive.cli import program
from mindformers_adaptive.lab.advise import other_cause
from mindformers_adaptive.lab.analysis_text import scales_in_words
from mindformers_adaptive.plots import report
from mindformers_adaptive.plots.run_series import series_of
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.scale_summary import bounds_in_words, summary_of
from mindformers_adaptive.record.thresholds import HELD
from tests.shared.records import run_of

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[1] / "record" / "samples"
RUNS = Path(__file__).parents[1] / "plots" / "runs"
RECORDS = [RUNS / name / "loss_scale_record.jsonl" for name in ("devices_1", "scale_512")]
# A NaN loss, a rounded scale, a start that was too high, unknown steps, no upper bound, and a cause in the steps.
FIELD = ["nan_collapse", "L10_rounded_scale", "lora_two_drops", "sink2_held", "M2_hf_no_steps", "late_streak"]


@pytest.mark.parametrize("clean", [HELD - 1, HELD])
def test_a_scale_settles_only_where_one_held(clean):
    run = run_of(([2.0] + [1.0] * clean) * 4, ([True] + [False] * clean) * 4)
    assert (summary_of(run).settled is not None) == (clean == HELD)


@pytest.mark.parametrize(
    ("scales", "went"),
    [
        ([16.0, 8.0] * 12, "The loss scale moved between 2^3 and 2^4"),
        ([2.0**k for k in range(20, 3, -1)] + [16.0, 8.0] * 3, "The loss scale fell from 2^20 to 2^3"),
        ([2.0, 4.0, 2.0, 4.0, 8.0, 16.0, 32.0], "The loss scale rose from 2^1 to 2^5"),
    ],
)
def test_a_scale_that_returns_has_not_fallen(scales, went):
    flags = [after < before for before, after in zip(scales, scales[1:] + scales[-1:], strict=True)]
    assert summary_of(run_of(scales, flags, final_loss_scale=scales[-1])).path == went


class Commands:
    """What the commands say of one log. Pictures are taken before they are written."""

    def __init__(self, folder, monkeypatch, capsys):
        self.page, self.figures, self.capsys = folder / "report.html", [], capsys
        monkeypatch.setattr(analyze_command, "save", lambda figure, path: self.figures.append(figure))
        monkeypatch.setattr(report, "_data", lambda figure: "")

    def said(self, *arguments):
        assert program.main([*map(str, arguments)]) == 0, arguments
        return self.capsys.readouterr().out

    def disagreements(self, log):
        """Return a list of the statements on which the commands differ; empty if they agree."""
        run = read_log(log)
        analysis = json.loads(self.said("analyze", log, "--no-python", "--json"))
        self.said("report", log, "--output", self.page)
        page = html.unescape(re.sub(r"<sup>(.*?)</sup>", r"^\1", self.page.read_text(encoding="utf-8")))
        self.said("analyze", log, "--plot", "run.png")
        compare = self.said("compare", log) if run.known_share >= 0.9 else None
        text = html.unescape(re.search(r"All details</summary><pre>(.*?)</pre>", page, re.DOTALL)[1])
        title, finding = (
            re.sub(r"\$2\^\{(.*?)\}\$", r"2^\1", each)
            for each in (self.figures.pop().get_suptitle(), series_of(run).finding())
        )
        skipped, went = analysis["skipped"], summary_of(run).path
        fewest, most = skipped["at_least"], skipped["at_most"]
        words = bounds_in_words(fewest, most).replace(",", "")
        cause = other_cause(run)
        bad_loss, printed = "loss was inf or NaN", [text, page, *([] if compare is None else [compare])]
        path_in_title = went.removeprefix("The ").partition(":")[0]
        unheld = "No loss scale has held" in " ".join(text.split())
        checks = {
            "held": not (unheld and (summary_of(run).held.answer or "settled" in went)),
            "scales of the page": scales_in_words(analysis["loss_scale"]) in page,
            "held on the page": page.count("No loss scale has held") == 2 * unheld,
            "verdict of the page": " ".join(analysis["verdict"]) in page,
            "path": went in " ".join(analysis["verdict"]) and went in page and path_in_title in title,
            "skipped in the picture": ("none" if most == 0 else words) in title.lower().replace(",", "")
            or f"All {fewest}" in title,
            "the picture of analyze and report": finding in title and f"<figcaption>{finding}" in page,
            "NaN loss": len({bad_loss in " ".join(each.split()) for each in (text, page)}) == 1,
            "NaN loss in the picture": ("loss inf or NaN" in title) == (bad_loss in text),
            "cause": {" ".join(cause.reason.split()) in " ".join(each.split()) for each in printed} == {True}
            if cause
            else "What to do: " not in (compare or ""),
        }
        return [name for name, agrees in checks.items() if not agrees]


@pytest.fixture
def commands(tmp_path, monkeypatch, capsys):
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", FIELD)
def test_commands_agree_on_logs_of_others(commands, tmp_path, name):
    with zipfile.ZipFile(SAMPLES / "field_logs.zip") as logs:
        assert commands.disagreements(logs.extract(f"{name}.log", tmp_path)) == []


@pytest.mark.parametrize("log", [*SAMPLES.glob("*.log"), *RECORDS], ids=str)
def test_commands_agree_on_samples(commands, log):
    assert commands.disagreements(log) == []
