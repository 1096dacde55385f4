"""Nothing takes CUDA for granted: names in the code, and a run on a device that torch never saw."""

import ast
import re
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "titan_ext"
_NAMED = {
    # It hides the accelerator from a dry run; ROCm reads it, too.
    ("config_registry/terminal.py", "CUDA_VISIBLE_DEVICES"),
    # The version of NCCL, or RCCL, where it is the backend; and how a trace names its operations.
    ("run/record.py", "nccl"),
    ("run/record.py", "cuda"),
}
"""Names of CUDA that may stand in the code, by file; messages and docstrings may name it."""


def _cuda_names(source: str) -> list[str]:
    """``torch.cuda``, ``x.cuda()``, "cuda", "cuda:0", "nccl" and names of its variables."""
    tree = ast.parse(source)
    found = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "cudart", "nccl")
    ]
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return found + [
        text
        for text in strings
        if text.split(":")[0].lower() in _DEVICES or text.startswith("CUDA_")
    ]


_DEVICES = ("cuda", "nccl")


def test_no_code_names_cuda_but_a_list():
    found = {
        (str(path.relative_to(_PACKAGE)), name)
        for path in _PACKAGE.rglob("*.py")
        for name in _cuda_names(path.read_text())
    }
    assert found == _NAMED


def _on_the_stand_in(*cases: str) -> list[str]:
    """What each case prints, in processes that are forked from one that has imported torch."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.stand_in_device", *cases],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    outputs = run.stdout.split("-- ")[1:]
    assert [output.splitlines()[0] for output in outputs] == list(cases)
    return outputs


def test_a_model_runs_on_a_device_that_is_not_cuda():
    """What is offloaded leaves it and comes back."""
    on_it, offloaded = _on_the_stand_in("1 partial_dtensor", "2 spmd_types offload")
    assert "float8 e4m3" in on_it
    for output in (on_it, offloaded):
        assert "device standin, gradients on {'standin'}" in output
    match = re.search(
        r"copies \[\('cpu', 'standin'\), \('standin', 'cpu'\)\], (\d+) of (\d+) bytes", offloaded
    )
    assert match, offloaded
    assert int(match[1]) > 0.9 * int(match[2])
