"""A rule whose step cannot run on every device is refused when it is made; the error names the line and a remedy."""

import pickle
import random
import re
import textwrap

import numpy as np
import pytest

from mindformers_adaptive import RuleLossScaleUpdateCell
from mindformers_adaptive.rules import Rule, RuleError, count, float32, int32, minimum, stack, where
from tests.shared.every_rule import Owned, is_same

HEAD = """
import copy, decimal, fractions, functools, itertools, math, operator, random, statistics, sys, time

import numpy as np
from mindformers_adaptive.rules import *
from mindformers_adaptive.rules import Rule

DECAY, CAP, KEPT = 0.99, 2**32, []
THIRD, TENTH = fractions.Fraction(1, 3), decimal.Decimal("0.1")


class Own(Rule):
    name = "own"
    state = {"clean": int32, "mean": float32, "vec": float32[3], "pair": {"a": float32, "b": float32}}
    needs_gradients = True

    def next_state(self, state, seen):
        s, o, n, v = state.loss_scale, seen.overflow, state.clean, state.vec
"""
SIGNATURE = HEAD[: HEAD.index("    def next_state")].count("\n") + 1


def made(folder, source):
    """Write source code of a rule's module to a file in a folder, and return the rule."""
    file = folder / "strange_rule.py"
    file.write_text(source)
    names = {"__name__": "strange_rule"}
    exec(compile(source, str(file), "exec"), names)
    return names["Own"]()


def refusal(folder, statement, after="return state"):
    """Return the error for a rule with a forbidden statement in its step, and the file and line of the statement."""
    body = textwrap.indent(f"{statement}\n{after}\n", " " * 8)
    with pytest.raises(ValueError, match=r"^The step of the rule 'own' ") as refused:
        made(folder, HEAD + body)
    return str(refused.value), folder / "strange_rule.py", HEAD.count("\n") + 1


def assert_says(message, problem, remedy, where_it_is):
    assert re.match(f"The step of the rule 'own' ({problem})", message, re.DOTALL), message
    assert re.search(remedy, message), message
    assert re.search(rf"{re.escape(where_it_is)}\.$", message), message
    assert len(message) < 600


BRANCH = ("has an 'if', 'and', 'or', 'not' or 'while' on a value", r"Use where\(condition, a, b\), & \| and ~")
OTHER = r"Use \+ - \* / //, comparisons, .*argmin, take and tabulate of mindformers_adaptive.rules"
NUMBER = ("needs a value .*Python number", OTHER)
AROUND = r"Write int32\(...\) or float32\(...\) around"
FOREIGN = ("uses .* of type .* as a number", "Convert it")
KEEP = "Keep in the state"
HAS = ", ".join(["loss_scale", "exponent", "clean", "mean", "vec", "a", "b", "skipped_steps", "consecutive_overflows"])
REPLACED = ", ".join(HAS.split(", ")[:-2])
TABULATE = r"(Return a tuple of int, .*int32 .*same length|calls tabulate\(\) with)"

