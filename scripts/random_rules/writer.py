"""Writes Python modules with randomly generated loss scaling rules, reproducible from a seed."""

import random
import re

__all__ = ["write_rule"]

_LARGEST = "3.4028234663852886e+38"
# Operands in the code of random rules: Python and NumPy numbers, and attributes of the rule. The operands after the
# character | are used less often.
_NUMBERS = {
    "float32": "0 1 -1 2 0.0 1.0 -1.0 0.5 2.0 -2.5 0.1 3.3 1e6 7 self.share self.limit self.share*3 self.steps | "
    f"-0.0 {_LARGEST} -{_LARGEST} math.inf -math.inf 1e30 1e-3 1e-30 -2147483904.0 16777217.0 2.0**127 -3e38 "
    "np.float32(0.1) np.int64(3)",
    "int32": "0 1 -1 2 3 -7 1000 np.int32(5) self.steps self.size | "
    "(2**31-1) (-(2**31)) 65536 46341 (2**24+1) np.int8(-3)",
    "bool": "True False | True",
}
_ARGUMENTS = (0.37, 1.5, 0.1, 1.0, -2.0, 0.0, 1e6, 3.0, 7.25, -1.0)
_ZEROS = (0.0, -0.0)
_FIRST = {
    "int32": (0, 1, 2, -5, 7, 2**31 - 1, -(2**31 - 1), 100),
    "float32": (0.0, -0.0, 1.5, -2.25, 1e6, 3e38, 0.1, float("inf"), float("nan"), 2.0**31, 5.0, 17.0),
}

# The scalar fields and the vector fields of a random rule's state, with their dtypes. The rule declares some scalar
# fields in groups: for example, the field "low" is in the group "spreads".
_FIELDS = {"few": "int32", "many": "int32", "mark": "int32", "yes": "int32", "no": "int32"}
_FIELDS |= {"level": "float32", "last": "float32", "before_last": "float32", "kept": "float32"}
_FIELDS |= {"low": "float32", "middle": "float32", "high": "float32"}
_VECTORS = {"counts": "int32", "rates": "float32", "old_rates": "float32"}

