"""What is compiled, without MindSpore: the functions that the cases name are in steps.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ALONE", "CASES", "CONTROLS", "WAYS", "Case", "World"]


@dataclass(frozen=True)
class World:
    """The process that compiles, and those that it believes to train with.

    Attributes:
        ranks (int): how many they are. Default: 1.
        rank (int): the one that compiles. Default: 0.
        mode (str): MindSpore's parallel mode. Default: "stand_alone".
        stages (int): pipeline stages. Default: 1.
        shards_optimizer (bool): whether optimizer state is divided among data-parallel processes. Default: False.
    """

    ranks: int = 1
    rank: int = 0
    mode: str = "stand_alone"
    stages: int = 1
    shards_optimizer: bool = False


ALONE = World()
# The names that MindSpore has for the devices.
CHIPS = {"910A": "ascend910", "910B": "ascend910b"}


@dataclass(frozen=True)
class Case:
    """One compilation.

    Attributes:
        name (str): ``setting/way`` for a train step that is compiled in several ways of scaling.
        function (str): the name of the function in steps.py that compiles it.
        arguments (Mapping): its arguments.
        chip (str): a key of ``CHIPS``. Default: "910B".
        world (World): Default: ``ALONE``.
        is_large (bool): whether it is left out without ``--all``. Default: False.
        needs_process (bool): whether it must be the first in its process. Default: False.
    """

    name: str
    function: str
    arguments: Mapping = field(default_factory=dict)
    chip: str = "910B"
    world: World = ALONE
    is_large: bool = False
    needs_process: bool = False

    @property
    def setting(self):
        return self.name.rpartition("/")[0]

    @property
    def way(self):
        return self.name.rpartition("/")[2]


# The ways of scaling: with MindSpore's or MindFormers' own train-step cell and MindSpore's dynamic update cell, and with
# those of this package.
STOCK, ADAPTIVE, GUIDED, EACH = "stock", "adaptive", "guided", "guided_each"
WAYS = (STOCK, ADAPTIVE, GUIDED, EACH)

# What a dry run has to say of operators that are known not to be an Ascend's: part of the error, or the operator that
# moves to the CPU.
CONTROLS = {
    "control/Add": None,
    "control/FloatStatus": "FloatStatus",
    "control/AvgPool_int32": "AvgPool",
    "control/Fmax": "Fmax",
}

_CELLS = {
    "dynamic": {"way": "dynamic"},
    "mindformers": {"way": "mindformers"},
    "adaptive": {"way": ADAPTIVE},
    "adaptive_hysteresis": {"way": ADAPTIVE, "hysteresis": 2},
    "adaptive_history": {"way": ADAPTIVE, "history_size": 8},
    "adaptive_bounds": {
        "way": ADAPTIVE,
        "min_loss_scale": 2.0**-4,
        "max_loss_scale": 2.0**24,
        "shrink_from_min_window": True,
    },
    "guided": {"way": GUIDED},
    "guided_history": {"way": GUIDED, "history_size": 8},
    "guided_bounds": {"way": GUIDED, "exchange_rate": 5.0, "min_loss_scale": 2.0**-4, "max_loss_scale": 2.0**24},
    "log_max": {"way": "log_max"},
}


def _in_each_way(setting, function, ways=WAYS, **options):
    arguments = options.pop("arguments", {})
    return [Case(f"{setting}/{way}", function, {"way": way, **arguments}, **options) for way in ways]


def _small_cases():
    yield from (Case(name, "control", {"operator": name.rpartition("/")[2]}) for name in CONTROLS)
    yield from (Case(f"cell/{name}", "update_cell_alone", arguments) for name, arguments in _CELLS.items())
    for chip in CHIPS:
        yield from _in_each_way(f"step/{chip}", "plain_step", chip=chip)
    yield from _in_each_way("mf_step/910B", "mf_step", (STOCK, ADAPTIVE, EACH))
    data = World(2, mode="data_parallel")
    yield from _in_each_way("data_parallel_2", "plain_step", world=data)
    split = World(2, mode="semi_auto_parallel")
    yield from _in_each_way("semi_auto_2", "plain_step", world=split, arguments={"network": "Split"})
    for rank in range(2):
        world = World(2, rank, "semi_auto_parallel", stages=2)
        yield from _in_each_way(f"pipeline_2/rank_{rank}", "pipeline_step", world=world)


CASES = {case.name: case for case in _small_cases()}
