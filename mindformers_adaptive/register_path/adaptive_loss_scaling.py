"""Register all cells of this package when MindFormers' ``auto_register`` loads this file.

MindFormers copies this file into ``./modules`` of the working folder and imports the copy, so every class is imported
from the installed package. A class defined in this file would exist twice.
"""

import mindformers_adaptive

mindformers_adaptive.register()


def __getattr__(name: str) -> object:
    # MindFormers' auto_register asks this module for a class and registers the class again. `LossScaling` fits every
    # update cell; a YAML file may also name the cell itself.
    return getattr(mindformers_adaptive, "AdaptiveLossScaleUpdateCell" if name == "LossScaling" else name)
