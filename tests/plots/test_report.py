"""The HTML page of a run: its content, the escaping of all text that was read, and its display in a browser."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
from matplotlib.figure import Figure

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots import report
from mindformers_adaptive.plots.report import RunTold, picture, render
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.logs import run_of_record
from tests.plots.drawn import title
from tests.shared.records import gradient_line, record_of

EVIL = "<script>document.title='taken over'</script>"
SKIPPED = range(1, 13)
RECORD = record_of([2.0 ** max(24 - step, 12) for step in range(61)], SKIPPED, gradient_norm=[1.5] * 60)
GRADIENTS = [{**gradient_line(step, 64.0, 1024.0), "loss_scale": 64.0} for step in (10, 20)]


def write(folder, record=RECORD, gradients=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("loss_scale_record", record), ("gradient_ranges", gradients or [])):
        if lines:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def page_of(tmp_path, run_program):
    """Return a function that writes the HTML report on one or more runs, and returns the HTML."""

    def write_page(*runs, options=()):
        code, printed, errors = run_program("report", *runs, "--output", str(tmp_path / "report.html"), *options)
        assert (code, errors) == (0, ""), errors
        assert printed == f"written: {tmp_path / 'report.html'}\n"
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write_page


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the pictures of the page empty, because drawing takes most of the time."""
    monkeypatch.setattr(report, "_data", lambda figure: "")


def test_page_tells_what_analyze_tells_with_the_yaml_to_paste(page_of, tmp_path):
    (tmp_path / "loss_scale_config.yaml").touch()
    page = page_of(write(tmp_path / "run", gradients=GRADIENTS))
    analysis = analyze(run_of_record(RECORD))
    for text in (*analysis.to_dict()["verdict"], analysis.advice[0].change, "Skipped   12"):
        assert (text if "<" in text else html.escape(text)) in page
    # The report page has two pictures: one of the run, and one of the gradients recorded in the run's folder. Each
    # picture has a wide and a narrow version, so there are four images.
    assert page.count("data:image/svg+xml;base64,") == 4
    shown = draw_runs({"": RECORD})
    assert [axes.get_ylabel() for axes in shown.axes][:2] == ["loss, unscaled", "gradient norm"]
    assert title(shown).replace("$2^{24}$", "2<sup>24</sup>").replace("$2^{12}$", "2<sup>12</sup>") in page
    assert re.search(r"mindformers_adaptive \d+\.\d+", page)


def test_without_matplotlib_the_page_says_what_to_install(page_of, tmp_path, monkeypatch):
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    page = page_of(write(tmp_path / "run", gradients=GRADIENTS))
    assert "<img" not in page
    assert page.count("pip install &#x27;.[plot]&#x27;") == 1
    assert "12 of 60 steps were skipped (20.0%)" in page


def test_an_explanation_beside_the_record_comes_first(page_of, undrawn, tmp_path):
    folder = write(tmp_path / "run")
    said = {"step": 12, "summary": ["The backward pass overflows: in lm_head", EVIL], "headline": "..."}
    (tmp_path / "run" / "overflow_explanation.json").write_text(json.dumps(said))
    for runs in ([folder], [folder, write(tmp_path / "other")]):
        page = page_of(*runs)
        [first, *heads] = re.findall("<p><strong>(.*?)</p>", page)
        assert re.match(r"(run: )?Step 12 was explained\. The backward pass overflows: in lm_head\.</strong>", first)
        assert not any("explained" in head for head in heads)
        assert "<script" not in page


def test_the_head_has_the_cause_first_in_three_lines(page_of, undrawn, tmp_path):
    losses = [2.0, 2.1, 2.0, 9000.0, 9100.0, 11.8125, *["nan"] * 20]
    record = [{**line, "loss": loss} for line, loss in zip(RECORD, losses, strict=False)]
    page = page_of(write(tmp_path / "run", record))
    [head] = re.findall("<p><strong>(.*?)</p>", page)
    cause, change, other = head.split("<br>")
    assert cause.startswith("The loss rose to 9e+03 in step 4, ")
    assert re.match(r".* update before step 4 .*: lower the learning rate", change)
    assert "steps were skipped" in other
    assert "11.81 at the end" not in page


def test_runs_in_one_folder_share_no_gradients(page_of, undrawn, tmp_path):
    record = [{**line, "loss": "nan" if line["step"] == 4 else 2.5} for line in RECORD[:5]]
    write(tmp_path / "run", record, GRADIENTS)
    other = tmp_path / "run" / "other.jsonl"
    other.write_text((tmp_path / "run" / "loss_scale_record.jsonl").read_text())
    page = page_of(tmp_path / "run" / "loss_scale_record.jsonl", other)
    # The folder has the records of two runs but only one record of gradients. The report cannot know which run the
    # gradients belong to, so it must leave them out.
    assert "Gradients by group of Parameters" not in page
    assert page.count("2.5 at first, 2.5 in the last step with a finite loss; inf or NaN in 1 step, first 4") == 2


def test_nothing_is_loaded_from_elsewhere(page_of, tmp_path):
    page = page_of(write(tmp_path / "a"), write(tmp_path / "b"))
    addresses = re.findall(r"""(?:src|srcset|href|url)\s*[=(]\s*["']?([^"')\s]{1,40})""", page)
    assert len(addresses) == 2
    assert {address[:19] for address in addresses} == {"data:image/svg+xml;"}
    assert "default-src 'none'" in page
    for script in ("<script", "javascript:", "@import", "http://", "https://"):
        assert script not in page.lower()


