"""The documentation's site builds without a warning, its links lead somewhere, and a browser shows its pages."""

import ast
import functools
import html
import http.server
import importlib
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import urllib.parse

import pytest

import mindformers_adaptive
from mindformers_adaptive import wrapper
from mindformers_adaptive.rules.formats import FLOAT16
from tests.conftest import ROOT
from tests.shared.pages import blocks_in

pytest.importorskip("sphinx", reason="Sphinx is not installed; the project installs it for Python 3.11 and later")
build_site = importlib.import_module("scripts.site.build_site")
LANGUAGES = tuple(build_site.FIRST_PAGES)
# Functions of the first module are described on the page of their subpackage, and dtypes of fields on the page of Rule.
UTILITIES = ("mindformers_adaptive.text.table", "mindformers_adaptive.rules.fields")
PUBLIC = [name for names in build_site.PUBLIC.values() for name in names]
# The public classes. Their pages in the API reference show the methods.
CLASSES = [name for name in PUBLIC if build_site.described(name)[0].startswith(".. autoclass")]

pytestmark = pytest.mark.xdist_group("site")


# Tests of the public names and of their docstrings, which the API reference shows


def test_every_public_name_has_a_page():
    names = [*mindformers_adaptive.__all__, *(f"wrapper.{name}" for name in wrapper.__all__), *imported_on_pages()]
    described = [described_by(name) for name in PUBLIC]
    assert [name for name in names if described_by(name) not in described] == []
    assert len({build_site.short_name(name) for name in PUBLIC}) == len(PUBLIC)


def imported_on_pages():
    """Yield the names that the documentation's Python blocks import from the package."""
    for code in blocks_in("python").values():
        for node in ast.walk(ast.parse(code)):
            module = getattr(node, "module", None) or ""
            if module.startswith("mindformers_adaptive"):
                names = [f"{module}.{alias.name}".removeprefix("mindformers_adaptive.") for alias in node.names]
                yield from (name for name in names if described_by(name).__module__ not in UTILITIES)


def described_by(name):
    module, _, attribute = f"mindformers_adaptive.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


# Classes that only store their arguments, and functions whose arguments cannot be wrong, so they raise no error.
RAISE_NOTHING = (
    "LossScaleState",
    "enable_loss_scale_in_model",
    "gradients.LossScaleRecommendation",
    "gradients.Verdict",
    "gradients.GradientRanges",
    "monitor.RunRecord",
    "overflow.Explanation",
    "register",
    "wrapper.NoLossScaleUpdateCell",
)
# The text below a heading of a docstring, up to the next heading.
_SECTION = r"^(?:{}):\n((?: {{4}}.*\n|\n)+)"
_ENTRY = re.compile(r"^ {4}([*\w, ]+?)(?: \((.*?)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)


def entries_of(text):
    """Return, for each argument of a function, its type and its description in the docstring."""
    sections = re.findall(_SECTION.format("Args|Attributes"), f"{text}\n", re.MULTILINE)
    entries = [entry for section in sections for entry in _ENTRY.findall(section)]
    return {name: (type_, said) for names, type_, said in entries for name in re.split(", ", names)}


@pytest.mark.parametrize("name", PUBLIC)
class TestDocstring:
    def test_names_every_argument_and_has_an_example(self, name):
        text = inspect.getdoc(described_by(name))
        # The example in the docstring is run as a test; see --doctest-modules in pyproject.toml.
        assert re.search(r"^Examples:\n.*>>> ", text, re.MULTILINE | re.DOTALL)
        named = [it.name for it in parameters_of(name) if it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)]
        left_out = [] if "**kwargs: all other" in text else [it for it in named if it not in entries_of(text)]
        assert left_out == []

    def test_has_types_and_shapes(self, name):
        entries = entries_of(inspect.getdoc(described_by(name)))
        variable = [f"*{it.name}" for it in parameters_of(name)] + [f"**{it.name}" for it in parameters_of(name)]
        assert [it for it, (type_, _) in entries.items() if not type_ and it not in variable] == []
        arrays = [said for type_, said in entries.values() if re.search(r"\b(Tensor|NDArray)\b", type_)]
        assert [said for said in arrays if not re.search(r"shape|of one\s+element", said)] == []

    def test_says_what_is_returned_and_raised(self, name):
        text = inspect.getdoc(described_by(name))
        assert bool(re.search("^Raises:", text, re.MULTILINE)) is (name not in RAISE_NOTHING)
        if not inspect.isclass(described_by(name)) and name not in ("enable_loss_scale_in_model", "register"):
            assert re.search(r"^Returns:\n    \S", text, re.MULTILINE)


