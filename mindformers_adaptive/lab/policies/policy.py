"""What all policies look like from outside: a scale, a window, and one step."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["FixedRule", "FixedState", "Policy", "Rule"]


class Rule(Protocol):
    """A rule of loss scaling: from a state, a NamedTuple with ``loss_scale``, to the next one."""

    def step(self, state: Any, overflow: bool, largest_gradient: float | None = None) -> Any:
        """Return the state after a step that overflowed or was clean."""


class Policy:
    """A policy of loss scaling: a rule and the state that it is in.

    Args:
        name (str): what the policy is called, see :func:`~mindformers_adaptive.lab.policies.make_policy`.
        rule (Rule): what a step does to the state.
        state (NamedTuple): the state before the first step.

    Attributes:
        current (NamedTuple): the state that it is in; do not change it.

    Examples:
        >>> from mindformers_adaptive.lab.policies import make_policy
        >>> policy = make_policy("torch", init_scale=1024.0, growth_interval=2)
        >>> [policy.step(overflow) for overflow in (True, False, False)]
        [512.0, 512.0, 1024.0]
        >>> policy.loss_scale, policy.scale_window
        (1024.0, 2)
    """

    def __init__(self, name: str, rule: Rule, state: Any) -> None:
        self.name = name
        self.rule = rule
        self.current = state

    @property
    def loss_scale(self) -> float:
        """float: the scale for the next step."""
        return float(self.current.loss_scale)

    @property
    def scale_window(self) -> int | None:
        """int: the clean steps before a raise, as of now; None where the policy has no window."""
        window: int | None = getattr(self.current, "scale_window", None)
        return window

    @property
    def moves_by_one_factor(self) -> bool:
        """bool: whether the scale falls at overflows only and rises at applied steps only, by one factor at a time."""
        return bool(getattr(self.rule, "moves_by_one_factor", True))

    @property
    def stopped(self) -> bool:
        """bool: whether the system itself would have ended the training with an error by now.

        fairseq does so at its smallest scale, and so does DeepSpeed's ``DynamicLossScaler`` with its default
        ``raise_error_at_min_scale``. A replay can go on: the scale then stays where it is until a raise.
        """
        return bool(getattr(self.current, "stopped", False))

    def step(self, overflow: bool, largest_gradient: float | None = None) -> float:
        """Take a step that overflowed or was clean, and return the loss scale for the next one.

        Args:
            overflow (bool): whether it overflowed.
            largest_gradient (float, optional): the largest absolute value of its gradients, unscaled, if it was
                applied. Rules without this signal ignore it. Default: None, not known.
        """
        self.current = self.rule.step(self.current, bool(overflow), largest_gradient)
        return self.loss_scale

    def state(self) -> dict[str, Any]:
        """Return all that the policy remembers, as plain Python numbers by name."""
        return dict(self.current._asdict())

    def __repr__(self) -> str:
        return f"<policy {self.name}: {self.current}>"


class FixedState(NamedTuple):
    """The state of a scale that never changes."""

    loss_scale: float
    scale_window: None = None


class FixedRule:
    """The rule that leaves the scale as it is."""

    def step(self, state: FixedState, overflow: bool, largest_gradient: float | None = None) -> FixedState:
        """Return ``state``."""
        return state
