"""The door that Titan knocks on: ``--module titan_ext --config NAME`` calls ``NAME()`` here."""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

from titan_ext.data.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path
from titan_ext.trainer import Trainer, extend_config

__all__ = ["moe_debug"]


def moe_debug() -> Trainer.Config:
    """The DeepSeek-V3 debug model on Python's standard library: ``make train``.

    Sized for 4 processes on a small machine with no GPU: EP 2 x FSDP, 30 steps in minutes. It
    saves a checkpoint every 10 steps and resumes from the latest one.
    """
    config = extend_config(deepseek_v3_debugmodel())
    config.hf_assets_path = str(default_tokenizer_path())
    config.dump_folder = "./outputs/moe_debug"
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset=STDLIB_CORPUS)
    config.training = TrainingConfig(
        local_batch_size=4, seq_len=256, steps=30, disable_cuda_graphs=True
    )
    config.parallelism.expert_parallel_degree = 2
    config.optimizer = default_adamw(lr=8e-4)
    # No decay: a second run goes on for 30 more steps, so there is no last step to decay to.
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=5, decay_ratio=0.0)
    config.metrics = MetricsProcessor.Config(log_freq=1, enable_tensorboard=True)
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=10, last_save_model_only=False, keep_latest_k=2
    )
    config.debug.seed = 42
    return config