def parameters_of(name):
    return list(inspect.signature(described_by(name)).parameters.values())


# Tests of the documentation's site after Sphinx has built it


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the documentation site and return its folder. The build fails if it imports MindSpore or MindFormers."""
    folder = tmp_path_factory.mktemp("site")
    for package in ("mindspore", "mindformers"):
        (folder / f"{package}.py").write_text(f"raise AssertionError('The site build must not import {package}')")
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "scripts/site/build_site.py", folder / "built"]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "built"


class Page:
    """The links of a page, the files that the page loads, and its anchors."""

    # In the site's pages, an angle bracket only begins or ends a tag. html.parser takes six times as long.
    _TAG = re.compile(r"<(\w+) ([^<>]*)>")
    _ATTRIBUTE = re.compile(r'\b(?<!-)(id|href|src|rel)="([^"]*)"')

    def __init__(self, file):
        self.links, self.loaded, self.anchors = [], [], set()
        for tag, attributes in self._TAG.findall(file.read_text(encoding="utf-8")):
            values = {name: html.unescape(value) for name, value in self._ATTRIBUTE.findall(attributes)}
            self.anchors.add(values.get("id"))
            if tag == "a" and "href" in values:
                self.links.append(values["href"])
            elif tag == "link" and values.get("rel") not in ("index", "search", "next", "prev"):
                self.loaded.append(values["href"])
            elif "src" in values:
                self.loaded.append(values["src"])


@functools.cache
def existing(folder, path):
    """Return the file or folder to which a link leads, or None; cached, because pages repeat the same links."""
    target = (folder / path).resolve()
    return target if target.exists() else None


def test_links_and_anchors_of_the_site_lead_somewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 200
    broken = []
    for file, page in pages.items():
        for link in [*page.links, *page.loaded]:
            if re.match("https?:|javascript:", link):
                continue
            path, _, anchor = link.partition("#")
            path = urllib.parse.unquote(path.partition("?")[0])
            target = existing(file.parent, path) if path else file
            if target is None or (anchor and urllib.parse.unquote(anchor) not in pages[target].anchors):
                broken.append((file.relative_to(site).as_posix(), link))
    assert broken == []
    assert {link for page in pages.values() for link in page.loaded if ":" in link} == set()


@pytest.mark.parametrize(("language", "first_page"), build_site.FIRST_PAGES.items())
def test_side_bar_is_grouped_as_the_first_page_is(site, language, first_page):
    shown = (site / language / "index.html").read_text(encoding="utf-8")
    [tree] = re.findall(r'<div class="sidebar-tree">(.*?)\n</div>', shown, re.DOTALL)
    captions = re.findall('<span class="caption-text">(.*?)</span>', tree)
    pages = [re.findall('href="([^"]+)[.]html"', part) for part in tree.split('<p class="caption"')[1:]]
    section = (ROOT / first_page).read_text(encoding="utf-8").rpartition("\n## ")[2]
    expected = {}
    for name, links in re.findall(r"^\| (\w[\w ]*) \| (.*)$", section, re.MULTILINE):
        linked = re.findall(r"\]\((?:docs/\w+/(\w+)[.](?:md|ipynb)|(CHANGELOG)[.]md)\)", links)
        expected[name] = [page or change_log.lower() for page, change_log in linked]
    assert dict(zip(captions[:-1], pages, strict=False)) == expected
    assert pages[0] == ["tutorial"]
    listed = [page for names in pages[:-1] for page in names]
    assert sorted(listed) == sorted(["changelog", *(page.stem for page in (ROOT / "docs" / language).glob("*.*"))])


def test_pages_of_the_reference_show_the_names(site):
    for language in LANGUAGES:
        for name in PUBLIC:
            file = site / language / "reference" / f"{build_site.short_name(name)}.html"
            assert f"mindformers_adaptive.{name}" in Page(file).anchors
            assert "viewcode-link" in file.read_text(encoding="utf-8"), name
        assert mindformers_adaptive.__version__ in (site / language / "index.html").read_text(encoding="utf-8")
    # The Chinese reference leads to the English pages of all modules.
    assert "../../en/reference/index.html#all-modules" in Page(site / "zh" / "reference" / "index.html").links


@pytest.mark.parametrize("name", PUBLIC)
def test_page_shows_the_signature(site, name):
    page = (site / "en" / "reference" / f"{build_site.short_name(name)}.html").read_text(encoding="utf-8")
    [shown, *_] = re.findall(r'<dt class="sig.*?</dt>', page, re.DOTALL)
    shown = text_of(re.sub("<a .*?</a>", "", shown, flags=re.DOTALL)).partition("(")[2].strip().removesuffix(")")
    shown = inspect.signature(eval(f"lambda {shown}: None", {"FLOAT16": FLOAT16, "nan": math.nan}))
    expected = parameters_of(name)
    if shown.parameters.keys() >= {"network", "kwargs"}:
        # The page leaves out the last arguments before ``kwargs``, because MindFormers' documentation describes them.
        expected = expected[: len(shown.parameters) - 1] + expected[-1:]
    assert [str(it) for it in shown.parameters.values()] == [str(bare(it)) for it in expected]


def bare(parameter):
    """Return a parameter of a signature without its type; a default that a dataclass creates becomes {}."""
    default = {} if "factory" in repr(parameter.default) else parameter.default
    return parameter.replace(annotation=parameter.empty, default=default)


@pytest.fixture
def release(request):
    """Skip the test unless a release is prepared: a changed docstring gets its Chinese only then."""
    if not request.config.getoption("--release"):
        pytest.skip("The Chinese of docstrings is checked with the option --release")


def test_reference_of_public_names_is_in_chinese(release, site):
    pages = list((site / "zh" / "reference").glob("*.html"))
    assert len(pages) == len(PUBLIC) + 1
    assert {page.name: english for page in pages if (english := english_on(page))} == {}


def english_on(file):
    """Return the untranslated paragraphs of a Chinese page. Code and formulas do not count as text."""
    paragraphs = re.findall("<(p|h[1-6])\\b[^>]*>(.*?)</\\1>", file.read_text(encoding="utf-8"), re.DOTALL)
    texts = [text_of(re.sub("<(code|math)\\b.*?</\\1>", "", text, flags=re.DOTALL)) for _, text in paragraphs]
    return [text for text in texts if re.search("[a-z]{2} [a-z]{2}", text) and not re.search("[\u4e00-\u9fff]", text)]


def text_of(page):
    return html.unescape(re.sub("<[^>]+>", "", page))


def test_no_chinese_is_left_of_removed_docstrings(release):
    catalog = (ROOT / "docs/site/locale/zh_CN/LC_MESSAGES/reference.po").read_text(encoding="utf-8")
    english = [ast.literal_eval(text) for text in re.findall('^msgid (".+")$', catalog, re.MULTILINE)]
    assert len(english) == len(set(english)) > 600
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in build_site.PACKAGE.rglob("*.py")]
    said = [node.value for tree in trees for node in ast.walk(tree) if isinstance(getattr(node, "value", None), str)]
    said = words("\n".join([*said, *(title for title in build_site.PUBLIC)]))
    assert [text for text in english if words(text) not in said] == []


def words(text):
    """Return the words of a text without its markup: a docstring and its translation entry have different markup."""
    return " ".join(re.findall(r"\w+", text))


# Tests of the methods that the API reference documents on the pages of classes

# The type at the start of a property's docstring.
_TYPE = re.compile(r"\w+(\[.*?\])?(, optional)?: ")
_ARRAY = re.compile(r"\b(Tensor|NDArray|ArrayLike)\b")
PROPERTIES = (property, functools.cached_property)


@pytest.mark.parametrize("name", CLASSES)
class TestMethods:
    """The checks of TestDocstring, for all methods and properties that a class's page in the API reference shows."""

    def test_name_every_argument_with_its_type_and_default(self, site, name):
        lacking = []
        for method, function in methods_on_page(site, name):
            entries = entries_of(inspect.getdoc(function))
            for it in inspect.signature(function).parameters.values():
                type_, said = entries.get(str(it.replace(annotation=it.empty)).partition("=")[0], ("", ""))
                if it.name != "self" and not (type_ and (it.default is it.empty or re.search(r"Default:\s", said))):
                    lacking.append((method, it.name))
            arrays = [said for type_, said in entries.values() if _ARRAY.search(type_)]
            lacking += [(method, said) for said in arrays if "shape" not in said]
        assert lacking == []

    def test_say_what_is_returned_and_raised(self, site, name):
        lacking = []
        for method, function in methods_on_page(site, name):
            text = inspect.getdoc(function)
            returned = re.findall(_SECTION.format("Returns"), f"{text}\n", re.MULTILINE)
            if bool(returned) is not returns_something(function):
                lacking.append((method, "Returns"))
            lacking += [(method, said) for said in returned if _ARRAY.search(said) and "shape" not in said]
            if raises(function) and "\nRaises:\n" not in text:
                lacking.append((method, "Raises"))
        assert lacking == []

    def test_properties_have_a_type(self, site, name):
        said = [inspect.getdoc(it) for _, it in members_on_page(site, name) if isinstance(it, PROPERTIES)]
        assert [text for text in said if not _TYPE.match(text)] == []


