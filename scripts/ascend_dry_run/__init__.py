"""MindSpore compiles for Ascend on a machine that has none; ``scripts/compile_for_ascend.py`` is the program."""
