"""Dependencies point one way, and what is plain Python stays free of MindSpore."""

import ast

import pytest
from conftest import ROOT

PACKAGE = ROOT / "mindformers_adaptive"

# What each module may import from this package. A module that is not here has to be given its place.
MAY_IMPORT = {
    "ladder": set(),
    "validation": set(),
    "whole_file": set(),
    "power_of_two": set(),
    "rule": {"ladder", "validation"},
    "megatron": {"validation"},
    "transition_tables": {"rule"},
    "restored_state": {"ladder", "rule"},
    "scale_history": {"validation"},
    "update_cell": {"ladder", "rule", "restored_state", "scale_history", "transition_tables"},
    "exported_graph": set(),
    "overflow": set(),
    "carried_state": {"restored_state", "update_cell"},
    "scale_sense": set(),
    "wrapper": {"update_cell", "overflow", "carried_state", "scale_sense"},
    "amp": set(),
    "amp.scaling": set(),
    "amp.manager": {"ladder", "rule", "update_cell"},
    "amp.scaler": {"amp.scaling", "ladder", "restored_state", "rule", "update_cell"},
    "amp.fixed_scale": {"amp.scaling", "validation"},
    "amp.train_network": {"scale_sense", "wrapper"},
    "checkpoint": set(),
    "checkpoint.sidecar": {"whole_file"},
    "checkpoint.reader": {"checkpoint.sidecar", "restored_state"},
    "inspect_checkpoint": {"checkpoint.reader"},
    "checkpoint.monitor": {"checkpoint.sidecar", "update_cell"},
    "records": {"whole_file"},
    "callbacks": set(),
    "callbacks.arguments": {"validation"},
    "callbacks.collapse": set(),
    "callbacks.tensorboard": set(),
    "callbacks.step_reader": {"restored_state"},
    "callbacks.loss_scale_monitor": {
        "callbacks.arguments",
        "callbacks.collapse",
        "callbacks.step_reader",
        "callbacks.tensorboard",
        "records",
    },
    "gradients": set(),
    "gradients.statistics": set(),
    "gradients.report": {"power_of_two", "gradients.statistics", "whole_file"},
    "gradients.recommendation": {"power_of_two", "gradients.report", "validation"},
    "gradients.ranges": {"gradients.report", "gradients.statistics", "validation"},
    "gradients.finder": {"gradients.ranges", "gradients.recommendation"},
    "gradients.probe": {"checkpoint.reader", "gradients.ranges", "launcher", "validation"},
    "callbacks.gradient_range_monitor": {
        "callbacks.arguments",
        "callbacks.step_reader",
        "callbacks.tensorboard",
        "gradients.ranges",
    },
    "registration": {
        "wrapper",
        "callbacks.gradient_range_monitor",
        "callbacks.loss_scale_monitor",
        "checkpoint.monitor",
    },
    "resume_workarounds": set(),
    "trainer": {"registration", "resume_workarounds"},
    "launch_options": set(),
    "launcher": {"launch_options", "registration", "resume_workarounds"},
    "lab": set(),
    "lab.trace": set(),
    "lab.policies": {"lab.policies.factory", "lab.policies.policy"},
    "lab.policies.factory": {
        "lab.policies.arguments",
        "lab.policies.dynamic_rule",
        "lab.policies.policy",
        "lab.policies.presets",
        "rule",
    },
    "lab.policies.presets": {"lab.policies.arguments", "lab.policies.dynamic_rule"},
    "lab.policies.dynamic_rule": {"validation"},
    "lab.policies.arguments": {"validation"},
    "lab.policies.policy": set(),
    "lab.text_table": set(),
    "lab.measures": {"lab.trace"},
    "lab.configuration": {"ladder", "rule"},
    "lab.simulate": {"lab.measures", "lab.text_table", "lab.trace"},
    "lab.sweep_tables": {"lab.measures", "lab.trace", "rule"},
    "lab.sweep": {"lab.configuration", "lab.measures", "lab.sweep_tables", "lab.trace", "rule"},
    "lab.tune": {"lab.configuration", "lab.measures", "lab.simulate", "lab.sweep", "lab.text_table", "lab.trace"},
    "lab.recorded_run": {"lab.trace"},
    "lab.scale_path": {"lab.recorded_run", "power_of_two"},
    "lab.evidence": {"ladder", "lab.recorded_run", "lab.scale_path", "lab.trace"},
    "lab.advice": {"power_of_two", "lab.evidence", "lab.measures", "lab.recorded_run", "lab.scale_path", "rule"},
    "lab.analysis_text": {"power_of_two", "lab.scale_path", "lab.text_table"},
    "lab.analysis": {
        "ladder",
        "power_of_two",
        "lab.advice",
        "lab.analysis_text",
        "lab.configuration",
        "lab.evidence",
        "lab.measures",
        "lab.policies",
        "lab.recorded_run",
        "lab.scale_path",
        "lab.simulate",
        "lab.trace",
        "lab.tune",
    },
    "lab.synthetic": {"lab.trace"},
    "lab.measured": {"lab.trace"},
    "lab.logs.lines": set(),
    "lab.logs.marks": set(),
    "lab.logs.deepspeed": {"lab.logs.lines", "lab.logs.marks"},
    "lab.logs.megatron": {"lab.logs.deepspeed", "lab.logs.lines", "lab.logs.marks"},
    "lab.logs.mindformers": {"lab.logs.lines", "lab.logs.marks"},
    "lab.logs.record": {"lab.logs.lines", "lab.logs.marks"},
    "lab.logs.expansion": {"lab.logs.marks"},
    "lab.logs": {
        "lab.logs.deepspeed",
        "lab.logs.expansion",
        "lab.logs.lines",
        "lab.logs.marks",
        "lab.logs.megatron",
        "lab.logs.mindformers",
        "lab.logs.record",
        "lab.recorded_run",
    },
    "plots": set(),
    "plots.canvas": {"whole_file"},
    "plots.thinning": set(),
    "plots.parameter_groups": set(),
    "plots.labels": {"plots.canvas"},
    "plots.run_series": {"lab.recorded_run", "plots.canvas"},
    "plots.sweep_series": {"power_of_two", "gradients.statistics", "plots.parameter_groups"},
    "plots.record": {"lab.recorded_run", "plots.canvas", "plots.run_series", "plots.thinning"},
    "plots.gradients": {"gradients.statistics", "plots.canvas", "plots.parameter_groups", "plots.sweep_series"},
    "plots.lab": {"lab.measures", "lab.simulate", "lab.trace", "plots.canvas", "plots.labels", "plots.thinning"},
    "plots.pareto": {"lab.simulate", "plots.canvas", "plots.labels"},
    "cli": set(),
    "cli.output": set(),
    "cli.program": {"cli.output"},
    "cli.train": {"launcher"},
    "cli.inspect": {"inspect_checkpoint"},
    "cli.megatron": {"megatron"},
    "cli.probe": {
        "cli.output",
        "gradients.probe",
        "gradients.ranges",
        "launch_options",
        "plots.canvas",
        "plots.gradients",
    },
    "cli.find": {"cli.output", "cli.probe", "gradients.recommendation"},
    "cli.plot": {"cli.output", "lab.logs", "plots.canvas", "plots.gradients", "plots.record", "records"},
    "cli.lab_arguments": {
        "cli.output",
        "lab.logs",
        "lab.measured",
        "lab.policies",
        "lab.recorded_run",
        "lab.synthetic",
        "lab.trace",
    },
    "cli.analyze": {"cli.output", "lab.analysis", "lab.logs", "plots.canvas", "plots.record"},
    "cli.simulate": {"cli.lab_arguments", "cli.output", "lab.policies", "lab.simulate", "plots.canvas", "plots.lab"},
    "cli.compare": {
        "cli.lab_arguments",
        "cli.output",
        "lab.simulate",
        "plots.canvas",
        "plots.lab",
        "plots.pareto",
    },
    "cli.tune": {
        "cli.lab_arguments",
        "cli.output",
        "lab.configuration",
        "lab.measures",
        "lab.recorded_run",
        "lab.tune",
    },
    "__main__": {"cli.program"},
    "register_path.__main__": set(),
    "register_path.adaptive_loss_scaling": {""},
    "register_path": set(),
    "": set(),
}
FREE_OF_MINDSPORE = [
    "plots.gradients",
    "plots.lab",
    "plots.pareto",
    "plots.record",
    "cli.program",
    "cli.plot",
    "cli.analyze",
    "cli.compare",
    "cli.simulate",
    "cli.tune",
    "cli.find",
    "ladder",
    "validation",
    "whole_file",
    "power_of_two",
    "megatron",
    "records",
    "gradients.recommendation",
    "callbacks",
    "callbacks.arguments",
    "callbacks.collapse",
    "lab.trace",
    "lab.policies",
    "lab.logs",
    "lab.recorded_run",
    "lab.synthetic",
    "lab.measured",
    "lab.simulate",
    "lab.sweep",
    "lab.tune",
    "rule",
    "restored_state",
    "transition_tables",
    "checkpoint.sidecar",
    "checkpoint.reader",
    "inspect_checkpoint",
    "resume_workarounds",
    "launch_options",
    "launcher",
    "register_path",
    "register_path.__main__",
    "",
]


