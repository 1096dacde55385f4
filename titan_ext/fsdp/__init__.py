# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 for decoders with experts: what one unit is, when it is resharded, what is prefetched.

``settings`` holds what the user asks for, and when a unit is freed. ``auto`` is the rule for what
the user left open. ``units`` decides what is gathered together, ``mesh`` where it is sharded, and
``prefetch`` how far ahead it is gathered. ``plan`` puts all this together, and ``shard`` calls
``fully_shard`` accordingly. ``collectives`` replaces FSDP2's where the plan says so.

Some parameters are not sharded like the others: replicated ones (whole on every rank; ``units``),
``nf4`` (frozen, in 4 bits), ``unmanaged`` (added after FSDP).
"""
