"""Show the state of loss scaling that a checkpoint holds."""

from mindformers_adaptive.checkpoint import report

__all__ = ["forward"]


def forward(arguments):
    """Run ``mindformers_adaptive.checkpoint.report``, and return its exit code."""
    return report.main(arguments)
