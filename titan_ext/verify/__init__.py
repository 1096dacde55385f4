# SPDX-License-Identifier: BSD-3-Clause
"""A small copy of a job, trained on this machine's cores and held against one process."""
