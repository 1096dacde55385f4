# SPDX-License-Identifier: BSD-3-Clause
"""Titan's checkpointer, with whole checkpoints, exports that can be opened, and keys of ours.

Where an export to Hugging Face safetensors fails, Titan has saved nothing after the last step.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from titan_ext.base.agreement import this_job
from titan_ext.base.messages import set_known_key
from titan_ext.components.hf_export import differences, stored_weights

WRITTEN_LAST = ".metadata"
"""The file that makes a checkpoint in torch's format whole."""


class CheckpointManager(TitanCheckpointManager):
    """Titan's checkpointer, with a key for what is verified before it loads.

    ``keep_latest_k`` counts whole checkpoints. Titan's purge counts folders
    (torchtitan/components/checkpointer/dcp.py): those of saves that were cut off, or are still
    being written, push whole checkpoints out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):
        verify_checksums_up_to_gib: float = 64.0
        """
        Before a run loads a checkpoint of at most this many GiB, its ranks read all of it, each a
        part, and compare the checksums. 0: never; inf: always. See docs/checkpoints.md.
        """
        ignore_weights: list[str] = field(default_factory=list)
        """
        Names, or globs, of weights and modules in a checkpoint or in safetensors that the model
        does not have and that stay unread ("model.layers.61"). All others are refused.
        """

        __setattr__ = set_known_key

    exported: Mapping[str, torch.Tensor] = {}
    """The tensors that an export must have, on the meta device; ``HuggingFaceExport`` sets them."""
    _saved_step = 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._saved_step = curr_step
        is_written = self._should_save(curr_step, last_step) and dist.get_rank() == 0
        if is_written and not filesystem.is_remote(self.folder):
            folder = Path(self._create_checkpoint_id(curr_step))
            # No rank writes before rank 0 has come.
            if last_step and self.last_save_in_hf:
                # torch joins what it finds, that of an export by more ranks that was cut off, too.
                shutil.rmtree(folder / "sharded", ignore_errors=True)
                for path in folder.glob("*.safetensors*"):
                    path.unlink()
            else:
                # torch overwrites files one by one, and this one last: cut off in between, old and
                # new files would pass for a whole checkpoint.
                (folder / WRITTEN_LAST).unlink(missing_ok=True)
        return super()._save(curr_step, last_step)

    def _save_last_step(self, curr_step: int) -> None:
        """Titan's. An export is opened again; if it fails, torch's format keeps the weights."""
        if not self.last_save_in_hf:
            super()._save_last_step(curr_step)
            return
        folder = self._create_checkpoint_id(curr_step)
        failed: Any = None
        try:
            super()._save_last_step(curr_step)
            wrong = this_job().broadcast("export", lambda: _wrong_export(folder, self.exported))
            if wrong:
                failed = RuntimeError(f"the export to {folder} is not whole: {wrong}.")
        except CheckpointException as error:  # raised on every rank
            failed = error
        if failed is None:
            return
        self.last_save_in_hf = False
        super()._save_last_step(curr_step)
        logger.error(f"The export failed. {folder} has the weights in torch's format.")
        raise failed

    def dcp_save(self, state_dict: dict[str, Any], *args: Any, **arguments: Any) -> Any:
        """Titan's, with floating-point buffers as they are: ``export_dtype`` is for parameters.

        A router's load-balancing bias is a buffer in fp32, in Titan and in transformers. In
        bfloat16 it would choose other experts.
        """
        model = self.states[MODEL]
        buffers = {canonical_fqn(n) for part in model.model for n, _ in part.named_buffers()}
        kept = {n: t for n, t in model.state_dict().items() if n in buffers and n in state_dict}
        return super().dcp_save({**state_dict, **kept}, *args, **arguments)

    def _purge_stale_checkpoints(self) -> None:
        """Delete what is older than the ``keep_latest_k`` newest whole checkpoints of this run.

        What lies above the step that is saved is of another start, and neither counts nor goes.
        """
        if not self._should_purge():
            return
        names = [re.fullmatch(r"step-(\d+)", name) for name in filesystem.listdir(self.folder)]
        steps = (int(name[1]) for name in names if name)
        whole = 0
        for step in sorted((s for s in steps if s <= self._saved_step), reverse=True):
            path = self._create_checkpoint_id(step)
            if whole >= self.keep_latest_k:
                self.purge_queue.put(path)
            else:
                whole += filesystem.isfile(filesystem.join(path, WRITTEN_LAST))


def _wrong_export(folder: str, exported: Mapping[str, torch.Tensor]) -> str:
    """The mistake in safetensors that were written, by their headers; "" if there is none."""
    try:
        stored = stored_weights(Path(folder))
    except ValueError as error:
        return str(error).removesuffix(".")
    return "; ".join(differences(exported, stored))
