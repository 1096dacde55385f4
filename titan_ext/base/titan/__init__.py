# SPDX-License-Identifier: BSD-3-Clause
"""All that differs between TorchTitan 0.3 and its main of 2026-08-21 (b5bcd76c).

No other module of titan_ext asks which TorchTitan there is: ``tests/base/test_titan_seam.py``.
Names that both have in one place are imported directly. When 0.3 goes, this folder goes.

- ``parallelism``: meshes, and what main has moved or mended around them
- ``batch``: sequences, which 0.3 counts, and tokens, which main counts; their keys
- ``data``: data sets, which 0.3 names and main builds; loaders
- ``attention``: batches of sequences, which 0.3's models take, and packed tokens, which main's take
"""
