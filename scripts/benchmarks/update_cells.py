"""The update cells that are measured, and their names in tables."""

from functools import partial

# A loss scale at which no step of the demo overflows, not even the first. The demo's loss scale settles at this value.
START = 2.0**14
# The scale window for measuring whole steps. No measurement fills this window, so the loss scale never changes.
LARGE_WINDOW = 1000

EMPTY, DYNAMIC, MINDFORMERS = "empty call", "MindSpore's dynamic", "MindFormers' adaptive"
ADAPTIVE, HYSTERESIS, HISTORY = "adaptive", "adaptive, hysteresis=2", "adaptive, history_size=100"
GUIDED, GUIDED_HISTORY = "guided", "guided, history_size=100"
# Display names of the update cells in the table of update times.
CELLS = {
    EMPTY: "empty call",
    DYNAMIC: "MindSpore's `DynamicLossScaleUpdateCell`",
    MINDFORMERS: "MindFormers' `AdaptiveLossScaleUpdateCell`",
    ADAPTIVE: "`AdaptiveLossScaleUpdateCell`",
    HYSTERESIS: "`AdaptiveLossScaleUpdateCell`, `hysteresis=2`",
    HISTORY: "`AdaptiveLossScaleUpdateCell`, `history_size=100`",
    GUIDED: "`GradientGuidedLossScaleUpdateCell`",
    GUIDED_HISTORY: "`GradientGuidedLossScaleUpdateCell`, `history_size=100`",
}


def make_update_cell(name, held=False):
    """Return an update cell. With ``held``, the cell computes everything but leaves the loss scale unchanged."""
    from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
    from mindspore import nn, ops

    from mindformers_adaptive import wrapper

    class EmptyUpdateCell(nn.Cell):
        def construct(self, loss_scale, overflow):
            # Give this baseline of the times one kernel, because MindSpore does not run a graph without kernels.
            return ops.logical_not(overflow)

        def get_loss_scale(self):
            return START

    bounds = {"min_loss_scale": START, "max_loss_scale": START} if held else {}
    window = LARGE_WINDOW if held else 20
    adaptive = partial(wrapper.AdaptiveLossScaleUpdateCell, START, 2, 20, **bounds)
    guided = partial(wrapper.GradientGuidedLossScaleUpdateCell, START, **bounds)
    cells = {
        EMPTY: EmptyUpdateCell,
        "no scaling": wrapper.NoLossScaleUpdateCell,
        "fixed": lambda: nn.FixedLossScaleUpdateCell(START),
        DYNAMIC: lambda: nn.DynamicLossScaleUpdateCell(START, 2, window),
        MINDFORMERS: lambda: MindFormersUpdateCell(START, 2, window),
        HYSTERESIS: lambda: adaptive(hysteresis=2),
        HISTORY: lambda: adaptive(history_size=100),
        GUIDED: guided,
        GUIDED_HISTORY: lambda: guided(history_size=100),
    }
    return cells.get(name, adaptive)()
