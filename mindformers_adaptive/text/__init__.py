"""What the package prints and writes: tables, loss scales as powers of two, JSON, and atomic writes of files."""
