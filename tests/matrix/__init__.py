"""Layouts in which our parallelize function is held against stock TorchTitan."""
