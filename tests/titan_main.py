"""titan_ext on a checkout of TorchTitan's main: names, imports, and training runs.

    make main TITAN=path/to/torchtitan

installs a checkout into an environment of its own (``.venv-main``, which sees what ``.venv`` has)
and prints a table for upstream/titan_main.md. Two gloo ranks train the DeepSeek-V3 debug model.
First with a TOML file and the trainer of titan_ext, which is planned before and resumed after. Then
with main's own trainer: with main's model spec, and with titan_ext's. Losses and weights are
compared bit for bit where nothing is lossy.

    python -m tests.titan_main --names

prints every name of TorchTitan and every private name of torch that titan_ext uses, and where.
"""

import ast
import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest.mock
import venv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.on_cpu import list_all_to_all
from titan_ext.base.run_folder import LOSS, read_scalar

ROOT = Path(__file__).parents[1]
TOKENS, STEPS, LAYERS = 256, 3, 3

ARMS: dict[str, dict[str, Any]] = {
    "block": {"fsdp_wrap": "block"},
    "submodule": {"fsdp_wrap": "submodule"},
    "experts": {"fsdp_wrap": "experts"},
    "submodule, prefetch 2 ahead, reshard never": {
        "fsdp_wrap": "submodule",
        "fsdp_prefetch": 2,
        "fsdp_reshard_after_forward": "never",
    },
    "submodule, shared experts not overlapped": {
        "fsdp_wrap": "submodule",
        "overlap_shared_experts": False,
    },
    "submodule, float8 activations": {"fsdp_wrap": "submodule", "ac": "fp8"},
    "block, float8 activations, preset stock": {"fsdp_wrap": "block", "ac": "stock"},
    "submodule, scores before the last GEMM": {"fsdp_wrap": "submodule", "ac": "early"},
    "submodule, tokens travel in float8": {"fsdp_wrap": "submodule", "exchange_dtype": "float8"},
}
"""Keys of ``parallelism``; "ac" is float8 checkpointing instead of Titan's selective."""
LOSSY = (
    "submodule, float8 activations",
    "submodule, scores before the last GEMM",
    "submodule, tokens travel in float8",
)


def missing_names(titan: Path) -> dict[str, list[str]]:
    """Names that titan_ext imports from TorchTitan and that a checkout does not define, by file.

    The seam (``titan_ext/base/titan/``), which asks for both, is left out.
    """
    found = defaultdict(list)
    for path in sorted((ROOT / "titan_ext").rglob("*.py")):
        if path.parent.name == "titan":
            continue
        for module, name in _imports(ast.parse(path.read_text())):
            if module.split(".")[0] == "torchtitan" and not _defines(titan, module, name):
                found[str(path.relative_to(ROOT))].append(f"{module}.{name}")
    return dict(found)


def used_names() -> dict[str, list[str]]:
    """Names of TorchTitan, and private names of torch, that titan_ext uses, and where.

    A name is what is imported, or the whole of a dotted expression such as ``torch._C.f``.
    """
    found = defaultdict(set)
    for path in sorted((ROOT / "titan_ext").rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names = {f"{module}.{name}" for module, name in _imports(tree)}
        names |= {
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node not in inner
        }
        for name in filter(_is_upstream, names):
            found[name].add(str(path.relative_to(ROOT)))
    return {name: sorted(found[name]) for name in sorted(found)}


def _is_upstream(name: str) -> bool:
    top, *rest = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in rest)
    is_name = name.replace(".", "").isidentifier()
    return is_name and (top == "torchtitan" or (top == "torch" and private))


def _imports(tree: ast.AST) -> list[tuple[str, str]]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [(str(node.module), alias.name) for node in nodes for alias in node.names]


def _defines(titan: Path, module: str, name: str) -> bool:
    base = titan.joinpath(*module.split("."))
    if (base / name).is_dir() or (base / f"{name}.py").exists():
        return True
    source = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)
    if source is None:
        return False
    words = {
        getattr(node, attribute)
        for node in ast.walk(ast.parse(source.read_text()))
        for attribute in ("name", "id", "asname")
        if isinstance(getattr(node, attribute, None), str)
    }
    return name in words


