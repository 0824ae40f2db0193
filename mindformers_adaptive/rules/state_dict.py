"""The state of loss scaling as one dict, which Megatron-LM's scaler and this package's classes have in common."""

import warnings
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import to_float32
from mindformers_adaptive.rules.restored_state import PARAMETER_NAMES, repair_loss_scale, repair_state

__all__ = ["LossScaleStateDict", "to_integer", "to_number"]

# Megatron-LM's name, and those of a checkpoint and of AdaptiveLossScaler.state().
_SCALE_NAMES = ("scale", "scale_sense", "loss_scale")


class LossScaleStateDict:
    """Mixin: ``state_dict()``, ``load_state_dict()`` and ``inv_scale`` of update cell, manager and scaler.

    A class has ``rule``, and reads and writes its loss scale and its counters, which are those that
    ``AdaptiveLossScaleUpdateCell.state()`` returns.
    """

    rule: AdaptiveRule

    def _read_state(self) -> tuple[float, dict[str, int]]:
        raise NotImplementedError

    def _write_state(self, loss_scale: float, counters: Mapping[str, int]) -> None:
        raise NotImplementedError

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return to_float32(1.0 / self._read_state()[0])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state as numbers.

        Megatron-LM's ``DynamicGradScaler`` loads it too, once ``scale`` is a tensor:
        ``state["scale"] = torch.tensor([state["scale"]])``. With arguments, which a parent cell gives, it is
        ``nn.Cell.state_dict``.

        Returns:
            dict[str, Union[int, float]], with ``scale``, ``growth_tracker`` (clean steps since the last overflow or
            raise), ``hysteresis_tracker`` (overflows left until a drop), and all counters of the update cell.

        Raises:
            RuntimeError: if an update cell took steps in a train-step cell of another package, and so does not know
                its loss scale.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)  # type: ignore[misc,no-any-return]
        loss_scale, counters = self._read_state()
        clean_steps = counters["cur_iter"] - 1 - counters["last_overflow_iter"]
        budget = counters.get("hysteresis_budget", self.rule.hysteresis)
        return {"scale": loss_scale, "growth_tracker": clean_steps, "hysteresis_tracker": budget, **counters}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; in a train-step cell of another package, load it before the cell is given to that.

        Args:
            state_dict (dict): what ``state_dict()`` returned, a Megatron-LM checkpoint's ``grad_scaler``, or what
                ``mindspore.load_checkpoint`` returned. Values are numbers or tensors of one element; other keys are
                ignored. Without counters, as from Megatron-LM, the present window stays. Counters that no run can
                reach, and windows that are not on the ladder, are changed with a warning.

        Raises:
            KeyError: if the loss scale is missing, or both the counters and Megatron-LM's trackers.
            TypeError: if a counter is not an integer.
            ValueError: if the loss scale is not finite and above 0, or Megatron-LM's trackers do not fit the rule.
        """
        present = self._read_state()[1]
        counters = {
            name: to_integer(name, state_dict[key])
            for name in present
            for key in (name, PARAMETER_NAMES[name])
            if key in state_dict
        }
        missing = [name for name in present if name not in counters]
        if not counters:
            counters = _counters_of_megatron(state_dict, self.rule.hysteresis)
        elif missing:
            warnings.warn(f"The state has no {', '.join(missing)}: what it lacks stays as it is.", stacklevel=2)
        scale_name = next((name for name in _SCALE_NAMES if name in state_dict), None)
        if scale_name is None:
            raise KeyError("The state has no 'scale'. Give what state_dict() returned.")
        loss_scale = repair_loss_scale(self.rule, float(to_number(state_dict[scale_name])), scale_name)
        repaired, problems = repair_state(self.rule, {**present, **counters})
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
        self._write_state(loss_scale, repaired)


def _counters_of_megatron(state_dict: Mapping[str, Any], hysteresis: int) -> dict[str, int]:
    missing = [key for key in ("scale", "growth_tracker", "hysteresis_tracker") if key not in state_dict]
    if missing:
        raise KeyError(
            "The state must have the counters of the update cell, or those of Megatron-LM's dynamic scaler, of which "
            f"{', '.join(map(repr, missing))} is missing. Give what state_dict() returned, or the checkpoint's "
            "'grad_scaler'; that of a constant scaler is empty."
        )
    growth_tracker, tracker = (to_integer(name, state_dict[name]) for name in ("growth_tracker", "hysteresis_tracker"))
    if growth_tracker < 0 or tracker > hysteresis:
        raise ValueError(
            f"'growth_tracker' must not be negative, nor 'hysteresis_tracker' above hysteresis={hysteresis}, but got "
            f"{growth_tracker} and {tracker}. Give the 'hysteresis' that Megatron-LM was started with."
        )
    # Below 0, where Megatron-LM counts on, all numbers mean the same.
    budget = {"hysteresis_budget": max(tracker, 0)} if hysteresis > 1 else {}
    return {"cur_iter": growth_tracker + 1, "last_overflow_iter": 0, **budget}


def to_integer(name: str, value: Any) -> int:
    """Return a counter of a state as an int, whether it is a number or a tensor of one element; raise TypeError."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"'{name}' must be an integer, but got {value!r}. Give what state_dict() returned.")
    return int(number)


def to_number(value: Any) -> Any:
    """Return a tensor of one element, of whatever library, as its number, and a number as it is."""
    return value.item() if hasattr(value, "item") else value
