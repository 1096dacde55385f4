"""Which collectives each rank issued, in which order, and who waits for whom when a run hangs.

``debug.record_collectives`` turns it on; off, nothing here is imported. ``ring`` keeps the records
outside the process, ``recorder`` makes them, ``compare`` finds where ranks differ, ``observer`` is
the small process that outlives the ranks, ``watch`` ties them to a training run. ``ring``,
``compare`` and ``observer`` need neither torch nor Titan. See docs/hangs_and_faults.md.
"""
