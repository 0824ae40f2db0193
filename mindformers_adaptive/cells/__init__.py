"""MindSpore cells: the update cell, and what the train-step cells add to the stock ones."""
