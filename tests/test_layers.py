"""Parts of the package import each other in one direction only, and plain-Python modules do not import MindSpore."""

import ast
import graphlib
import importlib
import re
from pathlib import PurePath

import pytest

import mindformers_adaptive
from mindformers_adaptive.public_names import PUBLIC
from tests.conftest import ROOT

PACKAGE = ROOT / "mindformers_adaptive"

# A room of the package is a folder or a top-level module. For each room, from the bottom up, these are the rooms from
# which it may import. A new room needs an entry here.
MAY_IMPORT = {
    "text": set(),
    "public_names": {"text"},
    "rules": {"text"},
    "cells": {"text", "public_names", "rules"},
    "wrapper": {"text", "cells"},
    "gradients": {"text", "public_names", "rules"},
    "record": {"text", "public_names", "rules"},
    "lab": {"text", "public_names", "rules", "record"},
    "overflow": {"text", "public_names", "rules", "gradients", "record"},
    "monitor": {"", "text", "public_names", "rules", "record", "gradients", "overflow"},
    "plots": {"text", "rules", "record", "gradients", "overflow", "lab"},
    "mindformers": {"text", "rules", "record", "cells", "wrapper", "gradients", "monitor", "overflow"},
    "cli": {"", "text", "rules", "record", "gradients", "lab", "monitor", "mindformers", "plots"},
    "__main__": {"cli"},
    "register_path": {""},
    "": {"public_names"},
}


def module_name(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def room_of(module):
    return module.partition(".")[0]


def imports_of(nodes):
    """Yield the names of all modules that nodes of a syntax tree import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_modules(names):
    """From imported names, yield this package's modules, without the package's name ("" for the package itself)."""
    for name in names:
        first, _, inner = name.partition(".")
        if first == "mindformers_adaptive":
            yield inner if inner in MODULES else inner.rpartition(".")[0]


def own_imports(source):
    """Return the modules of this package that a source imports, at the top level or within a function."""
    return set(own_modules(imports_of(ast.walk(ast.parse(source)))))


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_module_imports_only_from_rooms_below(module):
    room, imports = room_of(module), own_imports(MODULES[module].read_text(encoding="utf-8"))
    assert {*map(room_of, imports)} - MAY_IMPORT[room] - {room} == set()


def test_every_name_of_the_table_is_where_it_says():
    for group in PUBLIC.values():
        for name, module in group.items():
            room, _, short = f"mindformers_adaptive.{name}".rpartition(".")
            package, defining = importlib.import_module(room), importlib.import_module(f"mindformers_adaptive.{module}")
            assert getattr(package, short) is getattr(defining, short), name
            assert short in dir(package), name


def test_rooms_stand_above_each_other():
    # static_order raises CycleError if MAY_IMPORT lets two parts of the package import each other, directly or through
    # other parts.
    assert set(graphlib.TopologicalSorter(MAY_IMPORT).static_order()) == {*map(room_of, MODULES)}


def test_modules_within_a_room_import_each_other_one_way():
    graph = {
        module: own_imports(file.read_text(encoding="utf-8")) - {module} for module, file in MODULES.items() if module
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_scripts_import_each_other_one_way():
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in (ROOT / "scripts").rglob("*.py")}
    graph = {}
    for module, file in files.items():
        names = set(imports_of(ast.walk(ast.parse(file.read_text(encoding="utf-8")))))
        graph[module] = ({*names, *(name.rpartition(".")[0] for name in names)} & files.keys()) - {module}
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()


def nodes_at_import(tree):
    """Yield the nodes of a syntax tree that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        for_editors = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not for_editors and not isinstance(node, ast.FunctionDef):
            yield node
            yield from nodes_at_import(node)


def free_modules():
    """Return the modules that can be imported without MindSpore and MindFormers, according to their sources."""
    imports = {
        module: set(imports_of(nodes_at_import(ast.parse(file.read_text(encoding="utf-8")))))
        for module, file in MODULES.items()
    }
    graph = {module: {*own_modules(names)} - {module} for module, names in imports.items()}
    # The module adaptive_loss_scaling calls register() when it is imported, and register() loads MindSpore. The imports
    # in the module's source do not show this.
    heavy = {"register_path.adaptive_loss_scaling"}
    for module in graphlib.TopologicalSorter(graph).static_order():
        outside = {name.partition(".")[0] for name in imports[module]}
        if outside & {"mindspore", "mindformers"} or graph[module] & heavy:
            heavy.add(module)
    return MODULES.keys() - heavy


def test_mypy_checks_every_module_strictly():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 does not have it")
    with (ROOT / "pyproject.toml").open("rb") as settings:
        mypy = tomllib.load(settings)["tool"]["mypy"]
    assert {**mypy, "overrides": []} == {"files": ["mindformers_adaptive"], "strict": True, "overrides": []}
    # For this package, an override may only allow base classes and decorators without types.
    for_package = [override for override in mypy["overrides"] if "mindformers_adaptive" in str(override["module"])]
    allowed = {"module", "disallow_subclassing_any", "disallow_untyped_decorators"}
    assert set().union(*for_package) <= allowed


# A program that imports modules one after the other, and prints the first module that loads MindSpore, MindFormers or
# another heavy package.
REPORT = """
import importlib, sys
heavy = {"mindspore", "mindformers", "matplotlib", "tensorboardX"}
for module in sys.argv[1:]:
    importlib.import_module(module)
    if heavy & sys.modules.keys():
        print(module, *sorted(heavy & sys.modules.keys()))
        break
"""


def test_plain_python_stays_free_of_mindspore(run_python):
    """A single Python process imports all plain-Python modules, and prints the first module that loads MindSpore."""
    modules = [f"mindformers_adaptive.{module}".rstrip(".") for module in sorted(free_modules())]
    assert len(modules) > 60
    assert run_python("-c", REPORT, *modules).stdout == ""


def test_a_name_that_is_not_public_cannot_be_had():
    with pytest.raises(AttributeError, match="no attribute 'AdaptivLossScale'"):
        mindformers_adaptive.AdaptivLossScale  # noqa: B018


def test_former_names_are_the_present_ones():
    for former, name in (("enable_loss_scale_on_cpu", "enable_loss_scale_in_model"), ("make_policy", "start_rule")):
        assert getattr(mindformers_adaptive, former) is getattr(mindformers_adaptive, name)


def test_tests_mirror_the_package():
    rooms = {PurePath(*room.split(".")) for room in map(room_of, MODULES) if room not in ("", "__main__")}
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    without_room = {PurePath("."), *map(PurePath, ("scripts", "docs", "contract"))}
    assert folders - without_room <= rooms, sorted(map(str, folders - without_room - rooms))


def test_only_tests_of_scripts_import_scripts():
    tests = (ROOT / "tests").rglob("*.py")
    importing = {file for file in tests if re.search(r"^ *(from|import) scripts\b", file.read_text(), re.MULTILINE)}
    # The stand-ins for operators that a CPU lacks are shared with the study of what underflows below the ceiling.
    shared = {"tests/mindformers/mcore_on_cpu.py"}
    assert {str(file.relative_to(ROOT)) for file in importing if file.parent.name != "scripts"} == shared
