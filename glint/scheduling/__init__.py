"""Deciding what each step computes. Pure Python, knows nothing of the native engine."""
