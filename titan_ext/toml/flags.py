# SPDX-License-Identifier: BSD-3-Clause
"""Titan's command-line flags on top of a config; a wrong one gets the words that a file would.

tyro parses flags. It stops at the first that it does not understand, has no "did you mean" for a
value, and names a help that no command of titan_ext prints. So flags that it refuses are read once
more, one by one, as keys of a file.
"""

import contextlib
import io
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_ext.base.messages import COMMAND_LINE, checks_later
from titan_ext.toml.convert import POLICY, Given, changed, named_choices, values_of
from titan_ext.toml.files import MODEL, KeyLocation, TomlConfigError
from titan_ext.toml.values import leaves

_FRAME = re.compile(r"[\u2500-\u257f]+")  # box drawing
_AFTER_THE_MESSAGE = ("Argument helptext", "Available subcommands", "Perhaps you", "For full help")


class _RefusedError(Exception):
    """What tyro says of flags, without its box."""


def with_flags(config: Any, flags: Sequence[str]) -> Any:
    """A new config with flags on top, not checked yet.

    Titan's ConfigManager does the same right after. There a wrong flag prints a box and exits on
    every rank, and torchrun cannot tell why.

    Raises:
        TomlConfigError: for all wrong flags; in place of a file it names the command line.
    """
    ConfigManager()  # registers Titan's rules, such as A,B,C for a list of strings
    try:
        return _parse(config, flags)
    except _RefusedError as refused:
        errors = list(_wrong(config, flags))
        said = TomlConfigError(COMMAND_LINE, "", str(refused))
        raise TomlConfigError.of_all(errors or [said]) from refused


def keys_of(flags: Sequence[str]) -> Iterator[str]:
    """The dotted keys that flags name."""
    for flag in flags:
        if flag.startswith("--"):
            yield from _spellings(flag)


def _spellings(flag: str) -> tuple[str, str]:
    """The dotted key of a flag, as it stands and without the ``no-`` of ``--compile.no-enable``."""
    section, dot, key = flag[2:].split("=")[0].replace("-", "_").rpartition(".")
    return section + dot + key, section + dot + key.removeprefix("no_")


def _parse(config: Any, flags: Sequence[str]) -> Any:
    said = io.StringIO()
    try:
        with checks_later(), contextlib.redirect_stderr(said):
            return tyro.cli(type(config), args=flags, default=config, registry=custom_registry)
    except SystemExit as end:
        if not end.code:  # --help
            raise
    lines = [_FRAME.sub("", line).strip() for line in said.getvalue().splitlines()]
    lines = [line for line in lines if line][1:]  # without the title
    ends = (i for i, line in enumerate(lines) if line.startswith(_AFTER_THE_MESSAGE))
    raise _RefusedError(" ".join(lines[: next(ends, None)]))


def _wrong(config: Any, flags: Sequence[str]) -> Iterator[TomlConfigError]:
    """An error for each flag that tyro refuses by itself, or after the policy before it."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    policies = {name: known for name, hint in hints.items() if (known := named_choices(hint))}
    chosen: list[str] = []
    for flag, *words in _groups(flags, policies):
        try:
            chosen_config = _parse(config, [*chosen, flag, *words])
        except _RefusedError as refused:
            is_fine_alone = False
            with contextlib.suppress(_RefusedError):
                is_fine_alone = bool(chosen and _parse(config, [flag, *words]))
            at = KeyLocation(COMMAND_LINE, _spellings(flag)[0])
            if is_fine_alone:
                yield at.error(f"expected before {chosen[0]}, which only its own keys may follow.")
            else:
                yield _error(config, flag, words, policies, at, str(refused))
        else:
            if not flag.startswith("--"):
                chosen, config = [flag], chosen_config


def _groups(flags: Sequence[str], policies: dict[str, Any]) -> Iterator[list[str]]:
    """Each flag with its values; each choice of a policy (``activation_checkpoint:fp8``)."""
    group: list[str] = []
    for word in flags:
        if group and (word.startswith("--") or _section_of_choice(word) in policies):
            yield group
            group = []
        group.append(word)
    yield group


def _section_of_choice(word: str) -> str:
    section, colon, _ = word.replace("-", "_").partition(":")
    return section if colon else ""


def _error(
    config: Any,
    flag: str,
    words: list[str],
    policies: dict[str, dict[str, type]],
    at: KeyLocation,
    said: str,
) -> TomlConfigError:
    """What is wrong with one flag; tyro's words ``said``, if a file could have it."""
    if (section := _section_of_choice(flag)) in policies:
        return _in_a_file(config, f"{section}.{POLICY}", flag.partition(":")[2], at) or at.error(
            said
        )
    if _section_of_choice(flag.lstrip("-")) in policies:
        return at.error(f"expected {flag.lstrip('-')}, without dashes.")
    if not flag.startswith("--"):
        return TomlConfigError(COMMAND_LINE, flag, "is no flag; expected --SECTION.KEY VALUE.")
    key, positive = _spellings(flag)
    words = [*flag.split("=", 1)[1:], *words]
    known = leaves(config)
    key = key if key in known else positive
    section, dot, name = key.rpartition(".")
    having = [p for p, cls in policies.get(section, {}).items() if name in _names_of(cls)]
    values = [_value(word) for word in words]
    if isinstance(known.get(key), bool) and words:
        expected = f"--{key} or --{section}{dot}no-{name}"
        problem = f"takes no value; expected {expected}, got {' '.join(words)}."
    elif isinstance(known.get(key), bool):
        problem = said  # the class's own reason, such as another key that it needs
    elif key in known and not words:
        problem = "expected a value after it."
    elif "names and values" in said:  # names.table_flag
        problem = f"expected names and values in turn, got {' '.join(words)}."
    elif isinstance(known.get(section), dict):
        problem = f"expected --{section} NAME VALUE ..."
    elif section in policies and name == POLICY:
        problem = f"expected {section}:{' '.join(words)}, after the other flags."
    elif having and "Unrecognized" in said:
        problem = (
            f"a key of policy {' and '.join(having)}; expected {section}:{having[0]} before it."
        )
    elif not dot and (same := [k for k in known if k.rpartition(".")[2] == key]) and same != [key]:
        problem = f"no such key; did you mean {' or '.join(f'--{k}' for k in same)}?"
    elif key.startswith(f"{MODEL}."):
        problem = f"no flag sets it; expected it in a TOML file, under [{MODEL}]."
    elif error := _in_a_file(config, key, values[0] if len(values) == 1 else values, at):
        return error
    else:
        problem = "no flag sets it; expected it in a TOML file." if key not in known else said
    return at.error(problem)


def _in_a_file(config: Any, key: str, value: Any, at: KeyLocation) -> TomlConfigError | None:
    """The error of a file that has only this key."""
    table: Any = value
    for part in reversed(key.split(".")):
        table = {part: table}
    whole = KeyLocation(at.file)
    with checks_later(), contextlib.suppress(TomlConfigError):
        changed(type(config), values_of(config), [Given(whole, table)])
    return whole.errors[0] if whole.errors else None


def _names_of(cls: type) -> set[str]:
    return {f.name for f in fields(cls)} if cls is not type(None) else set()


def _value(word: str) -> Any:
    """A word of the command line as a file would have it."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(word)
    return word
