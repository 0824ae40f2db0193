"""The numbers of the 8-bit format HiF8, computed from its definition."""

OWN = {"name": "mine", "largest": 28.0, "smallest_normal": 0.25, "smallest_subnormal": 0.0625, "overflow": "saturate"}


def numbers_of_hifloat8():
    """Return all finite numbers above 0 of HiF8, an 8-bit format in which the first bits give the exponent's width."""
    values = []
    for code in {*range(1, 0x80)} - {0x6F}:
        bits = f"{code:07b}"
        for prefix, width in (("11", 4), ("10", 3), ("01", 2), ("001", 1), ("0001", 0), ("0000", None)):
            if not bits.startswith(prefix):
                continue
            bits_left = bits[len(prefix) :]
            if width is None:
                values.append(2.0 ** (int(bits_left, 2) - 23))
                break
            # The exponent of HiF8 has a sign and a magnitude. The first bit of the magnitude is always 1 and is not
            # stored.
            magnitude = int("1" + bits_left[1:width], 2) if width else 0
            exponent = -magnitude if bits_left[:1] == "1" and width else magnitude
            fraction = bits_left[width:]
            values.append(2.0**exponent * (1 + int(fraction, 2) / 2 ** len(fraction)))
            break
    return sorted(values)
