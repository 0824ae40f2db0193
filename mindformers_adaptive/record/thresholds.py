"""The numbers behind "held", "collapsed", "unusually low" and "decided", for every command that uses these words."""

from mindformers_adaptive.rules.ladder import DEFAULT_MIN_SCALE_WINDOW

# A loss scale has held if this many consecutive steps with this scale did not overflow. The number is the smallest
# scale window that MindFormers uses by default.
HELD = DEFAULT_MIN_SCALE_WINDOW

# Replay other rules only if the log states for at least this share of the steps whether they overflowed, and name a
# winner only if as many replayed steps follow from the log. This share is a judgement: with less, the winner could
# depend on assumed overflows.
DECIDED_FROM = 0.9

# Recommend a change only if it saves more skipped steps than this. Users of Megatron-LM and other systems tolerate two
# skipped steps anyway.
TOLERABLE = 2.0

# The loss scale has collapsed if this many steps in a row overflow, because from 2^32, the usual start, 32 halvings end
# at a scale of 1; or if STUCK steps in a row overflow at one loss scale, which then falls no further.
COLLAPSE, STUCK = 50, 10

# A loss scale that changes by more than this factor in one step of a log has jumped. Rules usually have a factor of 2.
JUMP = 10.5

# A loss scale up to this one is unusually low. With a mean as the loss, 2^10 and more hold.
LOW_SCALE = 2.0**7
