# SPDX-License-Identifier: BSD-3-Clause
"""The command line tool: ``titan_ext show | dry-run | tune | verify | peft | check``.

Commands are dataclasses that tyro parses. What it does not know are Titan's flags, which tyro
parses again over the config. Nothing here imports torch before a command needs it.
"""

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from titan_ext.base.machines import machine_of
from titan_ext.base.messages import did_you_mean
from titan_ext.config_registry.dry_run import DryRun
from titan_ext.config_registry.terminal import loading, phase, quiet
from titan_ext.config_registry.tune import Tune
from titan_ext.config_registry.verify import NOT_VERIFIED, Verify
from titan_ext.toml.files import check_new_file, extends_in, listing, nearest, read_chain, to_toml

if TYPE_CHECKING:
    from titan_ext.config_registry.resolve import Resolved

_DESCRIPTION = (
    "titan_ext: train mixture-of-experts models with TorchTitan in less memory. "
    "CONFIG is the path of a TOML file, the name of a shipped one (moe_debug.toml), a function "
    "of TorchTitan's models (deepseek_v3_16b), or one of yours (my_runs.my_16b). titan_ext show "
    "lists them. Titan's flags (--training.steps 50) go after it and win over the file."
)
_Config = Annotated[str, tyro.conf.arg(metavar="CONFIG")]


@dataclass
class Show:
    """Print every value that a run would have and where it comes from, as a TOML file.

    Without CONFIG: the shipped files, and TorchTitan's models with their config functions.
    """

    config: tyro.conf.Positional[_Config] = ""
    """The config to show."""
    changed: bool = False
    """Print only what differs from the config function at the end of the chain."""
    out: Path | None = None
    """A TOML file to write instead of printing. With --changed it extends CONFIG, with Titan's
    flags as its first keys."""

    def run(self, flags: list[str]) -> None:
        if not self.config:
            if self.changed or self.out:
                raise ValueError("--changed and --out need CONFIG; titan_ext show lists them.")
            print(*listing(), sep="\n")
            return
        if self.out is not None:
            check_new_file(self.out)
        from titan_ext.config_registry.resolve import resolve

        resolved = resolve(self.config, flags)
        if self.out is None:
            print(*self._lines(resolved), sep="\n")
            return
        base = extends_in(self.out.parent, self.config)
        values = {"dump_folder": to_toml(f"./outputs/{self.out.stem}")}
        values |= {key: value for key, value, _ in resolved.given()}
        short = [f"extends = {to_toml(base)}", *(f"{k} = {value}" for k, value in values.items())]
        self.out.write_text("\n".join(short if self.changed else self._lines(resolved)) + "\n")
        extended = base if self.changed else resolved.base
        print(f"{self.out} extends {extended}; titan_ext show {self.out} prints all its values.")

    def _lines(self, resolved: "Resolved") -> list[str]:
        return [
            f"# {' <- '.join([resolved.base, *resolved.files])}",
            f"extends = {to_toml(resolved.base)}",
            *(
                f"{key} = {value}  # from {origin}"
                for key, value, origin in resolved.lines(
                    lambda origin: not self.changed or origin != resolved.base
                )
            ),
        ]


@dataclass
class Peft:
    """Export the LoRA adapters of a run for the peft library."""

    config: tyro.conf.Positional[_Config]
    """The --config of the run; its Titan flags, and --checkpoint.load_step, may follow."""
    output: Path | None = None
    """Folder to write; by default peft/step-N in the run's."""
    base_model: str = ""
    """Name of the base model; by default what the run started from."""

    def run(self, flags: list[str]) -> None:
        loading()
        from titan_ext.components.lora import export_adapters
        from titan_ext.config_registry.resolve import resolve

        config = resolve(self.config, flags).config
        phase("exporting adapters")
        print(export_adapters(config, self.output, self.base_model))


