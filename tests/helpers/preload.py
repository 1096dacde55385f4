"""What every rank would do first, done once in the fork server that ranks are forked from."""

# ruff: noqa: E402
import gc

gc.disable()  # or the imports below make it walk millions of objects, again and again

import atexit
import os
import time
from types import SimpleNamespace
from typing import Any

import torchtitan.trainer
from torch._dynamo import trace_rules

from tests.helpers.training import titan_config
from titan_ext.base.no_accelerator import fast_bfloat16_matmul

titan_config("deepseek_v3")  # imports the models
trace_rules.get_torch_obj_rule_map()
# init_process_group empties it, in case torch.distributed was not imported when it was filled. To
# fill it again is 7% of what a rank takes.
trace_rules.clear_lru_cache = lambda: None
fast_bfloat16_matmul()

# Titan's trainer sleeps two seconds at the end of rank 0.
trainer_module: Any = torchtitan.trainer
trainer_module.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})

gc.freeze()
gc.enable()
atexit.register(os._exit, 0)  # or Triton's bindings report what they leak
