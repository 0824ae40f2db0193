"""Replaying policies on traces: one by one, many at once, and tuning."""
