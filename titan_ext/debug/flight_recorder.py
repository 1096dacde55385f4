# SPDX-License-Identifier: BSD-3-Clause
"""Reads dumps of torch's Flight Recorder, so that a hang with NCCL is told as ours are.

Titan turns the recorder on (``comm.trace_buf_size``); at a timeout each rank writes
``comm_traces/rank_N``. torch's ``torchfrtrace`` matches the collectives of these dumps, and shows
their sizes and stacks. What is added here is the unit that issued a collective, as far as a stack
of functions and files can tell it, and one line for all ranks that are alike. Nothing here runs
while a job trains.

    python -m titan_ext.debug.flight_recorder DUMP_FOLDER/comm_traces
"""

import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_ext.base.messages import ranks_in_words

_FILE = re.compile(r"\D*(\d+)")
_OF_TORCH = ("/torch/distributed/", "/torch/nn/", "/torch/autograd/", "/torch/utils/")
_DONE = "completed"
_SHOWN = 5
_FSDP = {"unshard": "FSDP's all-gather", "post_backward": "FSDP's reduction"}


class _Plain(pickle.Unpickler):
    """Takes values alone: a dump is dicts, lists, strings and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump has no {module}.{name}")


def read_dumps(folder: Path) -> dict[int, dict[str, Any]]:
    """The dumps in a folder, by rank, which is the number at the end of a file's name.

    Raises ValueError for a folder without dumps, and for a file that is none.
    """
    found = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        try:
            with file.open("rb") as dump:
                found[int(match[1])] = _Plain(dump).load()
            found[int(match[1])]["entries"]
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: expected a dump of Flight Recorder ({error}).") from error
    if not found:
        raise ValueError(
            f"{folder}: expected dumps of Flight Recorder, such as comm_traces/rank_0; Titan sets "
            "it up with comm.trace_buf_size, and NCCL writes them at a timeout."
        )
    return found


def report(dumps: Mapping[int, Mapping[str, Any]]) -> str:
    """Which collective of each group some ranks have not issued, or not finished, in words."""
    groups: dict[tuple[str, str], dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(dict)
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            group = tuple(entry["process_group"])
            of_rank = groups[group].setdefault(rank, {})
            of_rank[entry["collective_seq_id"]] = entry
        for config in dump.get("pg_config", {}).values():
            ranks = re.findall(r"\d+", str(config.get("ranks", "")))
            members[config.get("name", ""), config.get("desc", "")] |= set(map(int, ranks))
    lines = []
    for group, of_ranks in groups.items():
        ranks = sorted((members[group] or set(of_ranks)) & dumps.keys())
        lines += list(_of_group(group, {rank: of_ranks.get(rank, {}) for rank in ranks}))[:_SHOWN]
    silent = sorted({r for ranks in members.values() for r in ranks} - dumps.keys())
    if silent:
        lines.append(f"{ranks_in_words(silent)} left no dump")
    return "\n".join(lines or ["all ranks have issued the same, and finished what they issued"])


def _of_group(
    group: tuple[str, str], of_ranks: Mapping[int, Mapping[int, Mapping[str, Any]]]
) -> Iterator[str]:
    name = f"{group[1] or 'group'}/{group[0]}"
    reached = {rank: max(entries, default=0) for rank, entries in of_ranks.items()}
    if not any(reached.values()):
        return
    # A ring buffer has the newest entries; ranks are compared where all have some.
    first = max((min(entries) for entries in of_ranks.values() if entries), default=0)
    for position in range(first, min(reached.values()) + 1):
        alike: dict[str, list[int]] = defaultdict(list)
        for rank, entries in of_ranks.items():
            if position in entries:
                alike[_kind(entries[position])].append(rank)
        if len(alike) > 1:
            yield f"the ranks differ at collective {position} of {name}:"
            for ranks in alike.values():
                yield f"  {ranks_in_words(ranks)}: {describe(of_ranks[ranks[0]][position])}"
            return
    last, least = max(reached.values()), min(reached.values())
    if least < last:
        ahead = [rank for rank, at in reached.items() if at > least]
        behind = [rank for rank, at in reached.items() if at == least]
        entry = of_ranks[ahead[0]][min(k for k in of_ranks[ahead[0]] if k > least)]
        verb = "wait" if len(ahead) > 1 else "waits"
        yield f"{ranks_in_words(ahead)} {verb} in collective {least + 1} of {name}: " + describe(
            entry
        )
        yield f"  {ranks_in_words(behind)} {'has' if len(behind) == 1 else 'have'} not issued it"
        return
    unfinished = [
        rank
        for rank, entries in of_ranks.items()
        if entries[last]["state"] != _DONE and not entries[last].get("retired")
    ]
    if unfinished:
        yield (
            f"collective {last} of {name} has not ended on {ranks_in_words(unfinished)}: "
            + describe(of_ranks[unfinished[0]][last])
        )


def _kind(entry: Mapping[str, Any]) -> str:
    """What must be equal on all ranks; rows of an all-to-all may differ."""
    name = entry["profiling_name"]
    sizes = [] if "all_to_all" in name or "alltoall" in name else entry["input_sizes"]
    return repr((name, sizes, entry.get("input_dtypes")))


def describe(entry: Mapping[str, Any]) -> str:
    """One collective in words, with who issued it."""
    shapes = ", ".join("x".join(map(str, s)) or "scalar" for s in entry["input_sizes"])
    dtype = (entry.get("input_dtypes") or [""])[0]
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    return f"{operation} of {dtype}[{shapes}]{_issuer(entry.get('frames') or ())}"


def _issuer(frames: Sequence[Mapping[str, Any]]) -> str:
    """From the innermost frame on: FSDP's work, or the function outside of torch."""
    for frame in frames:
        file, name = frame.get("filename", ""), frame.get("name", "")
        if "_fsdp_param_group" in file and name in _FSDP:
            return f" by {_FSDP[name]}"
        if not any(part in file for part in _OF_TORCH):
            return f" in {name} ({Path(file).name}:{frame.get('line', '?')})"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report on a folder; 1 and a message if it has no dumps."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        print(report(read_dumps(Path(*arguments))))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
