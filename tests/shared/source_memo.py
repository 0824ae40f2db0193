"""Remember the source lines of each function that MindSpore compiles.

MindSpore reads the source of a function again for each graph in which it occurs, and Python finds the end of a function
by splitting it into tokens. With this memo, compiling a graph needs about a tenth less time.
"""

import inspect

_find = inspect.getsourcelines
# The code object is kept beside its lines, so that no other code object gets the same id.
_known = {}


def remember_source_lines():
    """Make ``inspect.getsourcelines`` look up each function once in this process."""
    inspect.getsourcelines = _lines_of


def _lines_of(source_of):
    unwrapped = inspect.unwrap(source_of) if callable(source_of) else source_of
    code = getattr(unwrapped, "__code__", None)
    if code is None:
        return _find(source_of)
    if id(code) not in _known:
        _known[id(code)] = code, _find(source_of)
    lines, first = _known[id(code)][1]
    return list(lines), first
