"""Settings of Sphinx, the same for both languages. scripts/site/build_site.py writes the sources that it reads."""

import re
import sys
from pathlib import Path

import chinese
import made_once
import mathml
import references
import search
from sphinx.ext.autodoc.mock import mock

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

project = "mindformers_adaptive"
copyright = "the authors of mindformers_adaptive"
release = re.search(r'__version__ = "(.+)"', (ROOT / "mindformers_adaptive" / "__init__.py").read_text())[1]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
nitpicky = True
# references.name_where_defined() names the module with the source of each name.
viewcode_follow_imported_members = False

# Pages

myst_heading_anchors = 6
# The headings of a page on GitHub may leave out a level.
suppress_warnings = ["myst.header"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "site" / "search_scorer.js")
# On what is typed in or pasted, without the prompts of an example: not on outputs and diffs.
copybutton_selector = "div.highlight:not(.highlight-text > *, .highlight-diff > *) > pre"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
toc_object_entries_show_parents = "hide"
# The Chinese of the docstrings, all in one file.
locale_dirs = [str(ROOT / "docs" / "site" / "locale")]
gettext_compact = "reference"
html_math_renderer = "mathml"

# API reference

# The site is built where these are not installed. For all extensions, of which autodoc alone would do so itself.
mocked = mock(["mindspore", "mindformers", "matplotlib", "safetensors", "tensorboardX"])
mocked.__enter__()
autodoc_default_options = {
    "members": True,
    "inherited-members": True,
    "ignore-module-all": True,
    "member-order": "bysource",
    # A tuple that is made for each rule.
    "exclude-members": "State",
}
autodoc_typehints = "none"
autodoc_use_type_comments = False
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# MindSpore's sections beside Google's.
napoleon_custom_sections = ["Inputs", "Outputs", "Supported Platforms"]


def setup(app):
    chinese.setup(app)
    made_once.setup(app)
    mathml.setup(app)
    references.setup(app)
    search.setup(app)
