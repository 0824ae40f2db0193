"""Groups the Parameters of a network by their names, such as attention and embedding."""

import re
from collections.abc import Callable, Mapping

# The largest number of groups of Parameters. A picture has a row of histograms for each group, and more rows than this
# are too many to compare.
MOST_GROUPS = 6
_OTHERS = "others"
_ORDER = ("embedding", "attention", "feed forward", "norm", "output")

# Groups of Parameters, each with a pattern for Parameter names. A Parameter belongs to the first group whose pattern
# matches its name. A norm may be named after the next layer, as in attention_norm, so the group "norm" comes first. The
# last layer of a block may be called output, so the group "output" comes last.
_KINDS = (
    ("norm", r"norm|(^|[._])(ln|bn)\d*([._]|$)|\.(gamma|beta)$"),
    ("embedding", r"embed|(^|\.)w[tp]e(\.|$)"),
    ("attention", r"attention|attn"),
    ("feed forward", r"feed_?forward|ffn|mlp|expert|intermediate|(layers?|blocks?|h)\.\d+\.output"),
    ("output", r"(^|[._])(head|classifier|pooler|output(_layer)?)(\.|$)"),
)


def parameter_group(name: str) -> str | None:
    """Return the group of a Parameter, or None if its name matches no group.

    The lower-case name is searched in this order: norm (``norm``, ``ln_1``, ``bn2``, ``.gamma``),
    embedding (``embed``, ``wte``, ``wpe``), attention (``attention``, ``attn``), feed forward (``feed_forward``,
    ``ffn``, ``mlp``, ``expert``), output (``head``, ``output_layer``).

    Args:
        name (str): the Parameter's name.

    Examples:
        >>> parameter_group("model.layers.0.attention.wq.weight")
        'attention'
        >>> parameter_group("model.layers.0.attention_norm.weight")
        'norm'
        >>> parameter_group("conv1.weight") is None
        True
    """
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), None)


def group_parameters(
    sizes: Mapping[str, int], group: Callable[[str], str | None] = parameter_group
) -> dict[str, list[str]]:
    """Return the names of the Parameters in each group, such as attention or embedding.

    Parameters without a group are grouped by the first component of their names that is not common to all of them. Of
    more than six groups, the five with the most elements stay and the rest are ``"others"``.

    Args:
        sizes (Mapping[str, int]): the number of elements of each Parameter, by name.
        group (Callable): returns the group of a Parameter's name, or None. Default: :func:`parameter_group`.

    Returns:
        dict[str, list[str]]: the names of the Parameters of each group. The groups that :func:`parameter_group` knows
            come first, from embedding to output.

    Examples:
        >>> group_parameters({"net.conv1.weight": 9, "net.conv1.bias": 1, "net.norm.gamma": 2})
        {'norm': ['net.norm.gamma'], 'conv1': ['net.conv1.weight', 'net.conv1.bias']}
    """
    kinds = {name: group(name) for name in sizes}
    shared = _shared_components([name for name, kind in kinds.items() if kind is None])
    groups: dict[str, list[str]] = {kind: [] for kind in _ORDER}
    for name, kind in kinds.items():
        groups.setdefault(kind or name.split(".")[shared], []).append(name)
    groups = {kind: members for kind, members in groups.items() if members}
    if len(groups) <= MOST_GROUPS:
        return groups
    largest = sorted(groups, key=lambda kind: -sum(sizes[name] for name in groups[kind]))[: MOST_GROUPS - 1]
    largest_groups = {kind: names for kind, names in groups.items() if kind in largest}
    remaining = [name for kind, names in groups.items() if kind not in largest for name in names]
    return {**largest_groups, _OTHERS: [*largest_groups.pop(_OTHERS, []), *remaining]}


def _shared_components(names: list[str]) -> int:
    """Return how many leading components all Parameter names share.

    Leave each name at least one component before its last component.
    """
    split = [name.split(".")[:-1] for name in names]
    same = [len(set(components)) == 1 for components in zip(*split, strict=False)]
    return same.index(False) if False in same else max(len(same) - 1, 0)
