"""A check of the record of a run: that it is what the rule does with the overflows that happened."""

from mindformers_adaptive.record.step import FIELDS

__all__ = ["assert_follows", "missing"]


def assert_follows(rule, state, lines):
    """See that the lines are those of the rule from this state on, in all that they know; return the last state."""
    for line in lines:
        assert line["loss_scale"] == state.loss_scale
        state = rule.step(state, line["overflow"], line.get("largest_gradient"))
        after = {"next_loss_scale": state.loss_scale, **state._asdict()}
        known = [field for field in FIELDS[4:10] if line.get(field) is not None]
        assert {field: line[field] for field in known} == {field: after[field] for field in known}
    return state


def missing(first, last):
    """The line of a record that stands for steps that nobody saw."""
    return {"missing_steps": last - first + 1, "first_step": first, "last_step": last}
