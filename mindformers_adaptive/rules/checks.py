"""Round numbers to float32 as on a device, and check arguments. Error messages say which value to give instead."""

import ctypes
import importlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, SupportsFloat

# The largest int32 number. Step counters are int32 on a device.
LARGEST_INT32 = 2**31 - 1
# The smallest and the largest normal number of float32.
SMALLEST_FLOAT32 = 2.0**-126
LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


def to_float32(value: SupportsFloat) -> float:
    """Round a real number to float32, as a float32 operation would; return inf beyond the largest float32."""
    try:
        return ctypes.c_float(float(value)).value
    except OverflowError:
        # Python cannot convert an integer beyond the range of float64 to a float.
        return math.inf


def fits(number: Any, dtype: str) -> bool:
    """Return whether a number is one that every device has in the dtype "int32" or "float32"; bool is no number."""
    kind: Any = Integral if dtype == "int32" else Real
    if isinstance(number, bool) or not isinstance(number, kind):
        return False
    if dtype == "int32":
        return bool(-LARGEST_INT32 - 1 <= number <= LARGEST_INT32)
    is_subnormal, is_infinite = 0 < abs(number) < SMALLEST_FLOAT32, abs(number) == math.inf
    return not is_subnormal and math.isinf(to_float32(number)) == is_infinite


def require_integer(
    name: str, value: object, least: int | None, remedy: str, *, most: int = LARGEST_INT32, unit: str = ""
) -> int:
    """Return an argument as an int, or raise an error if it is not an integer from ``least`` to ``most``.

    Args:
        name (str): the argument's name in messages.
        value (object): the argument's value. bool is rejected.
        least (int, optional): the smallest accepted value; None for no bound.
        remedy (str): a sentence that says what to give instead.
        most (int): the largest accepted value. Default: the largest int32.
        unit (str): what the argument counts, such as "number of steps". Default: "".

    Raises:
        TypeError: if it is not an integer.
        ValueError: if the integer is below ``least`` or above ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        wanted = f"an integer {unit}".rstrip()
        raise TypeError(f"'{name}' must be {wanted}, but got {with_type(value)}. {remedy}")
    if least is not None and value < least:
        raise ValueError(f"'{name}' must be at least {least}, but got {value}. {remedy}")
    if int(value) > most:
        bits = int(value).bit_length()
        got = value if bits <= 64 else f"one of {bits} bits"
        raise ValueError(f"'{name}' must be at most {most}, but got {got}. {remedy}")
    return int(value)


def require_number(name: str, value: object, wanted: str, accepts: Callable[[float], bool], remedy: str) -> float:
    """Return an argument as a float, or raise an error if it is not a finite number for which ``accepts`` is true.

    Args:
        name (str): the argument's name in messages.
        value (object): the argument's value. bool is rejected.
        wanted (str): the condition for messages, such as "a finite number above 1".
        accepts (Callable): returns whether a finite value, rounded to float32, is in range.
        remedy (str): a sentence that says what to give instead.

    Raises:
        TypeError: if it is not a number.
        ValueError: if the number is not finite in float32, or is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"'{name}' must be {wanted}, but got {with_type(value)}. {remedy}")
    rounded = to_float32(value)
    if not math.isfinite(rounded) or not accepts(rounded):
        raise ValueError(f"'{name}' must be {wanted} in float32, but got {value!r}. {remedy}")
    return float(value)


