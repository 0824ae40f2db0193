"""Build the documentation as a site in both languages, and treat warnings as errors.

    python -m scripts.site.build_site output/site

Sphinx reads copies of the pages in docs/ and of the first page, README.md, from a temporary folder. In the copies, the
links fit the site. If a page links to a file of the project, the site gets a page that shows this file. The API
reference has a page for each public name and for each subpackage. MindSpore is not needed.
"""

import argparse
import base64
import gc
import json
import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from mindformers_adaptive.public_names import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "mindformers_adaptive"
FIRST_PAGES = {"en": "README.md", "zh": "README_CN.md"}

# The titles of the API reference in Chinese.
TITLES = {
    "Update cells": "更新Cell",
    "Train-step cells": "单步训练Cell",
    "Managers and scalers": "管理器与scaler",
    "Training": "训练",
    "Monitors and records": "监控与记录",
    "Gradients": "梯度",
    "Rules": "规则",
    "The lab": "实验室",
}
WORDS = {
    "en": {"reference": "API reference", "modules": "All modules", "changes": "Changes"},
    "zh": {"reference": "API参考", "modules": "全部模块 (英文)", "changes": "更新记录 (英文)"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the folder of the site, which is replaced")
    output = parser.parse_args().output
    # Most objects that Sphinx creates live until the site is built, so garbage collection would only scan the same
    # objects again and again.
    gc.disable()
    # Sphinx logs 75,000 lines at this level, which are not shown.
    logging.disable(logging.DEBUG)
    # Put docs/site on the import path, because Sphinx's conf.py imports modules from this folder.
    sys.path.insert(0, str(DOCS / "site"))
    with tempfile.TemporaryDirectory() as folder:
        for language in FIRST_PAGES:
            source, built = Path(folder, "source", language), Path(folder, "site", language)
            write_sources(language, source)
            options = ["-W", "--keep-going", "-q", "-c", DOCS / "site", "-d", Path(folder, "doctrees", language)]
            options += ["-D", f"language={'zh_CN' if language == 'zh' else language}"]
            if status := build_main([*map(str, options), str(source), str(built)]):
                return status
        shutil.copy(DOCS / "site" / "index.html", Path(folder, "site"))
        shutil.rmtree(output, ignore_errors=True)
        shutil.move(Path(folder, "site"), output)
    print(f"Written: {output / 'index.html'}")
    # Exclude all objects from the garbage collection at exit, because scanning the objects would only take time.
    gc.freeze()
    return 0


def write_sources(language, folder):
    """Write the source files of one language for Sphinx."""
    first = ROOT / FIRST_PAGES[language]
    pages = {page: f"{page.stem}.md" for kind in ("md", "ipynb") for page in DOCS.glob(f"*/*.{kind}")}
    pages |= {ROOT / page: "index.md" for page in FIRST_PAGES.values()} | {ROOT / "CHANGELOG.md": "changelog.md"}
    write(folder / "reference" / "index.rst", reference(language, folder / "reference"))
    shutil.copytree(DOCS / "images", folder / "images")
    shown = {}
    for page in [first, ROOT / "CHANGELOG.md", *(page for page in pages if page.parent == DOCS / language)]:
        text = notebook(page, folder) if page.suffix == ".ipynb" else page.read_text(encoding="utf-8")
        if page.name == "CHANGELOG.md":
            # The change log exists in English only, so its links must not have the anchors of English pages.
            text = re.sub(r"(?<=\.md)#[^)]+", "", text)
        write(folder / pages[page], with_links(text, page, pages, shown))
    for file, name in shown.items():
        write(folder / name, page_of(file))
    words = WORDS[language]
    with open(folder / "index.md", "a", encoding="utf-8") as index:
        for caption, names in groups(first, pages).items():
            titles = {"changelog.md": f"{words['changes']} <changelog.md>"}
            index.write(toctree(caption, [titles.get(name, name) for name in names]))
        index.write(toctree(words["reference"], ["reference/index"]))


def groups(first, pages):
    """Return the groups of the side bar: as in the table of the last section of the first page, in the same order.

    Args:
        first (Path): the first page of a language.
        pages (dict): the name on the site of each page.

    Returns:
        dict, from the caption of a group to the names of its pages.
    """
    rows = _ROW.findall(first.read_text(encoding="utf-8").rpartition("\n## ")[2])
    return {
        caption: [pages[(ROOT / link).resolve()] for link in dict.fromkeys(_PAGE.findall(text))]
        for caption, text in rows
    }


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def toctree(caption, names):
    lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]
    return "\n".join(lines)


_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
# Patterns for a row of the table of all pages, whose first cell is the name of a group, and for a link in the row to a
# whole page, without #section.
_ROW = re.compile(r"^\| *(\w[^|]*?) *\|(.*)$", re.MULTILINE)
_PAGE = re.compile(r"\]\((docs/\w+/[^)#]+|CHANGELOG\.md)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def with_links(text, page, pages, shown):
    """Return a page's text with links that fit the site; add to ``shown`` the linked files that are not pages."""
    # Remove the links to the first page and to the other language, because the site's theme adds such links.
    text = re.sub(r"^\[(?:简体中文|English)\]\(\S+\)(?: · \[\w+\]\(\S+\))? ?", "", text, count=1, flags=re.MULTILINE)

    def fitting(match):
        link = match[0]
        if "://" in link:
            return link
        file = (page.parent / link).resolve()
        if file.parent == DOCS / "images" or link.startswith("images/"):
            return f"images/{file.name}"
        if file in pages:
            return pages[file]
        return shown.setdefault(file, f"files/{file.relative_to(ROOT).as_posix()}.md")

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(fitting, part) for part in parts[::2]]
    return "".join(parts)


def notebook(file, folder):
    """Return a notebook, with its outputs, as a page in Markdown; write the notebook's pictures into ``folder``."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```ipython3\n{source}\n```")
        for number, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"images/{file.stem}_{cell['id']}_{number}.png"
                (folder / picture).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![]({picture})")
            else:
                text = "".join(output.get("text") or data["text/plain"]).rstrip()
                parts.append(f"```{{code-block}} text\n:class: output\n\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def page_of(file):
    """Return a page that shows a file of the project, or the files of a folder."""
    files = sorted(file.glob("*.py")) if file.is_dir() else [file]
    lines = ["---", "orphan: true", "---", f"# {file.relative_to(ROOT)}"]
    for each in files:
        lines += ["", f"## {each.name}"] if len(files) > 1 else []
        lexer = "python" if each.suffix == ".py" else "yaml" if each.suffix == ".yaml" else "text"
        lines += ["", f"`````{lexer}", each.read_text(encoding="utf-8"), "`````"]
    return "\n".join(lines) + "\n"


# API reference


def reference(language, folder):
    """Write a page for each public name and, in English, each subpackage; return a page that lists all of them."""
    words = WORDS[language]
    lines = title(words["reference"])
    for english, names in PUBLIC.items():
        full = [f"{PACKAGE.name}.{name}" for name in names]
        lines += [
            *title(TITLES[english] if language == "zh" else english, "-"),
            ".. autosummary::",
            "   :nosignatures:",
            "",
        ]
        lines += [f"   ~{name}" for name in full]
        lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {short_name(name)}" for name in names), ""]
        for name in full:
            write(folder / f"{short_name(name)}.rst", "\n".join([*title_of_name(short_name(name)), *described(name)]))
    lines += title(words["modules"], "-")
    if language == "zh":
        # The docstrings of these pages are in English only, so the Chinese reference leads to the English pages.
        return "\n".join([*lines, "`mindformers_adaptive <../../en/reference/index.html#all-modules>`_"])
    for room in sorted([PACKAGE / "wrapper.py", *(path.parent for path in PACKAGE.glob("*/__init__.py"))]):
        if room.name != "register_path":
            write(folder / "modules" / f"{room.stem}.rst", room_page(room))
            lines.append(f"- :doc:`modules/{room.stem}`")
    return "\n".join(lines)


def described(name):
    """Return the Sphinx directives that describe a public name."""
    # In this package, names of classes begin with a capital letter and names of functions do not, so the first letter
    # tells them apart.
    kind = "class" if short_name(name)[0].isupper() else "function"
    return [f".. auto{kind}:: {name}", ""]


def room_page(room):
    """Return the API page of a subpackage. The page leaves out public names, because each has a separate page."""
    public = {short_name(name) for names in PUBLIC.values() for name in names}
    # Exclude the lab's class Parameter from the page. In docstrings, ``Parameter`` means MindSpore's class, and Sphinx
    # would link it to the lab's class.
    left_out = ", ".join(sorted({*public, "Parameter"}))
    # Keep these pages out of the navigation, because building it on every page would take most of the time.
    lines = [":orphan:", "", *title_of_name(f"{PACKAGE.name}.{room.stem}")]
    for file in sorted(room.rglob("*.py")) or [room]:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if file not in (room, room / "__init__.py"):
            lines += title(name.removeprefix(f"{PACKAGE.name}."), "-")
        lines += [f".. automodule:: {name}", f"   :exclude-members: {left_out}", ""]
    return "\n".join(lines)


def short_name(name):
    return name.rpartition(".")[2]


def title_of_name(name):
    """Return the reST lines of a page title that is one long name, with a style class that keeps it on one line."""
    return [".. rst-class:: name", "", *title(name)]


def title(text, line="="):
    # A Chinese character is two columns wide, so the underline has two characters for each character of the title.
    return [text, line * 2 * len(text), ""]


if __name__ == "__main__":
    sys.exit(main())
