"""``make matrix``, second part: every pair and every export of the table of checkpoints.

``python -m tests.matrix.checkpoint_runner [-k TEXT]`` runs those whose name contains TEXT.
"""

import argparse
import functools
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from tests.helpers.checkpointing import Leg, differing, read_checkpoint, run_leg
from tests.helpers.training import Run
from tests.matrix.checkpoints import EXPORTS, PAIRS, Pair, stock_export

SAVED_STEP, LAST_STEP = 2, 3
CLOSE = {"losses": 2e-4, "grad_norms": 1e-3}
"""Relative, where sums have another order. Permuted experts hide in it, not in their tensors."""
WEIGHTS = "model-00001-of-00001.safetensors"


@dataclass(frozen=True)
class Source:
    """A run that has saved, and has gone on."""

    checkpoint: Path
    tensors: dict[str, str]
    """As read from the checkpoint without ranks."""
    ranks: list[Leg]


class Sources:
    """Each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Source] = {}
        self._exports: dict[str, Path] = {}

    def get(self, run: Run) -> Source:
        if str(run) not in self._made:
            folder = self._folder / str(run)
            ranks = run_leg(
                run,
                folder,
                until=LAST_STEP,
                shared_stream=True,
                interval=SAVED_STEP,
                timeout_s=_timeout_s(run),
            )
            checkpoint = folder / "checkpoint" / f"step-{SAVED_STEP}"
            self._made[str(run)] = Source(checkpoint, read_checkpoint(checkpoint), ranks)
        return self._made[str(run)]

    def stock_export(self, run: Run) -> Path:
        """The export of what ``run``, stock, has saved."""
        if str(run) not in self._exports:
            folder = self._folder / f"export-{run}"
            self._exports[str(run)] = export(run, self.get(run), folder)
        return self._exports[str(run)]


def check_pair(pair: Pair, sources: Sources, folder: Path) -> str:
    """Load and go on. Returns what was equal, in words.

    Raises:
        AssertionError: naming what is wrong.
    """
    source = sources.get(pair.saved)
    ranks = run_leg(
        pair.loaded,
        folder / str(pair),
        until=LAST_STEP,
        look=True,
        shared_stream=True,
        initial_load_path=str(source.checkpoint),
        initial_load_model_only=False,
        timeout_s=_timeout_s(pair.loaded),
    )
    _check_tensors(_of_all(ranks), source.tensors)
    wanted, leg = _of_the_last_stage(source.ranks), _of_the_last_stage(ranks)
    assert list(leg.losses) == [LAST_STEP], f"went on with steps {list(leg.losses)}"
    off = {name: _relative(getattr(leg, name), getattr(wanted, name)) for name in CLOSE}
    said = f"loss {off['losses']:.1e} off, gradient norm {off['grad_norms']:.1e}"
    assert all(off[name] <= (0 if pair.is_exact else CLOSE[name]) for name in CLOSE), said
    # By value: a rank with two stages has two optimizers.
    rates, wanted_rates = set(leg.learning_rates), set(wanted.learning_rates)
    assert rates == wanted_rates, f"learning rates {rates} for {wanted_rates}"
    if pair.saved == pair.loaded:
        states = [rank.state_hash for rank in ranks], [rank.state_hash for rank in source.ranks]
        assert states[0] == states[1], "states after the last step differ"
    return f"{len(source.tensors)} items equal; next step: {said if any(off.values()) else 'equal'}"


def check_export(run: Run, sources: Sources, folder: Path) -> str:
    """Export from the layout of ``run``, compare with stock's export, and load it back.

    Raises:
        AssertionError: naming what is wrong.
    """
    stock = stock_export(run)
    source = sources.get(stock)
    wanted = load_file(sources.stock_export(stock) / WEIGHTS)
    exported = export(run, source, folder / f"export-{run}")
    tensors = load_file(exported / WEIGHTS)
    assert tensors.keys() == wanted.keys(), f"other names: {tensors.keys() ^ wanted.keys()}"
    wrong = [name for name in wanted if not torch.equal(tensors[name], wanted[name])]
    assert not wrong, f"{len(wrong)} tensors differ from stock's export: {wrong[:5]}"
    ranks = run_leg(
        run,
        folder / f"back-{run}",
        look=True,
        save_at_once=True,
        initial_load_path=str(exported),
        initial_load_in_hf=True,
        load_only=True,
        timeout_s=_timeout_s(run),
    )
    # The names that an architecture does not have there: hf_export warns of them.
    left_out = ".expert_bias_E" if run.model == "qwen3_moe" else "optimizer."
    _check_tensors(*(_model_only(t, left_out) for t in (_of_all(ranks), source.tensors)))
    return f"{len(tensors)} tensors equal stock's export, and come back"


def export(run: Run, source: Source, folder: Path) -> Path:
    """Load what ``source`` has saved and export it; the folder of the safetensors."""
    run_leg(
        run,
        folder,
        save_at_once=True,
        shared_stream=True,
        initial_load_path=str(source.checkpoint),
        initial_load_model_only=False,
        last_save_model_only=True,
        last_save_in_hf=True,
        timeout_s=_timeout_s(run),
    )
    return folder / "checkpoint" / f"step-{SAVED_STEP}"


def _check_tensors(loaded: dict[str, str], saved: dict[str, str]) -> None:
    names = differing(loaded, saved)
    assert not names, f"{len(names)} tensors differ: {', '.join(names[:5])}"


def _model_only(tensors: dict[str, str], left_out: str) -> dict[str, str]:
    return {
        name: value
        for name, value in tensors.items()
        if not name.startswith("optimizer.") and left_out not in name
    }


def _of_all(ranks: list[Leg]) -> dict[str, str]:
    """The ranks of a pipeline hold different tensors."""
    return {name: value for rank in ranks for name, value in rank.loaded.items()}


def _of_the_last_stage(ranks: list[Leg]) -> Leg:
    return max(ranks, key=lambda leg: max(leg.losses.values(), default=-math.inf))


def _relative(values: dict[int, float], wanted: dict[int, float]) -> float:
    return abs(values[LAST_STEP] / wanted[LAST_STEP] - 1)


def _timeout_s(run: Run) -> float:
    return 400.0 if run.compiled else 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="text", default="", help="only those whose name contains it")
    text = parser.parse_args().text
    checks: dict[str, Callable[[Sources, Path], str]] = {
        **{str(pair): functools.partial(check_pair, pair) for pair in PAIRS},
        **{f"export {run}": functools.partial(check_export, run) for run in EXPORTS},
    }
    checks = {name: check for name, check in checks.items() if text in name}
    folder = Path(tempfile.mkdtemp(prefix="titan_ext_checkpoints_"))
    sources = Sources(folder / "sources")
    failed = 0
    with tqdm(sorted(checks), unit="row") as progress:
        for name in progress:
            try:
                said = checks[name](sources, folder / "loaded")
            except AssertionError as error:  # a rank failed, or a difference
                said, failed = f"FAILED: {error}", failed + 1
            progress.write(f"{name}: {said}")
            shutil.rmtree(folder / "loaded", ignore_errors=True)
    shutil.rmtree(folder)
    print(f"{len(checks) - failed} checkpoints as saved, {failed} not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
