"""The folders of upstream/: patches apply to the installed sources, and all is ready to be sent.

``make upstream`` runs their tests, without and with each patch.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from upstream import check

PATCHES = pytest.mark.parametrize("patch", check.patches(), ids=lambda patch: patch.name)
FOLDERS: list[check.Folder] = [*check.patches(), *check.comments()]
README = (check.HERE / "README.md").read_text()


def _applied(patch: check.Patch) -> str:
    said = check.check(patch, quick=True).before
    if said.startswith("not tried"):  # made for other sources than the installed ones
        pytest.skip(said)
    return said


def test_every_folder_is_tried():
    readmes = {file.parent.name for file in check.HERE.glob("*/README.md")}
    assert readmes == {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_folder_is_complete(folder: check.Folder):
    assert not folder.lacks()
    package, version = folder.applies_to
    assert f"]({folder.name}/README.md) | {package} {version} |" in README


@PATCHES
def test_patch_applies(patch: check.Patch):
    assert _applied(patch) == "applies"


def test_another_version_gets_the_patch_that_was_made_for_it(monkeypatch: pytest.MonkeyPatch):
    (patch,) = (p for p in check.patches() if (p.folder / "main").is_dir())
    of_release = patch.file
    assert of_release.parent == patch.folder.resolve()
    monkeypatch.setattr(check, "installed", lambda _: ("0.2.2", Path()))
    assert patch.file == of_release.parent / "main" / of_release.name
    assert not patch.lacks()


def test_incomplete_folders_are_named(tmp_path: Path):
    patch = replace(check.patches()[0], folder=tmp_path / "copy")
    shutil.copytree(check.patches()[0].folder, patch.folder)
    readme = patch.folder / "README.md"
    readme.write_text(readme.read_text().replace("| measured |", "| guessed |"))
    patch.file.write_text(patch.file.read_text().replace("Test Plan:", "Tested: \u2713"))
    assert patch.lacks() == [
        "its README has no row 'measured'",
        "the patch is not ASCII",
        "its message has no test plan",
    ]


def test_a_patch_for_other_sources_says_so(tmp_path: Path):
    patch = replace(check.patches()[0], folder=tmp_path / "copy")
    shutil.copytree(check.patches()[0].folder, patch.folder)
    lines = patch.file.read_text().splitlines(keepends=True)
    context = next(i for i, line in enumerate(lines) if line.startswith("         "))
    lines[context] = lines[context].rstrip() + "  # and more\n"
    patch.file.write_text("".join(lines))
    assert "copy does not apply: error: patch failed" in _applied(patch)
