"""Formulas as MathML, which browsers draw themselves: MathJax would come from a server."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def draw(writer, node):
    """Write the formula of a node."""
    writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (draw, None), (draw, None))
