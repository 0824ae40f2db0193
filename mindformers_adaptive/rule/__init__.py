"""The rule of adaptive loss scaling in plain Python, and what feeds it: no MindSpore here."""
