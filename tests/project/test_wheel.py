"""The wheel, built and used from another folder; and what make says to an old Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import PATIENCE_S
from titan_ext.verify.ranks import free_port

ROOT = Path(__file__).parents[2]
SHIPPED = {"train_configs": "train_configs", "launch": "launch_scripts"}
"""Folders of the checkout that lie in the package, and their names there."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, target = folder / "source", folder / "wheels", folder / "target"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("titan_ext", *SHIPPED):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    _pip("wheel", str(source), "--no-build-isolation", "--wheel-dir", str(wheels), *offline)
    (wheel,) = wheels.glob("*.whl")
    _pip("install", str(wheel), "--target", str(target), *offline)
    return target


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _python(installed: Path, folder: Path, *arguments: str) -> str:
    """Run Python in ``folder`` with the installed package before the checkout's."""
    environment = {name: value for name, value in os.environ.items() if "TITAN_EXT" not in name}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_everything(installed: Path):
    package = installed / "titan_ext"
    modules = {path.relative_to(ROOT) for path in (ROOT / "titan_ext").rglob("*.py")}
    assert {path for path in modules if not (installed / path).exists()} == set()
    assert (package / "py.typed").exists()
    for folder, name in SHIPPED.items():
        ours = {path.name: path.read_text() for path in (ROOT / folder).iterdir()}
        assert {path.name: path.read_text() for path in (package / name).iterdir()} == ours
    assert all(os.access(path, os.X_OK) for path in (package / "launch_scripts").iterdir())


def test_the_wheel_is_used_from_another_folder(installed: Path, tmp_path: Path):
    """With the configs that it ships; nothing here imports torch."""
    code = (
        "import titan_ext; from titan_ext.toml.files import shipped_configs\n"
        "print(titan_ext.__file__, shipped_configs()['deepseek_v3_16b'], sep='\\n')"
    )
    where, config = _python(installed, tmp_path, "-c", code).split()
    assert Path(where).is_relative_to(installed)
    assert Path(config) == installed / "titan_ext" / "train_configs" / "deepseek_v3_16b.toml"
    printed = _python(installed, tmp_path, str(installed / "bin" / "titan_ext"), "show")
    assert "moe_debug" in printed
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_training_imports_no_tool(installed: Path, tmp_path: Path):
    """Without the folders of the commands that plan and prove a job, it trains."""
    package = tmp_path / "titan_ext"
    shutil.copytree(installed / "titan_ext", package)
    for tool in (package / "plan", package / "verify"):
        shutil.rmtree(tool, ignore_errors=True)
    (package / "base" / "machines.py").unlink()
    code = (
        "import os, runpy, sys\n"
        f"os.environ['TITAN_EXT_DATA'] = '{ROOT / '.data'}'\n"
        "names = dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='localhost')\n"
        f"os.environ.update(names, MASTER_PORT='{free_port()}')\n"
        "sys.argv[1:] = '--module titan_ext --config moe_debug.toml --training.steps 1 '"
        "'--training.seq_len 32 --training.local_batch_size 1 --checkpoint.no-enable '"
        "'--parallelism.expert_parallel_degree 1 activation_checkpoint:fp8'.split()\n"
        "runpy.run_module('torchtitan.train', run_name='__main__')\n"
        "print(len([name for name in sys.modules if name.startswith('titan_ext.')]))"
    )
    assert int(_python(tmp_path, tmp_path, "-c", code).split()[-1]) > 50


@pytest.mark.slow
def test_a_file_extends_what_the_wheel_ships(installed: Path, tmp_path: Path):
    code = "from titan_ext.base.stdlib_corpus import default_folder; print(default_folder())"
    corpus = _python(installed, tmp_path, "-c", code).strip()
    assert Path(corpus).parent == tmp_path / "cache" / "titan_ext"
    (tmp_path / "mine.toml").write_text('extends = "deepseek_v3_16b.toml"\n[training]\nsteps = 7\n')
    command = str(installed / "bin" / "titan_ext")
    printed = _python(installed, tmp_path, command, "show", "mine.toml")
    assert f"from {installed}/titan_ext/train_configs/deepseek_v3_16b.toml" in printed
    assert "training.steps = 7  # from mine.toml" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"mine.toml"}, "nothing is left behind"


def test_make_tells_an_old_python(tmp_path: Path):
    old = tmp_path / "python3.10"
    old.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ echo ran "$@"; exit 0; }}\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = (3, 10, 4, 0, 0); $2"\n'
    )
    old.chmod(0o755)
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["make", "-s", f"{venv}/.installed", f"VENV={venv}", f"PYTHON={old}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name[:4] != "MAKE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    said = f"titan_ext needs Python 3.11 or newer; {old} is 3.10. Try: make PYTHON=python3.11"
    assert said in done.stderr
    assert done.stdout == "", "no environment is made"
