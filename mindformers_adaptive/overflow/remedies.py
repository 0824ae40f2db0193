"""What can be changed in a network that is there: a layer in float32."""

import contextlib

from mindspore import dtype as mstype

__all__ = ["in_float32"]

# Of weights, which are not what is computed in.
_OF_WEIGHTS = ("param", "init", "weight")


@contextlib.contextmanager
def in_float32(cell):
    """Let a cell, and those inside, compute in float32 instead of float16 or bfloat16 for a while.

    What MindFormers' cells compute in is an attribute of theirs, such as ``dtype`` or ``compute_dtype``; other cells of
    MindSpore know it by ``to_float()``.

    Args:
        cell (Cell): changed in place, and restored.

    Yields:
        str, what was changed, as it is written in a program; "" if there was nothing.

    Examples:
        >>> from mindspore import nn
        >>> with in_float32(nn.Dense(2, 2).to_float(mstype.float16)) as changed:
        ...     changed
        'to_float'
    """
    changed = set()
    with contextlib.ExitStack() as stack:
        for _, each in cell.cells_and_names():
            for name, value in list(vars(each).items()):
                if value in (mstype.float16, mstype.bfloat16) and not any(word in name for word in _OF_WEIGHTS):
                    setattr(each, name, mstype.float32)
                    stack.callback(setattr, each, name, value)
                    changed.add(name)
            flags = {name: bool(getattr(each, name, False)) for name in ("fp16", "fp32", "bf16")}
            if flags["fp16"] or flags["bf16"]:
                each.add_flags(fp16=False, fp32=True, bf16=False)
                stack.callback(each.add_flags, **flags)
                changed.add("to_float")
        yield ", ".join(sorted(changed))
