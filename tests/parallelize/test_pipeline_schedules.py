"""Pipeline schedules that split backward: what is refused, and why."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.config import ParallelismConfig as TitanParallelismConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from tests.helpers.toml_files import Loader
from tests.helpers.training import Run, degrees, make_config, meta_model, train
from titan_ext.fsdp.settings import FSDPSettings
from titan_ext.parallelize.keys import ParallelismConfig
from titan_ext.parallelize.limits import wrong_schedule
from titan_ext.parallelize.passes import parallelize

DOC = Path(__file__).parents[2] / "docs" / "running.md"

_ZERO_BUBBLE = Run(
    world=2,
    pp=2,
    layers=4,
    schedule="InterleavedZeroBubble",
    ac="none",
    chunked_loss=False,
    parallelize="submodule",
)


def test_a_schedule_in_a_file_is_read(tmp_path: Path):
    file = tmp_path / "schedule.csv"
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file)
    )
    settings = FSDPSettings()

    def wrong() -> str:
        loss = ChunkedLossWrapper.Config()
        found = wrong_schedule(settings, parallelism, loss=loss, ac_config=None, compiled=False)
        return " ".join(found)

    file.write_text("0F0,0B0\n1F0,1B0\n")
    assert not wrong()
    file.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert re.search(r"_csv is '.*schedule.csv', which splits backward", wrong())


def test_the_example_of_the_docs(config: Loader):
    (example,) = re.findall(r"```toml\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert isinstance(config(example).loss, CrossEntropyLoss.Config)
    without_loss = example.split("[loss]")[0]
    with pytest.raises(ValueError, match="last norm would get no gradient"):
        config(without_loss)
    validates = example + "[validator]\nenable = true\n"
    with pytest.raises(ValueError, match=r"validator\.enable .* \"ZBVZeroBubble\", with which"):
        config(validates)
    assert config(validates.replace("ZBV", "Interleaved")).validator.enable


@pytest.mark.parametrize("ac", ["full", "fp8_no_recompute"])
def test_what_trains_is_not(ac: str, tmp_path: Path):
    make_config(replace(_ZERO_BUBBLE, ac=ac, reshard="never"), tmp_path)


@pytest.mark.slow
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


def test_parallelize_refuses_them_under_any_trainer():
    """With our model spec under Titan's own trainer, which has checks of its own only."""
    with pytest.raises(ValueError, match=r'ZBVZeroBubble.* policy "selective"'):
        parallelize(
            meta_model(),
            parallel_dims=degrees(pp=2),
            training=TrainingConfig(),
            parallelism=TitanParallelismConfig(
                pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble"
            ),
            compile_config=CompileConfig(),
            ac_config=SelectiveAC.Config(),
            dump_folder="",
        )
