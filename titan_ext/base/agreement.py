# SPDX-License-Identifier: BSD-3-Clause
"""Messages between the ranks of a job outside of its steps: a few words over its store.

The store is the one by which torch's process groups met. But for the broadcast of a name, nothing
here is a collective or gathers from all ranks to all ranks, so cost and memory of a rank stay the
same however many there are. One server answers all: at 4,096 ranks a round takes some 0.3 s of its
time (benchmarks/LOG.md).
"""

import contextlib
import hashlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store
from torchtitan.distributed import ParallelDims

_CLASSES = 8
"""At most so many different values of the ranks are kept: each rank may have one of its own."""
_FILES_A_STAGE = 8
_KNOW_WITHIN = timedelta(seconds=30)
"""They all ask at about the same time; if one has died, the launcher ends the others."""


class Job:
    """The ranks of a job, and their store.

    All ranks call the same methods in the same order, each once for a subject.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._store = store
        self._subjects: Counter[str] = Counter()

    def subject(self, name: str) -> dist.Store:
        """Keys of their own for a subject; those of the next trainer in this process differ."""
        self._subjects[name] += 1
        return dist.PrefixStore(f"{name} {self._subjects[name]}", self._store)

    def broadcast(self, subject: str, decide: Callable[[], Any]) -> Any:
        """The result of ``decide`` on rank 0, which alone calls it: something that JSON can hold.

        An error of it is raised on every rank, as ValueError if it is one, else as RuntimeError.
        """
        store = self.subject(subject)
        if self.rank == 0:
            try:
                result = decide()
            except Exception as error:
                is_users = isinstance(error, ValueError)
                words = str(error) if is_users else f"rank 0: {type(error).__name__}: {error}"
                store.set("result", json.dumps({"error": words, "is_users": is_users}))
                self.until_all_know(store)
                raise
            store.set("result", json.dumps({"result": result}))
            return result
        told = json.loads(_read(store, "result"))
        if "error" in told:
            self.until_all_know(store)
            raise (ValueError if told["is_users"] else RuntimeError)(told["error"])
        return told["result"]

    def compare(
        self, subject: str, value: str, verdict_of: Callable[[list[tuple[str, list[int]]]], str]
    ) -> str:
        """The verdict of ``verdict_of`` on the ranks' values, on every rank; one rank calls it.

        It gets the different values, each with the ranks that have it, in the order of their first
        ranks: a few, if there are many.
        """
        store = self.subject(subject)
        digest = hashlib.sha256(value.encode()).hexdigest()
        if store.add(f"ranks with {digest}", 1) == 1:
            index = store.add("values", 1)
            if index <= _CLASSES:
                store.set(f"value {index}", value)
                store.set(f"digest {index}", digest)
        # Before the count below, so that whoever counts last finds every rank in its list.
        store.append(f"with {digest}", f"{self.rank} ")  # pyrefly: ignore[missing-attribute]
        if store.add("ranks", 1) == self.ranks:  # the last one: all values are there
            count = store.add("values", 0)
            classes = [(list(range(self.ranks)), value)] if count == 1 else []
            for index in range(1, min(count, _CLASSES) + 1) if count > 1 else ():
                having = store.get(f"with {store.get(f'digest {index}').decode()}")
                ranks = sorted(int(rank) for rank in having.split())
                classes.append((ranks, store.get(f"value {index}").decode()))
            classes.sort()
            store.set("verdict", verdict_of([(value, ranks) for ranks, value in classes]))
        verdict = _read(store, "verdict").decode()
        self.until_all_know(store)
        return verdict

    def until_all_know(self, store: dist.Store) -> None:
        """Every rank calls this and rank 0 waits: its process may have the store, and ends."""
        if store.add("know", 1) == self.ranks:
            store.set("all know", "")
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                store.wait(["all know"], _KNOW_WITHIN)

    def all_come(self, subject: str, within: timedelta) -> bool:
        """True once all ranks have called this; False if one has not come in that time."""
        store = self.subject(subject)
        if store.add("ranks", 1) == self.ranks:
            store.set("all", "")
        try:
            store.wait(["all"], within)
        except RuntimeError:
            return False
        return True


class LastStep:
    """The last step of a run, the same on all ranks, once one of them asks for an end.

    Nobody waits for another rank, and until one asks the steps cost nothing: a thread of each rank
    looks now and then whether one has. Then every rank enters the step that it is in, and from
    there on each further one, before it begins it. When all have entered a step the list is closed.
    The last step is the latest on it, so nobody has begun a later one.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._store = job, job.subject("last step")
        self._lock = threading.Lock()
        self._begun: int | None = None
        self._is_asked = False
        self._has_entered = False

    def ask(self, reason: int) -> None:
        """Ask for an end; if others have asked as well, the first one's reason counts."""
        self._store.compare_set("asked", "", str(reason))
        self.look()

    def look(self) -> bool:
        """True if some rank has asked; then this one says where it is."""
        if not self._store.check(["asked"]):  # outside the lock: no step waits for the store
            return False
        with self._lock:
            self._is_asked = True
            self._enter()
        return True

    def may_begin(self, step: int) -> bool:
        """True if there is such a step. The thread that trains asks before it begins one."""
        with self._lock:
            if self._begun is None:
                self._begun = step - 1
            if self._is_asked:
                self._enter()
                if self._entered(step) < step:
                    return False
            self._begun = step
            return True

    def reason(self) -> int:
        """The first one's reason. Every rank calls this once, when it may not begin a step."""
        reason = int(self._store.get("asked"))
        self._job.until_all_know(self._store)
        return reason

    def _enter(self) -> None:
        if self._has_entered or self._begun is None:
            return
        self._has_entered = True
        self._entered(self._begun)
        if self._store.add("ranks", 1) < self._job.ranks:
            return
        latest = self._store.get("latest").decode()
        # compare_set returns what is there: another rank may have raised the step meanwhile.
        while not latest.endswith("closed"):
            latest = self._store.compare_set("latest", latest, f"{latest} closed").decode()

    def _entered(self, step: int) -> int:
        """The latest step on the list, with this one on it unless it is closed."""
        latest = self._store.compare_set("latest", "", str(step)).decode()
        while True:
            last = int(latest.split()[0])
            if last >= step or latest.endswith("closed"):
                return last
            latest = self._store.compare_set("latest", latest, str(step)).decode()


