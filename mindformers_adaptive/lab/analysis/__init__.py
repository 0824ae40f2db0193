"""What happened in a recorded run, and what to change."""
