"""Ways to keep the values of Parameters and to load values into them, for tests of loads in mid-run."""

import functools

import mindspore
from mindspore import Parameter, Tensor, nn, ops


class Outer(nn.Cell):
    """A user's cell around a train step. In graph mode, and with data sink, its graph runs without the train step."""

    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, x, y):
        return self.step(x, y)


def values_of(cell):
    """Return copies of the values of a cell's Parameters, by name."""
    return {parameter.name: parameter.asnumpy().copy() for parameter in cell.get_parameters()}


def as_checkpoint(values):
    return {name: Parameter(Tensor(value), name=name) for name, value in values.items()}


# Ways to keep a value that share memory with the Parameter: the next step may overwrite them.
VIEWS = {
    "asnumpy": lambda parameter: parameter.asnumpy(),
    "view": lambda parameter: parameter.view(parameter.shape),
    "reshape": lambda parameter: parameter.reshape(parameter.shape),
    "from_numpy": lambda parameter: Tensor.from_numpy(parameter.asnumpy()),
}
if not isinstance(Parameter.data, property):
    VIEWS["data"] = lambda parameter: parameter.data


def by_load_param(step, values):
    mindspore.load_param_into_net(step, as_checkpoint(values))


def by_state_dict(step, values):
    state = {key: values[each.name] for key, each in nn.Cell.state_dict(step).items() if each.name in values}
    nn.Cell.load_state_dict(step, state, strict=False)


def one_by_one(assign, step, values):
    for parameter in step.get_parameters():
        if parameter.name in values:
            assign(parameter, values[parameter.name])


def by_data(parameter, value):
    parameter.data = value


SEEN_EVERYWHERE = {
    "load_param_into_net": by_load_param,
    "load_state_dict": by_state_dict,
    "set_data": functools.partial(one_by_one, lambda parameter, value: parameter.set_data(value)),
    "Parameter.set_data": functools.partial(one_by_one, Parameter.set_data),
    "assign_value": functools.partial(one_by_one, lambda parameter, value: parameter.assign_value(value)),
    "copy_": functools.partial(one_by_one, lambda parameter, value: parameter.copy_(value)),
    "assign": functools.partial(one_by_one, ops.assign),
}
SEEN_BY_CALLS = {"data =": functools.partial(one_by_one, by_data)}
# In MindSpore 2.7, parameter.data is the Parameter itself, and cannot be set.
LOADS = SEEN_EVERYWHERE | (SEEN_BY_CALLS if "data" in VIEWS else {})
