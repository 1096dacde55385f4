"""Where values come from: files and the command line."""

from pathlib import Path

from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.helpers.toml_files import DATA, DEBUG
from titan_ext.base import no_accelerator
from titan_ext.config_registry.resolve import resolve
from titan_ext.run.trainer import Trainer


def test_every_value_has_an_origin(folder: Path):
    """A name in a file is looked for beside that file."""
    (folder / "base").mkdir()
    (folder / "base" / "root.toml").write_text(DEBUG + "[training]\nsteps = 1\nmax_norm = 2\n")
    (folder / "base" / "middle.toml").write_text(
        'extends = "root.toml"\n[training]\nsteps = 2\nseq_len = 512\n'
        '[activation_checkpoint]\npolicy = "full"\n'
    )
    (folder / "run.toml").write_text('extends = "base/middle.toml"\n[training]\nsteps = 3\n')
    resolved = resolve("run.toml")
    assert resolved.files == ("base/root.toml", "base/middle.toml", "run.toml")
    training = resolved.config.training
    assert (training.steps, training.seq_len, training.max_norm) == (3, 512, 2)
    assert resolved.origins.keys() == resolved.values.keys()
    origins = resolved.origins
    assert origins["training.steps"] == "run.toml"
    assert origins["training.seq_len"] == "base/middle.toml"
    assert origins["training.max_norm"] == "base/root.toml"
    assert origins["training.local_batch_size"] == "deepseek_v3.deepseek_v3_debugmodel"
    assert origins["activation_checkpoint.policy"] == "base/middle.toml"
    assert origins["activation_checkpoint.debug"] == "base/middle.toml"
    if no_accelerator.needed():
        assert origins["training.disable_cuda_graphs"] == "titan_ext, as the log says"


def test_a_list_that_is_replaced_takes_the_origins_of_its_items_along(folder: Path):
    (folder / "middle.toml").write_text(
        DEBUG + "[optimizer.param_groups.0.optimizer_kwargs]\nlr = 1e-4\n"
    )
    (folder / "run.toml").write_text(
        'extends = "middle.toml"\n[[optimizer.param_groups]]\n'
        'pattern = ".*"\noptimizer_name = "Adam"\noptimizer_kwargs = { lr = 1e-3 }\n'
    )
    one_key = resolve("middle.toml")
    assert one_key.config.optimizer.param_groups == default_adamw(lr=1e-4).param_groups
    middle, run = one_key.origins, resolve("run.toml").origins
    key = "optimizer.param_groups.0.optimizer_kwargs"
    assert middle[f"{key}.lr"] == "middle.toml"
    assert middle[f"{key}.eps"] == "deepseek_v3.deepseek_v3_debugmodel"
    assert run[f"{key}.lr"] == "run.toml"


def test_another_component_takes_the_origins_of_its_keys_along(folder: Path):
    (folder / "middle.toml").write_text(DEBUG + "[dataloader]\nnum_workers = 3\n")
    (folder / "run.toml").write_text(
        'extends = "middle.toml"\n[dataloader]\n'
        f'component = "{DATA}.InterleavedHuggingFaceTextDataLoader"\n'
    )
    assert resolve("middle.toml").origins["dataloader.num_workers"] == "middle.toml"
    origins = resolve("run.toml").origins
    assert origins["dataloader.component"] == "run.toml"
    assert origins["dataloader.num_workers"] == "run.toml"


def test_the_command_line_wins_and_is_named(folder: Path):
    (folder / "run.toml").write_text(DEBUG + "[training]\nsteps = 3\nseq_len = 512\n")
    flags = ["--training.steps", "5", "activation_checkpoint:full"]
    resolved = resolve("run.toml", flags)
    assert type(resolved.config) is Trainer.Config
    assert resolved.config.training.steps == 5
    assert isinstance(resolved.config.activation_checkpoint, FullAC.Config)
    assert resolved.origins["training.steps"] == "command line"
    assert resolved.origins["training.seq_len"] == "run.toml"
    assert resolved.origins["activation_checkpoint.policy"] == "command line"
    assert resolved.origins["training.gc_freq"] == "deepseek_v3.deepseek_v3_debugmodel"