@dataclass
class Check:
    """Check machines before a long job: links, versions, layout.

    Under torchrun, on all ranks: torchrun --nproc_per_node=8 -m titan_ext check CONFIG.
    """

    config: tyro.conf.Positional[_Config] = ""
    """The config whose layout to check; none by default."""
    machine: str = ""
    """The machine whose links to expect: h100, h200, b200, ... or a TOML file of rates."""
    mib: int = 16
    """MiB that two ranks send each other at a time."""

    def run(self, flags: list[str]) -> None:
        from titan_ext.base.nodes import NVLINK_DOMAIN
        from titan_ext.config_registry.resolve import resolve
        from titan_ext.run import preflight

        machine = machine_of(self.machine or "h100")
        if self.mib < 1:
            raise ValueError(f"--mib is {self.mib}; expected 1 or more.")
        if "RANK" not in os.environ:
            raise ValueError(
                "titan_ext check runs on every rank of a job: torchrun --nproc_per_node=8 -m "
                "titan_ext check CONFIG."
            )
        # A rack's domain is larger than its nodes; any other is a node, which torchrun counts.
        is_rack = machine.nvlink_domain > machine.ranks_per_node
        os.environ[NVLINK_DOMAIN] = str(machine.nvlink_domain if is_rack else 0)
        config = resolve(self.config, flags).config if self.config else None
        lines = preflight.check(config, machine=self.machine, mib=self.mib)
        if lines:
            print(*lines, sep="\n")


_COMMANDS = {
    "show": Show,
    "dry-run": DryRun,
    "tune": Tune,
    "verify": Verify,
    "peft": Peft,
    "check": Check,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or one message and 1 for a mistake of the user's, 2 for verify.

    Without ``arguments`` it is the program, which ends with its last line.
    """
    if arguments is not None:
        return _run(arguments)
    try:
        code = _run(sys.argv[1:])
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):  # sys.exit("words") in a config function
            print(code, file=sys.stderr)
            code = 1
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    # Else Python takes torch and Titan down, object by object: 40 s on a busy machine.
    os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    failed = NOT_VERIFIED if name == "verify" else 1
    try:
        # As python -m, find modules in the current folder, where a user's config functions are. The
        # installed script has its own folder on Python's path in place of it.
        if not sys.flags.safe_path and (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        if name not in _COMMANDS and name[:1] not in ("", "-"):
            raise ValueError(f"{name}: no such command{nearest(name, _COMMANDS)}")
        command, flags = _parse(arguments)
        with quiet(getattr(command, "verbose", False)):
            command.run(flags)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: titan_ext show | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failed
    except OSError as error:
        print(f"{error.filename or 'writing'}: {error.strerror or error}.", file=sys.stderr)
        return failed
    except (ValueError, AssertionError, ImportError, NotImplementedError) as error:
        if not str(error):
            raise
        print(error, file=sys.stderr)
        return failed
    return 0


def _parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command, and Titan's flags. Raises ValueError for what is neither, and missing files."""
    named = (Annotated[cls, tyro.conf.subcommand(name)] for name, cls in _COMMANDS.items())
    command, flags = tyro.cli(
        functools.reduce(operator.or_, named),
        prog="titan_ext",
        description=_DESCRIPTION,
        args=arguments,
        return_unknown_args=True,
    )
    # tyro 1.0 reads a positional that is left out as "[]" where words follow that it does not know.
    if flags and command.config in ("", "[]"):
        raise ValueError(
            f"unknown: {' '.join(flags)}; expected CONFIG before Titan's flags: titan_ext "
            f"{arguments[0]} --help."
        )
    options = [f"--{field.name.replace('_', '-')}" for field in fields(command)]
    for flag in (flag for flag in flags if flag.startswith("-") and "." not in flag):
        if (meant := did_you_mean(flag, options)) != ".":
            raise ValueError(f"{flag}: no option of titan_ext {arguments[0]}{meant}")
    if command.config:
        read_chain(command.config)
    return command, flags
