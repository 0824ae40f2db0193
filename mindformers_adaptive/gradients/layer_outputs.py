"""The outputs of chosen layers of a network, from a forward pass in PyNative mode."""

import contextlib
import difflib
from collections.abc import Iterable

import mindspore
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.statistics import array_statistics, merge_statistics

__all__ = ["LayerOutputs", "LayerOutputsError", "checked_layers"]

_FLOATS = (mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64)


class LayerOutputsError(RuntimeError):
    """A network cannot run in PyNative mode."""


class LayerOutputs:
    """Measures the outputs of layers, by a forward pass in PyNative mode.

    In graph mode, too, this one pass is in PyNative mode, where Python sees what a layer returns; the compiled graphs
    of the training stay as they are. The outputs do not depend on the loss scale.

    Args:
        network (Cell): a network, or the train-step cell that trains it.
        layers (Iterable[str]): names of cells, as ``cells_and_names()`` of the network yields them, or names of
            classes, for all cells of that class.

    Raises:
        TypeError: if ``layers`` is not an iterable of strings.
        ValueError: if no cell has such a name or class.
    """

    def __init__(self, network, layers):
        self._network = network.network if isinstance(network, nn.TrainOneStepCell) else network
        cells = {name: cell for name, cell in self._network.cells_and_names() if name}
        self._layers = {}
        for layer in checked_layers(layers):
            chosen = {name: cell for name, cell in cells.items() if layer in (name, type(cell).__name__)}
            if not chosen:
                candidates = [*{type(cell).__name__: None for cell in cells.values()}, *cells]
                similar = ", ".join(difflib.get_close_matches(layer, candidates, cutoff=0.0))
                raise ValueError(
                    f"'layers' must name cells of the network, or a class of them, but {layer!r} is neither. The "
                    f"nearest names are {similar}."
                )
            self._layers |= chosen

    def __call__(self, batch, observe=None):
        """Run the forward pass on a batch.

        Args:
            batch (tuple[Tensor]): the inputs of the network.
            observe (Callable, optional): called with the name and the output of each layer, a NumPy array. Default:
                None.

        Returns:
            dict[str, ArrayStatistics] by layer: of all its outputs of floating point together, and of all its calls.

        Raises:
            LayerOutputsError: if the network cannot run in PyNative mode.
        """
        if not self._layers:
            return {}
        parts = {name: [] for name in self._layers}

        def measured(name, construct):
            def construct_and_measure(*args, **kwargs):
                output = construct(*args, **kwargs)
                for tensor in output if isinstance(output, tuple | list) else [output]:
                    if isinstance(tensor, Tensor) and tensor.dtype in _FLOATS:
                        array = to_numpy(tensor)
                        parts[name].append(array_statistics(array))
                        if observe is not None:
                            observe(name, array)
                return output

            return construct_and_measure

        with contextlib.ExitStack() as stack:
            stack.callback(mindspore.set_context, mode=mindspore.get_context("mode"))
            mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
            for name, cell in self._layers.items():
                # Not by a hook of MindSpore: after one, it compiles every graph again, and dropout draws anew.
                vars(cell)["construct"] = measured(name, cell.construct)
                stack.callback(vars(cell).pop, "construct")
            try:
                self._network(*batch)
            except Exception as error:
                raise LayerOutputsError(
                    f"The outputs of 'layers' need a forward pass in PyNative mode, where the network fails: {error}."
                ) from error
        return {name: merge_statistics(statistics) for name, statistics in parts.items()}


def checked_layers(layers):
    """Return names of layers as a tuple, or raise TypeError."""
    is_list = isinstance(layers, Iterable) and not isinstance(layers, str)
    names = tuple(layers) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"'layers' must be a list of names, but got {layers!r} of type {type(layers).__name__}. Write ['Dense'] "
            "for a single one."
        )
    return names
