"""Loaded by MindFormers' ``auto_register``; registers the whole plugin as it is loaded.

MindFormers copies this file into ``./modules`` of the working folder and imports the copy, so everything is imported
from the installed package: a class defined here would exist twice.
"""

import mindformers_adaptive

mindformers_adaptive.register()


def __getattr__(name):
    # auto_register asks this module for an update cell by its name.
    return getattr(mindformers_adaptive, name)
