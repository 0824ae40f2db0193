"""Read and write text: files, JSON, YAML, tables, loss scales as powers of two, and errors that say what to install."""
