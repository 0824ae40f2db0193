"""One page for a run or several: what happened, pictures, advice. Pictures need matplotlib, the extra ``plot``."""
