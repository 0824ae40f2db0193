"""Names in docstrings that Sphinx does not find by itself."""

from docutils import nodes
from sphinx.util.nodes import make_refnode


def resolve(app, env, node, content):
    """Return the link of a name; the name alone for a type of another library; None, a warning, for a wrong role."""
    if node["refdomain"] != "py":
        return None
    # A docstring names what its own module has, and the rest by the modules that define it. The page of a public name
    # has it by the module that users import it from.
    objects = env.domains.python_domain.objects
    target = node["reftarget"]
    for name in (target, target.rpartition(".")[2]):
        found = {entry.docname: full for full, entry in objects.items() if full.endswith(f".{name}")}
        if len(found) == 1:
            [(page, full)] = found.items()
            return make_refnode(app.builder, node["refdoc"], page, objects[full].node_id, [content], full)
    # What a docstring's Args and Raises call a type is not a role.
    return None if isinstance(content, nodes.literal) else content


def setup(app):
    app.connect("missing-reference", resolve)
