"""upstream/check.py tells a patch that is not ready to be sent, and one that does not apply.

``make lint`` asks it of each folder, and ``make upstream`` runs the patches' tests.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from upstream import check


def test_incomplete_folders_are_named(tmp_path: Path):
    patch = replace(check.patches()[0], folder=tmp_path / "copy")
    shutil.copytree(check.patches()[0].folder, patch.folder)
    readme = patch.folder / "README.md"
    text = readme.read_text().replace("| measured |", "| guessed |")
    readme.write_text(text.replace("`together` in", "`apart` in"))
    patch.file.write_text(patch.file.read_text().replace("Test Plan:", "Tested: \u2713"))
    assert patch.lacks() == [
        "its README has no row 'measured'",
        "the patch is not ASCII",
        "its message has no test plan",
        "its README names apart in titan_ext/base/titan/data.py, which is not there",
    ]


def test_a_patch_for_other_sources_says_so(tmp_path: Path):
    ours = next(patch for patch in check.patches() if not patch.wrong_version)
    patch = replace(ours, folder=tmp_path / "copy")
    shutil.copytree(ours.folder, patch.folder)
    lines = patch.file.read_text().splitlines(keepends=True)
    context = next(i for i, line in enumerate(lines) if line.startswith("         "))
    lines[context] = lines[context].rstrip() + "  # and more\n"
    patch.file.write_text("".join(lines))
    assert "copy does not apply: error: patch failed" in check.check(patch, quick=True).before
