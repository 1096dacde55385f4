"""Every refused file with its message; no mistake is passed over and no ImportError escapes."""

from pathlib import Path

import pytest

from tests.helpers.bad_tomls import BadToml, bad_tomls
from titan_ext.config_registry.resolve import load
from titan_ext.toml.files import TomlConfigError


@pytest.mark.parametrize("bad", bad_tomls(), ids=lambda bad: bad.title.replace(" ", "-"))
def test_message(bad: BadToml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in bad.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        load(bad.loaded)
    assert str(refused.value) == bad.message


def test_text_that_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b'extends = "a.b"\ndump_folder = "\xff"\n')
    with pytest.raises(TomlConfigError, match=r"^bad.toml: line 2: not UTF-8 text\.$"):
        load("bad.toml")


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").mkdir()
    with pytest.raises(ValueError, match=r"^bad.toml: is a folder\.$"):
        load("bad.toml")


@pytest.mark.parametrize("name", ["fla", "torchvision.io"])
def test_a_package_that_is_missing_is_named_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # As if it were not installed; where it is not, this is what Python does by itself.
    (tmp_path / f"my_{name[:3]}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
    )
    (tmp_path / "bad.toml").write_text(f'extends = "my_{name[:3]}.base"\n')
    package = {"fla": "flash-linear-attention"}.get(name, name.split(".")[0])
    with pytest.raises(
        TomlConfigError, match=rf"needs the module {name}: pip install {package}\.$"
    ):
        load("bad.toml")