# Templates of expressions in a rule's step, by the dtype of the result. Each letter stands for an operand. A value is
# an expression that is computed in the step; a number is a constant.
#     v, w     values of the result's dtype
#     a, b     numbers
#     x, y     a value of the result's dtype, and a second value or a number; which of the two comes first is random
#     F, I, B  values of the dtypes float32, int32 and bool
#     FF, FG   as x and y, but float32
#     II, IJ   as x and y, but int32
#     C, K     a scalar flag, and a scalar index
#     V, P     a vector of the result's dtype, and a position in this vector
#     M, N     vectors of bool and of float32
# Only templates of vectors have these letters:
#     U        a stack of scalars
#     L, G     a list of numbers, and a list of flags
#     S        a scalar of the result's dtype, drawn anew for each S in a template
#     T        a scalar of the result's dtype, the same for each T in a template
_COMMON = (
    "where(B, x, y); where(C, v, w); minimum(x, y); maximum(x, y); minimum(maximum(x, y), a); maximum(a, maximum(b, v))"
    "; v + v; v - v; v * a * b; b * (a * v); a - (v - b); v + a + b; -(-v); v * 0; v * -1; 0 - v; v + 0; v * a + v * b"
    "; abs(-v); minimum(v, v); where(C, v, v); minimum(v, a) + minimum(v, b); x - y * v; v * w - v; -(v * a) * b; v * 1"
)
_ARITHMETIC = "x + y; x - y; x * y; -v; abs(v)"
_WAYS = {
    "float32": (
        f"{_ARITHMETIC}; x / y; x / y; floor(v); ceil(v); float32(I); float32(B)",
        _COMMON,
        "v / self.share; v / self.limit; minimum(v / 0, x); maximum(v / 0, x); minimum(x / y, w)",
        "v * a / b; v / a / b; v / v; a / v; v / 1; (float32(a) * b) * v; float32(int32(v)); v * 0.0; v / a * b; v / 0",
        f"minimum(v, {_LARGEST}); maximum(-{_LARGEST}, v); floor(floor(v)); v * 2 * 2 * 2; v / (1 / v); v - 0.0",
        "v + -0.0; minimum(v, 2.0**127); maximum(-3e38, v); v / -1; v * v * v",
    ),
    "int32": (
        f"{_ARITHMETIC}; x // y; x // y; int32(F); int32(F); int32(B)",
        _COMMON,
        "v // self.steps; v // self.size; int32(F * 0.5); int32(F * 3.3); int32(F * 0.5) - v",
        "v // a // b; v // v; v // 1; v // -1; v // 0; (int32(a) - b) + v; int32(float32(v)); v // 2 * 2; a // v",
    ),
    "bool": (
        "FF < FG; FF <= FG; FF > FG; FF >= FG; FF == FG; FF != FG; II < IJ; II <= IJ; II == IJ; II != IJ",
        "x & y; x | y; ~v; x == y; x != y; v & ~v; v | ~v; where(C, v, w); where(B, x, y); where(C, v, v); v & v",
    ),
}
_NUMBER_WAYS = {
    "float32": "take(V, K); V[P]; sum(V); take(V, K); where(C, 0.1, 1); where(C, -0.0, 0.0); take(WEIGHTS, K)",
    "int32": "take(V, K); V[P]; sum(V); count(M); argmin(N); argmin(N); where(C, 1, 0); take([3, -7, a], K)",
    "bool": "where(C, True, False); where(C, False, x); V[P]; take(V, K); float32(self.share) < self.limit; "
    "int32(self.size) < self.steps",
}
_PICKS = "where(B, S, S); where(B, T, T); where(stack(G), v, w); where(B, S, v); where(S < S, v, S)"
_VECTOR_WAYS = {
    "float32": f"U; v * L; L - v; minimum(v, L); {_PICKS}",
    "int32": f"U; v + L; L // v; {_PICKS}",
    "bool": "U; ~v; v & stack(L); where(B, S, S); where(B, T, T); S & v; v | S; where(S, v, w)",
}

_MODULE = '''"""A random rule, made from the seed {seed}."""

import math

import numpy as np

from mindformers_adaptive.rules import Rule, argmin, ceil, count, float32, floor, int32, maximum, minimum, stack
from mindformers_adaptive.rules import tabulate, take, where

WEIGHTS = np.array({weights}, np.float32)
FIRST_LOSS_SCALE = {loss_scale}
# The arguments of the rules that are stepped side by side, a dict for each rule.
ARGUMENTS = {arguments}


class RandomRule(Rule):
    name = "random_{seed}"
    state = {{
        **dict.fromkeys(("few", "many"), int32),
        "marks": {{"mark": int32}},
        "votes": {{"yes": int32, "no": int32}},
        **dict.fromkeys(("level", "last", "before_last", "kept"), float32),
        "spreads": {{"low": float32, "middle": float32, "high": float32}},
        "counts": int32[{length}],
        "rates": float32[{length}],
        "old_rates": float32[{length}],
    }}
    needs_gradients = {needs_gradients}
    counts_clean_steps = {counts_clean_steps}

    def __init__(self, share=0.37, limit=1e6, steps=3, size=2, **bounds):
        super().__init__(**bounds)
        self.share, self.limit, self.steps, self.size = share, limit, steps, size

    def first_state(self, loss_scale):
        return {first}

    def next_state(self, state, seen):
{lines}
'''


def write_rule(seed):
    """Return the source code of a Python module that defines a randomly generated rule."""
    return _Writer(seed).module()


