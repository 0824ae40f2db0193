"""Show the state of loss scaling that a checkpoint holds."""

from mindformers_adaptive import inspect_checkpoint

__all__ = ["forward"]


def forward(arguments):
    """Run ``mindformers_adaptive.inspect_checkpoint``, and return its exit code."""
    return inspect_checkpoint.main(arguments)