def leaves_files(parallel_dims: ParallelDims) -> bool:
    """True if this rank writes reports of its own: so do the first eight of each pipeline stage.

    The others of a stage do the same with other tokens.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank % (parallel_dims.world_size // parallel_dims.pp) < _FILES_A_STAGE


_of_group: tuple[Any, Job] | None = None


def this_job() -> Job:
    """The job of this process. All ranks call it at the same place the first time.

    A process alone is a job of one, and so is one that stands for all ranks.
    """
    global _of_group
    if not dist.is_initialized():
        return Job(dist.HashStore(), 0, 1)
    group = dist.group.WORLD
    if _of_group is None or _of_group[0] is not group:
        if dist.get_backend() == "fake":
            _of_group = group, Job(dist.HashStore(), 0, 1)
        else:
            # torchrun may start a job again with the same store, with the keys of the last attempt.
            name = [uuid.uuid4().hex]
            dist.broadcast_object_list(name, src=0)
            # torch has no public name for the store by which the default group met.
            store = dist.PrefixStore(f"titan_ext {name[0]}", _get_default_store())
            _of_group = group, Job(store, dist.get_rank(), dist.get_world_size())
    return _of_group[1]


def _read(store: dist.Store, key: str) -> bytes:
    store.wait([key], default_pg_timeout)  # the store's own patience is for the start
    return store.get(key)
