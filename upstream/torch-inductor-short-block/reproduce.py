# SPDX-License-Identifier: BSD-3-Clause
"""Inductor on a CPU leaves the end of padded rows unwritten, for pytorch issue 195582.

Rows of 200 values are padded to two blocks of 128. Each block is divided by its largest value, and
the padding is cut off again. Compiled, columns 128 to 199 are wrong, without an error.
"""

import torch
import torch.nn.functional as nnf


def normalise_blocks(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    blocks = nnf.pad(x, (0, -columns % 128)).reshape(rows, -1, 128)
    blocks = blocks / blocks.abs().amax(-1, keepdim=True)
    return blocks.reshape(rows, -1)[:, :columns].contiguous()


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 200)
    expected = normalise_blocks(x)
    compiled = torch.compile(normalise_blocks, fullgraph=True)(x)
    wrong = (compiled != expected).any(0).nonzero().flatten().tolist()
    print(f"torch {torch.__version__}: compiled differs in columns {wrong[:1]} to {wrong[-1:]}")
    assert wrong == list(range(128, 200)), "not seen"
    whole = x[:, :128]
    assert torch.equal(torch.compile(normalise_blocks)(whole), normalise_blocks(whole))


if __name__ == "__main__":
    main()