# For each error message: its problem, its remedy, and statements of a rule's step that cause the error (split at ;;).
REFUSED = {
    BRANCH: """
        if o: return state.replace(loss_scale=s / 2) ;; if s > 2: s = s / 2 ;; while s > 2: s = s / 2
        x = s if o else 2.0 ;; x = o and s > 2 ;; x = (s > 2) or o ;; x = not o ;; x = 1 < s < 3 ;; x = 1 < n <= 3 < 9
        assert o ;; x = max(s, 2.0) ;; x = min(2.0, s, 3.0) ;; x = max(v) ;; x = sorted(v) ;; x = s in (1.0, 2.0)
        x = 1.0 in v ;; x = any(v > 1) ;; x = all([o, s > 1]) ;; x = bool(o) ;; x = [x for x in v if x > 1]
        x = list(filter(None, v)) ;; x = next(x for x in v if x > 1) ;; x = [1.0, 2.0].index(s)
        x = [1.0, 2.0].count(s) ;; x = operator.not_(o) ;; x = operator.truth(s)
        x = itertools.compress([1], [o]).__next__() ;; x = sum(1 for x in v if x)
        x = list(itertools.takewhile(lambda x: x > 1, v)) ;; x = max(range(3), key=lambda place: v[place])
    """,
    ("mixes float32 and int32 in", AROUND): """
        x = s + n ;; x = s * n ;; x = s < n ;; x = s == n ;; x = s != n ;; x = v - n ;; x = where(o, s, n)
        x = minimum(s, n) ;; x = stack([s, n]) ;; x = s + state.skipped_steps
        x = seen.largest_gradient * seen.max_safe_exponent ;; x = sum([s, n])
    """,
    ("mixes int32 and float32 in", AROUND): """
        x = n + s ;; x = n // s ;; x = n / s ;; x = maximum(n, v)
    """,
    ("mixes (bool and|float32 and bool|int32 and bool)", AROUND): """
        x = o + n ;; x = s * o ;; x = n - o ;; x = o == n ;; x = where(o, o, s)
    """,
    ("uses '(add|sub|mul|less|less_equal|minimum|maximum|neg|abs)' on bool", AROUND): """
        x = o + o ;; x = o - (s > 1) ;; x = o * True ;; x = o < (s > 1) ;; x = o >= (s > 1) ;; x = minimum(o, s > 1)
        x = -o ;; x = abs(o)
    """,
    (r"uses .* with (a value of|an int32)", r"(Write|around)"): """
        x = n + 1.0 ;; x = n * 0.5 ;; x = 1.0 - n ;; x = n < 0.5 ;; x = where(o, n, 0.5) ;; x = n * DECAY
        x = int32(DECAY * (n + 1)) ;; x = n + math.pi ;; x = np.float64(0.5) * n ;; x = s * True ;; x = sum([o, o])
        x = n + True ;; x = o == 1 ;; x = where(o, True, 1.5) ;; x = where(o, 1, True)
        x = v * (1, 2.5, True) ;; state.replace(clean=1.0) ;; state.replace(clean=True)
        state.replace(loss_scale=False) ;; state.replace(clean=0.0 + 1)
    """,
    ("uses 'div' on int32", r"Write float32\(...\), or // for integers"): """
        x = n / 2 ;; x = 1 / n ;; x = n / n ;; x = np.true_divide(n, 2) ;; x = (n + 1) / state.skipped_steps
    """,
    ("uses '(floor|ceil)' on int32", r"Write float32\(...\)"): """
        x = floor(n) ;; x = ceil(n + 1)
    """,
    ("uses 'floordiv' on float32", r"Write floor\(a / b\)"): """
        x = s // 2 ;; x = 2.0 // s ;; x = v // 2.0
    """,
    (
        "(uses '(and|or|not)' on (int32|float32|a number)|mixes .* in '(and|or)')",
        r"in parentheses, as in \(a > b\) & c",
    ): """
        x = ~n ;; x = n & 1 ;; x = s | s ;; x = n | n ;; x = ~v ;; x = o & 1 ;; x = o | 0.0
        x = o & n > 3 ;; x = n > 3 & o ;; x = n > 3 | o ;; x = o | s == 2.0
    """,
    (r"has '\*\*' with a value.* depends on the device", "Use products"): """
        x = s ** 2 ;; x = 2 ** s ;; x = n ** 2 ;; x = s ** 0.5 ;; x = pow(s, 2) ;; s **= 2
        x = math.pow.__class__ and operator.pow(s, 2)
    """,
    ("has '%'.* depends on the device", r"Use a - a // b \* b of integers"): """
        x = s % 2 ;; x = n % 2 ;; x = 7 % n ;; n %= 2 ;; x = operator.mod(n, 2)
    """,
    ("has '@'", "Use products"): """
        x = v @ v ;; x = [1, 2, 3] @ v
    """,
    ("shifts bits", "(Multiply|Divide by //) instead"): """
        x = n << 2 ;; x = 2 >> n ;; n >>= 1
    """,
    (r"has '\^'", "Compare flags by != instead"): """
        x = o ^ (s > 2) ;; x = n ^ 1 ;; x = True ^ o
    """,
    ("calls (divmod|round)", OTHER): """
        x = divmod(n, 2) ;; x = divmod(7, n) ;; x = round(s) ;; x = round(s, 2)
    """,
    NUMBER: """
        x = float(s) ;; x = int(n) ;; x = complex(s) ;; x = math.floor(s) ;; x = math.ceil(s) ;; x = math.trunc(s)
        x = math.log2(s) ;; x = math.sqrt(s) ;; x = math.isnan(s) ;; x = math.isfinite(s) ;; x = math.copysign(1.0, s)
        x = math.hypot(s, s) ;; x = math.fsum(v) ;; x = range(n) ;; for i in range(n): s = s * 2 ;; x = [1.0, 2.0][n]
        x = (1.0, 2.0)[n] ;; x = "ab"[n] ;; x = [1.0, 2.0][n:] ;; x = operator.index(n) ;; x = hex(n)
        x = chr(n) ;; x = bytes(n) ;; x = "%d" % n ;; x = "%.3f" % s
        x = np.array([s, s]) ;; x = np.array(s) ;; x = np.float32(s) ;; x = np.int32(n) ;; x = np.asarray(s) + 1
        x = np.zeros(n) ;; x = np.arange(3)[n] ;; x = random.Random(0).randrange(n) ;; x = time.sleep(s)
        x = itertools.repeat(1.0, n)
    """,
    (r"calls numpy\.\w+", OTHER): """
        x = np.sqrt(s) ;; x = np.log2(s) ;; x = np.exp(s) ;; x = np.sign(s) ;; x = np.isnan(s) ;; x = np.isfinite(s)
        x = np.square(s) ;; x = np.power(s, 2) ;; x = np.mod(n, 2) ;; x = np.where(o, s, 2.0) ;; x = np.clip(s, 1, 2)
        x = np.mean(v) ;; x = np.sum(v) ;; x = np.max(v) ;; x = np.stack([s, s]) ;; x = np.concatenate([v, v])
        x = np.dot(v, v) ;; x = np.add.reduce(v) ;; x = np.multiply.outer(v, v) ;; x = np.argmin(v) ;; x = np.round(s)
        x = np.add(s, 1, where=o) ;; x = np.add(s, 1, out=np.zeros(()))
    """,
    ("indexes a vector .*computed value", r"Use take\(vector, index\)"): "x = v[n] ;; x = v[o] ;; x = v[v > 1]",
    ("uses the index .*, which is no integer", r"For more elements use stack\(\[v\[0\], v\[1\]\]\)"): """
        x = v[1.0] ;; x = v[0:2] ;; x = v[:] ;; x = v[None] ;; x = v[...] ;; x = v["a"] ;; x = v[True] ;; x = v[0, 1]
    """,
    (r"uses index -?\d+ of a vector of length 3", "Use 0 to 2"): """
        x = v[3] ;; x = v[-4] ;; x = take(v, 5)
    """,
    ("(indexes a number|uses a number .*vector)", "Only a vector.* has elements"): """
        x = s[0] ;; x, y = s ;; x = list(s) ;; x = len(s) ;; for x in s: pass ;; x = sum(s) ;; x = stack(s)
        x = [*n]
    """,
    (r"reads state\.(celan|pair|append|get|_replace),", rf"only {HAS} and .*replace\(name=value\). Use one"): """
        x = state.celan ;; x = state.pair ;; state.append(1) ;; x = state.get("clean")
        state._replace(clean=1) ;; x = getattr(state, "celan", s) ;; x = hasattr(state, "celan")
    """,
    (
        r"reads seen\.(overflows|loss_scale),",
        "'seen' has only overflow, gradient_known, largest_gradient, max_safe_exponent. Use one",
    ): """
        x = seen.overflows ;; x = seen.loss_scale
    """,
    (r"assigns state\.clean, .*cannot be changed", r"Return state\.replace\(clean=\.\.\.\)"): """
        state.clean = 1 ;; state.clean += 1 ;; setattr(state, "clean", n)
    """,
    ("sets '(overflow|largest_gradient|own)' in 'seen', which cannot change", "Use a variable"): """
        seen.overflow = True ;; seen.largest_gradient = 1.0 ;; seen.own = s ;; seen.overflow |= s > 2
    """,
    (
        "replaces '(celan|skipped_steps|consecutive_overflows|overflow|pair|1)' in the state",
        f"may replace only {REPLACED}",
    ): """
        state.replace(celan=n) ;; state.replace(skipped_steps=0) ;; state.replace(consecutive_overflows=n)
        state.replace(overflow=True) ;; state.replace(pair=v) ;; state.replace(**{"1": 2})
    """,
    (
        r"returns '\w+' as \w+ of shape \(.*\), but the state declares \w+ of shape",
        r"(Put \w+\(...\) around it|Give it the shape \(.*\)), or change .* in the rule's state",
    ): """
        state.replace(clean=s) ;; state.replace(clean=o) ;; state.replace(loss_scale=n)
        state.replace(loss_scale=state.exponent) ;; state.replace(exponent=s) ;; state.replace(mean=v)
        state.replace(vec=s) ;; state.replace(vec=0.0) ;; state.replace(vec=[0.0]) ;; state.replace(vec=stack([s, s]))
        state.replace(a=v[:1] if False else stack([s])) ;; state.replace(mean=take([1, 2], n))
        state.replace(mean=count(v > 1))
    """,
    FOREIGN: """
        state.replace(loss_scale=None) ;; state.replace(loss_scale="2") ;; state.replace(loss_scale=lambda: s)
        state.replace(loss_scale=seen) ;; state.replace(loss_scale=state) ;; state.replace(vec=map(abs, v))
        state.replace(vec={"a": 1})
        x = s * THIRD ;; x = TENTH + s
        x = s * TENTH ;; x = s * "2" ;; x = "a" * n ;; x = s + None ;; x = s * 2j ;; x = s == None ;; x = s == "a"
        x = n + [None] ;; x = v + {1, 2, 3} ;; x = v + range(3)
        x = v + np.ones((1, 3)) ;; x = v * np.ones((3, 1)) ;; x = s * np.datetime64("2020-01-01")
        x = s * np.complex64(1) ;; x = np.array([None]) * s ;; x = where(o, s, None) ;; x = where(o, s, "x")
        x = where(o, seen, s)
        x = minimum("a", s) ;; x = float32(None) ;; x = float32(state) ;; x = int32("3")
        x = floor("2") ;; x = take("ab", n) ;; x = s + seen ;; x = stack([s, None])
        x = stack("ab") ;; x = s + Own ;; x = s + int32 ;; x = s + True.__class__
    """,
    (r"uses (4294967296|2147483648|\d+), which int32 cannot hold", "Compute with float32 values"): """
        x = minimum(n, CAP) ;; x = n + CAP ;; x = n + 2**31 ;; x = where(o, n, CAP)
        x = np.array([1, 2, 2**40]) + stack([n, n, n]) ;; x = n + int32(2**40) ;; x = take([1, CAP], n)
        state.replace(clean=CAP) ;; x = where(o, CAP, 1)
    """,
    ("uses an integer of .* bits, which int32 cannot hold", "Compute with float32 values"): """
        x = n + 10**400
    """,
    ("uses .*, which float32 cannot hold", "Use a smaller number, or math.inf"): """
        x = s * 1e39 ;; x = s + 2**200 ;; x = s - 1e300 ;; x = v * [1, 1e300, 1] ;; x = s * 10**400
        state.replace(loss_scale=-1e39)
    """,
    (r"uses .*, but devices flush numbers below 2\^-126 to 0", "Use a larger number"): """
        x = s * 1e-40 ;; x = s + 5e-324 ;; x = s - 1e-300 ;; x = s * (1e-30 * 1e-30) ;; x = maximum(s, -1e-39)
        state.replace(mean=2.0**-127)
    """,
    ("has a constant .*NaN", "Mark a missing value by .* -1"): """
        x = s + math.nan ;; x = where(o, s, float("nan")) ;; state.replace(mean=math.nan) ;; x = maximum(s, np.nan)
    """,
    ("converts (nan|inf|-inf) to int32, which cannot represent it", "Use a finite number"): """
        x = n + int32(math.nan) ;; x = int32(math.inf) ;; x = int32(-math.inf)
    """,
    ("combines vectors of lengths", "Use vectors of equal length"): """
        x = v + [1.0, 2.0] ;; x = v + stack([s, s]) ;; x = [1.0] * v ;; x = where(v > 1, stack([s, s]), 1.0)
        x = where(stack([o, o]), v, 1.0) ;; x = v < (1, 2) ;; x = np.ones(4) * v
    """,
    ("(has an empty vector|calls stack without values)", "Give at least one (element|number)"): """
        x = v + [] ;; x = take([], n) ;; x = stack([]) ;; x = v * np.zeros(0)
    """,
    ("calls stack.. with a vector, but stack.. takes numbers only", r"Unpack the vector: stack\(\[\*v, x\]\)"): """
        x = stack([v, v]) ;; x = stack([v, 1.0])
    """,
    (r"calls count\(\) .* bool .*shape \(\)", r"Give count\(\) a vector of bool"): """
        x = count(o) ;; x = count(s > 2) ;; x = count(True)
    """,
    (r"calls count\(\) .* (float32|int32) .*shape", r"Give count\(\) a vector of bool"): """
        x = count(v) ;; x = count([1, 2]) ;; x = count(n)
    """,
    (r"calls argmin\(\) .*shape", r"Give argmin\(\) a vector of float32"): """
        x = argmin(s) ;; x = argmin(n) ;; x = argmin(v > 1) ;; x = argmin([1, 2])
    """,
    (r"calls take\(vector, index\) without a vector .*int32 index", r"Write take\(v, int32\(i\)\)"): """
        x = take(s, n) ;; x = take(v, s) ;; x = take(v, o) ;; x = take(v, stack([n, n]))
    """,
    (
        r"calls where\(\) with a condition .* not a bool",
        r"Write a comparison .* a > b, or stack\(\[...\]\) of",
    ): """
        x = where(s, s, 1.0) ;; x = where(n, s, 1.0) ;; x = where(v, v, 1.0) ;; x = where(1, s, 1.0)
        x = where(None, s, 1.0) ;; x = where([True, False, o], v, 1.0)
        x = where(np.array([True, False, True]), v, 1.0) ;; x = where(state, s, 1.0) ;; x = where(seen, s, 1.0)
    """,
    (r"calls where\(\) with two states and a vector", "Use one bool"): """
        x = where(v > 1, state, state.replace(loss_scale=1.0))
    """,
    (r"calls where\(\) with only one state", "two states or two values"): """
        x = where(o, state, None) ;; x = where(o, state, {"loss_scale": 1.0}) ;; x = where(o, s, state)
    """,
    ("uses a list .*of values", r"Use stack\(\[...\]\) .*only one of the values"): """
        state.replace(vec=[s, s, 1.0]) ;; x = take([1.0, s], n) ;; x = v + (s, 1.0, 2.0) ;; x = count([o, True])
        state.replace(clean=tabulate(lambda n: (n, n), n=(n, 0, 3))) ;; x = argmin([s, s])
    """,
    ("compares (states|'seen')", r"(Compare numbers|Use seen.overflow)"): """
        x = state == state ;; x = state != state.replace(loss_scale=1.0) ;; if state: s = s / 2 ;; if seen: s = s / 2
        x = state and s ;; x = not seen
    """,
    (".*tabulate", TABULATE): """
        x = tabulate(lambda n: n + 1, n=(n, 0, 3)) ;; x = tabulate(lambda n: (n + 0.5,), n=(n, 0, 3))
        x = tabulate(lambda n: (2**40,), n=(n, 0, 3)) ;; x = tabulate(lambda n: (1,) * n, n=(n, 1, 3))
        x = tabulate(lambda n: [n], n=(n, 1, 3)) ;; x = tabulate(lambda n: None, n=o)
        x = tabulate(lambda n: ("a",), n=o) ;; x = tabulate(lambda n: (None,), n=o)
        x = tabulate(lambda n: (s,), n=o) ;; x = tabulate(functools.partial(lambda k, n: k, 2), n=o)
        x = tabulate(lambda n: (1,), n=n) ;; x = tabulate(lambda n: (1,), n=(n, 1))
        x = tabulate(lambda n: (1,), n=(n, 1, 2, 3)) ;; x = tabulate(lambda n: (1,), n=(s, 1, 3))
        x = tabulate(lambda n: (1,), n=(v, 1, 3)) ;; x = tabulate(lambda n: (1,), n=(o, 0, 1))
        x = tabulate(lambda n: (1,), n=3) ;; x = tabulate(lambda n: (1,), n=(3, 0, 4))
        x = tabulate(lambda n: (1,), n=()) ;; x = tabulate(lambda n: (1,), n=v > 1)
        x = tabulate(lambda n: (1,), n=(n, 0.5, 3)) ;; x = tabulate(lambda n: (1,), n=(n, "a", 3))
        x = tabulate(lambda n: (1,), n=(n, -2**40, 1 - 2**40)) ;; x = tabulate(lambda: (1,)) ;; x = tabulate(3, n=o)
        x = tabulate(None, n=o)
    """,
    (r"calls tabulate\(", r"(more than 65536 combinations|n=\(value, lowest, highest\) with an int32 value)"): """
        x = tabulate(lambda n: (1,), n=(n, 0, 2**16)) ;; x = tabulate(lambda n: (1,), n=(n, 3, 1))
        x = tabulate(lambda n: (1,), n=(n, n, 3))
        x = tabulate(lambda n, m: (1,), n=(n, 0, 300), m=(n, 0, 300))
    """,
    ("sets loss_scale and .* exponent, .*loss_scale", "Use only one"): """
        return state.replace(exponent=state.exponent - 1, loss_scale=s / 2)
        return state.replace(loss_scale=s / 2, clean=state.exponent)
        return where(o, state.replace(exponent=1), state.replace(loss_scale=s * 2))
        return state.replace(loss_scale=float32(state.exponent))
    """,
    ("must return state.replace", "returns"): """
        return {"loss_scale": s} ;; return None ;; return ;; return (s, n) ;; return [state] ;; return s
        return state.replace ;; return seen ;; return True ;; return lambda: state ;; yield state
    """,
    ("assigns self.(kept|factor|min_loss_scale|state)", KEEP): """
        self.kept = s ;; self.kept = getattr(self, "kept", 0) + 1 ;; self.factor = 2.0 ;; self.min_loss_scale = 4.0
        setattr(self, "kept", []) ;; self.state = {}
    """,
    ("uses a value .*another call", KEEP): """
        KEPT.append(s); x = s + KEPT[0] ;; KEPT.append(v); x = stack([s, KEPT[0][0]])
        KEPT.append(o); x = where(KEPT[0], s, 1.0) ;; KEPT.append(n); x = int32(KEPT[0])
        Own.kept = getattr(Own, "kept", s); return state.replace(loss_scale=Own.kept)
        KEPT.append(state); x = KEPT[0].clean + n
    """,
    ("returns the state .*another call", r"Return state.replace\(...\) of the argument 'state'"): """
        KEPT.append(state); return KEPT[0] ;; KEPT.append(state.replace(mean=s)); return KEPT[0]
    """,
    ("does something else .*called again", "on its arguments only"): """
        return state.replace(mean=random.random()) ;; return state.replace(mean=s * random.gauss(0, 1))
        return state.replace(mean=np.random.rand() + s) ;; return state.replace(mean=s * (1 + time.time()))
        return state.replace(mean=s * time.perf_counter())
        return state.replace(clean=id(object()) % 7 + time.time_ns() % 1000003)
        KEPT.append(1); return state.replace(loss_scale=s * len(KEPT))
        KEPT.append(1); return state.replace(loss_scale=s / 2 if len(KEPT) > 1 else s * 2)
        KEPT.append(1); return state.replace(loss_scale=s) if len(KEPT) > 1 else state.replace(loss_scale=s + 1)
        Own.calls = getattr(Own, "calls", 0) + 1; return state.replace(loss_scale=s * Own.calls)
        return state.replace(clean=tabulate(lambda o: (random.randint(0, 10**6),), o=o)[0])
        return state.replace(mean=take([random.random(), 1.0], n))
    """,
    ("sets the attribute 'dtype' of a value", "Compute a new value instead"): """
        s.dtype = 'int32'
    """,
    ("has the list .* in place of a number", r"For a vector use stack\(\[...\]\)"): """
        x = where(o, [1.0, 2.0], [2, 3]) ;; x = v + [[1.0, 2.0, 3.0]] ;; x = float32([1, 2]) ;; x = argmin([[s, s]])
    """,
    ("uses the attribute '\\w+', but .* no such attribute", r"Use \+ - \* / //, comparisons"): """
        x = s.astype(1) ;; x = v.sum() ;; x = v.T ;; x = s.item() ;; x = statistics.mean(v)
    """,
    ("assigns an element .*vector", r"Make another vector by stack\(\[...\]\)"): "v[0] = 1.0 ;; v[o] = s",
    ("looks a value up .* dict", "Compare it by ==, or use tabulate"): """
        x = s in {1.0, 2.0} ;; x = {0: 1, 1: 2}.get(n, 3) ;; x = len({n, n + 0}) ;; x = {n: 1}
    """,
    (r"creates a rule or .*step\(\)", r"Create rules in the constructor.*next_state\(\)"): """
        x = Own() ;; x = Own().next_state(state, seen) ;; x = self.start(1.0) ;; x = self.step(None, False)
    """,
}
# These problems are found only after the rule's step has returned, so the error names the line of the step's 'def'.
OF_THE_STEP = ("sets loss_scale", "must return", "returns the state", "does something else")