def failed_imports() -> dict[str, str]:
    """Modules of titan_ext that do not import with the TorchTitan that is first on the path."""
    import titan_ext

    failed = {}
    for module in pkgutil.walk_packages(titan_ext.__path__, "titan_ext."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            failed[module.name] = str(error)
    return failed


def train(arm: str, folder: Path) -> None:
    """One rank under main's own trainer, which saves its losses and weights in ``folder``.

    "stock": with main's own model spec, else with titan_ext's.
    """
    from torchtitan.components.data import ConcatThenSplitPackingConfig  # type: ignore
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    from titan_ext import api
    from titan_ext.activation_checkpoint import FP8AC
    from titan_ext.base import no_accelerator, stdlib_corpus
    from titan_ext.components.early_scores import use_early_scores

    no_accelerator.enable()
    stdlib_corpus.register_stdlib_corpus()
    keys = dict(ARMS.get(arm, {}))
    kinds = {
        "fp8": FP8AC.Config(),
        "stock": FP8AC.Config(preset="stock"),
        "early": FP8AC.Config(preset="stock", score_before_last_gemm=True),
    }
    config: Any = deepseek_v3_debugmodel()
    config.activation_checkpoint = kinds.get(keys.pop("ac", ""), SelectiveAC.Config())
    config.parallelism = api.ParallelismConfig(expert_parallel_degree=2, **keys)
    if getattr(config.activation_checkpoint, "score_before_last_gemm", False):
        use_early_scores(config.model_spec)
    if arm != "stock":
        config.model_spec = api.extend_model_spec(config.model_spec)
    no_accelerator.adapt_config(config)
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.hf_assets_path = str(stdlib_corpus.default_tokenizer_path())
    config.dataloader.dataset = ConcatThenSplitPackingConfig(
        dataset=DATASETS[stdlib_corpus.STDLIB_CORPUS]
    )
    config.dump_folder = str(folder / arm.replace(" ", "_"))
    config.training.num_tokens_per_microbatch_per_dp_rank = 2 * TOKENS
    config.training.max_context_length = TOKENS
    config.training.steps = STEPS
    config.checkpoint.enable = False
    config.debug.seed, config.debug.deterministic = 42, True
    losses: list[torch.Tensor] = []
    # gloo has no all-to-all of uneven lists, which main's own dispatcher calls.
    with (
        unittest.mock.patch.object(dist, "all_to_all", list_all_to_all),
        unittest.mock.patch("torchtitan.trainer.time.sleep"),
    ):
        trainer = config.build()
        no_accelerator.reduce_without_premul_sum(trainer.model_parts[0])  # main's own, for gloo
        step = trainer.forward_backward_step

        def forward_backward_step(**arguments: Any) -> torch.Tensor:
            loss = step(**arguments)
            losses.append(loss.detach().clone())
            return loss

        trainer.forward_backward_step = forward_backward_step
        trainer.train()
    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): p.detach().to_local()
        for name, p in trainer.model_parts[0].named_parameters()
    }
    result = {"losses": torch.stack(losses), **weights}
    torch.save(result, folder / f"{arm.replace(' ', '_')}-{dist.get_rank()}.pt")
    trainer.close()
    dist.destroy_process_group()


def _trained(arm: str, folder: Path) -> list[dict[str, torch.Tensor]] | str:
    """The results of both ranks, or the last line of what went wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "tests.titan_main", "--arm", arm, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if "Error" in line]
        return (lines or ["no message"])[0].partition(": ")[2][:200]
    names = [f"{arm.replace(' ', '_')}-{rank}.pt" for rank in range(2)]
    return [torch.load(folder / name) for name in names]


def _verdict(stock: Any, ours: Any, lossy: bool) -> str:
    if isinstance(ours, str):
        return f"broken: {ours}"
    if isinstance(stock, str):
        return f"trains; main's own does not: {stock}"
    pairs = [(a[name], b[name]) for a, b in zip(stock, ours, strict=True) for name in a]
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal, bit for bit"
    cosine = min(
        torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()
        for a, b in pairs
        if a.numel() > 1
    )
    return f"{'trains' if lossy else 'DIFFERS'}; smallest cosine {cosine:.5f}"


RUN = """
extends = "moe_debug.toml"
[training]
local_batch_size = 2
seq_len = 128
steps = 4
[checkpoint]
interval = 2
"""
"""A TOML file with keys of 0.3, for the real trainer. Two ranks; both checkpoints are kept."""
PROFILER = [
    "--profiler.enable_profiling",
    "--profiler.profile_freq",
    "2",
    "--profiler.profiler_warmup",
    "0",
]
"""Flags that record the last step of a run that is resumed, for ``titan_ext ledger``."""


def _run(*words: str | Path, python: str | Path = sys.executable) -> str:
    """What a command of this environment's Python prints; ValueError with its last line if not."""
    run = subprocess.run([python, *words], capture_output=True, text=True, timeout=900)
    if run.returncode:
        said = run.stderr.splitlines()
        lines = [x for word in ("traceback :", "Error") for x in said if word in x]
        what = " ".join(map(str, words[1:3]))
        raise ValueError(f"{what}: {[*lines, *said[-1:], 'no message'][0][-300:]}")
    return run.stdout + run.stderr


def _first_line(told: str) -> str:
    return " ".join(told.splitlines()[0].split())


def _on_ranks(*words: str | Path) -> str:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    return _run(*launch, "-m", *words)


def _train_with_toml(file: Path, *flags: str | Path) -> str:
    names = ("torchtitan.train", "--module", "titan_ext", "--config", file)
    return _on_ranks(*names, "--debug.deterministic", *flags)


