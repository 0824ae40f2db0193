"""Write and read the records of runs, and read the logs of other training programs."""
