"""The examples of the README and the docs: Python and TOML run, commands name what exists."""

import contextlib
import functools
import importlib.util
import os
import pkgutil
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.run import get_args_parser
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import ConfigManager, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.tools.logging import init_logger

from tests.helpers import muon
from tests.helpers.cluster import run_line, run_ranks
from tests.helpers.toml_files import DEBUG, Loader
from titan_ext import api, config_registry
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base.stdlib_corpus import default_folder, make_corpus
from titan_ext.components.optim import resolve_groups
from titan_ext.config_registry.resolve import resolve
from titan_ext.fsdp.unmanaged import replicate_undeclared
from titan_ext.toml.convert import leaves

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "benchmarks" / name for name in ("fp8_ac.md", "gpu_receipts.md", "support.md")),
        ROOT / "upstream" / "titan_main.md",
        *sorted(DOCS.glob("*.md")),
    ]
}

RUN = {
    ("docs/float8.md", 0),
    ("docs/float8.md", 1),
    ("docs/lora.md", 0),  # PEFT: tests/components/test_peft.py runs the page from its TOML to here
    ("docs/lora.md", 1),
    ("docs/configs.md", 0),
    ("docs/your_model.md", 0),
    ("docs/your_model.md", 1),
    ("docs/your_model.md", 2),
}
"""The Python examples, by page and position; each has a test."""


def examples(language: str) -> dict[tuple[str, int], str]:
    """The fenced blocks of a language, by page and position."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    return {
        (page, index): code
        for page, text in PAGES.items()
        for index, code in enumerate(fence.findall(text))
    }


def _python(page: str, index: int = 0, **given: Any) -> dict[str, Any]:
    """Run a Python example and return its names."""
    assert (page, index) in RUN
    # dataclass() looks its class' module up by name
    names: dict[str, Any] = {"__name__": __name__, **given}
    exec(examples("python")[page, index], names)
    return names


def test_every_python_example_has_a_test():
    assert set(examples("python")) == RUN


# Python


def test_a_config_function_in_python(folder: Path):
    (module,) = re.findall(r"`--module (\w+) --config my_16b`", PAGES["docs/configs.md"])
    (folder / f"{module}.py").write_text(examples("python")["docs/configs.md", 0])
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, module, None)
        config: Any = ConfigManager().parse_args(["--module", module, "--config", "my_16b"])
    assert config.parallelism.expert_parallel_degree == 8
    assert config.parallelism.fsdp_wrap == "submodule"


def test_float8_store(capsys: pytest.CaptureFixture):
    _python("docs/float8.md", 1)
    assert "float8" in capsys.readouterr().out


def _build_with_fp8() -> int:
    dist.init_process_group("gloo")
    model = _python("docs/float8.md")["model"]
    return sum(isinstance(block, CheckpointWrapper) for block in model.layers.values())


def test_fp8_in_an_own_loop(tmp_path: Path):
    assert run_ranks(_build_with_fp8, 1, log_folder=tmp_path) == [6]


def _run_own_loop() -> list[float]:
    init_logger()
    return _python("docs/your_model.md", 2)["losses"]


@pytest.mark.slow
def test_own_loop(tmp_path: Path):
    ranks = run_ranks(_run_own_loop, 2, log_folder=tmp_path)
    for losses in ranks:
        assert losses[-1] < losses[0] - 0.5
    assert "submodule, 14 units in 19 groups" in (tmp_path / "rank_0.log").read_text()


def _train_with_adapters(folder: Path) -> dict[str, Any]:
    """As ``--module my_adapters --config with_adapters``, on data and a size for a test."""
    init_logger()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    flags = ["--module", "my_adapters", "--config", "with_adapters", "--dump_folder", "run"]
    flags += ["--dataloader.dataset", "python_stdlib", "--training.seq_len", "64"]
    flags += ["--training.local_batch_size", "1", "--training.steps", "2", "--debug.seed", "1"]
    flags += ["--hf_assets_path", str(default_folder() / "tokenizer"), "--checkpoint.no-enable"]
    trainer = cast(Any, ConfigManager().parse_args(flags)).build()
    before = {
        canonical_fqn(name): param.full_tensor().clone()
        for name, param in trainer.model_parts[0].named_parameters()
        if ".wo." in name
    }
    trainer.train()
    return {
        name: (tensor != param.full_tensor()).any().item()
        for name, param in trainer.model_parts[0].named_parameters()
        if (tensor := before.get(canonical_fqn(name))) is not None
    }


@pytest.mark.slow
def test_adapters_of_your_own(tmp_path: Path):
    assert "`--module my_adapters --config with_adapters`" in PAGES["docs/lora.md"]
    (tmp_path / "my_adapters.py").write_text(examples("python")["docs/lora.md", 1])
    make_corpus()
    changed, other = run_ranks(_train_with_adapters, 2, tmp_path, log_folder=tmp_path / "logs")
    assert len(changed) == 6 * 3
    assert all(changed.values()), "base, down and up of every block train"
    assert changed == other


# A model of your own

YOURS = "docs/your_model.md"


def test_your_model_trains_as_the_page_says(tmp_path: Path):
    """Its three pieces as they stand: default backend, Titan's trainer, our door."""
    (tmp_path / "my_model.py").write_text(examples("python")[YOURS, 0])
    (tmp_path / "my_run.toml").write_text(examples("toml")[YOURS, 0])
    (command,) = (line for line in _commands(YOURS) if "--config my_run.toml" in line)
    make_corpus()
    ranks = run_line(tmp_path, command)
    output = re.sub(r"\x1b\[[0-9;]*m", "", "".join(rank.out + rank.error for rank in ranks))
    assert [rank.code for rank in ranks] == [0, 0], output[-3000:]
    assert "FSDP units: submodule, 20 units" in output
    assert "6 block, 6 attention, 6 feed_forward" in output, "the gain is a group of the block"
    losses = [float(loss) for loss in re.findall(r"step: +5 +loss: +(\d+\.\d+)", output)]
    assert len(losses) == 2
    assert losses[0] == losses[1] < 8.5


