# SPDX-License-Identifier: BSD-3-Clause
"""Try the patches for torch and TorchTitan on the installed sources.

A patch is worth a reviewer's time if its test fails without it and passes with it. This file shows
both, without a checkout: it builds a tree of links to the installed package, in which only the
files that the patch touches are copies, and puts it first on the path.

    python upstream/check.py [--any-version] [FOLDER ...]

``--any-version`` tries the patches for TorchTitan on what is installed, such as a checkout of its
main in an environment of its own.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("torch", "torchtitan")
TESTS = ("test/", "tests/")
"""Where the repositories of torch and TorchTitan have their tests; their wheels have none."""
ROWS = ("applies to", "fails before with", "answers", "measured", "state")
"""What the table at the top of a README must say."""
LIMIT_S = 1200
PRELUDE = "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    pass\n"
"""Stands in for the package expecttest: torch's test base derives from it, no test here uses it."""


@dataclass(frozen=True)
class Patch:
    """A change in a folder, with its test and its description."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def rows(self) -> dict[str, str]:
        """The table at the top of its README."""
        text = (self.folder / "README.md").read_text()
        return dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", text, flags=re.MULTILINE))

    @property
    def applies_to(self) -> tuple[str, str]:
        """Package and version, such as ("torch", "2.15.0")."""
        package, version = self.rows["applies to"].split()[:2]
        return package, version.rstrip(",")

    @property
    def wrong_version(self) -> str:
        """Why it cannot be tried here; empty if it can."""
        package, version = self.applies_to
        here = installed(package)[0]
        return "" if here == version else f"not tried: {package} {here} is installed"

    @property
    def file(self) -> Path:
        (file,) = self.folder.glob("0001-*.patch")
        return file.resolve()

    @property
    def files(self) -> list[str]:
        """The files that it touches, relative to the root of their repository."""
        return re.findall(r"^diff --git a/(\S+) b/", self.file.read_text(), flags=re.MULTILINE)

    @property
    def sources(self) -> list[str]:
        return [file for file in self.files if not file.startswith(TESTS)]

    @property
    def tests(self) -> list[str]:
        return [file for file in self.files if file.startswith(TESTS)]

    @property
    def failure(self) -> str:
        """What its test prints without it."""
        return self.rows["fails before with"].strip("`")

    def lacks(self) -> list[str]:
        """What keeps it from being sent, in words."""
        wrong = [f"its README has no row {row!r}" for row in ROWS if row not in self.rows]
        text = self.file.read_bytes()
        header = text.partition(b"\n---\n")[0].decode("ascii", errors="replace")
        if not text.isascii():
            wrong.append("the patch is not ASCII")
        for field in ("From", "Date", "Subject"):
            if not re.search(rf"^{field}: \S", header, flags=re.MULTILINE):
                wrong.append(f"the patch has no {field}")
        if "Test Plan:" not in header:
            wrong.append("its message has no test plan")
        wrong += [] if self.tests else ["the patch has no test"]
        # With the change, this is what goes here: a name that has moved would stay for ever.
        text = (self.folder / "README.md").read_text()
        for name, ours in re.findall(r"(?:`([\w.]+)` in )?`(titan_ext/\S+\.py)`", text):
            source = HERE.parent / ours
            if not source.exists() or name not in source.read_text():
                wrong.append(f"its README names {name or 'a file'} in {ours}, which is not there")
        return wrong + [f"touches {f!r}" for f in self.sources if not f.startswith(PACKAGES)]


def patches() -> list[Patch]:
    return [Patch(file.parent) for file in sorted(HERE.glob("*/0001-*.patch"))]


def installed(package: str) -> tuple[str, Path]:
    """The version of ``package``, and the folder that it lies in."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    return importlib.metadata.version(package), Path(str(spec.origin)).parent.parent


