"""Compile cells and train steps for Ascend in MindSpore's dry run, with stand-ins for CANN.

    python scripts/compile_for_ascend.py                        # the small cases
    python scripts/compile_for_ascend.py --all                  # and whole models, in many processes too
    python scripts/compile_for_ascend.py 'step/*' control/Fmax  # these
    python scripts/compile_for_ascend.py --list                 # what there is

Needs neither an Ascend nor CANN, but gcc, and MindSpore's wheel for Linux on x86_64. MindSpore compiles each case to
the end: its passes for Ascend, a kernel for each operator, streams and queues. Nothing is computed.
"""

from ascend_dry_run.program import main

if __name__ == "__main__":
    main(__doc__)