@pytest.mark.parametrize("axis", ["tp_enabled", "cp_enabled", "ep_enabled"])
def test_which_axes_need_a_declaration(axis: str):
    axes: Any = SimpleNamespace(tp_enabled=False, cp_enabled=False, ep_enabled=False)
    setattr(axes, axis, True)
    model = nn.ModuleDict({"inner_experts": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"inner_experts.weight, .*: no sharding_config says how"):
        replicate_undeclared(model, axes)
    replicate_undeclared(model, axes, ignored=["inner_experts.weight", "inner_experts.bias"])


def _your_model(tp: int) -> dict[str, list[float]]:
    """The gradients of the gains, from sums that only rounding changes."""
    code = examples("python")
    names: dict[str, Any] = {"__name__": __name__}
    exec(code[YOURS, 0], names)
    exec(code[YOURS, 1] + "GainModel = SplitGainModel\n", names)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, parallel_dims = api.build_decoder(
        names["my_spec"](),
        parallelism=api.ParallelismConfig(tensor_parallel_degree=tp),
        training=TrainingConfig(mixed_precision_param="float32"),
    )
    with get_spmd_context(parallel_dims=parallel_dims)():
        (model(torch.arange(64).view(2, 32)).float().pow(2).sum() / 1e4).backward()
    return {
        name: cast(Any, param.grad).full_tensor().tolist()
        for name, param in model.named_parameters()
        if "gain" in name
    }


def test_your_model_with_tensor_parallelism(tmp_path: Path):
    """What the second example declares is right: split and whole, the gradients are the same."""
    splits, (whole, other) = (
        run_ranks(_your_model, 2, tp, log_folder=tmp_path / str(tp)) for tp in (2, 1)
    )
    assert whole == other
    for name, gain in whole.items():
        assert any(gain)
        halves = [value / 2 for value in gain]  # from two ranks with the same data
        for split in splits:
            assert split[name] == pytest.approx(halves, rel=1e-3)


# TOML


def _keys(value: Any, prefix: str = "") -> list[str]:
    """The dotted keys of what a file holds."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return [prefix]
    return [key for name in value for key in _keys(value[name], f"{prefix}.{name}".lstrip("."))]


_TOML = examples("toml")


@pytest.mark.parametrize("place", _TOML, ids=str)
def test_every_key_of_a_toml_example_arrives(folder: Path, place: tuple[str, int]):
    for name, code in (("my_model", (YOURS, 0)), ("my_adapters", ("docs/lora.md", 1))):
        (folder / f"{name}.py").write_text(examples("python")[code])
    table = tomllib.loads(_TOML[place])
    (folder / "run.toml").write_text(("" if "extends" in table else DEBUG) + _TOML[place])
    origins = resolve("run.toml").origins
    table = {key: value for key, value in table.items() if key not in ("extends", "world_size")}
    assert [key for key in _keys(table) if origins[key] != "run.toml"] == []


def test_muon_from_a_file(config: Loader):
    """The matrix trains with this pattern (tests.helpers.muon)."""
    ours = config(_TOML["docs/lora.md", 2])
    assert ours.optimizer.param_groups[0].pattern == muon.PATTERN
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in ours.model_spec.model.build().named_parameters()}
    matrices, rest = resolve_groups(shapes, ours.optimizer.param_groups)
    assert {"tok_embeddings.weight", "lm_head.weight"} <= set(rest)
    assert all(len(shapes[name]) == 1 for name in rest if name.startswith("layers."))
    # attention, the dense layer; attention, router, shared and routed experts
    assert len(matrices) == (4 + 3) + 26 * (4 + 1 + 3 + 3)


# Commands and names

_PROGRAM = re.compile(
    r"(\$ )?([A-Z_]+=\S+ +)*(\S*/)?"
    r"(make|torchrun|python|pytest|sbatch|titan_ext|run_train\.sh|multi_node\.sh)(?= |$)"
)
_MAKEFILE = (ROOT / "Makefile").read_text()
_LAUNCH = {path.name: path.read_text() for path in (ROOT / "launch").iterdir()}
_OTHERS = ("MODULE", "CONFIG", "NGPU", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
"""Variables that TorchTitan's run_train.sh or torch reads."""


def _commands(page: str) -> Iterator[str]:
    """The command lines of a page: in indented blocks and between backticks."""
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4,7}(\S.*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    for line in [*indented, *_quoted(page)]:
        if _PROGRAM.match(line):
            yield line.removeprefix("$ ").strip()


def _quoted(page: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", PAGES[page])


def _unknown(command: str) -> Iterator[str]:
    """What a command names that does not exist."""
    words = shlex.split(command, comments=True)
    while "=" in words[0]:
        yield from _unknown_variable(words.pop(0))
    program = Path(words.pop(0)).name
    if program == "make":
        targets = [word for word in words if "=" not in word]
        yield from (word for word in targets if f"\n{word}:" not in _MAKEFILE)
        yield from (name for word in words if "=" in word for name in _unknown_variable(word))
        return
    yield from (word for word in words if _is_path(word) and not (ROOT / word).exists())
    source = None
    if program == "torchrun":
        ours = words.index("-m") if "-m" in words else len(words)
        yield from _unknown_torchrun_flags(words[:ours])
        words = words[ours:]
    elif program == "titan_ext" or words[:2] == ["-m", "titan_ext"]:
        words = words[2:] if program == "python" else words
        folder = ROOT / "titan_ext" / "config_registry"
        names = ("commands.py", "dry_run.py", "tune.py", "verify.py")
        text = "".join((folder / name).read_text() for name in names)
        fields = re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)
        source = " ".join(["--help", *(f"--{field.replace('_', '-')}" for field in fields)])
        yield from (word for word in words[:1] if word[0].islower() and f'"{word}": ' not in text)
    elif program == "python" and _is_path(words[0]):
        source = (ROOT / words[0]).read_text()
    if words[:1] == ["-m"]:
        module = importlib.util.find_spec(words[1])
        if module and module.submodule_search_locations:
            module = importlib.util.find_spec(f"{words[1]}.__main__")
        if module is None:
            yield words[1]
        elif words[1].split(".")[0] in ("titan_ext", "tests", "benchmarks"):
            source = Path(str(module.origin)).read_text()
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        if "." in flag:
            yield from _unknown_keys(flag[2:].replace("-", "_"))
        elif source and flag not in source:
            yield flag


def _is_path(word: str) -> bool:
    return bool(
        re.fullmatch(r"(tests|benchmarks|launch|train_configs|titan_ext|docs)/[\w./]+", word)
    )


def _unknown_variable(assignment: str) -> Iterator[str]:
    name, value = assignment.split("=", 1)
    read = _MAKEFILE + "".join(_LAUNCH.values())
    if name not in _OTHERS and not re.search(rf"\b{name}\b", read):
        yield name
    if _is_path(value) and not (ROOT / value).exists():
        yield value


def _unknown_torchrun_flags(words: list[str]) -> Iterator[str]:
    known = {name.replace("_", "-") for name in get_args_parser()._option_string_actions}
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        if "." not in flag and flag.replace("_", "-") not in known | {"--module", "--config"}:
            yield flag


@functools.cache
def _keys_of_a_run() -> frozenset[str]:
    """The dotted keys of every section, policy and choice of the model; and the sections."""
    config = config_registry.__getattr__("deepseek_v3_debugmodel")()
    keys = set(leaves(config))
    for policy in (FP8AC, FullAC, MemoryBudgetAC, SelectiveAC):
        keys |= {f"activation_checkpoint.{key}" for key in ("policy", *leaves(policy.Config()))}
    keys |= {f"model.{name}" for name in ("flavor", "attn_backend", "converters")}
    return frozenset(
        ".".join(parts[:count])
        for parts in (key.split(".") for key in keys)
        for count in range(1, len(parts) + 1)
    )


def _unknown_keys(key: str) -> Iterator[str]:
    section, _, name = key.rpartition(".")
    if not {key, f"{section}.{name.removeprefix('no_')}"} & _keys_of_a_run():
        yield key


def _unknown_names(quoted: str) -> Iterator[str]:
    """A file, a key of a run or a name in titan_ext that does not exist."""
    word = quoted.split("(")[0].split(" ")[0].rstrip("/")
    if _is_path(word):
        if not (ROOT / word).exists():
            yield word
    elif re.fullmatch(r"titan_ext(\.\w+)+", word):
        if not _resolves(word):
            yield word
    elif (
        re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(?<!\.py)", word)
        and word.split(".")[0] in _keys_of_a_run()
    ):
        yield from _unknown_keys(word)


def _resolves(name: str) -> bool:
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str):
    unknown = {command: names for command in _commands(page) if (names := list(_unknown(command)))}
    unknown |= {word: names for word in _quoted(page) if (names := list(_unknown_names(word)))}
    assert unknown == {}