def methods_on_page(site, name):
    members = members_on_page(site, name)
    return [(method, it) for method, it in members if inspect.isroutine(it) and not isinstance(it, PROPERTIES)]


def members_on_page(site, name):
    """Return the members of a class that its page in the API reference shows, as pairs of name and member."""
    anchors = Page(site / "en" / "reference" / f"{build_site.short_name(name)}.html").anchors - {None}
    shown = [it.rpartition(".") for it in anchors]
    of_class = [member for owner, _, member in shown if owner == f"mindformers_adaptive.{name}"]
    # A dataclass field without a default is not an attribute of its class, so the field's name is paired with None.
    return [(member, getattr(described_by(name), member, None)) for member in sorted(of_class)]


def returns_something(function):
    annotation = inspect.signature(function).return_annotation
    if annotation is not inspect.Signature.empty:
        return annotation not in (None, "None")
    return any(isinstance(node, ast.Return) and node.value is not None for node in nodes_of(function))


def raises(function):
    """Return whether the code of a function has a raise statement, other than for NotImplementedError."""
    raised = [node.exc for node in nodes_of(function) if isinstance(node, ast.Raise)]
    return any(it is None or ast.unparse(it) != "NotImplementedError" for it in raised)


def nodes_of(function):
    return ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))


def test_the_site_shows_methods(site):
    assert {"step", "window_at", "nearest_scale"} <= dict(methods_on_page(site, "AdaptiveRule")).keys()


