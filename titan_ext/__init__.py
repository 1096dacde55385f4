# SPDX-License-Identifier: BSD-3-Clause
"""titan_ext: an extension of TorchTitan for people who train mixture-of-experts models.

Titan finds it by name (``--module titan_ext``) and starts at ``config_registry``. Imports point
down from there: config_registry -> verify -> plan -> run -> parallelize -> activation_checkpoint ->
fsdp and components -> fp8 and toml -> base. Importing this package has no side effects and imports
neither torch nor torchtitan.
"""

__version__ = "0.1.0"
