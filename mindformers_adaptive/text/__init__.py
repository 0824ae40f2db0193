"""Text that comes in and goes out: files, JSON, YAML, tables, loss scales as powers of two, what to install."""
