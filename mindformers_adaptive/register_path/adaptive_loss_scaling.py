"""Loaded by MindFormers' ``auto_register``; registers the whole plugin as it is loaded.

MindFormers copies this file into ``./modules`` of the working folder and imports the copy, so everything is imported
from the installed package: a class defined here would exist twice.
"""

import mindformers_adaptive

mindformers_adaptive.register()


def __getattr__(name):
    # An update cell, as auto_register names it.
    return getattr(mindformers_adaptive, name)
