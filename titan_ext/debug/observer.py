"""A small process that outlives the ranks and says which of them differ, wait or have died.

Local rank 0 of each machine starts one (``start``), which looks at the ranks of its machine; rank
0's looks at all ranks. It reads the records while the ranks run, and
reports on standard error and in ``report.txt`` beside the records:

- when two ranks' collectives differ;
- when nothing has been issued for half the timeout while somebody waits: who waits for whom;
- when a rank of this machine has died, or was told by torch that its wait timed out. Ranks of the
  machine that are stopped (SIGSTOP) are killed then, so that the run can end.

It ends when the ranks of its machine have ended. ``python -m titan_ext.debug.observer FOLDER``
reports once about records that are there already.
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
from titan_ext.debug.ring import Facts

__all__ = ["REPORT", "main", "report_once", "start"]

REPORT = "report.txt"
_POLL_S = 0.1
_SETTLE_S = 1.0
"""How long others may take to notice a death before the report is written."""


def start(folder: Path, *, of_all_machines: bool) -> None:
    """Start an observer of this machine's ranks, or of all ranks, in a session of its own."""
    command = [sys.executable, "-m", "titan_ext.debug.observer", str(folder), "--follow"]
    command += [] if of_all_machines else ["--host", socket.gethostname()]
    # A session of its own: torchrun ends a worker with everything in the worker's session.
    subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def report_once(folder: Path) -> str:
    """What the records in ``folder`` say about how the run ended."""
    comparison = Comparison(folder)
    comparison.advance()
    parts = [comparison.difference, comparison.waiting(), _states(comparison.facts)]
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
            states = {rank: _state(facts) for rank, facts in self._local().items()}
            if any(_has_failed(state) for state in states.values()):
                self._report_the_end()
                return
            if states and all(state == "finished" for state in states.values()):
                self._say(self._comparison.waiting())
                return
            self._look_for_a_hang()
            time.sleep(_POLL_S)

    def _local(self) -> dict[int, Facts]:
        host = socket.gethostname()
        return {r: f for r, f in self._comparison.facts.items() if f.host == host}

    def _look_for_a_hang(self) -> None:
        quiet_s = time.monotonic() - self._last_news
        timeout_s = min((f.timeout_s for f in self._local().values()), default=float("inf"))
        if quiet_s < timeout_s / 2:
            return
        if waiting := self._comparison.waiting():
            self._say(f"{waiting}\n{_states(self._comparison.facts)}")

    def _report_the_end(self) -> None:
        time.sleep(_SETTLE_S)
        self._comparison.advance()
        for part in (self._comparison.difference, self._comparison.waiting()):
            self._say(part)
        self._say(_states(self._comparison.facts))
        self._end_stopped_ranks()

    def _end_stopped_ranks(self) -> None:
        """torchrun asks with SIGTERM, which a stopped process cannot hear, and waits 30 seconds."""
        for facts in self._local().values():
            if not facts.ending and _process_state(facts.pid) == "T":
                os.kill(facts.pid, signal.SIGKILL)
                self._say(f"rank {facts.rank} was stopped; now killed (process {facts.pid})")

    def _say(self, text: str) -> None:
        if not text or text in self._said:
            return
        self._said.add(text)
        with open(self._folder / REPORT, "a") as file:
            file.write(text + "\n")
        lines = [f"[collectives] {line}" for line in text.splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)


def _states(facts: dict[int, Facts]) -> str:
    states = {rank: _state(f) for rank, f in facts.items()}
    return "\n".join(f"rank {rank}: {state}" for rank, state in states.items())


def _has_failed(state: str) -> bool:
    return state.startswith(("died", "failed"))


def _state(facts: Facts) -> str:
    """Of one rank: "running", "stopped ...", "died ...", "failed: <error>", or "finished"."""
    if facts.ending:
        return facts.ending
    if facts.host != socket.gethostname():
        return f"running on {facts.host}, as far as its records say"
    match _process_state(facts.pid):
        case "":
            return f"died without a word (process {facts.pid}): killed, or aborted by its backend"
        case "T":
            return f"stopped by a signal (process {facts.pid})"
        case _:
            return f"running (process {facts.pid})"


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
