"""The record of a run and the logs of others: one schema of a step, its writer, the readers, and what a log proves."""
