"""Types of command-line arguments that several scripts have."""

import argparse


def positive(text):
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {text}")
    return number
