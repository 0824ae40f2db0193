"""The names in the state of the gradient-guided update cell, and in its checkpoints."""

__all__ = ["COUNTERS", "PARAMETER_NAMES", "PLACES"]

# The integers that only this rule has, in the order in which one Parameter holds them.
COUNTERS = (
    "scale_window",
    "base",
    "observed_steps",
    "limit",
    "bound",
    "trial",
    "clean_steps",
    "contradictions",
    "first_exponent",
)

# The Parameters of the cell by attribute, and their names in a checkpoint. The adaptive cell has the last four too.
PARAMETER_NAMES = {
    "counters": "guided_counters",
    "level": "guided_level",
    "overflow_rate": "guided_overflow_rate",
    "largest_gradient": "largest_gradient",
    "cur_iter": "current_iterator_step",
    "last_overflow_iter": "last_overflow_iterator_step",
    "skipped_steps": "skipped_steps",
    "consecutive_overflows": "consecutive_overflows",
}

# How many powers of two the record of overflow rates looks at.
PLACES = 16
