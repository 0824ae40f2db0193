"""What takes long and is the same on several pages or in both languages is made once: code, navigation, stems."""

import functools

from sphinx.highlighting import PygmentsBridge
from sphinx.search.en import SearchEnglish

_highlighted = {}


def remember_highlighted(highlight_block):
    """Return a ``PygmentsBridge.highlight_block`` that highlights the same code in the same way once."""

    @functools.wraps(highlight_block)
    def remembered(self, source, lang, opts=None, force=False, location=None, **options):
        key = (self.dest, str(self.formatter_args), source, lang, str(opts), force, str(sorted(options.items())))
        if key not in _highlighted:
            _highlighted[key] = highlight_block(self, source, lang, opts, force, location, **options)
        return _highlighted[key]

    return remembered


def share_navigation():
    """Return a handler that gives one navigation to pages of a folder that have no place in it, as listings of code."""
    shared = {}

    def of_page(app, pagename, templatename, context, doctree):
        if "orphan" not in app.env.metadata.get(pagename, {"orphan": True}):
            return
        folder, toctree = pagename.rpartition("/")[0], context["toctree"]

        def navigation(**options):
            key = (folder, *sorted(options.items()))
            if key not in shared:
                shared[key] = toctree(**options)
            return shared[key]

        context["toctree"] = navigation

    return of_page


def setup(app):
    if not hasattr(PygmentsBridge.highlight_block, "__wrapped__"):
        PygmentsBridge.highlight_block = remember_highlighted(PygmentsBridge.highlight_block)
        SearchEnglish.stem = functools.cache(SearchEnglish.stem)
    # Before the theme.
    app.connect("html-page-context", share_navigation(), priority=400)
