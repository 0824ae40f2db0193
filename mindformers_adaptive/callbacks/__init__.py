"""Callbacks for ``mindspore.train.Model`` and for MindFormers."""
