"""What FSDP holds unsharded, in bytes: measured and predicted.

``tracker`` measures, ``predict`` (with ``simulate``) computes from the plan, both as ``accounting``
counts; ``timeline`` draws, and ``log`` does all this in a run.
"""
