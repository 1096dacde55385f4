"""The launches of the README, as a user types them.

TorchTitan's run_train.sh is in its repository, not in the wheel. It ends in the torchrun command
line below with MODULE and CONFIG put in (release/0.3), so that command line is what runs here.
"""

import re
import shlex
from pathlib import Path

from tests.helpers.cluster import run_line

ROOT = Path(__file__).parents[2]
_SMALL = "--training.steps 1 --training.seq_len 64 --training.local_batch_size 1 "
_SMALL += "--checkpoint.no-enable --debug.seed 42"


def test_toml_with_flags_that_win(tmp_path: Path):
    """The file is in no folder of these. No torchrun runs: test_make_train.py has it."""
    flags = f"{_SMALL} --dump_folder {tmp_path} --parallelism.fsdp_wrap auto"
    train = "torchrun --nproc_per_node=2 -m torchtitan.train --module titan_ext --config"
    first, _ = run_line(tmp_path, f"{train} moe_debug.toml {flags}")
    output = re.sub(r"\x1b\[[0-9;]*m", "", first.out + first.error)
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
