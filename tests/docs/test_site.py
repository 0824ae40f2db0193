"""The documentation as a site: it is built without a warning, its links lead somewhere, and a browser shows it."""

import ast
import functools
import html.parser
import http.server
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse

import pytest
from conftest import ROOT
from pages import blocks_in

import mindformers_adaptive
from mindformers_adaptive import wrapper

build_site = pytest.importorskip("build_site", reason="There is no Sphinx for a Python before 3.11")
LANGUAGES = tuple(build_site.FIRST_PAGES)
# What is in them is on the page of their room.
UTILITIES = ("mindformers_adaptive.rules.backend", "mindformers_adaptive.text.table")
PUBLIC = [name for names in build_site.PUBLIC.values() for name in names]

pytestmark = pytest.mark.xdist_group("site")


# API reference


def test_every_public_name_has_a_page():
    names = [*mindformers_adaptive.__all__, *(f"wrapper.{name}" for name in wrapper.__all__), *imported_on_pages()]
    described = [described_by(name) for name in PUBLIC]
    assert [name for name in names if described_by(name) not in described] == []
    assert len({build_site.short_name(name) for name in PUBLIC}) == len(PUBLIC)


def imported_on_pages():
    """What the Python blocks of the pages import from the package."""
    for code in blocks_in("python").values():
        for node in ast.walk(ast.parse(code)):
            module = getattr(node, "module", None) or ""
            if module.startswith("mindformers_adaptive") and module not in UTILITIES:
                yield from (f"{module}.{alias.name}".removeprefix("mindformers_adaptive.") for alias in node.names)


def described_by(name):
    module, _, attribute = f"mindformers_adaptive.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_names_every_argument_and_has_an_example(name):
    described = described_by(name)
    text = inspect.getdoc(described)
    # What stands there is run, see --doctest-modules in pyproject.toml.
    assert re.search(r"^Examples:\n.*>>> ", text, re.MULTILINE | re.DOTALL)
    parameters = inspect.signature(described).parameters.values()
    named = [it.name for it in parameters if it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)]
    assert not named or re.search("^(Args|Attributes):", text, re.MULTILINE)
    left_out = [] if "**kwargs: all other" in text else [it for it in named if not re.search(rf"\b{it}\b", text)]
    assert left_out == []


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built where MindSpore cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    for package in ("mindspore", "mindformers"):
        (folder / f"{package}.py").write_text("raise AssertionError('The site is to be built without it')")
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "scripts/build_site.py", folder / "built"]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "built"


class Page(html.parser.HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, file):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("index", "search", "next", "prev"):
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


def test_links_and_anchors_of_the_site_lead_somewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 200
    broken = []
    for file, page in pages.items():
        for link in [*page.links, *page.loaded]:
            path, _, anchor = link.partition("#")
            path = urllib.parse.unquote(path.partition("?")[0])
            target = (file.parent / path).resolve() if path else file
            if not re.match("https?:|javascript:", link) and not (
                target.exists() and (not anchor or urllib.parse.unquote(anchor) in pages[target].anchors)
            ):
                broken.append((file.relative_to(site).as_posix(), link))
    assert broken == []
    assert {link for page in pages.values() for link in page.loaded if ":" in link} == set()


def test_pages_of_the_reference_show_the_names(site):
    for language in LANGUAGES:
        for name in PUBLIC:
            file = site / language / "reference" / f"{build_site.short_name(name)}.html"
            assert f"mindformers_adaptive.{name}" in Page(file).anchors
            assert "viewcode-link" in file.read_text(encoding="utf-8"), name
        assert mindformers_adaptive.__version__ in (site / language / "index.html").read_text(encoding="utf-8")


def test_each_public_name_is_summed_up_in_chinese(site):
    index = (site / "zh" / "reference" / "index.html").read_text(encoding="utf-8")
    summaries = re.findall(r"</a></p></td>\s*<td><p>(.*?)</p></td>", index)
    assert len(summaries) == len(PUBLIC)
    assert [summary for summary in summaries if not re.search("[\u4e00-\u9fff]", summary)] == []


# In a browser


@pytest.fixture(scope="module")
def browse(site):
    """A function that opens a page in Chromium, and returns what it shows as HTML and what its console says."""
    chromium = shutil.which("chromium") or pytest.skip("There is no chromium: apt-get install chromium")
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
        ]

        def open_page(address):
            address = f"http://127.0.0.1:{server.server_port}/{address}"
            shown = subprocess.run(
                [chromium, *options, "--dump-dom", address], capture_output=True, text=True, check=True
            )
            return shown.stdout, [line for line in shown.stderr.splitlines() if ":CONSOLE" in line]

        yield open_page
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize("language", LANGUAGES)
def test_browser_shows_a_page_without_errors(browse, language):
    shown, console = browse(f"{language}/reference/GuidedRule.html")
    assert console == []
    [other] = set(LANGUAGES) - {language}
    for text in (
        f'href="../../{other}/reference/GuidedRule.html"',
        {"en": "Parameters", "zh": "参数"}[language],
        "<math",
    ):
        assert text in shown


# What a stranger looks for in the first hour, and the page that answers.
SEARCHES = [
    ("en", "exchange_rate", "rule.html"),
    ("en", "AdaptiveLossScaleUpdateCell", "reference/AdaptiveLossScaleUpdateCell.html"),
    ("en", "upgrade uninstall", "contributing.html"),
    ("en", "first steps skipped", "contributing.html"),
    ("en", "resume checkpoint", "resuming.html"),
    ("en", "msrun several machines", "yaml.html"),
    ("en", "BF16", "choose.html"),
    ("en", "initial loss scale", "monitoring.html"),
    ("zh", "exchange_rate", "rule.html"),
    ("zh", "断点续训", "resuming.html"),
    ("zh", "梯度引导", "rule.html"),
]


@pytest.mark.parametrize(("language", "words", "page"), SEARCHES)
def test_search_finds_the_page(browse, language, words, page):
    shown, console = browse(f"{language}/search.html?q={urllib.parse.quote(words)}")
    results = re.search(r'<ul[^>]*class="search".*?</ul>', shown, re.DOTALL)[0]
    assert page in [link.partition("?")[0].partition("#")[0] for link in re.findall('href="([^"]+)"', results)]
    assert console == []
