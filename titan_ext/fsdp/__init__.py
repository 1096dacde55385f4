# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 for decoders with experts: what one unit is, when it is resharded, what is prefetched.

``settings`` holds what the user asks for. ``units`` decides what is gathered together, ``mesh``
where it is sharded, ``reshard`` when it is freed, and ``prefetch`` how far ahead it is gathered.
``auto`` chooses what the user left open, by the model of a step in ``cost``. ``plan`` puts all this
together and ``shard`` calls ``fully_shard`` accordingly. Some parameters are
not sharded like the others: ``replicated`` (whole on every rank), ``quantized`` (frozen, in NF4),
``unmanaged`` (added after FSDP). ``expert_collectives`` sends experts in fewer bytes.

``memory`` counts the bytes.
"""
