"""The launches of the README, as a user types them.

TorchTitan's run_train.sh is in its repository, not in the wheel. It ends in the torchrun command
line below with MODULE and CONFIG put in (release/0.3), so that command line is what runs here.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cluster import PATIENCE_S, run_line

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sys.executable).parent / "torchrun")


def _launch(config: str, *flags: str, cwd: Path = ROOT, processes: int = 2) -> str:
    """The last lines of run_train.sh with NGPU=2, MODULE=titan_ext and CONFIG=config."""
    command = [TORCHRUN, f"--nproc_per_node={processes}", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint=localhost:0", "--local-ranks-filter", "0", "--role", "rank"]
    command += ["--tee", "3", "-m", "torchtitan.train", "--module", "titan_ext"]
    command += ["--config", config, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    output = done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


def _small(dump_folder: Path, *more: str) -> list[str]:
    flags = ["--training.steps", "1", "--training.seq_len", "64", "--training.local_batch_size"]
    flags += ["1", "--checkpoint.no-enable", "--debug.seed", "42"]
    return [*flags, "--dump_folder", str(dump_folder), *more]


def _fork(config: str, *flags: str) -> str:
    """As ``_launch``, without torchrun and its imports."""
    folder = Path(flags[-1])
    line = f"torchrun --nproc_per_node=2 -m torchtitan.train --module titan_ext --config {config} "
    ranks = run_line(folder, line + shlex.join(flags))
    return re.sub(r"\x1b\[[0-9;]*m", "", ranks[0].out + ranks[0].error)


@pytest.mark.parametrize("launch", [_fork, pytest.param(_launch, marks=pytest.mark.slow)])
def test_toml_with_flags_that_win(launch: Callable[..., str], tmp_path: Path):
    output = launch("moe_debug.toml", *_small(tmp_path))  # which is in no folder of these
    assert re.search(r"step:  1  loss:  8\.\d+", output), output[-3000:]
    assert "sequence length 64, total steps 1" in output
    assert "says what ran." in output
    assert re.search(r'FSDP units: block, 8 units.*, auto is "block" \(EP 2', output)


def _first_screen() -> list[str]:
    """The commands of the README above its picture."""
    text = (ROOT / "README.md").read_text().partition("\n![")[0]
    return re.findall(r"^    (\S.*)$", text, flags=re.MULTILINE)


def test_the_files_of_the_first_screen_are_found_in_an_empty_folder(tmp_path: Path):
    install, train, cluster = _first_screen()
    assert install == "pip install ."  # tests/project/test_wheel.py does it
    *variables, script = shlex.split(cluster)
    given = dict(variable.split("=") for variable in variables)
    assert (given["MODULE"], script) == ("titan_ext", "./run_train.sh")
    for config in (train.split()[-1], given["CONFIG"]):
        (shown,) = run_line(tmp_path, f"titan_ext show {config} --changed")
        assert shown.code == 0, shown.error
        assert "expert_parallel_degree = " in shown.out


@pytest.mark.slow
def test_the_first_screen_of_the_readme_trains_in_an_empty_folder(tmp_path: Path):
    """As printed, but for the size of the run; the last line's job needs GPUs."""
    folder = tmp_path / "empty"
    folder.mkdir()
    _, train, _ = _first_screen()
    *small, _, _ = _small(folder)  # without its dump_folder
    ranks = run_line(folder, f"{train} {shlex.join(small)}")
    output = re.sub(r"\x1b\[[0-9;]*m", "", ranks[0].out + ranks[0].error)
    assert [rank.code for rank in ranks] == [0, 0, 0, 0], output[-3000:]
    assert re.search(r"step:  1  loss:  8\.\d+", output), output[-3000:]
    assert "Finished at step 1; outputs/moe_debug/run.json says what ran." in output
    assert (folder / "outputs" / "moe_debug" / "run.json").exists()


@pytest.mark.slow
def test_config_function_of_titan(tmp_path: Path):
    """MODULE=deepseek_v3 to MODULE=titan_ext, and everything else kept."""
    data = ["--dataloader.dataset", "python_stdlib", "--hf_assets_path", str(_tokenizer())]
    flags = _small(tmp_path, *data, "--parallelism.expert_parallel_degree", "2")
    output = _launch("deepseek_v3_debugmodel", *flags)
    assert re.search(r"step:  1  loss:  8\.\d+", output), output[-3000:]
    assert re.search(r'FSDP units: block, 8 units.*, auto is "block" \(EP 2', output)


@pytest.mark.slow
def test_dry_run_of_a_large_job(tmp_path: Path):
    """run_train.sh with NGPU=64 COMM_MODE=fake_backend: one process, no torchrun."""
    command = [sys.executable, "-m", "torchtitan.train", "--module", "titan_ext", "--config"]
    command += ["train_configs/moe_debug.toml", *_small(tmp_path), "--comm.mode=fake_backend"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NGPU": "64", "LOCAL_RANK": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    output = done.stdout + done.stderr
    assert "dp_shard=64" in output, output[-3000:]
    assert "Training completed" in output


def _tokenizer() -> Path:
    from titan_ext.base.stdlib_corpus import default_tokenizer_path, make_corpus

    make_corpus()
    return default_tokenizer_path()
