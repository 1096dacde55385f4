"""The patches of upstream/: they apply to the installed sources, and each is ready to be sent."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from upstream import check

PATCHES = pytest.mark.parametrize("patch", check.patches(), ids=lambda patch: patch.name)
README = (check.HERE / "README.md").read_text()


def _checked(patch: check.Patch, quick: bool = False) -> check.Verdict:
    verdict = check.check(patch, quick)
    if verdict.before.startswith("not tried"):  # made for other sources than the installed ones
        pytest.skip(verdict.before)
    return verdict


@PATCHES
def test_folder_is_complete(patch: check.Patch):
    assert not check.lacks(patch)
    package, version = patch.applies_to
    assert f"]({patch.name}/README.md) | {package} {version} |" in README


@PATCHES
def test_patch_applies(patch: check.Patch):
    assert _checked(patch, quick=True).before == "applies"


@pytest.mark.slow
@PATCHES
def test_patch_fails_before_and_passes_after(patch: check.Patch):
    verdict = _checked(patch)
    assert verdict.good, verdict


def test_incomplete_folders_are_named(tmp_path: Path):
    patch = replace(check.patches()[0], folder=tmp_path / "copy")
    shutil.copytree(check.patches()[0].folder, patch.folder)
    readme = patch.folder / "README.md"
    readme.write_text(readme.read_text().replace("| measured |", "| guessed |"))
    patch.file.write_text(patch.file.read_text().replace("Test Plan:", "Tested: \u2713"))
    assert check.lacks(patch) == [
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
