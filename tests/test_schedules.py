"""Pipeline schedules that split backward: what is refused, and why."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import Run, make_config, train

_ZERO_BUBBLE = Run(
    world=2,
    pp=2,
    layers=4,
    schedule="InterleavedZeroBubble",
    ac="none",
    chunked_loss=False,
    parallelize="submodule",
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ac": "selective"}, 'policy "selective"'),
        ({"ac": "fp8"}, 'policy "fp8" with mode "selective"'),
        ({"ac": "fp8_full"}, 'policy "fp8" with mode "full"'),
        ({"compiled": True}, "compile.enable"),
        ({"chunked_loss": True}, "last norm would get no gradient"),
        ({"reshard": "always"}, "parallelism.fsdp_reshard_after_forward is 'always'"),
        (
            {"reshard_groups": (("attention", "never"), ("moe", "always"))},
            "parallelism.fsdp_reshard_groups.moe is 'always'",
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_what_would_fail_or_lose_gradients_is_refused(schedule: str, changes, named, tmp_path):
    run = replace(_ZERO_BUBBLE, schedule=schedule, **changes)
    with pytest.raises(ValueError, match=f"{schedule}', which splits backward") as error:
        replace(make_config(run, tmp_path))  # checked again, as when a trainer is built
    assert named in str(error.value)
    make_config(replace(run, schedule="Interleaved1F1B"), tmp_path)
    make_config(replace(run, pp=1), tmp_path)


@pytest.mark.parametrize("ac", ["none", "full", "fp8_none"])
def test_what_trains_is_not(ac: str, tmp_path: Path):
    make_config(replace(_ZERO_BUBBLE, ac=ac, reshard="never"), tmp_path)


def test_stock_loses_a_gradient_and_says_nothing(tmp_path: Path):
    """If this fails, a release of torch or Titan has mended it: our refusal can go."""
    run = replace(
        _ZERO_BUBBLE,
        schedule="ZBVZeroBubble",  # under which rank 0 has the last stage
        parallelize="stock",
        steps=1,
        keep_gradients=True,
    )
    whole = train(run, tmp_path / "plain").ranks[0].gradients
    chunked = train(replace(run, chunked_loss=True), tmp_path / "chunked").ranks[0].gradients
    assert whole.keys() - chunked.keys() == {"norm.weight"}
