"""The policy lab: replay, compare and tune loss scaling offline, in plain Python and NumPy."""