CASES = [
    pytest.param(problem, remedy, part.strip(), id=part.strip().replace("@", "at"))
    for (problem, remedy), lines in REFUSED.items()
    for line in lines.strip().splitlines()
    for part in line.split(" ;; ")
]


@pytest.mark.parametrize(("problem", "remedy", "statement"), CASES)
def test_forbidden_parts_of_a_step_are_refused_with_their_line(tmp_path, problem, remedy, statement):
    message, file, line = refusal(tmp_path, statement)
    line = SIGNATURE if problem.startswith(OF_THE_STEP) or statement.endswith("return KEPT[0]") else line
    assert_says(message, problem, remedy, f", in line {line} of {file}")


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("x = nothing", "NameError: name 'nothing' is not defined"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("raise NotImplementedError('later')", "NotImplementedError: later"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("x = self.nothing", "AttributeError: 'Own' object has no attribute 'nothing'"),
        ("x = state['clean']", "TypeError: '.*State' object is not subscriptable"),
        ("a, b = v", "ValueError: too many values"),
        ("x = where(o, s)", r"TypeError: where\(\) missing 1 required positional argument: 'y'"),
        ("x = minimum(s, 1, 2)", r"TypeError: minimum\(\) takes 2 positional arguments but 3 were given"),
        ("state.replace({'clean': 1})", r"TypeError: .*replace\(\) takes 1 positional argument but 2 were given"),
        ("x = tabulate(lambda n: (1 // 0,), n=o)", "ZeroDivisionError"),
        ("x = tabulate(lambda m: (1,), n=o)", "TypeError: .*unexpected keyword argument 'n'"),
        ("x = math.ldexp(1.0, state.exponent)", "TypeError: Expected an int .*ldexp"),
        ("x = itertools.islice([1, 2], n)", "ValueError: Stop argument for islice"),
        ("x = f'{s:.3f}'", "TypeError: unsupported format string"),
        ("f = lambda x: f(x); f(s)", "RecursionError: maximum recursion depth exceeded"),
        ("x = self.next_state(state, seen)", "RecursionError: maximum recursion depth exceeded"),
        ("assert False, 'so'", "AssertionError: so"),
        ("next(iter(()))", "StopIteration"),
    ],
)
def test_an_error_in_a_step_is_told_with_the_line_of_the_rule(tmp_path, statement, error):
    message, file, line = refusal(tmp_path, statement)
    # If a step calls itself without end, the message may name the line of the call or the line before it.
    line = rf"({line}|{line - 1})" if "next_state" in statement else line
    where_it_is = rf", in line {line} of {re.escape(str(file))}\.$"
    assert re.search(rf"^The step of the rule 'own' raises {error}.*{where_it_is}", message), message


