"""Floating-point formats such as FP16: their range, their rounding, and what a number that overflows becomes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mindformers_adaptive.rules.checks import require_choice, require_integer, require_number, with_type

_OVERFLOWS = ("inf", "nan", "saturate")
_ROUNDINGS = ("even", "away")

# The names of floating-point formats in texts and pictures, by the dtype names of MindSpore.
_TITLES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e5m2": "FP8 E5M2",
    "float8_e4m3fn": "FP8 E4M3",
    "hifloat8": "HiF8",
}


def _pairs_of(precision: Any) -> tuple[tuple[int, int], ...]:
    """Return the ``precision`` of a format as a tuple of pairs; raise an error if it is invalid.

    A pair (exponent, bits) says that numbers from 2^exponent on have this many bits in the mantissa.
    """
    remedy = (
        "Give pairs of an exponent and a number of bits, with increasing exponents, such as [[-15, 1], [-7, 2]]. Or "
        "leave out 'precision'."
    )
    is_list = isinstance(precision, list | tuple)
    pairs = [pair for pair in precision if isinstance(pair, list | tuple) and len(pair) == 2] if is_list else []
    if not is_list or len(pairs) < len(precision):
        raise TypeError(f"'precision' must be a list of pairs of integers, but got {precision!r}. {remedy}")
    checked = tuple(
        (
            require_integer("precision", first, -1074, remedy, most=1023, unit="as exponent"),
            require_integer("precision", bits, 0, remedy, most=52, unit="number of bits"),
        )
        for first, bits in pairs
    )
    if list(checked) != sorted(checked) or len({first for first, _ in checked}) < len(checked):
        raise ValueError(f"'precision' must have increasing exponents, but got {precision!r}. {remedy}")
    return checked


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point format, such as FP16, whose range is at most the range of float32.

    Attributes:
        name (str): as MindSpore calls the dtype, or a name of your own.
        largest (float): the largest finite number.
        smallest_normal (float): the smallest number with all bits of the mantissa, a power of two.
        smallest_subnormal (float): the smallest number above 0, a power of two.
        overflow (str): what a number becomes that rounds beyond the largest: "inf", "nan", or "saturate", the largest
            number. Default: "inf".
        rounding (str): how numbers round: to the nearest number; ties go to "even" or "away" from 0. Default: "even".
        precision (tuple[tuple[int, int], ...]): pairs (exponent, bits): from this exponent of 2 on, the mantissa has
            this many bits; exponents increase. Default: (), as many bits as there are from the smallest subnormal
            number to the smallest normal one.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a number is out of its range, or the format has no such number.

    Examples:
        >>> small = Format("mine", largest=28.0, smallest_normal=0.25, smallest_subnormal=0.0625)
        >>> small.quantum(4), small.quantum(-3), small.title
        (4.0, 0.0625, 'mine')
        >>> Format.from_bits(exponent=3, mantissa=2, overflow="saturate").largest
        28.0
    """

    name: str
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    overflow: str = "inf"
    rounding: str = "even"
    precision: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        remedy = f"float16 has 65504, 2^-14 and 2^-24; the known formats are {', '.join(_TITLES)}."
        if not isinstance(self.name, str):
            raise TypeError(f"'name' must be text, but got {with_type(self.name)}. {remedy}")
        least = 0.0
        for name in ("smallest_subnormal", "smallest_normal", "largest"):
            kind = "a number" if name == "largest" else "a power of two"
            wanted = f"{kind} above 0 and of at least {least:g}"
            number = require_number(name, getattr(self, name), wanted, lambda value: value > 0, remedy)
            if number < least or (name != "largest" and math.frexp(number)[0] != 0.5):
                raise ValueError(f"'{name}' must be {wanted}, but got {number}. {remedy}")
            least = number
        for name, known in (("overflow", _OVERFLOWS), ("rounding", _ROUNDINGS)):
            require_choice(name, getattr(self, name), known, f"Leave '{name}' out to use the default.")
        # YAML and JSON files have the ``precision`` of a format as lists; turn these lists into tuples.
        object.__setattr__(self, "precision", _pairs_of(self.precision))
        if self.largest % self.quantum(math.frexp(self.largest)[1] - 1):
            raise ValueError(
                f"'largest' must be a number that the format can represent, but got {self.largest}. {remedy}"
            )

    @property
    def title(self) -> str:
        """str: the display name of the format."""
        return _TITLES.get(self.name, self.name)

    @property
    def exponents(self) -> tuple[float, float, float]:
        """tuple[float, float, float]: log2 of the format's smallest subnormal, smallest normal and largest number.

        Below the smallest normal number, precision is lower; below half the smallest subnormal, numbers become 0;
        beyond the largest, they overflow.
        """
        return math.log2(self.smallest_subnormal), math.log2(self.smallest_normal), math.log2(self.largest)

    @classmethod
    def from_bits(
        cls, exponent: int, mantissa: int, overflow: str = "inf", rounding: str = "even", name: str | None = None
    ) -> Format:
        """Return the floating-point format with a sign bit and the given numbers of exponent and mantissa bits.

        The exponent is biased as in IEEE 754.

        Args:
            exponent (int): bits of the exponent, 2 to 8.
            mantissa (int): bits of the mantissa without the leading one, 1 to 23.
            overflow (str): as in :class:`Format`, and with it what the highest exponent is for: "inf", for inf and NaN,
                as in IEEE 754; "nan", for numbers and one NaN, as in E4M3 of OCP; "saturate", for numbers only, as in
                E2M1, E2M3 and E3M2 of OCP. The last two need an exponent of at most 7 bits. Default: "inf".
            rounding (str): as in :class:`Format`. Default: "even".
            name (str, optional): the name of the format. Default: None, for a name such as "e5m2".

        Returns:
            Format.

        Raises:
            TypeError: if a number of bits is no integer.
            ValueError: if a number of bits is out of its range, or ``overflow`` or ``rounding`` is another word.

        Examples:
            >>> Format.from_bits(exponent=5, mantissa=2).largest
            57344.0
        """
        is_ieee = overflow == "inf"
        remedy = "FP8 E5M2 has 5 and 2, float16 5 and 10, bfloat16 8 and 7."
        require_integer("exponent", exponent, 2, remedy, most=8 if is_ieee else 7, unit="number of bits")
        require_integer("mantissa", mantissa, 1, remedy, most=23, unit="number of bits")
        bias = 2 ** (exponent - 1) - 1
        # The mantissa of the format's largest number is 2 minus this many units in the last place.
        lacking = 2 if overflow == "nan" else 1
        largest = (2.0 - lacking * 2.0**-mantissa) * 2.0 ** (bias if is_ieee else bias + 1)
        normal = 2.0 ** (1 - bias)
        title = name or f"e{exponent}m{mantissa}"
        return cls(title, largest, normal, normal * 2.0**-mantissa, overflow, rounding)

    def to_config(self) -> str | dict[str, Any]:
        """Return this floating-point format as its name, or as a dict for JSON. :func:`find_format` accepts both.

        Returns:
            Union[str, dict].
        """
        return self.name if FORMATS.get(self.name) == self else dataclasses.asdict(self)

    # In version 1.0.0, the property ``given`` did what to_config() does now. Keep it for code written for that version.
    # It has no docstring, because the API reference then leaves it out.
    given = property(lambda self: self.to_config())

    def quantum(self, exponent: int) -> float:
        """Return the distance between neighbouring numbers of the format at a given exponent of 2.

        Args:
            exponent (int): the numbers lie from ``2**exponent`` to ``2**(exponent + 1)``.

        Returns:
            float, a power of two.
        """
        lowest, normal = (int(math.log2(number)) for number in (self.smallest_subnormal, self.smallest_normal))
        for first, bits in reversed(self.precision or ((normal, normal - lowest),)):
            if exponent >= first:
                return 2.0 ** (exponent - bits)
        return self.smallest_subnormal