# Tests of the documentation's pages in a browser


# This HTML page opens each page of the site in a frame, and then replaces the frame by that page's HTML as text. One
# browser opens all pages, because starting a browser takes longer than opening a page.
TOGETHER = """<!DOCTYPE html><meta charset="utf-8"><body><script>
const open = ([address, ...others]) => {
  const frame = document.createElement("iframe");
  const look = () => {
    const summary = frame.contentDocument.querySelector(".search-summary");
    if (address.includes("search.html") && !(summary && summary.textContent.trim())) return setTimeout(look, 50);
    const shown = document.createElement("pre");
    shown.textContent = frame.contentDocument.documentElement.outerHTML;
    frame.replaceWith(shown);
    if (others.length) open(others);
  };
  frame.onload = () => setTimeout(look, 50);
  frame.src = address;
  document.body.append(frame);
};
open(ADDRESSES);
</script></body>
"""


@pytest.fixture(scope="module")
def browse(site):
    """Return a function that returns two things: the HTML of a page in Chromium, and console messages of all pages."""
    chromium = shutil.which("chromium") or pytest.skip("The program chromium is missing: apt-get install chromium")
    addresses = [page_of_rule(language) for language in LANGUAGES] + [TUTORIAL]
    addresses += [search_for(language, words) for language, words, _ in SEARCHES]
    addresses += [search_for("en", words) for words in SYMBOLS]
    together = TOGETHER.replace("ADDRESSES", json.dumps(addresses))
    handler = functools.partial(Handler, directory=site, together=together)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        # Chromium's virtual time (in ms) stands still while a page loads, so a slow page does not use up the budget.
        options += [
            "--virtual-time-budget=100000",
            "--dump-dom",
            f"http://127.0.0.1:{server.server_port}{Handler.PATH}",
        ]
        opened = subprocess.run([chromium, *options], capture_output=True, text=True, check=True)
        server.shutdown()
    pages = map(html.unescape, re.findall("<pre>(.*?)</pre>", opened.stdout, re.DOTALL))
    shown = dict(zip(addresses, pages, strict=True))
    console = [line for line in opened.stderr.splitlines() if ":CONSOLE" in line]
    return lambda address: (shown[address], console)


