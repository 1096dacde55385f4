# SPDX-License-Identifier: BSD-3-Clause
"""A run: the trainer, its checks, its start and end, checkpoints, its record, its launcher."""