def overlay(patch: Patch, root: Path) -> None:
    """Make the installed package anew in ``root``: links, but for the files that are patched."""
    site = installed(patch.applies_to[0])[1]
    for file in patch.sources:
        for folder in reversed(Path(file).parents[:-1]):
            _open(root / folder, site / folder)
        (root / file).unlink(missing_ok=True)
        if (site / file).exists():  # else the patch adds it
            shutil.copyfile(site / file, root / file)
    if importlib.util.find_spec("expecttest") is None:
        (root / "expecttest.py").write_text(PRELUDE)


def _open(folder: Path, source: Path) -> None:
    """Put a real folder in the place of a link, with links to what ``source`` has."""
    if folder.is_dir() and not folder.is_symlink():
        return
    folder.unlink(missing_ok=True)
    folder.mkdir()
    for entry in source.iterdir():
        if entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)


def apply(patch: Patch, root: Path, *options: str) -> None:
    """Apply ``patch``, or a part of it, to the tree in ``root``.

    Raises:
        ValueError: if it does not apply, with git's words.
    """
    # Inside a checkout git would look for the files at that checkout's root, and skip these.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    done = subprocess.run(
        ["git", "apply", "--whitespace=error-all", *options, str(patch.file)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"{patch.name} does not apply: {done.stderr.strip()}")


def run_tests(patch: Patch, root: Path) -> tuple[int, str]:
    """Run the tests of ``patch`` on the tree in ``root``: how many ran, what the failed ones said.

    A test that is skipped has shown nothing: it counts as failed.
    """
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran, failed = 0, ""
    for file in patch.tests:
        done = subprocess.run(
            [sys.executable, file],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        count = re.search(r"^Ran (\d+) tests? in", done.stdout, flags=re.MULTILINE)
        ran += int(count[1]) if count else 0
        if done.returncode != 0 or not re.search(r"^OK$", done.stdout, flags=re.MULTILINE):
            failed += done.stdout
    return ran, failed


@dataclass(frozen=True)
class Verdict:
    """What was seen of one patch."""

    patch: Patch
    tests: int = 0
    before: str = ""
    after: str = ""

    @property
    def good(self) -> bool:
        return self.before == "fails, as it should" and self.after == "passes"

    def row(self) -> str:
        package, version = self.patch.applies_to
        cells = [self.patch.name, f"{package} {version}", str(self.tests), self.before, self.after]
        return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


HEADER = "| patch | on | tests | before | after |\n|---|---|---|---|---|"


def check(patch: Patch, quick: bool = False, any_version: bool = False) -> Verdict:
    """Apply ``patch`` to the installed sources, its tests first, and run them before and after.

    Args:
        quick: whether to apply it only.
        any_version: whether to try it on another version than it was made for.
    """
    if (wrong := patch.wrong_version) and not any_version:
        return Verdict(patch, before=wrong)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        overlay(patch, root)
        only_tests = [f"--include={pattern}*" for pattern in TESTS]
        try:
            apply(patch, root, *only_tests)
            tests, before = (0, "") if quick else run_tests(patch, root)
            apply(patch, root, *(f"--exclude={pattern}*" for pattern in TESTS))
        except ValueError as error:
            return Verdict(patch, before=str(error))
        if quick:
            return Verdict(patch, before="applies")
        after = run_tests(patch, root)[1]
    return Verdict(
        patch,
        tests,
        before="fails, as it should" if patch.failure in before else before[-2000:] or "passes",
        after=after[-2000:] or "passes",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help="folders beside this file; none: all")
    parser.add_argument("--any-version", action="store_true", help="patches, on what is installed")
    found = {patch.name: patch for patch in patches()}
    given = parser.parse_args()
    chosen = [found[Path(folder).name] for folder in given.folders]
    good = True
    print(HEADER, flush=True)
    for patch in chosen or found.values():
        lacks = patch.lacks()
        for words in lacks:
            print(f"{patch.name}: {words}", file=sys.stderr)
        verdict = check(patch, any_version=given.any_version)
        good = good and verdict.good and not lacks
        print(verdict.row(), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
