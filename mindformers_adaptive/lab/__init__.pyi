"""The public names, for editors and type checkers."""

from mindformers_adaptive.lab.analysis import analyze as analyze
from mindformers_adaptive.lab.ceilings import from_gradient_ranges as from_gradient_ranges
from mindformers_adaptive.lab.replay import compare as compare
from mindformers_adaptive.record.logs import read_log as read_log
from mindformers_adaptive.record.run import RecordedRun as RecordedRun
from mindformers_adaptive.record.trace import Trace as Trace
