"""MindFormers' own ``run_mindformer.py`` loads this package through ``--register_path`` and ``auto_register``."""

import json
import os
import re
from pathlib import Path

import mindspore
import pytest
import yaml

from tests.conftest import CONFIG

pytestmark = pytest.mark.slow

GUIDED = "GradientGuidedLossScaleUpdateCell"


@pytest.fixture
def register_path(run_python):
    """Return the folder that ``python -m mindformers_adaptive.register_path`` prints for a user."""
    return run_python("-m", "mindformers_adaptive.register_path").stdout.removesuffix("\n")


def test_the_command_does_without_mindspore(run_python):
    imported = run_python("-X", "importtime", "-m", "mindformers_adaptive.register_path").stderr
    # Python's list of imported modules must contain this package. With an empty list, the next check would always pass.
    assert re.search(r"\| +mindformers_adaptive$", imported, re.MULTILINE)
    assert not re.search(r"\| +(mindspore|mindformers|numpy)\b", imported)


BUILD_AND_TRAIN = """
import json
import sys

import mindformers
import numpy as np
from mindformers.tools.register import MindFormerRegister
from mindformers.wrapper import build_wrapper
from mindspore import Tensor, nn

# This process is forked from one that has imported the package. Forget it, so that MindFormers has to load it.
for module in [name for name in sys.modules if name.partition(".")[0] == "mindformers_adaptive"]:
    del sys.modules[module]
assert not MindFormerRegister.is_exist("wrapper", "AdaptiveLossScale")
network = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
name, arguments = sys.argv[1], json.loads(sys.argv[2])
scale_sense = {"type": name, "auto_register": "adaptive_loss_scaling.LossScaling", **arguments}
cell = build_wrapper(
    {"type": "MFTrainOneStepCell", "scale_sense": scale_sense, "use_clip_grad": True},
    default_args={
        "network": nn.WithLossCell(network, nn.MSELoss()),
        "optimizer": nn.SGD(network.trainable_params(), learning_rate=0.1),
        "parallel_config": None,
    },
)

# Import the package only after MindFormers has loaded it through auto_register.
import mindformers_adaptive
from mindformers_adaptive import wrapper

assert type(cell.loss_scaling_manager) is getattr(mindformers_adaptive, name)
assert type(cell) is wrapper.MFTrainOneStepCell
assert MindFormerRegister.get_cls("wrapper", name) is getattr(mindformers_adaptive, name)

cell.set_train()
for factor in (np.inf, 1.0):
    cell(Tensor(np.full((2, 2), factor, np.float32)), Tensor(np.zeros((2, 1), np.float32)))
state = cell.loss_scaling_manager.state()
print(state["skipped_steps"], state.get("largest_gradient"))
"""


@pytest.mark.parametrize(
    ("cell", "arguments", "printed"),
    [
        ("AdaptiveLossScaleUpdateCell", {"scale_factor": 2, "scale_window": 20, "hysteresis": 2}, "1 None"),
        # Each output is 1 + 1 = 2, and the loss is the mean of the squared outputs. So the gradient before clipping is
        # 2 * output * input = 2 * 2 * 1.
        (GUIDED, {}, "1 4.0"),
    ],
)
def test_auto_register_gives_the_installed_class_and_train_step(
    run_forked, tmp_path, register_path, cell, arguments, printed
):
    (tmp_path / "train.py").write_text(BUILD_AND_TRAIN)
    arguments = json.dumps({"loss_scale_value": 2**20, **arguments})
    finished = run_forked(tmp_path / "train.py", cell, arguments, REGISTER_PATH=register_path)
    assert finished.stdout.splitlines()[-1] == printed


@pytest.mark.skipif(
    "MINDFORMERS_HOME" not in os.environ,
    reason="MINDFORMERS_HOME is not set, and MindFormers' wheel has no run_mindformer.py. Set the variable to a source "
    "tree of the installed version of MindFormers",
)
@pytest.mark.parametrize("cell", ["AdaptiveLossScaleUpdateCell", GUIDED])
def test_the_unmodified_script_of_mindformers_trains_on_cpu(run_python, register_path, corpus, tmp_path, cell):
    config = yaml.safe_load(CONFIG.read_text())
    if cell == GUIDED:
        config["runner_wrapper"]["scale_sense"] = {"type": GUIDED, "loss_scale_value": 2**32}
    config["runner_wrapper"]["scale_sense"]["auto_register"] = f"adaptive_loss_scaling.{cell}"
    config["model"]["model_config"].update(seq_length=32, hidden_size=32)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    script = Path(os.environ["MINDFORMERS_HOME"], "run_mindformer.py")
    options = {"config": tmp_path / "run.yaml", "register_path": register_path, "train_dataset_dir": corpus}
    run = run_python(script, *(f"--{name}={value}" for name, value in options.items()), "--num_samples=64")

    steps = re.findall(r"step:\[ *(\d+)/ *8\].*overflow cond: (\w+), loss_scale: (\S+),", run.stdout + run.stderr)
    # From a loss scale of 2^32, this model overflows for more than eight steps if each overflow halves the scale. The
    # guided rule drops ten bits at once.
    exponents = [22, 12] if cell == GUIDED else range(31, 23, -1)
    assert [int(number) for number, *_ in steps] == list(range(1, 9))
    assert [(overflow, float(scale)) for _, overflow, scale in steps[: len(exponents)]] == [
        ("True", pytest.approx(2.0**exponent, rel=1e-6)) for exponent in exponents
    ]
    # Only this package's cells count the skipped steps.
    [checkpoint] = tmp_path.glob("output/checkpoint/rank_0/*.ckpt")
    skipped = sum(overflow == "True" for _, overflow, _ in steps)
    assert mindspore.load_checkpoint(str(checkpoint))["skipped_steps"].asnumpy() == skipped
    assert skipped == len(exponents)
