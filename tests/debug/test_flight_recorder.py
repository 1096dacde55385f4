"""Dumps of torch's Flight Recorder, told as our own records: of gloo, and of NCCL's states."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.helpers.cluster import run_ranks
from titan_ext.debug.flight_recorder import main, read_dumps, report


def _exchange_tokens(group: Any) -> Any:
    rows = torch.ones(3, 2)
    return dist.all_to_all_single(torch.empty_like(rows), rows, group=group, async_op=True)


def _record(folder: Path) -> None:
    """Three ranks, of which the last skips an exchange; each leaves what its recorder holds."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "64"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2], group_desc="mesh_ep")
    _exchange_tokens(group).wait()
    dist.all_reduce(torch.ones(10))
    if rank != 2:
        _exchange_tokens(group)
    (folder / f"rank_{rank}").write_bytes(_distributed_c10d._dump_fr_trace())  # pyrefly: ignore
    # The others wait for what never comes: no orderly end.
    (folder / f"done_{rank}").touch()
    while len(list(folder.glob("done_*"))) < 3:
        time.sleep(0.05)
    dist.destroy_process_group()


def test_a_real_dump_says_who_waits_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "comm_traces"
    folder.mkdir()
    run_ranks(_record, 3, folder, log_folder=tmp_path / "logs")
    for file in folder.glob("done_*"):
        file.unlink()
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ranks 0-1 wait in collective 2 of mesh_ep/")
    assert "all_to_all of Float[3x2] in _exchange_tokens (test_flight_recorder.py:" in lines[0]
    assert lines[1] == "  rank 2 has not issued it"


def _entry(position: int, op: str = "nccl:_all_gather_base", **others: Any) -> dict[str, Any]:
    entry = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": position,
        "profiling_name": op,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
        "state": "completed",
        "retired": True,
        "frames": [
            {
                "filename": "/x/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
                "name": "unshard",
                "line": 1,
            }
        ],
    }
    return entry | others


def _dumps(*of_ranks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    ranks = list(range(len(of_ranks)))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(ranks)}}
    return {r: {"entries": of_ranks[r], "pg_config": config} for r in ranks}


def test_ranks_that_differ_and_collectives_that_hang():
    fine = [_entry(position) for position in range(5, 9)]
    assert report(_dumps(fine, fine)).startswith("all ranks have issued the same")
    other = [*fine[:2], _entry(7, "nccl:all_reduce"), fine[3]]
    assert report(_dumps(fine, other, fine)).splitlines() == [
        "the ranks differ at collective 7 of default_pg/0:",
        "  ranks 0, 2: _all_gather_base of BFloat16[4x8] by FSDP's all-gather",
        "  rank 1: all_reduce of BFloat16[4x8] by FSDP's all-gather",
    ]
    hangs = [*fine[:3], _entry(8, state="started", retired=False)]
    assert report(_dumps(fine, hangs)) == (
        "collective 8 of default_pg/0 has not ended on rank 1: _all_gather_base of BFloat16[4x8] "
        "by FSDP's all-gather"
    )
    rows = [_entry(1, "nccl:all_to_all", input_sizes=[[rows, 8]]) for rows in (3, 5)]
    assert report(_dumps(*([row] for row in rows))).startswith("all ranks")
    silent = _dumps(fine, fine, fine)
    del silent[1]
    assert report(silent) == "rank 1 left no dump"


class _Command:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1]), pickle.dumps(_Command())])
def test_what_is_no_dump_is_named_and_not_run(content: bytes, tmp_path: Path):
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(ValueError, match=r"rank_0: expected a dump of Flight Recorder"):
        read_dumps(tmp_path)


def test_a_folder_without_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "none")]) == 1
    assert "expected dumps of Flight Recorder" in capsys.readouterr().err
