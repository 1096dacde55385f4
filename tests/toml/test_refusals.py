"""Every config that is refused, on one page: the message names the key and what is expected."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.converters import any_gpu
from tests.helpers.toml_files import DEBUG
from titan_ext.base.messages import Mistakes
from titan_ext.config_registry.resolve import load, resolve
from titan_ext.parallelize.limits import wrong_degrees
from titan_ext.run.trainer import Trainer
from titan_ext.toml.files import TomlConfigError

PAGE = Path(__file__).parents[1] / "data" / "refusals.md"


@dataclass
class Case:
    """Files, what is around them, and the lines of the message."""

    files: dict[str, str] = field(default_factory=lambda: {"bad.toml": ""})
    around: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = " ".join([*self.around.values(), *self.files["bad.toml"].splitlines()])
        return re.sub(r"[^\w.]+", "-", text)[:60].strip("-")


def cases() -> Iterator[Case]:
    """Those of the page, whose head says how to read them."""
    for block in re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        case, file = Case(), "bad.toml"
        for line in block.splitlines():
            if case.lines and not line.startswith("#>"):
                yield case
                case, file = Case(), "bad.toml"
            kind, _, rest = line[3:].partition(" ")
            if line.startswith("#>"):
                case.lines.append(line[3:])
            elif not line.startswith("#: "):
                case.files[file] += f"{line}\n"
            elif "." in kind:
                file = kind
                case.files[file] = ""
            else:
                case.around[kind] = rest
        yield case


def _changed(config: Trainer.Config, case: Case) -> Trainer.Config:
    """By code in place of a file, whose values nobody converts."""
    if "python" not in case.around:
        return config
    section, _, values = case.around["python"].partition(" ")
    changed: Any = replace(getattr(config, section), **eval(f"dict({values})"))
    return replace(config, **{section: changed})


@pytest.mark.parametrize("case", cases(), ids=str)
def test_refused(
    case: Case, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", case.around.get("ranks", "64"))  # as torchrun does
    if "accelerator" in case.around:
        request.getfixturevalue("accelerator")
    for name, text in case.files.items():
        whole = "extends" in text or not name.endswith(".toml")
        (folder / name).write_text(text if whole else DEBUG + text)
    name = case.around.get("load", "bad.toml")
    message = "accepted"
    with any_gpu() if "gpu" in case.around else contextlib.nullcontext():
        try:
            config = resolve(name, case.around.get("flags", "").split()).config
            config = _changed(config, case)
            ranks = int(case.around.get("ranks", 0)) or None
            Mistakes(wrong_degrees(config, ranks)).raise_all()  # as Titan's door does
        except ValueError as error:
            message = str(error)
    if not {"python", "ranks"} & case.around.keys():
        assert re.match(r"\w+\.\w+( with flags)?: |accepted$", message), message
    said = re.sub(r"^([\w. ]+: )?\d+ mistakes:\n +|^bad\.toml( with flags)?: ", "", message)
    pieces = [re.split(r"(?: |^)\.\.\.(?: |$)", line) for line in case.lines]
    wanted = r"\n *".join(".*".join(map(re.escape, line)) for line in pieces)
    assert re.fullmatch(wanted, said), f"expected {case.lines}, got: {message}"


def test_text_that_is_not_utf_8(folder: Path):
    (folder / "bad.toml").write_bytes(b'extends = "a.b"\ndump_folder = "\xff"\n')
    with pytest.raises(TomlConfigError, match=r"^bad.toml: not valid TOML: 'utf-8' codec"):
        load("bad.toml")


def test_a_folder(folder: Path):
    (folder / "bad.toml").mkdir()
    with pytest.raises(ValueError, match=r"^bad.toml: is a folder\.$"):
        load("bad.toml")
