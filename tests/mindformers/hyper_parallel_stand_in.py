"""Stand-ins with which MindFormers' PyNative trainer runs on a CPU without hyper-parallel.

The stand-ins replace only what is missing: the names of hyper-parallel, as empty classes and functions;
``Tensor.backward`` and ``Parameter.grad``, by means of MindSpore's own ``run_backward``; and three kernels that a CPU
lacks, by other operations. Trainer, callbacks, checkpoints and optimizer are MindFormers' own.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__all__ = ["install"]

_PACKAGE = "hyper_parallel"


class _Module(types.ModuleType):
    """A module in which every name exists: as an empty class, or as a function that returns None."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_Empty,), {}) if name.lstrip("_")[0].isupper() else lambda *_, **__: None
        setattr(self, name, value)
        return value


class _Empty:
    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        is_its = name.partition(".")[0] == _PACKAGE
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_its else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Install the stand-ins for hyper-parallel in this process, before ``mindformers.pynative`` is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
        _complete_mindspore()


def _complete_mindspore():
    import hyper_parallel.platform.mindspore.autograd_compat as autograd
    import mindspore
    from mindspore import ops
    from mindspore._c_expression import PyNativeExecutor_, run_backward

    def backward(self, sense=None):
        sense = ops.ones_like(self) if sense is None else sense
        run_backward((self,), (sense,), False, False, (), True, accumulate_grad=True)

    def enable():
        PyNativeExecutor_.get_instance().set_grad_flag(True)
        mindspore.Tensor.backward = backward
        mindspore.Parameter.grad = property(lambda self: self._grad, lambda self, value: setattr(self, "_grad", value))

    autograd.enable_mindspore_backward_compat = enable
    mindspore.mint.stack = lambda tensors, dim=0: ops.stack(tensors, dim)
    mindspore.mint.ones_like = ops.ones_like
    mindspore.mint.addcmul = lambda x, first, other, value=1: x + value * first * other
