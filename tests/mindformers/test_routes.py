"""Every way to train with the README's YAML uses this package's cell; without the package, the training fails."""

import re

import pytest
import yaml

from tests.conftest import CONFIG, ROOT
from tests.shared.pages import blocks

START = """
import sys

from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper import build_wrapper
from mindspore import nn

route, file = sys.argv[1:]
if route == "launcher":
    from mindformers_adaptive.mindformers.launcher import load_config
    config = load_config(file)
elif route == "Trainer":
    from mindformers_adaptive import Trainer
    config = Trainer(MindFormerConfig(file)).config
else:
    if route == "register":
        from mindformers_adaptive import register
        register()
    config = MindFormerConfig(file)

network = nn.Dense(2, 1)
optimizer = nn.SGD(network.trainable_params(), learning_rate=0.1)
arguments = {"network": nn.WithLossCell(network, nn.MSELoss()), "optimizer": optimizer, "parallel_config": None}
build_wrapper(config.runner_wrapper, default_args=arguments).set_train()
"""
FOLDER = str(ROOT / "mindformers_adaptive" / "register_path")
OURS = ["Loss scaling by AdaptiveLossScaleUpdateCell of mindformers_adaptive: loss_scale 65536.0, scale_window 20"]


@pytest.fixture
def start(run_forked, tmp_path):
    """Return a function that loads the README's YAML by a route, such as "Trainer", and returns the ended process."""
    [diff] = [text for language, text in blocks(ROOT / "README.md") if language == "diff" and "runner_wrapper" in text]
    section = yaml.safe_load("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != "-"))

    def start(route, *left_out, expect_exit=0, **environment):
        for key in left_out:
            del section["runner_wrapper"]["scale_sense"][key]
        # base.yaml has no loss scaling. So a key that a test removes from the README's YAML is really missing.
        base = yaml.safe_load(CONFIG.read_text())
        del base["runner_wrapper"]
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"base_config": "base.yaml", **section}))
        (tmp_path / "start.py").write_text(START)
        return run_forked(tmp_path / "start.py", route, "run.yaml", expect_exit=expect_exit, **environment)

    return start


@pytest.mark.parametrize(
    ("route", "environment"),
    [
        ("launcher", {}),
        ("Trainer", {}),
        ("register", {}),
        ("run_mindformer.py", {"REGISTER_PATH": FOLDER}),
        # Here REGISTER_PATH is a folder of the user's own classes.
        ("launcher", {"REGISTER_PATH": "."}),
    ],
)
def test_the_log_says_that_this_packages_cell_runs(start, route, environment):
    assert re.findall("Loss scaling by .*", start(route, **environment).stdout) == OURS


@pytest.mark.parametrize(
    ("left_out", "environment", "message"),
    [
        ([], {}, "REGISTER_PATH must be specified"),
        (["auto_register"], {}, "class name AdaptiveLossScale in class registry"),
        (["auto_register"], {"REGISTER_PATH": FOLDER}, "class name AdaptiveLossScale in class registry"),
    ],
)
def test_where_the_package_is_not_registered_nothing_trains(start, left_out, environment, message):
    assert message in start("run_mindformer.py", *left_out, expect_exit=1, **environment).stderr