class _Writer:
    """Writes the module of a random rule. ``pools``: names of values by dtype and length; scalars have length 0."""

    def __init__(self, seed):
        self.seed, self.random = seed, random.Random(seed)
        self.length = self.pick((1, 2, 3, 3, 4, 9))
        self.by_exponent, self.needs_gradients = self.pick((True, False, False)), self.pick((True, True, False))
        # Some generated rules use the number of clean steps (steps since the last overflow), as the adaptive rule does.
        self.counts_clean_steps = self.chance(0.3)
        self.lines, self.made, self.pools = [], 0, {}
        self.know("int32", 0, "state.skipped_steps", "state.consecutive_overflows")
        self.know("float32", 0, "state.loss_scale")
        self.know("bool", 0, "seen.overflow")
        if self.by_exponent:
            self.know("int32", 0, "state.exponent", "state.exponent")
        if self.needs_gradients:
            self.know("int32", 0, "seen.max_safe_exponent")
            self.know("float32", 0, "seen.largest_gradient", "seen.largest_gradient")
            self.know("bool", 0, "seen.gradient_known")
        if self.counts_clean_steps:
            self.know("int32", 0, "state.clean_steps", "state.clean_steps")
        for name, dtype in _FIELDS.items():
            self.know(dtype, 0, f"state.{name}")
        for name, dtype in _VECTORS.items():
            self.know(dtype, self.length, f"state.{name}")

    def pick(self, several):
        return self.random.choice(several)

    def chance(self, share):
        return self.random.random() < share

    def know(self, dtype, length, *names):
        self.pools.setdefault((dtype, length), []).extend(names)

    def module(self):
        self.keep("float32", 3, "stack([state.low, state.middle, state.high])")
        self.keep("int32", 3, "stack((state.few, state.many, state.mark))")
        for length in sorted({self.length, 3}):
            self.keep("bool", length, f"{self.value('float32', length, 0)} < {self.value('float32', 0, 0)}")
        for _ in range(self.random.randint(6, 15)):
            way = self.random.random()
            if way < 0.06:
                self.keep_table()
            elif way < 0.12:
                self.keep_state()
            else:
                dtype, length = self.pick(("float32", "float32", "int32", "bool")), self.pick((0, 0, 0, self.length, 3))
                self.keep(dtype, length, self.expression(dtype, length, 2))
        self.write_return()
        bounds = {"min_loss_scale": self.pick((1.0, 2.0**-20, 8.0, 2.0**-126))}
        bounds |= self.pick(({}, *({"max_loss_scale": most} for most in (2.0**24, 3e38, 2.0**127))))
        bounds["gradient_format"] = self.pick(("float16", "bfloat16", "float8_e4m3fn"))
        first = {name: self.pick(_FIRST[dtype]) for name, dtype in _FIELDS.items() if self.chance(0.8)}
        for name, dtype in _VECTORS.items():
            first[name] = [self.pick(_FIRST[dtype]) for _ in range(self.length)]
        return _MODULE.format(
            seed=self.seed,
            loss_scale=self.pick((2.0**10, 2.0**16)) if self.by_exponent else self.pick((1000.0, 65536.0)),
            arguments=self.arguments_of_lanes(bounds),
            length=self.length,
            weights=[self.pick(_ARGUMENTS) for _ in range(self.length)],
            needs_gradients=self.needs_gradients,
            counts_clean_steps=self.counts_clean_steps,
            first=repr(first).replace("inf", "math.inf").replace("nan", "math.nan"),
            lines="\n".join(f"        {line}" for line in self.lines),
        )

    def arguments_of_lanes(self, bounds):
        several = {
            "share": self.pick((_ARGUMENTS, _ARGUMENTS, _ZEROS)),
            "limit": self.pick((_ARGUMENTS, (0.0, 1.5))),
            "steps": (1, 3, -2, 0),
            "size": (0, 1, 2, 5),
        }
        return [{name: self.pick(some) for name, some in several.items()} | bounds for _ in range(3)]

    def keep(self, dtype, length, expression):
        name = f"{dtype[0]}{self.made}"
        self.made += 1
        self.lines.append(f"{name} = {expression}")
        # Add the new value's name to the pool of names three times, so that expressions use new values more often than
        # old values.
        self.know(dtype, length, *[name] * 3)

    def keep_table(self):
        number, flag, lowest = self.value("int32", 0, 0), self.value("bool", 0, 1), self.pick((-2, 0, 5))
        first, other = f"t{self.made}", f"u{self.made}"
        inner = ("number * 3 - flag, number if flag else self.steps", "int(number > self.size), number // 2")
        self.lines.append(f"def table{self.made}(number, flag):")
        self.lines.append(f"    return {self.pick(inner)}")
        span = f"({number}, {lowest}, {lowest} + self.size)"
        self.lines.append(f"{first}, {other} = tabulate(table{self.made}, number={span}, flag={flag})")
        self.know("int32", 0, first, other, first, other)
        self.made += 1

    def keep_state(self):
        name, sides = f"s{self.made}", []
        for _ in range(2):
            keys = self.random.sample([*_FIELDS, *_VECTORS], 2)
            sides.append(
                self.pick(("state", f"state.replace({', '.join(f'{key}={self.result(key)}' for key in keys)})"))
            )
        self.lines.append(f"{name} = where({self.value('bool', 0, 1)}, {', '.join(sides)})")
        self.made += 1
        for key, dtype in _FIELDS.items():
            self.know(dtype, 0, f"{name}.{key}")
        for key, dtype in _VECTORS.items():
            self.know(dtype, self.length, f"{name}.{key}")

    def result(self, key):
        """Return code for the new value of a state field, at random: an old value, a number or an expression."""
        dtype, length = (_FIELDS[key], 0) if key in _FIELDS else (_VECTORS[key], self.length)
        parts = [name for name, kind in (_VECTORS if length else _FIELDS).items() if kind == dtype]
        way = self.random.random()
        if way < 0.3:
            return f"state.{key if way < 0.12 else self.pick(parts)}"
        if way < 0.35 and not length:
            return self.number(dtype)
        value = self.value(dtype, length, 1)
        if dtype == "float32" and self.chance(0.7):
            # Replace small values by 0, or products of products would soon be subnormal.
            return f"where(abs({value}) < 0.001, {self.pick(('0.0', f'{value} * 0.0'))}, {value})"
        return value

    def write_return(self):
        before, share = "state", 0.85
        if self.chance(0.4):
            # Change some fields before where() may choose between two new states, so that these changes take
            # effect whichever state where() chooses.
            keys = self.random.sample([*_FIELDS, *_VECTORS], 4)
            self.lines.append(f"both = state.replace({_named({key: self.result(key) for key in keys})})")
            before, share = "both", 0.5
        swapped, taken = {"level": "state.last", "last": "state.level"}, {"level": "state.low", "few": "state.yes"}
        handed_on = dict(self.pick((swapped, taken)))
        if self.counts_clean_steps:
            handed_on["many"] = "state.clean_steps + 1"
        changed = f"{before}.replace({_named(self.changes(share, handed_on, '0'))})"
        # A real rule changes few fields after a step without an overflow. So, in half of the random rules, change few
        # fields in the second branch of where(overflow, ...).
        share = self.pick((share, 0.0))
        other = f"{before}.replace({_named(self.changes(share, handed_on, 'state.clean_steps + 1'))})"
        flag = self.pick(("seen.overflow", "seen.overflow", self.value("bool", 0, 1)))
        after = self.pick((changed, *(f"where({flag}, {changed}, {side})" for side in (other, other, before))))
        if self.chance(0.25):
            # Also compute another expression from the new state, to test that a step may use the new state.
            self.lines.append(f"after = {after}")
            key = self.pick(("level", "last", "kept"))
            after = f"after.replace({key}=where(after.{self.pick(('kept', 'middle'))} < 1, after.low, after.{key}))"
        self.lines.append(f"return {after}")

    def changes(self, share, handed_on, clean_steps):
        """Return the new values of the state fields that change, by key. A field changes with probability ``share``."""
        changes = {key: self.result(key) for key in [*_FIELDS, *_VECTORS] if self.chance(share)}
        if share and self.chance(0.3):
            changes |= {part: self.value("float32", 0, 1) for part in ("low", "middle", "high")}
        if self.chance(0.6):
            changes |= handed_on
        if self.chance(0.9):
            name, dtype = ("exponent", "int32") if self.by_exponent else ("loss_scale", "float32")
            changes[name] = self.value(dtype, 0, 1)
        if self.counts_clean_steps and self.chance(0.8):
            changes["clean_steps"] = self.pick((clean_steps, clean_steps, self.value("int32", 0, 1)))
        return changes

    def number(self, dtype):
        usual, rare = _NUMBERS[dtype].split(" | ")
        return self.pick((rare if self.chance(0.15) else usual).split())

    def value(self, dtype, length, depth):
        """Return a random expression whose value has the given dtype and length."""
        if depth and self.chance(0.5):
            return f"({self.expression(dtype, length, depth - 1)})"
        return self.pick(self.pools[dtype, length])

    def expression(self, dtype, length, depth):
        ways = [_VECTOR_WAYS[dtype] if length else _NUMBER_WAYS[dtype], _WAYS[dtype][0], *_WAYS[dtype]]
        way = self.pick(self.pick(ways).split("; "))
        some = _Operands(self, dtype, length, depth)
        return re.sub(r"(?<![\w.])(?:[a-zA-Z]|FF|FG|II|IJ)(?![\w(.])", lambda match: some[match[0]], way)


