"""The update cell of every rule can run on Ascend, according to its exported graph and MindSpore's documentation."""

import mindformers
import mindspore
import pytest
from mindspore import Tensor

from mindformers_adaptive import AdaptiveLossScaleUpdateCell
from tests.cells.graph_checks import CHECKS
from tests.conftest import mindspore_mode
from tests.shared.every_rule import KINDS
from tests.shared.exported_graph import BOOKKEEPING, LossScaleHolder, export_graph, export_update_cell

pytestmark = pytest.mark.usefixtures("graph_mode")

REFERENCE_PAIR = (mindspore.__version__, mindformers.__version__) == ("2.9.0", "1.9.0")

CELLS = {name: kind.cell for name, kind in KINDS.items()} | {
    "defaults": lambda **options: AdaptiveLossScaleUpdateCell(2**16, 2, 20, **options),
    "one window": lambda **options: AdaptiveLossScaleUpdateCell(2**16, 2, 20, 20, 20, **options),
}
MOST_KERNELS = {"adaptive with hysteresis": 44, "guided": 100, "log_max": 59}


def export_with_history(cell):
    holder = LossScaleHolder(cell, cell.get_loss_scale())
    # Put the Parameters of the history of recent steps into a cell, because MindSpore's export rejects Parameters that
    # belong to no cell.
    for parameter in (cell.history.scales, cell.history.counts, cell.history.place):
        holder.insert_param_to_cell(parameter.name, parameter, check_name_contain_dot=False)
    return export_graph(holder, Tensor(True))


@pytest.fixture(scope="module", params=CELLS)
def graphs(request):
    """Return the name of an update cell, and its exported graph, for a rule also that with a history of steps."""
    with mindspore_mode("graph"):
        cell = CELLS[request.param]
        with_history = [export_with_history(cell(history_size=4))] if request.param in KINDS else []
        return request.param, export_update_cell(cell()), with_history


def test_update_can_run_on_ascend(graphs):
    for graph in (graphs[1], *graphs[2]):
        assert {check.__name__: check(graph) for check in CHECKS} == {check.__name__: set() for check in CHECKS}
        # An empty graph would pass all checks. So make sure that this graph has kernels, tensors and constants.
        assert set.union(*graph.tensor_types.values()) >= {*graph.kernels, "Constant", "loss_scale", "overflow"}
        assert graph.plain_constants


@pytest.mark.skipif(not REFERENCE_PAIR, reason="The kernel counts hold for MindSpore 2.9.0 and MindFormers 1.9.0")
def test_update_takes_few_kernels_and_a_history_nine_more(graphs):
    name, graph, with_history = graphs
    assert BOOKKEEPING.isdisjoint(graph.kernels)
    assert len(graph.kernels) <= MOST_KERNELS.get(name, 34), len(graph.kernels)
    for history in with_history:
        assert len(history.kernels) - len(graph.kernels) <= 9 + ("guided" in name)
