"""Find known names that are similar to a misspelled name."""

import difflib
from collections.abc import Collection, Sequence


def nearest_names(word: str, known: Collection[str]) -> str:
    """Return the three known names that are most similar to a word, separated by commas.

    Examples:
        >>> nearest_names("wq", ["wk", "wo", "lm_head", "wq.weight"])
        'wo, wk, wq.weight'
    """
    return ", ".join(difflib.get_close_matches(word, known, cutoff=0.0))


# Former names of arguments, each with the name of the argument that replaced it.
_RENAMED = {"exchange_rate": "margin"}


def did_you_mean(word: str, known: Collection[str], most: int = 1, similarity: float = 0.6) -> str:
    """Return "Did you mean ...? " with the known names that are similar to a word; "" if no name is similar.

    Args:
        word (str): the misspelled name.
        known (Collection[str]): the names to choose from.
        most (int): how many names to give. Default: 1.
        similarity (float): the lowest similarity, from 0 to 1, of the names to give. Default: 0.6.

    Examples:
        >>> did_you_mean("scale_windw", ["scale_window", "scale_factor"])
        "Did you mean 'scale_window'? "
        >>> did_you_mean("seed", ["scale_window"])
        ''
        >>> did_you_mean("exchange_rate", ["margin"])
        "Use 'margin' instead. "
    """
    if _RENAMED.get(word) in known:
        return f"Use {_RENAMED[word]!r} instead. "
    similar = difflib.get_close_matches(word, known, n=most, cutoff=similarity)
    return f"Did you mean {' or '.join(map(repr, similar))}? " if similar else ""


def describe_wrong(words: Sequence[str], known: Collection[str]) -> str:
    """Return misspelled names in quotes, and the known names that are similar to each of them.

    Examples:
        >>> describe_wrong(["scale_windw"], ["scale_window", "scale_factor"])
        "'scale_windw'. Did you mean 'scale_window'? "
        >>> describe_wrong(["scale_windw", "seed"], ["scale_window"])
        "'scale_windw', 'seed'. Did you mean 'scale_window' for 'scale_windw'? "
    """
    listed = f"{', '.join(map(repr, words))}. "
    hints = {word: did_you_mean(word, known, most=3, similarity=0.8) for word in words}
    if len(words) == 1:
        return listed + hints[words[0]]
    return listed + "".join(
        f"{hint.rstrip('?. ')} for {word!r}{hint.strip()[-1]} " for word, hint in hints.items() if hint
    )


def letters_apart(word: str, other: str) -> int:
    """Return how many letters must be added, removed or replaced to turn one word into another.

    Examples:
        >>> letters_apart("runner_wraper", "runner_wrapper"), letters_apart("optimiser", "optimizers")
        (1, 2)
    """
    distances = list(range(len(other) + 1))
    for row, letter in enumerate(word, start=1):
        diagonal, distances[0] = distances[0], row
        for column, known in enumerate(other, start=1):
            replaced = diagonal + (letter != known)
            diagonal = distances[column]
            distances[column] = min(replaced, distances[column] + 1, distances[column - 1] + 1)
    return distances[-1]
