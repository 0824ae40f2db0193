"""Train, fine-tune, evaluate or predict from a YAML file of MindFormers."""

from mindformers_adaptive.integration import launcher

__all__ = ["forward"]


def forward(arguments):
    """Run the launcher, whose options these are."""
    launcher.main(arguments, program="adaptive-loss-scale train")
