# SPDX-License-Identifier: BSD-3-Clause
"""Dry runs: one step without a GPU, its bytes, its time, and the jobs that would be better."""
