# SPDX-License-Identifier: BSD-3-Clause
"""Records of the collectives of each rank, and who waits for whom when a run hangs.

``debug.record_collectives`` turns it on; otherwise nothing here is imported. ``watchdog`` writes
the records and stops the run when ranks differ, ``hang_report`` reads them and says where. See
docs/running.md.
"""