@pytest.mark.parametrize(
    "statement", ["try: x = s + n\nexcept ValueError: pass", "try:\n    if o: s = 2.0\nexcept Exception: s = s / 2"]
)
def test_a_refusal_that_the_rule_catches_stands(tmp_path, statement):
    message, file, line = refusal(tmp_path, statement)
    line += statement.startswith("try:\n")
    assert_says(message, "(mixes|has an 'if')", r"(Write|Use)", f", in line {line} of {file}")


def test_the_line_is_that_of_a_helper_function_in_its_own_file(tmp_path, monkeypatch):
    helper = tmp_path / "helper_of_a_rule.py"
    helper.write_text("def lowered(scale):\n    # A comment.\n    return scale % 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    message, _, _ = refusal(tmp_path, "from helper_of_a_rule import lowered; x = lowered(s)")
    assert_says(message, "has '%'", "Use a - a", f", in line 3 of {helper}")


def test_a_signal_that_is_not_declared_is_refused(tmp_path):
    source = HEAD.replace("    needs_gradients = True\n", "\n")
    for name in ("largest_gradient", "gradient_known", "max_safe_exponent"):
        with pytest.raises(RuleError) as refused:
            made(tmp_path, source + f"        x = seen.{name}\n        return state\n")
        where_it_is = f", in line {HEAD.count(chr(10)) + 1} of {tmp_path / 'strange_rule.py'}"
        assert_says(str(refused.value), rf"reads seen\.{name},", "Set needs_gradients = True", where_it_is)


def test_values_work_within_a_step_only():
    saved = []

    class Keeps(Rule):
        name = "keeps"

        def next_state(self, state, seen):
            saved.append(state.loss_scale)
            return state

    Keeps()
    uses = (
        lambda: saved[0] + 1,
        lambda: saved[0] > 1,
        lambda: abs(saved[0]),
        lambda: stack([1.0]),
        lambda: count([True]),
    )
    for use in (
        *uses,
        lambda: where(saved[0] > 1, 1, 2),
        lambda: int32(saved[0]),
        lambda: float32(3),
        lambda: minimum(1, 2),
    ):
        with pytest.raises(
            RuleError, match=r"only inside next_state\(\), but this code .*, in line \d+ of .*test_tracing\.py\.$"
        ):
            use()
    with pytest.raises(RuleError, match=r"creates a value \('constant'\)\. Write a plain number.*float32\[8\]"):
        float32(8)


# Class attributes that a rule must not have, such as a name with a space: the package refuses the rule.


def described(**names):
    """Return a rule whose class has the given attributes."""
    return type("Own", (Rule,), {"name": "own", "next_state": lambda self, state, seen: state, **names})()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(({"name": name}, r"must have a name .*letters.* name = 'halve'") for name in ("", "a b", "a.b", "../x", 7)),
        ({"name": None}, "must have a name .*letters"),
        *(
            ({"state": {"x": kind}}, "declares the field 'x' as .* Write int32 or float32, .* or a dict such as")
            for kind in (int, bool, "int32", np.int32, 0, None, [], {}, {"a": int32, "b": float32}, {"a": {"b": int32}})
        ),
        ({"state": {"x": {"a": int32[2]}}}, "declares the field 'x' as .* Write int32 or float32"),
        *(({"state": state}, "must have 'state' as a dict") for state in (["x"], None, int32, 7)),
        *(
            ({"state": {key: int32}}, "in its state, .*name of letters, digits")
            for key in ("a b", "_a", "lambda", 7, "")
        ),
        *(
            ({"state": {key: int32}}, f"has '{key}' in its state, .*this package uses.*Choose another")
            for key in (
                "loss_scale",
                "exponent",
                "history",
                "min_loss_scale",
                "max_exponent",
                "cur_iter",
                "skipped_steps",
                "step",
            )
        ),
        ({"state": {"x": {"cur_iter": int32}}}, "has 'cur_iter' in its state, .*this package uses"),
        ({"state": {"x": {"a": int32}, "y": {"a": int32}}}, "has 'a' in its state, .*another field"),
        ({"state": {"x": {"a": int32}, "a": int32}}, "has 'a' in its state, .*another field"),
        ({"state": {"x": {"y": int32}, "y": {"z": int32}}}, "has 'y' in its state, .*another field"),
        *(
            (
                {"needs_gradients": needs_gradients},
                "must have needs_gradients = True or False",
            )
            for needs_gradients in (("largest_gradient",), None, 1, "True")
        ),
        ({"signals": ("largest_gradient",)}, "has 'signals'.* needs_gradients = True"),
        ({"recorded": ("x",)}, "has 'x' in 'recorded', .*no number of that name"),
        (
            {"recorded": ("x",), "state": {"x": {"a": int32}}},
            "has 'x' in 'recorded', .*no number of that name",
        ),
        ({"recorded": None}, "must have 'recorded' as a tuple of names"),
        ({"recorded": ([],)}, "must have 'recorded' as a tuple of names"),
        ({"next_state": Rule.next_state}, r"Define .*next_state\(self, state, seen\)"),
        ({"next_state": None}, r"next_state\(self, state, seen\)"),
        ({"next_state": lambda self, state: state}, r"next_state\(self, state, seen\)"),
        (
            {"__init__": lambda self, window=2, /: Rule.__init__(self)},
            "must take its argument 'window' by name. Leave out the '/'",
        ),
        (
            {"__init__": lambda self, window=2: Rule.__init__(self)},
            "must keep its argument 'window' .*self.window = window",
        ),
        ({"__init__": lambda self: None}, r"super\(\).__init__\("),
        ({"__init__": lambda self, **bounds: None}, r"super\(\).__init__\("),
    ],
)
def test_wrong_description_is_refused_when_the_rule_is_made(names, message):
    with pytest.raises(ValueError, match=message) as refused:
        described(**names)
    assert f"rule {names.get('name', 'own')!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(
            ("own", [field])
            for field in ("scale", "scale_sense", "growth_tracker", "hysteresis_tracker", "restored", "inv_scale")
        ),
        ("own", ["vector", "vector_0"]),
    ],
)
def test_names_that_mean_something_in_checkpoints_are_refused(name, fields):
    with pytest.raises(ValueError, match=f"rule '{name}' .*{fields[-1]}'.*(this package uses|another field)"):
        described(name=name, state={field: float32[2] if field == "vector" else float32 for field in fields})


