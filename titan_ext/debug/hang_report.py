# SPDX-License-Identifier: BSD-3-Clause
"""A small process that outlives the ranks and reports which of them differ, wait or died.

Local rank 0 of each machine starts one (``start``), which looks at the ranks of its machine; rank
0's looks at all ranks. It reads the records while the ranks run. It reports on standard error and
in ``report.txt`` beside the records:

- when two ranks' collectives differ;
- who waits for whom, when some rank waits and no rank has issued anything for half the timeout;
- when a rank of this machine has died, or torch reported that its wait timed out. It then kills the
    machine's stopped ranks (SIGSTOP), so that the run can end.

It ends when the ranks of its machine have ended. ``python -m titan_ext.debug.hang_report FOLDER``
reports once on existing records. Needs neither torch nor Titan.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from titan_ext.debug.compare import Comparison
from titan_ext.debug.trace_buffer import RankInfo

REPORT = "report.txt"
_POLL_S = 0.1
_SETTLE_S = 1.0
"""How long others may take to notice a death before the report is written."""


def start(folder: Path, *, of_all_machines: bool) -> None:
    """Start an observer of this machine's ranks, or of all ranks, in its own session."""
    command = [sys.executable, "-m", "titan_ext.debug.hang_report", str(folder), "--follow"]
    command += [] if of_all_machines else ["--host", socket.gethostname()]
    # A session of its own: torchrun ends a worker with everything in the worker's session.
    subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def report_once(folder: Path) -> str:
    """Report how the run ended, from the records in ``folder``."""
    comparison = Comparison(folder)
    comparison.advance()
    parts = [comparison.difference, comparison.waiting(), _states(comparison.infos)]
    return "\n".join(part for part in parts if part)


class _Observer:
    def __init__(self, folder: Path, host: str) -> None:
        self._folder = folder
        self._comparison = Comparison(folder, host=host)
        self._last_news = time.monotonic()
        self._said: set[str] = set()

    def follow(self) -> None:
        while True:
            if self._comparison.advance():
                self._last_news = time.monotonic()
            self._say(self._comparison.difference)
            states = [_state(info) for info in self._local().values()]
            if any(state.startswith(("died", "failed")) for state in states):
                self._report_the_end()
                return
            if states and all(state == "finished" for state in states):
                self._say(self._comparison.waiting())
                return
            self._look_for_a_hang()
            time.sleep(_POLL_S)

    def _local(self) -> dict[int, RankInfo]:
        host = socket.gethostname()
        return {r: i for r, i in self._comparison.infos.items() if i.host == host}

    def _look_for_a_hang(self) -> None:
        quiet_s = time.monotonic() - self._last_news
        timeout_s = min((i.timeout_s for i in self._local().values()), default=float("inf"))
        if quiet_s < timeout_s / 2:
            return
        if waiting := self._comparison.waiting():
            self._say(f"{waiting}\n{_states(self._comparison.infos)}")

    def _report_the_end(self) -> None:
        time.sleep(_SETTLE_S)
        self._comparison.advance()
        for part in (self._comparison.difference, self._comparison.waiting()):
            self._say(part)
        self._say(_states(self._comparison.infos))
        self._end_stopped_ranks()

    def _end_stopped_ranks(self) -> None:
        """torchrun asks with SIGTERM, which a stopped process cannot hear, and waits 30 seconds."""
        for info in self._local().values():
            if not info.ending and _process_state(info.pid) == "T":
                os.kill(info.pid, signal.SIGKILL)
                self._say(f"rank {info.rank} was stopped; now killed (process {info.pid})")

    def _say(self, text: str) -> None:
        if not text or text in self._said:
            return
        self._said.add(text)
        with open(self._folder / REPORT, "a") as file:
            file.write(text + "\n")
        lines = [f"[collectives] {line}" for line in text.splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)


def _states(infos: dict[int, RankInfo]) -> str:
    return "\n".join(f"rank {rank}: {_state(info)}" for rank, info in infos.items())


def _state(info: RankInfo) -> str:
    """Of one rank: "running", "stopped ...", "died ...", "failed: <error>", or "finished"."""
    if info.ending:
        return info.ending
    if info.host != socket.gethostname():
        return f"running on {info.host}, as far as its records say"
    match _process_state(info.pid):
        case "":
            return f"died without an error (process {info.pid}): killed, or aborted by its backend"
        case "T":
            return f"stopped by a signal (process {info.pid})"
        case _:
            return f"running (process {info.pid})"


def _process_state(pid: int) -> str:
    """The letter of ps(1); "" if the process has ended; "?" where the system does not say."""
    try:
        os.kill(pid, 0)
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return ""
    except OSError:
        return "?"
    return "" if letter in "ZX" else letter


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of records: collectives/<run>")
    parser.add_argument("--follow", action="store_true", help="watch until the ranks have ended")
    parser.add_argument("--host", default="", help="only the ranks of this machine")
    parsed = parser.parse_args(arguments)
    if parsed.follow:
        _Observer(parsed.folder, parsed.host).follow()
    else:
        print(report_once(parsed.folder) or "no difference, and nobody waits")


if __name__ == "__main__":
    main()
