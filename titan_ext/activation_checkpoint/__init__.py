"""Activation checkpointing with verdicts: exact, float8, recompute or drop."""