@pytest.mark.parametrize(
    "name", ["loss_scale_value", "init_loss_scale", "scale_value", "rule", "type", "needs_gradients"]
)
def test_argument_named_like_a_cells_or_a_sections_is_refused(name):
    of_constructor = {}
    exec(f"def __init__(self, {name}=3):\n    Rule.__init__(self)\n", {"Rule": Rule}, of_constructor)
    with pytest.raises(ValueError, match=f"has an argument '{name}', .* already uses this name. Rename"):
        described(**of_constructor)


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "2", None, (2, 3), 10**12])
def test_a_vector_has_a_length(length):
    with pytest.raises(
        ValueError, match=rf"float32\[...\] must have one length, .* 65536, but got {re.escape(repr(length))}\. "
    ):
        _ = float32[length]


def test_a_step_of_too_many_operations_is_refused():
    def doubled(self, state, seen):
        return state.replace(values=state.values * 2)

    def in_parts(self, state, seen):
        return state.replace(values=stack([number * 2 for number in state.values]))

    for length in (1, 512, 65536):
        described(state={"values": float32[length]}, next_state=doubled)
    described(state={"values": float32[512]}, next_state=in_parts)
    for length in (1024, 65536):
        with pytest.raises(ValueError, match=r"records more than 2048 operations.*whole vectors.* take, .*line"):
            described(state={"values": float32[length]}, next_state=in_parts)


