"""Compile cells and train steps for Ascend in MindSpore's dry run, with stand-ins for CANN.

    python -m scripts.ascend.compile_for_ascend                        # the small cases
    python -m scripts.ascend.compile_for_ascend --all                  # all cases, also whole models and many processes
    python -m scripts.ascend.compile_for_ascend 'step/*' control/Fmax  # these cases
    python -m scripts.ascend.compile_for_ascend --list                 # the names of the cases

It needs neither an Ascend nor CANN, but gcc and MindSpore's wheel for Linux on x86_64. MindSpore compiles each
case to the end: its passes for Ascend, a kernel for each operator, streams and queues. Nothing is computed.
"""

from scripts.ascend.program import main

if __name__ == "__main__":
    main(__doc__)
