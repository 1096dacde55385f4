"""The same verdicts where torch.compile runs the blocks: no hook runs there, a partitioner does.

``sites`` names the operations that torch.compile traces, ``decisions`` is the checkpoint it sees,
``partition`` cuts forward from backward, ``codec`` writes float8 into the two graphs, ``receipts``
says what they keep.
"""
