"""MindSpore cells: update cells, loss scalers, loss-scale managers, and a mixin for train-step cells."""
