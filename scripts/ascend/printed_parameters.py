"""The Parameters that MindFormers prints, such as several losses or learning rates."""

import contextlib

__all__ = ["LEARNING_RATES", "LOSSES", "forget_printed"]

# What MindFormers prints with print_separate_loss.
LOSSES = ("lm_loss", "mtp_loss", "aux_loss", "indexer_loss")
# Where its train-step cell keeps the learning rates that its callback prints.
LEARNING_RATES = ("current_default_lr", "current_grouped_lr")


def forget_printed(names):
    """Have MindFormers forget them: it keeps one of each name in a process, and refuses a second train-step cell."""
    with contextlib.suppress(ImportError):  # before MindFormers 1.7
        from mindformers.utils.parameter_register import parameter_register

        for name in names:
            parameter_register._params.pop(name, None)
