# SPDX-License-Identifier: BSD-3-Clause
"""Titan's validator, where ranks have different numbers of batches and for losses with positions.

With ``validator.steps = -1``, its default, Titan's ranks validate until their own data end. They
have not as many batches each, so one that still has some waits for the others without end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_ext.base.titan.data import may_end, split_among_workers, together
from titan_ext.base.titan.parallelism import ranks_without_data
from titan_ext.components.overlap import runs_in_halves


class Validator(TitanValidator):
    """Titan's validator; all ranks end with the first whose data end."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanValidator.Config):
        pass

    _positions: torch.Tensor | None = None
    _has_said = False
    _has_batch = False

    def __init__(self, config: Config, **built_with: Any) -> None:
        super().__init__(config, **built_with)
        self._titan_loss, self.loss_fn = self.loss_fn, self._loss
        self._data = self.dl_config
        # Titan's validate(), one long function, builds its loader from dl_config each time.
        made: Any = SimpleNamespace(build=self._batches)
        self.dl_config = made

    def _batches(self, **built_with: Any) -> Iterator[Any]:
        """The iterable of a validation, made anew for each."""
        loader = self._data.build(**built_with)
        split_among_workers(loader)
        self._has_batch = False
        if not may_end(self._data):
            return iter(loader)
        alike = self.parallel_dims.pp_enabled or runs_in_halves(self.parallel_dims)
        return together(loader, 1, self._all_have_data, alike=alike)

    def _all_have_data(self, mine: bool) -> bool:
        lacking, ranks = ranks_without_data(
            self.parallel_dims, mine=not mine, device=utils.device_type
        )
        if lacking and not self._has_batch:
            raise ValueError(
                f"validator.dataloader does not have one batch for {lacking} of {ranks} "
                "data-parallel rank(s); expected more documents, or fewer ranks."
            )
        self._has_batch = True
        if 0 < lacking < ranks and not self._has_said:
            self._has_said = True
            logger.info(
                f"Validation ends with the data of {lacking} of {ranks} data-parallel rank(s); the "
                "others skip the rest of theirs each time."
            )
        return not lacking

    def post_dataloading_process(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        inputs, labels, more = super().post_dataloading_process(*args, **kwargs)
        self._positions = more.get("positions")
        return inputs, labels, more

    def _loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the batch, with its positions, as the trainer calls it (MTPLoss needs them).

        Titan's validator leaves them out (torchtitan/components/validate.py).
        """
        if self._positions is not None:
            kwargs["positions"] = self._positions
        return self._titan_loss(*args, **kwargs)
