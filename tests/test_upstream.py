"""The folders of upstream/: patches apply to the installed sources, and all is ready to be sent."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from upstream import check

PATCHES = pytest.mark.parametrize("patch", check.patches(), ids=lambda patch: patch.name)
COMMENTS = check.comments()
FOLDERS: list[check.Folder] = [*check.patches(), *COMMENTS]
README = (check.HERE / "README.md").read_text()


def _checked(patch: check.Patch, quick: bool = False) -> check.Verdict:
    verdict = check.check(patch, quick)
    if verdict.before.startswith("not tried"):  # made for other sources than the installed ones
        pytest.skip(verdict.before)
    return verdict


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
    assert _checked(patch, quick=True).before == "applies"


@pytest.mark.slow
@PATCHES
def test_patch_fails_before_and_passes_after(patch: check.Patch):
    verdict = _checked(patch)
    assert verdict.good, verdict


@pytest.mark.slow
@pytest.mark.parametrize("comment", COMMENTS, ids=lambda comment: comment.name)
def test_what_a_comment_says_is_seen(comment: check.Comment):
    if wrong := comment.wrong_version:
        pytest.skip(wrong)
    assert check.reproduce(comment) == "seen"


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
    assert "copy does not apply: error: patch failed" in _checked(patch, quick=True).before