# Commands of titan_ext run, by the installed script


def _whole_commands(page: str, *names: str) -> list[str]:
    """The commands ``titan_ext NAME ...`` of a page that a user can type as they stand."""
    found = []
    for command in _commands(page):
        program, *words = shlex.split(command, comments=True)
        names_a_config = len(words) > 1 and words[1][0] != "-"
        if (
            program == "titan_ext"
            and words[:1]
            and words[0] in names
            and (names_a_config or words in (["show"], ["--help"]))
            and not any(word.isupper() for word in words)
        ):
            found.append(command)
    return found


def _run_commands(folder: Path, commands: list[str]) -> str:
    """Run them in turn, by the installed script, and return what the last one printed."""
    printed = ""
    for command in commands:
        (done,) = run_line(folder, command)
        assert done.code == 0, (command, done.error)
        printed = done.out
    return printed


def _prepare(folder: Path, page: str) -> None:
    """The files that a page tells its reader to write, and those of a checkout."""
    if page == "docs/configs.md":
        (folder / "my_runs.py").write_text(examples("python")[page, 0])
        (folder / "my_run.toml").write_text(examples("toml")[page, 0])
    shutil.copytree(ROOT / "train_configs", folder / "train_configs")
    shutil.copy(ROOT / "benchmarks" / "cpu.toml", folder / "my_card.toml")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _whole_commands(page, "show", "--help")]
)
def test_commands_of_a_page_run(page: str, tmp_path: Path):
    _prepare(tmp_path, page)
    _run_commands(tmp_path, _whole_commands(page, "show", "--help"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if _whole_commands(page, "dry-run", "tune")]
)
def test_dry_runs_of_a_page_run(page: str, tmp_path: Path):
    """Of a small model by the names of the large ones: the files that are here come first."""
    _prepare(tmp_path, page)
    for name in ("deepseek_v3_671b", "deepseek_v3_16b"):
        for file in (tmp_path / f"{name}.toml", tmp_path / "train_configs" / f"{name}.toml"):
            file.write_text((ROOT / "train_configs" / "moe_debug.toml").read_text())
    commands = _whole_commands(page, "show", "dry-run", "tune")
    commands = [command.replace("--ranks 2048", "--ranks 512") for command in commands]
    _run_commands(tmp_path, commands)


def test_a_config_function_of_yours(tmp_path: Path):
    """By the name that every command takes; a file extends it as well.

    The script's own folder is first on its path, in place of the current one.
    """
    _prepare(tmp_path, "docs/configs.md")
    (tmp_path / "my_run.toml").unlink()
    shown = _run_commands(tmp_path, ["titan_ext show my_runs.my_16b"])
    assert 'parallelism.fsdp_wrap = "submodule"  # from my_runs.my_16b' in shown
    commands = [
        "titan_ext show my_runs.my_16b --changed --out my_run.toml",
        "titan_ext show my_run.toml --changed",
    ]
    assert "# my_runs.my_16b <- my_run.toml" in _run_commands(tmp_path, commands)
