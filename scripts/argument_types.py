"""Types of command-line arguments that several scripts share."""

import argparse


def positive(text):
    """Return a text as an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {text}")
    return number
