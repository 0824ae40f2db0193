"""Records of runs and logs of other programs: the schema of a step, the writer, the readers, and the recorded run."""