@pytest.mark.parametrize("name", ["select", "phase", "scale_factor", "inputs", "step_function", "rule", "training"])
def test_field_named_like_the_cells_attribute_is_refused(name):
    rule = described(state={name: float32})
    assert rule.step(rule.start(2.0), False)[1] == 0.0
    with pytest.raises(ValueError, match=f"rule 'own' must not be called '{name}'.*Choose another name"):
        RuleLossScaleUpdateCell(rule, 2.0)


# Tests that rules with unusual but correct code are accepted: unusual statements, and state fields with names that the
# generated code uses too.

NAMES = [
    "v0",
    "v1",
    "w2",
    "np",
    "ops",
    "mstype",
    "places",
    "changed",
    "powers",
    "NONE",
    "taken",
    "r_loss_scale",
    "index",
]


def mixed_up(self, state, seen):
    values = {name: getattr(state, name) for name in NAMES}
    values_of_rest = dict(zip(NAMES, [*list(values.values())[1:], values["v0"] + 1], strict=True))
    raised = state.replace(loss_scale=state.loss_scale * 1.5, **values_of_rest)
    return where(seen.overflow, state.replace(loss_scale=state.loss_scale / 3, v0=state.index), raised)


# Expressions that a rule's step accepts as they are; each expression gives a float32.
ACCEPTED = """
sum(v) / len(v)
stack(list(reversed(list(v))))[0] * v[-1]
take([1.0, 2.5], n) + take(v, n - 1) * take((0.5, 0.25), 1)
float32(n) + 16777217
np.maximum(s, 2.0) + np.abs(-s) + np.floor(s / 3)
np.float64(0.1) * s - s * np.float16(0.1) + np.float32(1) / s
(np.array(2.0) * s + (np.arange(3.0) + v + np.array([1, 2, 2**40]))[1]) * 1e-3
float32(np.uint8(3) - n * np.int64(3))
float32(int32(o) + int32(~o) * 3 + int32(o == True) + int32(o != (s > 2)))
float32(int32((s > 2) & True) + int32(np.logical_and(o, s > 1)) + int32(np.logical_or(o, True)))
where(True, s, n) + where(np.bool_(False), n, s)
float32(where(o, 1, 2)) + where(o, 1, 2.5)
functools.reduce(maximum, v) - next(iter(v))
math.prod(v) + sum(x * 2 for x in v)
float32(tabulate(functools.partial(lambda k, n: (k + n,), 2), n=o)[0])
float32(stack(tabulate(lambda n, o: (n * n, -n), n=(n, -3, 3), o=o))[1] + tabulate(lambda n: (n,), n=(n, 1, 3))[0])
float32(7 // (n - 3) - n // -1 + n // 3 + (n - 2**30) // 2**20)
eval("s / 2") + {0: s, 1: 2.0}[len(v) - 2]
(lambda x, *more, y=2.0: x * y + sum(more))(s, v[0], 1)
operator.add(s, 1) - operator.neg(s) + operator.truediv(1, s)
float32(count(v > 1) * 10 + argmin(v) + argmin([2.0, 1.0]) + count([True, False]))
abs(+s - -v[2]) + ceil(s / 7) + floor(2.5) + ceil(2)
float32(int32(s * 1e6) // 2 - int32(-s * 1e9) + int32(2.7) + int32(0.99 * float32(n + 1)))
where(v > 1, v, [3.0, 2.0, 1.0])[2] + where(v[0] > v[1], 1, 2.5)
s * DECAY + v[1] * (1 - DECAY)
seen.largest_gradient + float32(seen.max_safe_exponent) * 0.5 + where(seen.gradient_known, 1.0, 0.0)
minimum(s, math.inf) + maximum(-math.inf, v[2]) + minimum(maximum(s * 1e30, 5.0), 1e38)
s + KEPT.__len__() + self.min_loss_scale + self.gradient_format.largest + self.max_exponent
copy.copy(state).replace(mean=s * 2).mean + copy.deepcopy(state).mean
""".strip().splitlines()
STATES = f"""
    state = {{"clean": int32, "mean": float32, "vec": float32[3], "found": float32[{len(ACCEPTED)}]}}
"""