def require_positive(name: str, value: object) -> float:
    """Return a loss scale, or a bound of the loss scale, rounded to float32; raise an error if it is not positive.

    Raises:
        TypeError: if ``value`` is not a number. bool is rejected.
        ValueError: if ``value`` is not finite and above 0 in float32.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"'{name}' must be a number, but got {with_type(value)}. {number_remedy(value)}")
    rounded = to_float32(value)
    if not SMALLEST_FLOAT32 <= rounded <= LARGEST_FLOAT32:
        raise ValueError(
            f"'{name}' must be finite and above 0 in float32, but got {value!r}. Give a positive number; loss scales "
            "are usually powers of two from 1 to 4294967296."
        )
    return rounded


def number_remedy(value: object, otherwise: str = "Give a number, such as 65536.") -> str:
    """Return the sentence that says which number to give instead of a value that is no number.

    Args:
        value (object): the value.
        otherwise (str): the sentence unless the value is a text that looks like a number.
    """
    number = r"\s*[-+]?\d[\d_.,]*(e[-+]?\d+)?\s*"
    if isinstance(value, str) and re.fullmatch(number, value, re.IGNORECASE):
        return f"Write it as a plain number: YAML reads {value.strip()} as text, and 65536 or 6.5536e+4 as numbers."
    return otherwise


def warn_of_rounding(name: str, loss_scale: object, stacklevel: int, least: float = 0.0) -> None:
    """Warn if a loss scale is not a power of two, because multiplying by such a scale rounds every gradient.

    Args:
        name (str): the name of the loss scale in the message.
        loss_scale (object): the loss scale. Anything but a finite number above 0 gives no warning, because
            :func:`require_positive` rejects it.
        stacklevel (int): as in ``warnings.warn``; 1 is the line that calls this function.
        least (float): warn also if the loss scale is below this power of two. Default: 0.0, no lower bound.
    """
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, Real):
        return
    rounded = to_float32(loss_scale)
    if not 0 < rounded <= LARGEST_FLOAT32 or (math.frexp(rounded)[0] == 0.5 and rounded >= least):
        return
    at_least = f" of at least {least:g}" if least else ""
    nearest = max(2.0 ** round(math.log2(rounded)), least)
    warnings.warn(
        f"'{name}' must be a power of two{at_least}, but got {loss_scale}: scaling by it rounds every gradient. The "
        f"value is used all the same; a power of two near it is {nearest:.10g}.",
        stacklevel=stacklevel + 1,
    )


def require_flag(name: str, value: object) -> bool:
    """Return an argument that is True or False; raise TypeError for any other value."""
    if not isinstance(value, bool):
        raise TypeError(f"'{name}' must be True or False, but got {with_type(value)}. Give one of the two.")
    return value


def require_choice(name: str, value: object, choices: Collection[str], remedy: str = "Give one of these.") -> str:
    """Return an argument that must be one of a few words; raise TypeError or ValueError for any other value."""
    wanted = f"'{name}' must be one of {', '.join(map(repr, choices))}, but got"
    if not isinstance(value, str):
        raise TypeError(f"{wanted} {with_type(value)}. {remedy}")
    if value not in choices:
        raise ValueError(f"{wanted} {value!r}. {remedy}")
    return value


def require_names(name: str, value: object) -> tuple[str, ...]:
    """Return a list or another iterable of names as a tuple; raise TypeError for any other value."""
    names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"'{name}' must be a list of names, but got {with_type(value)}. Write ['Dense'] for a single one."
        )
    return names


def with_type(value: object) -> str:
    """Return a wrong value and its type for a message, such as "3 of type int"."""
    return f"{value!r} of type {type(value).__name__}"


def imported(name: str, wanted: str) -> Any:
    """Return what a name ``module.attribute`` stands for; a module may also be in the current folder.

    Args:
        name (str): the name.
        wanted (str): the start of the message if the name is wrong, which ends in "but".

    Raises:
        ValueError: if ``name`` is no such name, or cannot be imported.
    """
    module, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")) or not module:
        raise ValueError(f"{wanted} got {name!r}.")
    here = str(Path.cwd())
    # An installed command, such as adaptive-loss-scale, starts Python without the current folder in the search path for
    # modules.
    sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), attribute)
    # The import of a user's module may raise any exception, even SystemExit.
    except (Exception, SystemExit) as error:
        raise ValueError(f"{wanted} {name!r} cannot be imported: {error!r}.") from error
    finally:
        sys.path.remove(here)