# These formats represent the same values as the dtypes of the same names in NumPy and ml_dtypes; tests check this.
# Neither library has hifloat8. Its values follow the definition of HiF8. A number halfway between two hifloat8 values
# is rounded away from 0, as in CANN's conversion from float32.
FLOAT16 = Format.from_bits(5, 10, name="float16")
FORMATS = {
    number_format.name: number_format
    for number_format in (
        FLOAT16,
        Format.from_bits(8, 7, name="bfloat16"),
        Format.from_bits(5, 2, name="float8_e5m2"),
        Format.from_bits(4, 3, overflow="nan", name="float8_e4m3fn"),
        Format(
            "hifloat8",
            *(2.0**15, 2.0**-15, 2.0**-22),
            rounding="away",
            precision=((-22, 0), (-15, 1), (-7, 2), (-3, 3), (4, 2), (8, 1)),
        ),
    )
}


def find_format(value: str | Mapping[str, Any] | Format, argument: str = "gradient_format") -> Format:
    """Return the floating-point format with the given name, or the format that a dict of numbers describes.

    Args:
        value (Union[str, Mapping, Format]): one of ``FORMATS`` by name, numbers by the names of :class:`Format`, or the
            format itself.
        argument (str): the argument's name in messages. Default: "gradient_format".

    Returns:
        Format; a Format is returned as it is.

    Raises:
        TypeError: if ``value`` has another type.
        ValueError: if there is no format of this name, or the numbers do not make a format.

    Examples:
        >>> find_format("float8_e5m2").largest
        57344.0
    """
    if isinstance(value, Format):
        return value
    names = ", ".join(FORMATS)
    if isinstance(value, str):
        if value not in FORMATS:
            raise ValueError(
                f"'{argument}' must be one of {names}, but got {value!r}. Describe another format by its numbers: "
                "name, largest, smallest_normal and smallest_subnormal."
            )
        return FORMATS[value]
    if not isinstance(value, Mapping):
        raise TypeError(
            f"'{argument}' must be one of {names}, or a dict with the keys name, largest, smallest_normal and "
            f"smallest_subnormal, but got {with_type(value)}. The default is float16."
        )
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Format)}
    wrong = [f"{key!r} is unknown" for key in value if key not in fields]
    wrong += [f"{name!r} is missing" for name, is_required in fields.items() if is_required and name not in value]
    if wrong:
        raise TypeError(
            f"'{argument}' must be a dict with the keys {', '.join(fields)}, but got {dict(value)}: "
            f"{', '.join(wrong)}. The keys overflow, rounding and precision are optional."
        )
    return Format(**value)