def trainer_rows(folder: Path) -> Iterator[str]:
    """Rows for what users do: plan, train, resume and solve for a budget, all with a TOML file."""
    file, run, again = folder / "run.toml", folder / "run", folder / "again"
    file.write_text(RUN)
    plan = ("-m", "titan_ext", "dry-run", file, "--ranks", "2", "--ranks-per-node", "2")
    planned = (*plan, "--memory", "80GiB", "--machine", "h100", "--out")
    yield f"| dry run of a TOML file | {_first_line(_run(*planned, run))} |"
    _run(*planned, folder / "on_0.3", python=ROOT / ".venv" / "bin" / "python")
    plans = [json.loads((at / "plan_rank0.json").read_text()) for at in (run, folder / "on_0.3")]
    pairs = [plan["moments"] for plan in plans]
    others = [here["moment"] for here, there in zip(*pairs, strict=True) if here != there]
    peak = f"peak {'as on 0.3' if plans[0]['peak'] == plans[1]['peak'] else 'DIFFERS from 0.3'}"
    said = f"{peak}; of {len(pairs[0])} moments not as there: {', '.join(others) or 'none'}"
    yield f"| its bytes | {said} |"
    told = _train_with_toml(file, "--dump_folder", run)
    losses = read_scalar(run, LOSS)
    yield (
        f"| training with the TOML file, {len(losses)} steps | loss {losses[1]:.3f} to "
        f"{losses[max(losses)]:.3f} |"
    )
    kept = [line.partition("Plan of rank 0")[2] for line in told.splitlines()]
    said = next(filter(None, kept), "broken: no comparison")
    yield f"| the run beside its plan |{said.partition(':')[2].replace(';', ',')} |"
    shutil.copytree(run / "checkpoint" / "step-2", again / "checkpoint" / "step-2")
    _train_with_toml(file, "--dump_folder", again, *PROFILER)
    resumed = read_scalar(again, LOSS)
    same = {step: losses[step] for step in (3, 4)} == resumed
    yield f"| resumed after 2 steps | losses {'equal' if same else f'DIFFERS: {resumed}'} |"
    shutil.copy(run / "plan_rank0.json", again)
    told = _run("-m", "titan_ext", "ledger", again)
    yield f"| ledger of a profiled step | {_first_line(told)} |"
    told = _on_ranks("titan_ext", "check", file)
    yield f"| check of the ranks | {_first_line(told)} |"
    try:
        told = _run(*plan, "--parallelism.overlap_exchanges", "halves")
    except ValueError as error:
        told = f"refused: {error}"
    yield f'| `overlap_exchanges = "halves"` | {_first_line(told)} |'
    told = _run(*plan, "--activations", "6MiB", "--on-cpu", "--out", again)
    yield f"| best checkpointing for 6 MiB | {_first_line(told)} |"


def _tokens_read() -> str:
    from torchtitan.config import TrainingConfig

    from titan_ext.base.titan.batch import tokens_of_microbatch

    config: Any = TrainingConfig
    read = tokens_of_microbatch(
        config(num_tokens_per_microbatch_per_dp_rank=2 * TOKENS, max_context_length=TOKENS)
    )
    return "read from its keys" if read == (2 * TOKENS, TOKENS) else f"broken: {read}"


def environment(titan: Path) -> Path:
    """The Python of an environment with a checkout, what only it needs, and all of this one."""
    folder = ROOT / ".venv-main"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.check_output(where, text=True).strip())
    (packages / "titan_ext_base.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--force-reinstall", "--no-deps", titan], check=True)
    subprocess.run([*install, titan], check=True)
    return python


def compare(titan: Path) -> int:
    """Print the table, with the TorchTitan of the environment; 1 if something is broken."""
    lines = ["| what | on main |", "|---|---|"]
    missing = missing_names(titan)
    lines += [f"| {path} | names gone: {', '.join(names)} |" for path, names in missing.items()]
    failed = failed_imports()
    lines += [f"| {name} | does not import: {why} |" for name, why in failed.items()]
    if not missing and not failed:
        lines.append("| names and imports of every module | all there |")
    lines.append(f"| tokens of a microbatch | {_tokens_read()} |")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in trainer_rows(Path(folder)):
                lines.append(row)
                print(row, file=sys.stderr, flush=True)
        except ValueError as error:
            lines.append(f"| the trainer | broken: {error} |")
        stock = _trained("stock", Path(folder))
        for arm in ARMS:
            verdict = _verdict(stock, _trained(arm, Path(folder)), arm in LOSSY)
            lines.append(f"| {arm} | {verdict} |")
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    return int(any("broken" in x or "DIFFERS" in x or " gone" in x for x in lines))


if __name__ == "__main__":
    if sys.argv[1] == "--arm":
        train(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1] == "--names":
        print("\n".join(f"{name}: {', '.join(files)}" for name, files in used_names().items()))
    elif sys.argv[1] == "--compare":
        sys.exit(compare(Path(sys.argv[2])))
    else:
        checkout = Path(sys.argv[1]).resolve()
        again = [environment(checkout), "-m", "tests.titan_main", "--compare", checkout]
        sys.exit(subprocess.run(again, cwd=ROOT).returncode)
