"""Loss scaling in MindSpore: update cells, scalers, loss-scale managers, and a mixin for train-step cells."""