def test_random_statements_are_right_where_they_are_accepted(graph_mode, tmp_path):
    head = re.sub(r"\n    state = .*\n", STATES, HEAD)
    lines = "".join(f"            {line},\n" for line in ACCEPTED)
    after = "vec=stack([v[1] + 1, v[2] * 0.5, v[0] + float32(n)])"
    scale = "loss_scale=where(o, s / 3, s * 1.7), clean=where(o, n - 4, n + 1)"
    body = f"        found = stack([\n{lines}        ])\n        return state.replace(found=found, {scale}, {after})\n"
    assert_equal_steps(made(tmp_path, head + body), 60)


def test_fields_may_be_called_like_names_of_the_generated_code(graph_mode):
    assert_equal_steps(described(state=dict.fromkeys(NAMES, int32), next_state=mixed_up), 40)


def assert_equal_steps(rule, steps):
    numbers, state, owned = np.random.default_rng(0), rule.start(2.0**16), Owned(RuleLossScaleUpdateCell(rule, 2.0**16))
    for number in range(steps):
        overflow, gradient = numbers.random() < 0.3, float(np.float32(numbers.choice([1.0, 1e-3, 0.0, np.inf, 77.0])))
        state = rule.step(state, overflow, gradient)
        owned.step(overflow, gradient)
        assert is_same(owned.update_cell.rule_state(), state), number
    assert len({*state}) > 3


