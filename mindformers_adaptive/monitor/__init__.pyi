"""The public names, for editors and type checkers."""

from mindformers_adaptive.record.writer import RunRecord as RunRecord
from mindformers_adaptive.record.writer import read_record as read_record
