"""FSDP2 for decoders with experts: what one unit is, when it is resharded, what is prefetched.

``units`` decides what is gathered together, ``mesh`` where it is sharded, ``reshard`` when it is
freed, ``prefetch`` how far ahead it is gathered; ``planning`` makes a ``plan`` of these, and
``shard`` calls ``fully_shard`` with it. What is not sharded as all others: ``replicated`` (kept
whole), ``late`` (added afterwards), ``quantized`` (frozen, in NF4); ``names`` finds them.

What it comes to in bytes: ``tracker`` measures, ``predict`` (with ``simulate``) computes from the
plan, both as ``accounting`` counts; ``timeline`` draws, and ``memory_log`` does all this in a run.
"""
