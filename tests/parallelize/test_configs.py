"""Our keys are Titan keys: on the command line, in the config, and refused with one message."""

import dataclasses
import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer as TitanTrainer

from tests.helpers.training import titan_config
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.facts import Effect, KeyFacts, facts_of
from titan_ext.config_registry.resolve import load
from titan_ext.parallelize.keys import FACTS, ParallelismConfig
from titan_ext.run import trainer
from titan_ext.run.trainer import Trainer, extend_config
from titan_ext.toml.files import to_toml

MOE_DEBUG = Path(__file__).parents[2] / "train_configs" / "moe_debug.toml"


def _parse(*flags: str) -> Trainer.Config:
    args = ["--module", "titan_ext", "--config", str(MOE_DEBUG), *flags]
    return cast(Trainer.Config, ConfigManager().parse_args(args))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Trainer.Config]:
    """Every config of ours that Titan's checks see, which run at the end of ours."""
    seen = []
    check = TitanTrainer.Config.__post_init__

    def note(config: TitanTrainer.Config) -> None:
        if isinstance(config, Trainer.Config):
            seen.append(config)
        check(config)

    monkeypatch.setattr(TitanTrainer.Config, "__post_init__", note)
    monkeypatch.setattr(trainer, "_checked", set())
    return seen


def test_a_file_is_checked_once_and_tyro_and_build_do_not_check_it_again(checked: list):
    load(MOE_DEBUG)
    assert len(checked) == 1
    checked.clear()
    config = _parse()
    dataclasses.replace(config)  # as in Configurable.Config.build
    assert len(checked) == 1
    checked.clear()
    config = _parse("--training.steps=17")
    dataclasses.replace(config)
    assert [seen.training.steps for seen in checked] == [30, 17]  # the file; with the flags
    config.parallelism.pipeline_parallel_microbatch_size = 0
    with pytest.raises(ValueError, match="microbatch_size is 0; expected 1 or more"):
        dataclasses.replace(config)


def test_an_extended_config_is_checked_once_with_the_checks_of_its_class(checked: list):
    ours = extend_config(titan_config("kimi_text"))
    assert checked == [ours]
    assert extend_config(ours) is ours
    dataclasses.replace(ours)
    assert len(checked) == 1
    assert isinstance(ours, Trainer.Config)
    assert ours._owner is Trainer
    with pytest.raises(ValueError, match="Kimi DistMuon currently requires"):
        dataclasses.replace(ours, parallelism=ParallelismConfig(tensor_parallel_degree=2))


_OURS = ("parallelism", "optimizer", "checkpoint", "debug", "validator")


def test_extended_config_keeps_every_value():
    titan = titan_config("deepseek_v3")
    ours = extend_config(titan)
    for f in fields(TitanTrainer.Config):
        if f.name in ("model_spec", *_OURS):
            continue
        assert getattr(ours, f.name) is getattr(titan, f.name), f.name
    assert ours.optimizer.to_dict() == titan.optimizer.to_dict()
    for section in set(_OURS) - {"optimizer"}:
        theirs = getattr(titan, section)
        for f in fields(theirs):
            assert getattr(getattr(ours, section), f.name) == getattr(theirs, f.name), f.name


def test_a_layout_without_cuda_graphs_leaves_other_configs_theirs(accelerator):
    ours = extend_config(titan_config("deepseek_v3"))
    assert not ours.training.disable_cuda_graphs
    for parallelism in (
        dataclasses.replace(ours.parallelism, expert_parallel_degree=2),
        dataclasses.replace(ours.parallelism, pipeline_parallel_degree=2),
    ):
        assert dataclasses.replace(ours, parallelism=parallelism).training.disable_cuda_graphs
    assert not ours.training.disable_cuda_graphs


def _choices(hint: Any) -> set[str]:
    """The values of every Literal in a type."""
    if typing.get_origin(hint) is Literal:
        return {to_toml(value) for value in typing.get_args(hint)}
    return {value for part in typing.get_args(hint) for value in _choices(part)}


def _new_keys() -> dict[str, tuple[str, set[str]]]:
    """The keys that our sections add to Titan's, or give other types: default and choices."""
    ours = extend_config(titan_config("qwen3"))
    names = [field.name for field in fields(ours) if field.name != "model_spec"]
    sections = {name: getattr(ours, name) for name in names}
    found = {}
    for section, config in {**sections, "activation_checkpoint": FP8AC.Config()}.items():
        if not type(config).__module__.startswith("titan_ext."):
            continue
        hints = typing.get_type_hints(type(config))
        before = typing.get_type_hints(type(config).__mro__[1])
        for field in fields(config):
            if hints[field.name] != before.get(field.name):
                default = to_toml(getattr(type(config)(), field.name))
                found[f"{section}.{field.name}"] = (default, _choices(hints[field.name]))
    return found


def test_the_page_of_keys_has_every_key():
    """With its default, choices and effect on results, and no other key."""
    page = (Path(__file__).parents[2] / "docs" / "configs.md").read_text()
    rows = re.findall(r"^\| `(\w+\.\w+)` \|(.*?)\|(.*?)\|.*\|(.*?)\|$", page, re.MULTILINE)
    new = _new_keys()
    assert sorted(key for key, *_ in rows) == sorted(new)
    words = {Effect.NONE: "same", Effect.ROUNDING: "rounding", Effect.LOSSY: "lossy"}
    for key, choices, default, effect in rows:
        assert re.findall(r"`(.*?)`", default)[0] == new[key][0], key
        assert new[key][1] <= set(re.findall(r"`(.*?)`", choices)), key
        assert words[FACTS.get(key, KeyFacts()).effect] in effect, key


def test_a_key_that_tells_no_facts_cannot_be_imported():
    class Config(ParallelismConfig):
        fsdp_new: int = 0

    with pytest.raises(AssertionError, match=r"fsdp_new: expected Annotated\[\.\.\., KeyFacts"):
        facts_of("parallelism", Config)
