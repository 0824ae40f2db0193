"""The Parameters whose values MindFormers prints in training, such as several losses or learning rates."""

import contextlib

# The losses that MindFormers prints with print_separate_loss.
LOSSES = ("lm_loss", "mtp_loss", "aux_loss", "indexer_loss")
# Where MindFormers' train-step cell keeps the learning rates that the callback prints.
LEARNING_RATES = ("current_default_lr", "current_grouped_lr")


def forget_printed(names):
    """Remove Parameters from MindFormers' register, so that a second train-step cell can register the same names."""
    with contextlib.suppress(ImportError):  # before MindFormers 1.7
        from mindformers.utils.parameter_register import parameter_register

        for name in names:
            parameter_register._params.pop(name, None)
