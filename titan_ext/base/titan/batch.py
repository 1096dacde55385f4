# SPDX-License-Identifier: BSD-3-Clause
# pyrefly: ignore-errors
"""How large a batch is: 0.3 counts sequences, main counts tokens.

=============================================  ===================================================
key of 0.3, in sequences                       key of main, in tokens
=============================================  ===================================================
``training.seq_len`` (tokens)                  ``training.max_context_length``
``training.local_batch_size``, of a pass       ``training.num_tokens_per_microbatch_per_dp_rank``
``training.global_batch_size``                 ``training.num_tokens_per_train_step``
``parallelism.pipeline_parallel_               ``parallelism.num_pp_microbatches``, of a pass
microbatch_size``
=============================================  ===================================================

A pass is one forward and backward of a data-parallel rank, with all microbatches of a pipeline. So
a TOML file with 0.3's keys means the same on both (``own_keys``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torchtitan.config import TrainingConfig

_COUNTS_TOKENS = "max_context_length" in {f.name for f in fields(TrainingConfig)}
_TRAINING, _PARALLELISM = "training", "parallelism"
_DEGREE = "pipeline_parallel_degree"

OLD = ("seq_len", "local_batch_size", "global_batch_size", "pipeline_parallel_microbatch_size")
NEW = (
    "max_context_length",
    "num_tokens_per_microbatch_per_dp_rank",
    "num_tokens_per_train_step",
    "num_pp_microbatches",
)
_OTHERS, _OWN = (OLD, NEW) if _COUNTS_TOKENS else (NEW, OLD)
_LENGTH, _LOCAL, _GLOBAL, _MICROBATCH = _OWN

BATCH_KEYS = {
    _TRAINING: {_LOCAL: False, _GLOBAL: True, _LENGTH: False},
    _PARALLELISM: {_MICROBATCH: False},
}
"""The keys that count a batch, by section, and whether -1 means "as many as there are"."""

RENAMED = {f"{_TRAINING}.{_OTHERS[0]}": f"{_TRAINING}.{_LENGTH}"}
"""Key of the other TorchTitan -> the key of this one with the same meaning and unit."""

if _COUNTS_TOKENS:
    OTHER_TITAN = "TorchTitan 0.3"
    _BATCH = (
        "counts sequences; TorchTitan main has training.{}, which counts tokens: write the number "
        "of sequences times training.max_context_length"
    )
    _PASS = (
        "counts sequences in a microbatch; TorchTitan main has parallelism.{}, which counts "
        "microbatches"
    )
else:
    OTHER_TITAN = "TorchTitan main"
    _BATCH = (
        "counts tokens; TorchTitan 0.3 has training.{}, which counts sequences: write the number "
        "of tokens divided by training.seq_len"
    )
    _PASS = (
        "counts microbatches; TorchTitan 0.3 has parallelism.{}, which counts sequences in one: "
        "write training.local_batch_size divided by the number of microbatches"
    )
OTHER_UNIT = {
    f"{_TRAINING}.{_OTHERS[1]}": _BATCH.format(_LOCAL),
    f"{_TRAINING}.{_OTHERS[2]}": _BATCH.format(_GLOBAL),
    f"{_PARALLELISM}.{_OTHERS[3]}": _PASS.format(_MICROBATCH),
}
"""Key of the other TorchTitan -> how to convert its number, which is in another unit here."""


def tokens_of_microbatch(training: Any, parallelism: Any = None) -> tuple[int, int]:
    """Tokens of a microbatch on a data-parallel rank, and of one of its sequences.

    ``parallelism`` is Titan's section if a pipeline splits the batch.
    """
    if hasattr(training, "max_context_length"):  # main counts tokens, a pipeline's included
        return training.num_tokens_per_microbatch_per_dp_rank, training.max_context_length
    batch = training.local_batch_size
    if parallelism is not None:
        batch = parallelism.pipeline_parallel_microbatch_size
    return batch * training.seq_len, training.seq_len


def microbatches_of_pass(training: Any, parallelism: Any) -> int:
    """Microbatches of a forward and backward of a rank: 1 without a pipeline."""
    if getattr(parallelism, _DEGREE) == 1:
        return 1
    if _COUNTS_TOKENS:
        return parallelism.num_pp_microbatches
    return training.local_batch_size // parallelism.pipeline_parallel_microbatch_size


def shape_of_tokens(tokens: int, length: int, shards: int = 1) -> tuple[int, ...]:
    """The shape in which a rank's model gets a microbatch: ``(B, L)``, or ``(T,)`` on main.

    Args:
        tokens: Of the microbatch, on a data-parallel rank.
        length: Of a sequence.
        shards: Over how many ranks context or sequence parallelism cuts it.
    """
    return (tokens // shards,) if _COUNTS_TOKENS else (tokens // length, length // shards)


def wrong_global_batch(config: Any, ranks: int) -> str:
    """What is wrong with the batch of a step on so many data-parallel ranks; "" if nothing is."""
    training, total = config.training, getattr(config.training, _GLOBAL)
    local = getattr(training, _LOCAL)
    pipelined = _COUNTS_TOKENS and getattr(config.parallelism, _DEGREE) > 1
    microbatches = microbatches_of_pass(training, config.parallelism) if pipelined else 1
    step = local * microbatches * ranks
    if total <= 0 or total % step == 0:
        return ""
    times = f" x {microbatches} microbatches" if microbatches > 1 else ""
    return (
        f"{_TRAINING}.{_GLOBAL} is {total}; expected a multiple of {step}: {_TRAINING}.{_LOCAL} "
        f"{local}{times} x {ranks} data-parallel ranks."
    )


LOCAL_BATCH, GLOBAL_BATCH = f"{_TRAINING}.{_LOCAL}", f"{_TRAINING}.{_GLOBAL}"
"""Dotted keys of a rank's batch and of a step's."""


def unit_of_batch(now: Mapping[str, Any]) -> int:
    """What ``LOCAL_BATCH`` counts for a sequence, in a config's values by dotted key."""
    return now[f"{_TRAINING}.{_LENGTH}"] if _COUNTS_TOKENS else 1


