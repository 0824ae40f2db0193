"""An update in PyNative mode is one compiled graph, also where a user's subclass adds to it."""

import mindspore
import pytest
from conftest import mindspore_mode
from mindspore import Parameter, Tensor

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell


@pytest.fixture(autouse=True, params=["pynative", "asynchronous"])
def _pynative_mode(request):
    with mindspore_mode(request.param):
        yield


class NotesOperators:
    """Notes the names of the operators that Python code takes from the cell."""

    taken = ()

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if isinstance(value, mindspore.ops.Primitive):
            NotesOperators.taken += (name,)
        return value


class Adaptive(NotesOperators, AdaptiveLossScaleUpdateCell):
    pass


class Guided(NotesOperators, GradientGuidedLossScaleUpdateCell):
    pass


@pytest.mark.parametrize(
    "cell",
    [lambda: Adaptive(2**10, 2, 20, hysteresis=2, history_size=2), lambda: Guided(2**10, history_size=2)],
    ids=["adaptive", "guided"],
)
def test_operators_are_not_started_from_python_again(cell):
    cell = cell()
    loss_scale = Parameter(Tensor(cell.get_loss_scale(), mindspore.float32), name="loss_scale")
    NotesOperators.taken = ()
    cell(loss_scale, Tensor(True))
    assert "assign" in NotesOperators.taken
    NotesOperators.taken = ()
    cell(loss_scale, Tensor(True))
    assert NotesOperators.taken == ()
    state = cell.state()
    assert (state["skipped_steps"], state["consecutive_overflows"], state["cur_iter"]) == (2, 2, 3)
    assert float(loss_scale) < 2.0**10
    assert [step["step"] for step in cell.history.steps(0, 2)] == [1, 2]


class CountsCalls(AdaptiveLossScaleUpdateCell):
    """As a user would write it: with an ``__init__`` and a ``construct`` of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = Parameter(Tensor(0, mindspore.int32), name="calls", requires_grad=False)

    def construct(self, loss_scale, overflow):
        self.calls += 1
        return super().construct(loss_scale, overflow)


def test_a_subclass_that_adds_to_construct_updates_once():
    cell = CountsCalls(2**10, 2, 20)
    loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
    for overflow in (True, False, True):
        cell(loss_scale, Tensor(overflow))
    assert (int(cell.calls), cell.state()["cur_iter"], float(loss_scale)) == (3, 4, 2.0**8)