def module_name(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(source):
    """The names of all modules that a source imports, at its top or within a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(source):
    """The modules of this package that a source imports; "" is the package itself."""
    modules = {module_name(file) for file in PACKAGE.rglob("*.py")}
    for name in imports_of(source):
        first, _, rest = name.partition(".")
        if first == "mindformers_adaptive":
            yield rest if rest in modules else rest.rpartition(".")[0]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_module_imports_only_from_below(file):
    assert set(own_imports(file.read_text(encoding="utf-8"))) <= MAY_IMPORT[module_name(file)]


def test_an_import_from_above_would_be_seen():
    assert set(own_imports("from mindformers_adaptive import wrapper")) == {"wrapper"}
    assert set(own_imports("def f():\n    from mindformers_adaptive.rule import AdaptiveRule")) == {"rule"}
    assert set(own_imports("from mindformers_adaptive import register")) == {""}


REPORT = "import sys, {}; print(sorted({{'mindspore', 'mindformers'}} & sys.modules.keys()))"


@pytest.mark.parametrize("module", FREE_OF_MINDSPORE)
def test_import_stays_free_of_mindspore(run_python, module):
    printed = run_python("-c", REPORT.format(f"mindformers_adaptive.{module}".rstrip("."))).stdout
    assert printed == "[]\n"


def test_an_import_of_mindspore_would_be_seen(run_python):
    printed = run_python("-c", REPORT.format("mindformers_adaptive.update_cell")).stdout
    assert printed.splitlines()[-1] == "['mindspore']"


def test_package_loads_a_name_that_needs_mindspore_on_first_use(run_python):
    code = "import sys, mindformers_adaptive as m; before = 'mindspore' in sys.modules; m.AdaptiveLossScaleUpdateCell; "
    printed = run_python("-c", code + "print(before, 'mindspore' in sys.modules)").stdout
    assert printed.splitlines()[-1] == "False True"


def test_every_public_name_can_be_had_and_others_cannot():
    import mindformers_adaptive

    for name in mindformers_adaptive.__all__:
        assert getattr(mindformers_adaptive, name).__doc__, name
        assert name in dir(mindformers_adaptive)
    with pytest.raises(AttributeError, match="no attribute 'AdaptivLossScale'"):
        mindformers_adaptive.AdaptivLossScale  # noqa: B018
