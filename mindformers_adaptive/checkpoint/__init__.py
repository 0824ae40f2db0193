"""MindFormers' checkpoint formats: the state of loss scaling saved, restored and read."""
