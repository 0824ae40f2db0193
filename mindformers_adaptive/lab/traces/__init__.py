"""Traces: what each step's ceiling is, or what is known of it."""
