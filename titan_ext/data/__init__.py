# SPDX-License-Identifier: BSD-3-Clause
"""Text to train on where no network is: the source of Python's standard library."""
