# SPDX-License-Identifier: BSD-3-Clause
"""All that differs between TorchTitan 0.3 and its main of 2026-08-21 (b5bcd76c).

No other module of titan_ext asks which TorchTitan there is: ``tests/base/test_titan_seam.py``.
Names that both have in one place are imported directly. When 0.3 goes, this folder goes.

- ``parallelism``: meshes, and what main has moved or mended around them
- ``batch``: sequences, which 0.3 counts, and tokens, which main counts; their keys
- ``data``: data sets, which 0.3 names and main builds; loaders
- ``attention``: batches of sequences, which 0.3's models take, and packed tokens, which main's take
"""

from titan_ext.base.titan.attention import PlainAttention, as_models_call, rows_of
from titan_ext.base.titan.batch import (
    BATCH_KEYS,
    GLOBAL_BATCH,
    LOCAL_BATCH,
    OTHER_TITAN,
    OTHER_UNIT,
    RENAMED,
    microbatches_of_pass,
    own_keys,
    refuse,
    shape_of_tokens,
    tokens_of_microbatch,
    unit_of_batch,
    wrong_global_batch,
)
from titan_ext.base.titan.data import (
    BaseDataLoader,
    named_data,
    ranks_of_data,
    register_dataset,
)
from titan_ext.base.titan.parallelism import (
    EXPERT_SHARDS,
    apply_cp_to_forward,
    context_mesh,
    dense_mesh,
    experts_mesh,
    keep_frozen,
    mesh_with_axes,
    pipeline_mesh,
    validate_config,
)

__all__ = [
    "BATCH_KEYS",
    "EXPERT_SHARDS",
    "GLOBAL_BATCH",
    "LOCAL_BATCH",
    "OTHER_TITAN",
    "OTHER_UNIT",
    "RENAMED",
    "BaseDataLoader",
    "PlainAttention",
    "apply_cp_to_forward",
    "as_models_call",
    "context_mesh",
    "dense_mesh",
    "experts_mesh",
    "keep_frozen",
    "mesh_with_axes",
    "microbatches_of_pass",
    "named_data",
    "own_keys",
    "pipeline_mesh",
    "ranks_of_data",
    "refuse",
    "register_dataset",
    "rows_of",
    "shape_of_tokens",
    "tokens_of_microbatch",
    "unit_of_batch",
    "validate_config",
    "wrong_global_batch",
]
