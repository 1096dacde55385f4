# SPDX-License-Identifier: BSD-3-Clause
"""Meshes, batches and data of TorchTitan 0.3, which its main has moved (upstream/titan_main.md).

No other module of titan_ext asks for them: ``tests/base/test_titan_seam.py``. Another TorchTitan
begins here.

- ``parallelism``: a function for each mesh, and what mends 0.3 around them
- ``batch``: the keys that say how large a batch is
- ``data``: data sets by name, and whose positions a loader saves
"""