def _named(changes):
    return ", ".join(f"{key}={value}" for key, value in changes.items())


class _Operands(dict):
    """The operands that replace the letters of an expression's template, each generated when it is first used."""

    def __init__(self, writer, dtype, length, depth):
        super().__init__()
        self.writer, self.dtype, self.length, self.depth = writer, dtype, length, depth

    def __missing__(self, letter):
        writer, length, depth = self.writer, self.length, self.depth
        if letter == "S":
            # Draw a new scalar for each S in the template of an expression. So return it without storing it in this
            # dict, which would use it again for the next S.
            return writer.value(self.dtype, 0, 0)
        if letter in ("x", "y", "FF", "FG", "II", "IJ"):
            dtype = {"F": "float32", "I": "int32"}.get(letter[0], self.dtype)
            pair = (writer.value(dtype, length, depth), self.beside(dtype))
            names = {"F": ("FF", "FG"), "I": ("II", "IJ")}.get(letter[0], ("x", "y"))
            self.update(zip(names, pair if writer.chance(0.6) else pair[::-1], strict=True))
            return self[letter]
        if letter in "VPMN":
            several = writer.pick((writer.length, 3))
            for name, dtype in (("V", self.dtype), ("M", "bool"), ("N", "float32")):
                self[name] = writer.value(dtype, several, depth)
            self["P"] = str(writer.random.randrange(-several, several))
        elif letter in "FIBCK":
            dtype = {"F": "float32", "I": "int32", "B": "bool", "C": "bool", "K": "int32"}[letter]
            self[letter] = writer.value(dtype, 0 if letter in "CK" else length, depth)
        elif letter in "ab":
            self[letter] = writer.number(self.dtype)
        elif letter == "T":
            self[letter] = writer.value(self.dtype, 0, 0)
        elif letter in "LG":
            dtype = self.dtype if letter == "L" else "bool"
            self[letter] = f"[{', '.join(writer.number(dtype) for _ in range(length))}]"
        elif letter == "U":
            parts = [self.beside(self.dtype, is_number=True) for _ in range(length)]
            parts[writer.random.randrange(length)] = writer.value(self.dtype, 0, 0)
            self[letter] = f"stack([{', '.join(parts)}])"
        else:
            self[letter] = writer.value(self.dtype, length, depth)
        return self[letter]

    def beside(self, dtype, is_number=False):
        """Return a random second operand of an operation: a number, a scalar, or a value as long as the first one."""
        writer = self.writer
        if writer.chance(0.35):
            return writer.number(dtype)
        return writer.value(dtype, writer.pick((self.length, 0)) if not is_number else 0, self.depth)
