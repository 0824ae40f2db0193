"""Finds the layers of a network by name, and measures their outputs and the gradients of these outputs."""

import contextlib
import fnmatch
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.statistics import ArrayStatistics, array_statistics, merge_statistics
from mindformers_adaptive.gradients.temporary_changes import without_recomputation
from mindformers_adaptive.rules.checks import require_names
from mindformers_adaptive.text.nearest import nearest_names


class LayerOutputsError(RuntimeError):
    """Raised if a network cannot run in PyNative mode, in which the outputs of layers are measured."""


class LayerOutputs:
    """Measures the outputs of layers in a PyNative forward pass, and the gradients of these outputs in a backward pass.

    In graph mode, too, these passes are in PyNative mode, where Python sees what a layer returns; the compiled graphs
    of the training stay as they are. The outputs do not depend on the loss scale. Layers are in the order of execution.

    Args:
        network (Cell): a network, or the train-step cell that trains it.
        layers (Iterable[str]): names of cells, as the names of their Parameters have them or as ``cells_and_names()``
            of the network yields them, or names of classes, for all cells of that class; or patterns of either with
            ``*``, which alone is all of them.

    Raises:
        TypeError: if ``layers`` is not an iterable of strings.
        ValueError: if no cell has such a name or class.

    Examples:
        >>> import numpy as np
        >>> outputs = LayerOutputs(nn.SequentialCell(nn.Dense(3, 2), nn.ReLU()), ["ReLU"])
        >>> measured = outputs((Tensor(np.ones((4, 3), np.float32)),))
        >>> list(measured), measured["1"].size
        (['1'], 8)
    """

    def __init__(self, network: Any, layers: Iterable[str]) -> None:
        self._network = network.network if isinstance(network, nn.TrainOneStepCell) else network
        names, cells = _named_cells(self._network)
        self._layers: dict[str, Any] = {}
        self._named: set[str] = set()
        for layer in require_names("layers", layers):
            wanted = names.get(layer, layer)
            chosen = {name: cell for name, cell in cells.items() if _is_called(wanted, name, type(cell).__name__)}
            if not chosen:
                candidates = [*{type(cell).__name__: None for cell in cells.values()}, *cells]
                raise ValueError(
                    f"'layers' must name cells of the network, or a class of cells, but {layer!r} is neither. The "
                    f"nearest names are {nearest_names(layer, candidates)}."
                )
            self._layers |= chosen
            self._named |= set() if "*" in wanted else chosen.keys()

    def __call__(
        self, batch: tuple[Any, ...], observe: Callable[[str, Any], object] | None = None
    ) -> dict[str, ArrayStatistics]:
        """Run a forward pass on a batch, and return the statistics of the layers' outputs.

        Args:
            batch (tuple[Tensor]): the inputs of the network.
            observe (Callable, optional): called with the name and the output of each layer, a NumPy array. Default:
                None.

        Returns:
            dict[str, ArrayStatistics] by layer: the statistics of its floating-point outputs, over all its calls.

        Raises:
            LayerOutputsError: if the network cannot run in PyNative mode.
        """
        parts: dict[str, list[ArrayStatistics]] = {}

        def measure(name: str, tensor: Any) -> Any:
            array = to_numpy(tensor)
            parts[name].append(array_statistics(array))
            if observe is not None:
                observe(name, array)
            return tensor

        with self._watched(lambda name: parts.setdefault(name, []), measure, "outputs", "forward"):
            self._network(*batch)
        # Leave out cells whose names match a pattern but which did not run, such as a CellList, which cannot be called.
        shown = [*parts, *(name for name in self._layers if name in self._named and name not in parts)]
        return {name: merge_statistics(parts.get(name, [])) for name in shown}

    def gradients(self, backward: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Run a backward pass, and return the gradients of the layers' outputs.

        Args:
            backward (Callable): runs the backward pass of ``network``.

        Returns:
            tuple[object, dict[str, NDArray]], what ``backward`` returned, and by layer the gradients of all its outputs
            of floating point and of all its calls, one after the other, of shape (elements,). Layers that the pass does
            not reach have none.

        Raises:
            LayerOutputsError: if the network cannot run in PyNative mode.
        """
        gradients_of: dict[str, dict[int, Any]] = {}
        places = itertools.count()

        def hook(name: str, tensor: Any) -> Any:
            index = next(places)

            def keep(gradients: Any) -> None:
                gradients_of[name][index] = to_numpy(gradients[0]).reshape(-1)

            return ops.HookBackward(keep)(tensor)

        with self._watched(lambda name: gradients_of.setdefault(name, {}), hook, "activation gradients", "backward"):
            returned = backward()
        # MindSpore calls the hooks in the order of the backward pass. Sort the gradients into the order in which the
        # forward pass called the layers.
        in_order = {
            name: [array for _, array in sorted(arrays.items())] for name, arrays in gradients_of.items() if arrays
        }
        return returned, {name: np.concatenate(arrays) for name, arrays in in_order.items()}

    @contextlib.contextmanager
    def _watched(
        self, enter: Callable[[str], object], see: Callable[[str, Any], Any], what: str, way: str
    ) -> Iterator[None]:
        """Run the block in PyNative mode; call ``enter`` before each layer, and ``see`` on each output of the layer.

        The Tensor that ``see`` returns replaces the output.
        """
        names = {id(cell): name for name, cell in self._layers.items()}
        call = nn.Cell.__call__

        def call_and_see(cell: Any, *args: Any, **kwargs: Any) -> Any:
            if (name := names.get(id(cell))) is None:
                return call(cell, *args, **kwargs)
            enter(name)
            output = call(cell, *args, **kwargs)
            if type(output) in (tuple, list):
                return type(output)([replaced(name, value) for value in output])
            return replaced(name, output)

        def replaced(name: str, value: Any) -> Any:
            return see(name, value) if isinstance(value, Tensor) and value.is_floating_point() else value

        with contextlib.ExitStack() as stack:
            stack.callback(mindspore.set_context, mode=mindspore.get_context("mode"))
            mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
            # Do not use MindSpore's hooks on cells: after such a hook, MindSpore compiles every graph again, and
            # dropout draws new random numbers. Do not patch the inside of a cell: a cell with its own bprop has no
            # gradients inside.
            stack.callback(setattr, nn.Cell, "__call__", call)
            nn.Cell.__call__ = call_and_see
            stack.enter_context(without_recomputation(cell for _, cell in self._network.cells_and_names()))
            try:
                yield
            except Exception as error:
                raise LayerOutputsError(
                    f"To measure the {what} of 'layers', the network must run a {way} pass in PyNative mode, but the "
                    f"pass failed: {error}. Leave out 'layers', or change the network so that it runs in PyNative mode."
                ) from error


def _is_called(wanted: str, name: str, class_name: str) -> bool:
    """Return whether a name or pattern matches a cell's name or class. Square brackets match only themselves."""
    if "*" not in wanted:
        return wanted in (name, class_name)
    pattern = wanted.replace("[", "[[]")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(class_name, pattern)


def named_cells(network: Any) -> dict[str, Any]:
    """Return a dict of all cells of a network by name. The names of Parameters begin with the name of their cell.

    Args:
        network (Cell): the network without its train-step cell.

    Returns:
        dict[str, Cell], in the order in which they were made.
    """
    return _named_cells(network)[1]


def _named_cells(network: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return two dicts: from a cell's path in the network to the name of the layer, and from this name to the cell."""
    paths = {path: cell for path, cell in network.cells_and_names() if path}
    # A trainer may put cells around the network. Parameter names leave these cells out, and so do layer names.
    around = _path_around(network)
    short = {path: path.removeprefix(around) for path in paths}
    names = {path: path if name in paths else name for path, name in short.items()}
    return names, {names[path]: cell for path, cell in paths.items()}


def _path_around(network: Any) -> str:
    """Return the prefix, such as "network.", that a Parameter's path in the network has, but its name does not have."""
    paths = [(path, weight.name) for path, weight in network.parameters_and_names()]
    around = Counter(path.removesuffix(name) for path, name in paths if path.endswith(f".{name}"))
    return around.most_common(1)[0][0] if around else ""
