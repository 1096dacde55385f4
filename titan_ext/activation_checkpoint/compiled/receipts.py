"""What compiled graphs save for backward, in tensors and bytes.

A graph is compiled once and runs for every block of its kind, so this is by graph, where an eager
receipt is by block. The tokens that a rank's experts get are not known to it: such tensors are
counted, and their bytes are given for each token.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from titan_ext.activation_checkpoint.compiled.codec import Saved
from titan_ext.fp8 import Codec

__all__ = ["GraphRow", "graph_rows", "write_graphs"]


@dataclass(frozen=True)
class GraphRow:
    """Tensors of one class that a graph saves.

    Attributes:
        source: The operation that made them ("aten.mm"), or "input".
        treatment: "float8 e4m3", or "exact" and why.
        tensors: How many.
        nbytes: Of those whose size is fixed.
        nbytes_a_token: Of the others, for each token.
    """

    source: str
    treatment: str
    tensors: int
    nbytes: int
    nbytes_a_token: int


def graph_rows(saved: Sequence[Saved], codec: Codec) -> list[GraphRow]:
    """The rows of one graph, sorted. Parameters, which are exact inputs, are left out."""
    classes: dict[tuple[str, str], list[Saved]] = defaultdict(list)
    for tensor in saved:
        if tensor.source != "input" or not tensor.treatment.startswith("exact"):
            classes[tensor.source, tensor.treatment].append(tensor)
    rows = []
    for (source, treatment), tensors in sorted(classes.items()):
        fixed = [t for t in tensors if _is_fixed(t)]
        varying = [t for t in tensors if not _is_fixed(t)]
        rows.append(
            GraphRow(
                source,
                treatment,
                len(tensors),
                sum(_nbytes(t, codec) for t in fixed),
                sum(_nbytes(t, codec) for t in varying),
            )
        )
    return rows


def write_graphs(graphs: Sequence[Sequence[GraphRow]], file: Path) -> None:
    """Write the rows of all graphs as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([[asdict(row) for row in rows] for rows in graphs], indent=1))


def _is_fixed(tensor: Saved) -> bool:
    return all(isinstance(size, int) for size in tensor.shape)


def _nbytes(tensor: Saved, codec: Codec) -> int:
    """Bytes; of a tensor whose size varies, with that dimension as one."""
    shape = tuple(size if isinstance(size, int) else 1 for size in tensor.shape)
    if tensor.treatment.startswith("float8"):
        return codec.nbytes(torch.Size(shape))
    numel = 1
    for size in shape:
        numel *= size
    return numel * tensor.dtype.itemsize
