"""Selects which values of a sweep to show (gradients of weights or activations, weights, outputs) and which modules."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from mindformers_adaptive.gradients.groups import MOST_GROUPS
from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.text.nearest import nearest_names

KINDS = ("gradients", "weights", "outputs", "activation_gradients")

# The kinds of values that the loss scale multiplies.
SCALED = ("gradients", "activation_gradients")


def select(ranges: GradientRanges, kind: str = "gradients", modules: Sequence[str] = ()) -> GradientRanges:
    """Return a copy of a sweep over loss scales with values of another kind, such as weights, in place of gradients.

    Weights and outputs do not depend on the loss scale, so the sweep returned for them has only the scale 1.

    Args:
        ranges (GradientRanges): the sweep.
        kind (str): "gradients", "weights", "outputs" or "activation_gradients" (gradients of the outputs of layers).
            Default: "gradients".
        modules (Sequence[str]): as in :func:`group_of_modules`. Default: none, for all modules.

    Raises:
        ValueError: if the sweep has no values of this kind, or no such module.
    """
    if kind != "gradients":
        values = getattr(ranges, kind)
        if not values or (kind in SCALED and not values[0][0].parameters):
            measured = "" if kind == "weights" else ": to measure them, give 'layers' or --layers"
            what = kind.replace("_", " ")
            raise ValueError(f"There are no {what} to draw{measured}. Draw the gradients, or measure again.")
        ranges = replace(ranges, batches=values if kind in SCALED else ((ScaleRanges(1.0, math.nan, values),),))
    if not modules:
        return ranges
    if len(modules) > MOST_GROUPS:
        raise ValueError(
            f"'modules' must have at most {MOST_GROUPS} names, because the picture has a row for each module, but got "
            f"{len(modules)}. Draw the other modules in another picture."
        )
    group = group_of_modules(modules, ranges.batches[0][0].parameters)

    def selected(scale_ranges: ScaleRanges) -> ScaleRanges:
        # Keep the order of the given modules, which is the order of the rows in the picture.
        parameters = {
            name: each for module in modules for name, each in scale_ranges.parameters.items() if group(name) == module
        }
        return replace(scale_ranges, parameters=parameters)

    return replace(ranges, batches=tuple(tuple(map(selected, batch)) for batch in ranges.batches))


def group_of_modules(modules: Sequence[str], names: Iterable[str]) -> Callable[[str], str | None]:
    """Return a function that maps the name of a Parameter or layer to the first module that it belongs to, or None.

    Args:
        modules (Sequence[str]): names of modules or Parameters, or patterns with ``*``.
        names (Iterable[str]): the names of all Parameters or layers.

    Raises:
        ValueError: if no Parameter or layer belongs to a module.

    Examples:
        >>> group = group_of_modules(["layers.0", "*.wq"], ["layers.0.wk", "layers.1.wq"])
        >>> group("layers.0.wk"), group("layers.1.wq"), group("layers.1.wk")
        ('layers.0', '*.wq', None)
    """

    def belongs(name: str, module: str) -> bool:
        return name == module or name.startswith(f"{module}.") or fnmatchcase(name, module)

    there = [*names]
    for module in modules:
        if not any(belongs(name, module) for name in there):
            raise ValueError(
                f"'modules' must name measured modules or Parameters, but {module!r} is not among them. The nearest "
                f"names are {nearest_names(module, there)}."
            )
    return lambda name: next((module for module in modules if belongs(name, module)), None)
