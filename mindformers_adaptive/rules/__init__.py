"""The rule of adaptive loss scaling in plain Python, without MindSpore."""
