"""The state of the update cell in Parameters: made, read, restored, and checked when training starts."""

import warnings

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.saved_state import SavedState
from mindformers_adaptive.rules.restored_state import (
    PARAMETER_NAMES,
    from_rule_state,
    is_foreign_state,
    repair_state,
)
from mindformers_adaptive.rules.state_dict import LossScaleStateDict

__all__ = ["RestorableState"]


class RestorableState(SavedState, LossScaleStateDict):
    """Mixin of the update cell: everything that is not part of its graph."""

    @classmethod
    def from_rule(cls, rule, state, steps=0):
        """Return a cell that goes on by a rule from a state.

        Args:
            rule (AdaptiveRule): the rule.
            state (LossScaleState): its state.
            steps (int): how many steps led to it. Default: 0, it is the start.

        Returns:
            AdaptiveLossScaleUpdateCell, whose ``state()`` and loss scale are those of ``state``.

        Examples:
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell, AdaptiveRule
            >>> rule = AdaptiveRule(hysteresis=2)
            >>> state = rule.step(rule.start(2.0**16), overflow=True)
            >>> AdaptiveLossScaleUpdateCell.from_rule(rule, state, steps=1).state()["hysteresis_budget"]
            1
        """
        cell = cls(
            state.loss_scale,
            rule.scale_factor,
            rule.ladder[max(state.window_index, 0)],
            rule.ladder[-1],
            rule.ladder[0],
            min_loss_scale=rule.min_loss_scale,
            max_loss_scale=rule.max_loss_scale,
            hysteresis=rule.hysteresis,
            shrink_from_min_window=rule.shrink_from_min_window,
        )
        if steps > 0:
            cell._write_state(state.loss_scale, from_rule_state(rule, state, steps))
        return cell

    def _make_state(self, start):
        self.start_window = start.scale_window
        self.written_state = self.checked_state = None
        for name, value in from_rule_state(self.rule, start, steps=0).items():
            # The base class has a constant scale_window; here the window moves.
            parameter = Parameter(Tensor(value, mstype.int32), name=PARAMETER_NAMES[name], requires_grad=False)
            setattr(self, name, parameter)
        # By its values, a state of MindFormers' own cell can be that of a dynamic or a gradient-guided one, neither of
        # which has a place on the ladder.
        self.restored = set()
        self._notice_when_restored("window_index")
        self._notice_when_restored("cur_iter")

    def _notice_when_restored(self, name):
        parameter = getattr(self, name)

        def set_data(*args, **kwargs):
            self.restored.add(name)
            return type(parameter).set_data(parameter, *args, **kwargs)

        parameter.set_data = set_data

    def state(self):
        """Return all Parameters as dict[str, int] by attribute name; this waits for the device."""
        return {name: int(getattr(self, name).asnumpy()) for name in PARAMETER_NAMES if hasattr(self, name)}

    def _read_state(self):
        counters = self.state()
        if self.bound_loss_scale is not None:
            return float(self.bound_loss_scale.asnumpy()), counters
        if counters["cur_iter"] > 1 and counters != self.written_state:
            raise RuntimeError(
                "The update cell does not know its loss scale, because its train-step cell is not one of "
                "mindformers_adaptive.wrapper. Call update_cell.bind_loss_scale(train_step.scale_sense) first."
            )
        return float(self.loss_scale_value), counters

    def _write_state(self, loss_scale, counters):
        self._write_scale(loss_scale)
        self.written_state = self.checked_state = dict(counters)
        self._set_counters(counters)

    def _set_counters(self, counters):
        for name, value in counters.items():
            getattr(self, name).set_data(Tensor(value, mstype.int32))

    def check_state(self):
        """Repair a restored state that this cell cannot go on with.

        A checkpoint may come from another cell, or from this one with other windows. Each change gives a warning that
        names the Parameter, its value and the value used instead. The start of training calls this; call it yourself
        if you load a checkpoint without calling ``set_train()`` afterwards.

        Examples:
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
            >>> cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
            >>> _ = cell.window_index.set_data(Tensor(99, mstype.int32))
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     cell.check_state()
            >>> cell.state()["window_index"], len(caught)
            (0, 1)
        """
        state = self.state()
        if state == self.checked_state:
            return
        repaired, problems = repair_state(self.rule, state)
        if not problems and self._lacks_window(state):
            repaired["last_overflow_iter"] = repaired["cur_iter"] - 1
            problems = [
                "The checkpoint has steps but no window, as one of dynamic or gradient-guided loss scaling: the ladder "
                f"starts afresh at window {self.start_window}."
            ]
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
        self._set_counters({name: value for name, value in repaired.items() if value != state[name]})
        # Warn once: a repaired state may still look foreign when it is checked again.
        self.checked_state = repaired
        self.restored.discard("cur_iter")

    def _lacks_window(self, state):
        if "window_index" in self.restored:
            return False
        # The gradient-guided cell counts skipped steps as this one does, and then the other counters do not tell.
        skipped_by_another = "cur_iter" in self.restored and state["skipped_steps"] > 0
        return skipped_by_another or is_foreign_state(state, self.start_window)
