"""The Parameters whose values MindFormers prints in training, such as the losses of a model and learning rates."""

from tests.shared.versions import BEFORE_1_7


def forget_printed(names):
    """Remove Parameters from MindFormers' register, which accepts each name once, so that a new cell can add them."""
    if not BEFORE_1_7:
        from mindformers.utils.parameter_register import parameter_register

        for name in names:
            parameter_register._params.pop(name, None)
