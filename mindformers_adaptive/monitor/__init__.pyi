"""The public names, for editors and type checkers."""

from mindformers_adaptive.monitor.record import RunRecord as RunRecord
from mindformers_adaptive.monitor.record import read_record as read_record