def test_what_comes_from_files_is_text(page_of, tmp_path):
    record = [{**line, "loss": EVIL} if line["step"] == 5 else line for line in RECORD]
    record[7] |= {"note": [EVIL, "--><b>"], "gradient_format": "float16"}
    page = page_of(write(tmp_path / "<script>alert(1)<" / "run", record), write(tmp_path / "b & <i>"))
    assert ("<script" in page, "<i>" in page, "<b>" in page) == (False, False, False)
    assert "&lt;script&gt;alert(1)&lt;" in page


def test_names_of_rules_and_settings_are_text():
    values = analyze(run_of_record(RECORD)).to_dict()
    values["advice"][0] |= {"change": EVIL, "reason": f"'\"{EVIL}"}
    values["scale_sense"], values["verdict"] = f"type: {EVIL}", [EVIL]
    page = render([RunTold(EVIL, EVIL, values, EVIL)], [], written=EVIL, versions=EVIL)
    assert "<script" not in page
    assert page.count(html.escape(EVIL)) == 14


def test_advice_may_lack_settings():
    analysis = analyze(run_of_record(record_of([1.0] * 41, range(21, 41))))
    page = render([RunTold("run", "run.log", analysis.to_dict(), analysis.text())], [], written="", versions="")
    assert f"<ol><li>{analysis.advice[0].change.partition(':')[0]}" in page
    assert "runner_wrapper" not in page


def test_the_title_of_a_picture_is_text():
    page = picture(lambda: draw_runs({f"{EVIL} $1": RECORD, "-->": RECORD}), EVIL)
    assert "<script" not in page
    assert f"({html.escape(EVIL)} $1)" in page


def test_powers_and_dollars_in_a_title_are_written_for_html():
    def draw():
        figure = Figure()
        figure.suptitle(r"$2^{-3}$ to $2^{4.5}$ for \$1")
        return figure

    page = picture(draw, "")
    assert "<figcaption>2<sup>-3</sup> to 2<sup>4.5</sup> for $1</figcaption>" in page
    assert 'alt="2^-3 to 2^4.5 for $1"' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "There is no file or folder 'none'"),
        (["empty"], "must hold loss_scale_record.jsonl, which LossScaleMonitor writes, but holds none"),
        (["."], "must hold one loss_scale_record.jsonl, but holds a/loss_scale_record.jsonl, b/loss_scale_record"),
        (["a", "--output", "page.pdf"], "must name a file that ends in .html, but got 'page.pdf'"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, monkeypatch, run_program, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a"), write(tmp_path / "b"), (tmp_path / "empty").mkdir()
    (tmp_path / "page.html").write_text("as it was")
    code, _, errors = run_program("report", "--output", "page.html", *arguments)
    assert (code > 0, message in errors) == (True, True), errors
    assert (tmp_path / "page.html").read_text() == "as it was"


# Tests that open the HTML page of a run in a browser

# A page that shows the report in a frame of the given width, and collects what is visible there.
_FRAME = """<!DOCTYPE html><iframe id="page" src="report.html" width="{width}" height="900" style="border:0"></iframe>
<p id="seen"></p><script>
document.getElementById("page").onload = function () {{
  const page = this.contentDocument, picture = page.querySelector("img");
  picture.decode().finally(() => document.getElementById("seen").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth, image: picture.naturalWidth, shown: picture.clientWidth,
    narrow: picture.currentSrc === page.querySelector("source").srcset, title: page.title,
    background: getComputedStyle(page.body).backgroundColor, filter: getComputedStyle(picture).filter,
    scripts: page.scripts.length,
  }}));
}};
</script>"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def seen(tmp_path):
    """Return a function that opens the page in Chromium and returns what is visible, and the console messages."""
    chromium = shutil.which("chromium") or pytest.skip("There is no chromium: apt-get install chromium")
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=tmp_path)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def look(width, dark):
            (tmp_path / "frame.html").write_text(_FRAME.format(width=width))
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
            options += ["--window-size=1400,1000", "--virtual-time-budget=5000"]
            options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
            address = f"http://127.0.0.1:{server.server_port}/frame.html"
            shown = subprocess.run(
                [chromium, *options, "--dump-dom", address], capture_output=True, text=True, check=True
            )
            sizes = json.loads(html.unescape(re.search(r'<p id="seen">(.*?)</p>', shown.stdout)[1]))
            return sizes, [line for line in shown.stderr.splitlines() if ":CONSOLE" in line]

        yield look
        server.shutdown()


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (400, True)])
def test_a_browser_shows_the_page_in_its_width_and_colours(page_of, seen, tmp_path, width, dark):
    page_of(write(tmp_path / EVIL.replace("/", "") / "a", gradients=GRADIENTS), write(tmp_path / "b"))
    sizes, console = seen(width, dark)
    assert console == []
    # The browser shows the page in a frame of this width. The page fits into the frame, so it needs no horizontal
    # scroll bar.
    assert sizes["width"] <= width
    # The picture is wider than half of the frame, and not wider than the frame.
    assert (sizes["image"] > 0, 0.5 * width < sizes["shown"] <= width) == (True, True)
    # The narrow picture is shown only in the narrow frame, and the page has no scripts.
    assert (sizes["narrow"], sizes["scripts"], sizes["title"].startswith("Loss scaling of ")) == (width == 400, 0, True)
    dark_page, dark_picture = "rgb(20, 23, 26)", "invert(0.92) hue-rotate(180deg)"
    assert (sizes["background"], sizes["filter"]) == (
        (dark_page, dark_picture) if dark else ("rgb(255, 255, 255)", "none")
    )
