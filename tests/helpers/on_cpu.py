"""What a CPU lacks, for stock Titan and for ours alike: FlexAttention, a quick initialisation."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import init

from titan_ext.base import no_accelerator


@contextlib.contextmanager
def quick_initialisation() -> Iterator[None]:
    """``trunc_normal_`` of a whole DTensor at once; elsewhere each operation of it is dispatched.

    The values are those of ``no_accelerator.layout_independent_init``.
    """
    truncated_normal = init._no_grad_trunc_normal_

    def of_whole(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return truncated_normal(tensor, *args, **kwargs)
        with torch.no_grad():
            return no_accelerator.fill_whole(
                tensor, lambda whole: truncated_normal(whole, *args, **kwargs)
            )

    with unittest.mock.patch.object(init, "_no_grad_trunc_normal_", of_whole):
        yield


@contextlib.contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Run FlexAttention as plain operations, and make its masks eagerly.

    What else is compiled stays so, as it would not with ``torch.compiler.set_stance``.
    """
    adapted = unittest.mock.patch.object(no_accelerator, "adapt_spec", no_accelerator.keep_masks)
    with adapted, no_accelerator.eager_masks():
        yield
