# SPDX-License-Identifier: BSD-3-Clause
"""A restart by torchrun meets addresses of dead workers, for pytorch issue 167288; on gloo, no GPU.

Both workers end with an error in their first attempt. In the second, rank 1 joins late. Rank 0 then
finds the address that rank 1 left in the store in the first attempt, and cannot connect.
"""

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

RUNS = 4
OPT_OUT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def worker() -> None:
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if attempt == "1" and rank == "1":
        time.sleep(3)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    dist.barrier()
    if attempt == "0":
        os._exit(1)


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--max-restarts=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    return subprocess.run(
        [*command, str(Path(__file__).resolve()), "--worker"],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def main() -> None:
    shared = [run() for _ in range(RUNS)]
    own = [run(**{OPT_OUT: "1"}) for _ in range(RUNS)]
    failed = [done for done in shared if done.returncode]
    refused = sum("Connection refused" in done.stderr for done in failed)
    print(f"as it is: {len(failed)} of {RUNS} fail, {refused} with 'Connection refused'")
    print(f"{OPT_OUT}=1: {sum(done.returncode != 0 for done in own)} of {RUNS} fail")
    assert failed, "not seen"
    assert not any(done.returncode for done in own)


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