class Handler(http.server.SimpleHTTPRequestHandler):
    PATH = "/together.html"

    def __init__(self, *arguments, together, **options):
        self.together = together.encode()
        super().__init__(*arguments, **options)

    def do_GET(self):
        if self.path != self.PATH:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(self.together)))
        self.end_headers()
        self.wfile.write(self.together)

    def log_message(self, *_):
        pass


TUTORIAL = "en/tutorial.html"


def page_of_rule(language):
    return f"{language}/reference/GuidedRule.html"


def search_for(language, words):
    return f"{language}/search.html?q={urllib.parse.quote(words)}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_browser_shows_a_page_without_errors(browse, language):
    shown, console = browse(page_of_rule(language))
    assert console == []
    [other] = set(LANGUAGES) - {language}
    for text in (
        f'href="../../{other}/reference/GuidedRule.html"',
        {"en": "Parameters", "zh": "参数"}[language],
        "<math",
    ):
        assert text in shown


# Each entry: a language of the site, words that a new user searches for, and the page that must be a result.
SEARCHES = [
    ("en", "exchange_rate", "guided.html"),
    ("en", "AdaptiveLossScaleUpdateCell", "reference/AdaptiveLossScaleUpdateCell.html"),
    ("en", "upgrade uninstall", "faq.html"),
    ("en", "first steps skipped", "faq.html"),
    ("en", "growth_interval", "migrating.html"),
    ("en", "resume checkpoint", "resuming.html"),
    ("en", "msrun several machines", "yaml.html"),
    ("en", "BF16", "choose.html"),
    ("en", "loss nan", "overflows.html"),
    ("en", "loss is NaN", "overflows.html"),
    ("en", "nan loss", "overflows.html"),
    ("en", "initial loss scale", "gradients.html"),
    ("zh", "exchange_rate", "guided.html"),
    ("zh", "loss nan", "overflows.html"),
    ("zh", "loss为NaN", "overflows.html"),
    ("zh", "断点续训", "resuming.html"),
    ("zh", "梯度引导", "guided.html"),
]
# The words of two searches: one finds guides as well as API reference pages, one is the exact name of a class.
SYMBOLS = ("history device", "GuidedRule")


@pytest.mark.parametrize(("language", "words", "page"), SEARCHES)
def test_search_finds_the_page(browse, language, words, page):
    assert page in found_pages(browse, language, words)


@pytest.mark.parametrize(("language", "words"), [it[:2] for it in SEARCHES if it[2] == "overflows.html"])
def test_search_for_a_nan_shows_first_how_to_find_its_cause(browse, language, words):
    assert found_pages(browse, language, words)[0] == "overflows.html"


def found_pages(browse, language, words):
    """Return the pages that a search finds, in the order of its results."""
    shown, console = browse(search_for(language, words))
    assert console == []
    results = re.search(r'<ul[^>]*class="search".*?</ul>', shown, re.DOTALL)[0]
    return [link.partition("?")[0].partition("#")[0] for link in re.findall('href="([^"]+)"', results)]


def test_search_shows_guides_before_symbols(browse):
    both, symbol = SYMBOLS
    is_guide = ["/" not in page for page in found_pages(browse, "en", both)]
    assert is_guide == sorted(is_guide, reverse=True)
    assert set(is_guide) == {True, False}
    assert found_pages(browse, "en", symbol)[0] == "reference/GuidedRule.html"


def test_what_can_be_pasted_has_a_button_to_copy_it(browse):
    shown, _ = browse(TUTORIAL)
    blocks = re.findall(r'<div class="(output )?highlight-\w+ .*?</pre>(<button class="copybtn)?', shown, re.DOTALL)
    assert {(bool(is_output), bool(button)) for is_output, button in blocks} == {(True, False), (False, True)}