@pytest.mark.parametrize(
    "again", [lambda error: type(error)(f"'rule': {error}"), lambda error: pickle.loads(pickle.dumps(error))]
)
def test_a_refusal_may_be_passed_on(tmp_path, again):
    with pytest.raises(RuleError) as refused:
        made(tmp_path, f"{HEAD}        x = s % 2\n        return state\n")
    text = str(again(refused.value))
    assert text.removeprefix("'rule': ") == str(refused.value)
    assert "has '%'" in text


def test_chance_is_noticed_in_every_rule(tmp_path):
    class Noise(Rule):
        name = "noise"

        def __init__(self, share):
            super().__init__()
            self.share = share

        def next_state(self, state, seen):
            return state.replace(loss_scale=state.loss_scale * (1.0 + self.share * random.random()))

    Noise(0.0)
    with pytest.raises(ValueError, match=r"does something else .*called again\. .* on its arguments"):
        Noise(0.5)


def test_a_rule_that_is_installed_has_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("mindformers_adaptive.rules.values._STANDARD", f"{tmp_path.parent}/")
    monkeypatch.setattr("mindformers_adaptive.rules.values._INSTALLED", f"{tmp_path}/")
    message, file, line = refusal(tmp_path, "x = s % 2")
    assert_says(message, "has '%'", "Use a - a // b", f", in line {line} of {file}")
