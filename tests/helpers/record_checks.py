"""A check of the record of a run: that it is what the rule does with the overflows that happened."""

from mindformers_adaptive.monitor.record import FIELDS

__all__ = ["assert_follows"]


def assert_follows(rule, state, lines):
    """See that the lines are those of the rule from this state on, in all that they know; return the last state."""
    for line in lines:
        assert line["loss_scale"] == state.loss_scale
        signals = [] if line["largest_gradient"] is None else [line["largest_gradient"]]
        state = rule.step(state, line["overflow"], *signals)
        after = {"next_loss_scale": state.loss_scale, **state._asdict()}
        known = [field for field in FIELDS[4:10] if line[field] is not None]
        assert {field: line[field] for field in known} == {field: after[field] for field in known}
    return state
