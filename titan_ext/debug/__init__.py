# SPDX-License-Identifier: BSD-3-Clause
"""Which collectives each rank issued, in which order, and who waits for whom when a run hangs.

``debug.record_collectives`` turns it on; otherwise nothing here is imported. ``trace_buffer`` keeps
the records outside the process, ``watchdog`` makes them and stops the run when ranks differ,
``compare`` finds the difference, and ``hang_report`` is the small process that outlives the ranks.
``trace_buffer``, ``compare`` and ``hang_report`` need neither torch nor Titan. See
docs/hangs_and_faults.md.
"""
