# SPDX-License-Identifier: BSD-3-Clause
"""What FSDP holds unsharded, in bytes, measured and predicted.

``tracker`` measures; ``predict`` computes from a plan, with ``simulate``; both count as
``accounting`` says; ``log`` uses them in a run, writes files and draws.
"""
