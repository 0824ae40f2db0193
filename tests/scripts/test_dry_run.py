"""MindSpore's dry run compiles cells and train steps for Ascend, with stand-ins for the libraries of CANN."""

import ctypes
import subprocess
import sys

import mindspore
import pytest

from scripts.ascend import program, stand_ins
from scripts.ascend.cases import CASES, CONTROLS
from scripts.ascend.program import HCCL, NOTHING, compile_cases, kernels_of, problem, verdict
from tests.conftest import ROOT
from tests.shared.pages import figure

# Run these tests in one pytest worker, because they share the compiled cases.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(stand_ins.missing()), reason=stand_ins.missing() or "nothing is missing"),
    pytest.mark.xdist_group("ascend dry run"),
]

# Small cases that the program compile_for_ascend compiles, but these tests do not. Their operators are part of another
# case, whose name is the value. The update cells of MindSpore and MindFormers (None) have no code of this package.
PART_OF = {
    "cell/dynamic": None,
    "cell/mindformers": None,
    "cell/adaptive": "cell/adaptive_hysteresis",
    "cell/adaptive_bounds": "cell/adaptive_hysteresis",
    "cell/guided": "cell/guided_history",
    "cell/guided_bounds": "cell/guided_history",
    "step/910B/guided": "mf_step/guided",
    "per_token/guided": "mf_step/guided",
    "fixed_scale/adaptive": "mf_step/guided",
}
SMALL = [case for case in CASES.values() if not case.is_large and case.name not in PART_OF]
COMPILED = [case.name for case in SMALL if case.name not in CONTROLS]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder in which these tests keep the stand-ins for CANN."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def results(cache):
    return {result["case"]: result for result in compile_cases(SMALL, cache)}


# Control cases, some of which must fail to compile: if nothing could fail, a compiled case would prove nothing.


def test_an_operator_that_an_ascend_has_compiles(results):
    assert verdict(results["control/Add"]) == "compiled"
    assert results["control/Add"]["kernels"] == {"opapi_kernel": {"Add": 1}}


@pytest.mark.parametrize("control", ["control/FloatStatus", "control/AvgPool_int32"])
def test_operator_or_dtype_that_ascend_lacks_is_refused(results, control):
    assert verdict(results[control]) == "refused"
    assert f"/{CONTROLS[control]}-op" in problem(results[control])
    assert "Ascend operator selection failed" in problem(results[control])


def test_an_operator_that_moves_to_the_cpu_is_seen(results):
    assert (results["control/Fmax"]["error"], problem(results["control/Fmax"])) == ("", "on the CPU: Fmax")


# Tests of cells and train steps


@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_and_nothing_moves_to_the_cpu(results, name):
    assert problem(results[name]) == ""


@pytest.mark.parametrize("name", COMPILED)
def test_its_kernels_are_those_of_the_pages(results, name):
    data = figure("ascend_dry_run")
    if data["mindspore"] != mindspore.__version__:
        pytest.skip(f"the expected kernels are known only for MindSpore {data['mindspore']}; install it")
    [known] = [case for case in data["cases"] if case["case"] == name]
    for key in ("kernels", "collectives"):
        assert results[name][key] == known[key]


def count(result, operator):
    return sum(kernels.get(operator, 0) for kernels in result["kernels"].values())


def test_what_is_not_compiled_by_itself_is_part_of_what_is():
    assert {*PART_OF} < {*CASES}
    assert {*PART_OF.values()} - {None} <= {*COMPILED}
    known = {case["case"]: case for case in figure("ascend_dry_run")["cases"]}
    for part, whole in PART_OF.items():
        assert whole is None or all(count(known[whole], name) > 0 for name in operators_of(known[part]))


def operators_of(result):
    return {name for kernels in result["kernels"].values() for name in kernels}


@pytest.mark.parametrize("name", ["step/910A/guided", "mf_step/guided"])
def test_largest_gradient_of_all_four_weights_is_measured(results, name):
    assert count(results[name], "ReduceMax") >= 4
    assert count(results[name], "AllFinite" if "910A" not in name else "NPUGetFloatStatusV2") == 1


@pytest.mark.parametrize("name", ["semi_auto_2/guided", "pipeline_2/rank_1/guided"])
def test_largest_gradients_cover_all_slices_and_stages(results, name):
    collectives = results[name]["collectives"]
    largest = {text: number for text, number in collectives.items() if " max " in text}
    assert largest == {"AllReduce max of 4 bytes by all": 1}
    assert sum(results[name]["kernels"][HCCL].values()) == sum(collectives.values())


def test_every_case_is_on_the_pages_and_has_no_problem():
    data = figure("ascend_dry_run")
    assert [result["case"] for result in data["cases"]] == list(CASES)
    assert [result for result in data["cases"] if result["case"] not in CONTROLS and problem(result)] == []


# Tests of the stand-ins for CANN


def test_stand_in_without_an_answer_ends_the_process(cache):
    library = stand_ins.folder_of_stand_ins(cache) / "latest" / "lib64" / "libascendcl.so"
    call = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).aclrtMalloc()"
    finished = subprocess.run([sys.executable, "-c", call, library], capture_output=True, text=True)
    assert finished.returncode != 0
    said = program.why_ended(finished.returncode, finished.stderr)
    assert said == "the stand-ins need an update for this MindSpore: aclrtMalloc was called"
    # The dry run replaces CANN by stand-ins, and most of their functions end the process. This function returns 0
    # instead.
    assert ctypes.CDLL(library).aclnnAddGetWorkspaceSize() == 0


def test_what_is_missing_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stand_ins.missing() == "there is no gcc: install the package gcc and libc6-dev"


def test_stand_ins_are_made_once(cache):
    first = stand_ins.folder_of_stand_ins(cache)
    assert mindspore.__version__ in first.name
    (first / "mark").touch()
    assert (stand_ins.folder_of_stand_ins(cache) / "mark").exists()
    assert list(cache.iterdir()) == [first]


# Tests of the program compile_for_ascend


def run(*arguments):
    command = [sys.executable, "-m", "scripts.ascend.compile_for_ascend", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_program_lists_cases_and_refuses_others():
    assert run("--list").stdout.splitlines() == list(CASES)
    refused = run("step/910C/*")
    assert (refused.returncode, "no case is called step/910C/*" in refused.stderr) == (2, True)


def test_a_process_that_ends_early_costs_one_case_only(monkeypatch, cache):
    monkeypatch.setattr(program, "SECONDS", 0.1)
    cases = [CASES["control/Add"], CASES["cell/dynamic"]]
    errors = {result["case"]: result["error"] for result in compile_cases(cases, cache)}
    assert errors == {case.name: "the process took longer than 0.1 seconds for each case" for case in cases}
    assert problem({"case": "control/Add", "error": "", **NOTHING}) == "no kernel was selected"
    assert kernels_of({"kernels": {HCCL: {"AllReduce": 1}, "acl_kernel": {"Assign": 2}}}) == 2