def refuse(parallelism: Any) -> None:
    """Raise ValueError for one of our keys that this TorchTitan's models cannot run."""
    if _COUNTS_TOKENS and getattr(parallelism, "overlap_exchanges", "none") == "halves":
        raise ValueError(
            f'{_PARALLELISM}.overlap_exchanges = "halves" needs TorchTitan 0.3: a model of main '
            'gets all tokens in a row and one mask for them. Expected "none".'
        )


def own_keys(
    tables: Sequence[Mapping[str, Any]], training: Any, parallelism: Any
) -> list[Mapping[str, Any]]:
    """Tables of TOML files in which this TorchTitan's keys stand for 0.3's; on 0.3 as they are.

    What 0.3's keys of all files mean together stands in the last file that has one. Later files
    still win.

    Args:
        tables: Of the files, in the order in which they apply. They stay as they are.
        training: Titan's section in the config function that the files start from.
        parallelism: Titan's section there.

    Raises:
        ValueError: for a batch that is no whole number of microbatches.
    """
    return in_tokens(tables, training, parallelism) if _COUNTS_TOKENS else list(tables)


def in_tokens(
    tables: Sequence[Mapping[str, Any]], training: Any, parallelism: Any
) -> list[Mapping[str, Any]]:
    """``own_keys`` on main."""
    tables = list(tables)
    context, local, step, microbatches = NEW
    base = {_TRAINING: training, _PARALLELISM: parallelism}
    old, last = {}, -1
    for index, table in enumerate(tables):
        for section in base:
            values = dict(_ints(table, section))
            for key, own in zip(OLD, NEW, strict=True):
                if key in values and own in values:
                    raise ValueError(
                        f"{section}.{key} is TorchTitan 0.3's key for {section}.{own}, and both "
                        "are given."
                    )
            if found := {key: value for key, value in values.items() if key in OLD}:
                last, old = index, old | found
                kept = {key: x for key, x in table[section].items() if key not in found}
                table = tables[index] = {**table, section: kept}
    if last < 0:
        return tables

    def now(section: str, key: str, files: int = last + 1) -> int:
        given = [dict(_ints(table, section)) for table in tables[:files]]
        return next((x[key] for x in reversed(given) if key in x), getattr(base[section], key))

    is_pipelined = now(_PARALLELISM, _DEGREE, len(tables)) > 1
    before, count = now(_TRAINING, context), now(_PARALLELISM, microbatches)
    rows = max(now(_TRAINING, local) // before, 1)
    length, sequences, total, of_microbatch = (old.get(key) for key in OLD)
    length = before if length is None else length
    if of_microbatch is None:  # 0.3's default, if the file counts as 0.3 does
        of_microbatch = rows if sequences is None else 1
    if sequences is None:
        sequences = rows * count if is_pipelined else rows
    if is_pipelined and (of_microbatch < 1 or sequences % of_microbatch):
        raise ValueError(
            f"{_TRAINING}.{OLD[1]} is {sequences}; expected a multiple of "
            f"{_PARALLELISM}.{OLD[3]}, which is {of_microbatch}."
        )
    own = {context: length, local: length * (of_microbatch if is_pipelined else sequences)}
    if total is None and now(_TRAINING, step) > 0:
        total = now(_TRAINING, step) // before
    if total is not None:
        own[step] = total * length if total > 0 else total
    changed = {_TRAINING: own}
    if is_pipelined:
        changed[_PARALLELISM] = {microbatches: sequences // of_microbatch}
    for section, values in changed.items():
        tables[last] = {**tables[last], section: {**tables[last].get(section, {}), **values}}
    return tables


def _ints(table: Mapping[str, Any], section: str) -> list[tuple[str, int]]:
    """The whole numbers in a section of a file; what else stands there is refused later."""
    values = table.get(section)
    if not isinstance(values, Mapping):
        return []
    return [(key, x) for key, x in values.items() if type(x) is int]
