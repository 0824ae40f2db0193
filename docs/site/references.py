"""What autodoc shows of the package: names that it does not find by itself, signatures, and which members."""

import functools
import inspect
import re
import sys

from docutils import nodes
from sphinx import addnodes
from sphinx.domains.python import PyObject
from sphinx.locale import _
from sphinx.util.inspect import stringify_signature
from sphinx.util.nodes import make_refnode

from mindformers_adaptive.public_names import PUBLIC

# By its short name, where users find a public name.
_PUBLIC = {name.rpartition(".")[2]: (f"mindformers_adaptive.{name}",) for group in PUBLIC.values() for name in group}


def resolve(app, env, node, content):
    """Return the link of a name; the name alone for a type of another library; None, a warning, for a wrong role."""
    if node["refdomain"] != "py":
        return None
    # A docstring names what its own module has, and the rest by the modules that define it. The page of a public name
    # has it by the module that users import it from.
    objects = env.domains.python_domain.objects
    target = node["reftarget"]
    short = target.rpartition(".")[2]
    for name in (target, *_PUBLIC.get(short, ()), short):
        known = names_by_last_word(env).get(name.rpartition(".")[2], [])
        pages = {objects[full].docname: full for full in known if f".{full}".endswith(f".{name}")}
        if len(pages) == 1:
            [(page, full)] = pages.items()
            return make_refnode(app.builder, node["refdoc"], page, objects[full].node_id, [content], full)
    # What a docstring's Args and Raises call a type is not a role. Only the English reference has pages of all modules.
    return None if isinstance(content, nodes.literal) and app.config.language == "en" else content


@functools.lru_cache(maxsize=1)
def names_by_last_word(env):
    """Return the full names of all that is described by their last words; only when all pages have been read."""
    names = {}
    for full in env.domains.python_domain.objects:
        names.setdefault(full.rpartition(".")[2], []).append(full)
    return names


def signature_of(app, what, name, obj, options, signature, return_annotation):
    """Return the signature of a class by its constructor: autodoc shows that of the mocked base instead."""
    if what != "class" or not obj.__module__.startswith("mindformers_adaptive"):
        return None
    if "__signature__" in vars(obj):
        return documented_signature(inspect.getdoc(obj)), None
    if "__init__" not in vars(obj):
        return None
    _, *parameters = inspect.signature(obj.__init__).parameters.values()
    shown = stringify_signature(inspect.Signature(parameters), show_annotation=False)
    return _FORMAT.sub(lambda match: match[1].upper(), shown).replace("<factory>", "{}"), None


# A format as a default, which has a constant by its name.
_FORMAT = re.compile(r"Format\(name='(\w+)'.*?\)\)")
_ARGUMENT = re.compile(r"^    (\*{0,2}\w+)(?: \(.*?\))?: (.+(?:\n {8}.*)*)", re.MULTILINE)
_DEFAULT = re.compile(r"Default: (.+?)\.(?:\s|$)")


def documented_signature(docstring):
    """Return what Args says of a constructor that is the mocked base's."""
    [section] = re.findall(r"^Args:\n((?: {4}.*\n)+)", docstring, re.MULTILINE)
    shown = []
    for name, text in _ARGUMENT.findall(section):
        default = _DEFAULT.search(text)
        shown.append(f"{name}={default[1]}" if default else name)
    return f"({', '.join(shown)})"


def is_left_out(app, what, name, obj, skip, options):
    """Leave out what every tuple with names has, whose class describes its fields, and every exception."""
    is_of_tuple = name in ("count", "index") or str(inspect.getdoc(obj)).startswith("Alias for field number")
    return True if is_of_tuple or name in ("add_note", "with_traceback") else None


def show_commands_as_code(app, what, name, obj, options, lines):
    """Show the commands at the end of a subcommand's help as they are typed."""
    start = next((number for number, line in enumerate(lines) if line in ("example:", "examples:")), None)
    if what == "module" and start is not None:
        lines[start + 1 :] = ["    .. code-block:: text", "", *(f"     {line}" for line in lines[start + 1 :])]


def name_where_defined(app, doctree):
    """Name what is described by the module that defines it, too: viewcode links there and back by that name."""
    for node in doctree.findall(addnodes.desc_signature):
        described = sys.modules.get(node.get("module"))
        for name in node.get("fullname", "").split("."):
            described = getattr(described, name, None)
        # A class may name the module that users import it from, but its methods name the module of the source.
        defining = vars(described).get("__init__", described) if inspect.isclass(described) else described
        if module := getattr(defining, "__module__", None):
            node["module"], anchor = module, f"{module}.{node['fullname']}"
            node["ids"] += [] if anchor in node["ids"] else [anchor]


def setup(app):
    app.connect("missing-reference", resolve)
    # Before viewcode.
    app.connect("doctree-read", name_where_defined, priority=400)
    app.connect("autodoc-process-signature", signature_of)
    app.connect("autodoc-skip-member", is_left_out)
    # Before napoleon.
    app.connect("autodoc-process-docstring", show_commands_as_code, priority=400)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = _("Attributes")
