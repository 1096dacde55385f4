# SPDX-License-Identifier: BSD-3-Clause
"""Which rank of a run is late, and for which unit, on top of torch's Flight Recorder.

``debug.record_collectives`` turns it on; otherwise nothing here is imported. See docs/running.md.
"""
