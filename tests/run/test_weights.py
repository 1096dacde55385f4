"""Weights of Hugging Face: those that do not fit are refused, and exports can be opened.

The files are made and opened by transformers. Nothing trains.
"""

import functools
import json
import re
import shutil
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter, hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

from tests.components.test_peft import hf_config
from tests.helpers.checkpointing import differing, digests_of, run_leg
from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, deepseek_v3_layers, make_config
from titan_ext.base.stdlib_corpus import default_tokenizer_path
from titan_ext.components.hf_export import HuggingFaceExport, files_of
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.stand_ins import as_rank
from titan_ext.run.checkpoints import CheckpointManager
from titan_ext.run.weights import check_weights

INDEX = "model.safetensors.index.json"
SIZES: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 2}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.layers.1.mlp.gate.weight"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


_FEW: dict[str, int] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
MODELS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: hf_config("deepseek_v3", 2, **_FEW),
    "deepseek_v3 without q LoRA": lambda: hf_config("deepseek_v3", 2, **_FEW, q_lora_rank=None),
    "qwen3_moe": lambda: hf_config("qwen3_moe", 2, num_experts=4),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that transformers has written in bfloat16, in several files, by model."""
    made = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(make(), dtype=torch.bfloat16)
        for weight, tensor in model.state_dict().items():
            if weight.endswith("bias"):
                tensor.copy_(torch.linspace(-0.1, 0.1, tensor.numel()))
        made[name] = tmp_path_factory.mktemp("hf")
        model.save_pretrained(made[name], max_shard_size="1MB")
    return made


def _config(name: str, folder: Path, **keys: Any) -> Any:
    """The trainer's, of Titan's model of the same sizes."""
    config: Any = make_config(_run(name), folder / "run")
    config.hf_assets_path = str(folder)
    config.checkpoint = CheckpointManager.Config(enable=True, **keys)
    _make_small(name, config)
    return config


def _run(name: str, **layout: Any) -> Run:
    return Run(model=name.split()[0], layers=2, experts=4, parallelize="submodule", **layout)


def _make_small(name: str, config: Any) -> None:
    if name.startswith("deepseek"):
        model = config.model_spec.model
        model.layers = deepseek_v3_layers(
            model.dim,
            q_lora_rank=0 if "without" in name else 48,
            num_experts=4,
            router_top_k=2,
            router_num_expert_groups=2,
            router_num_limited_groups=1,
        )


def _load(name: str, folder: Path, **keys: Any) -> Any:
    keys = {"initial_load_in_hf": True, "initial_load_path": str(folder), **keys}
    return _config(name, folder, **keys)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))


def _quantized(tensors: dict[str, torch.Tensor], block: int = 128) -> dict[str, torch.Tensor]:
    """As DeepSeek-V3 ships: a code and, for each block of a matrix, a scale."""
    made = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not ("self_attn" in name or "mlp.e" in name):
            made[name] = tensor
            continue
        counts = [-(-size // block) for size in tensor.shape]
        scale = torch.full(counts, 2.0**-9)
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        scaled = tensor.float() / spread[: tensor.shape[0], : tensor.shape[1]]
        made[name] = scaled.to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scale
    return made


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_fit(name: str, folders: dict[str, Path], tmp_path: Path):
    count = len(_tensors(folders[name]))
    said = check_weights(_load(name, folders[name]))
    dtypes = "bfloat16" if name == "qwen3_moe" else "bfloat16, float32"
    assert said == f"{count} of {count} fit ({dtypes}), in {folders[name]}"
    assets = _config(name, folders[name], initial_load_in_hf=True)
    assert check_weights(assets) == said
    assert check_weights(_config(name, folders[name])) == ""
    elsewhere = _load(name, tmp_path / "none")
    with pytest.raises(ValueError, match=r"initial_load_path is .*none': no such folder"):
        check_weights(elsewhere)
    assert check_weights(elsewhere, may_be_elsewhere=True).startswith("not read, ")


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a layer more": (
        lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}),
        r"with model\.layers\.2\.mlp\.up_proj\.weight, which the model does not have \(to leave "
        r"them unread, .*checkpoint\.ignore_weights\)",
    ),
    "an expert more": (
        lambda w: w.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.ones(64, 256)}),
        r"with model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight, which the model does not",
    ),
    "a key less": (lambda w: w.pop(BIAS), rf"model: without {BIAS}\.$"),
    "another shape": (
        lambda w: w.update({GATE: torch.ones(8, 256)}),
        rf"model: with {GATE} \[8, 256\], here \[4, 256\]\.$",
    ),
    "another dtype": (
        lambda w: w.update({GATE: torch.ones(4, 256, dtype=torch.int8)}),
        rf"{GATE} \(int8\); TorchTitan cannot read them for deepseek_v3: convert",
    ),
    "float8": (
        lambda w: w.update(_quantized(w)),
        rf"{Q_A} \(float8_e4m3fn\).*; set checkpoint\.initial_load_in_hf_quantized = true",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_weights_that_do_not_fit(edit: str, folders: dict[str, Path], tmp_path: Path):
    change, error = EDITS[edit]
    tensors = _tensors(folders["deepseek_v3"])
    change(tensors)
    _write(tmp_path, tensors)
    config = _load("deepseek_v3", tmp_path)
    with pytest.raises(ValueError, match=error) as refused:
        check_weights(config)
    assert str(tmp_path) in str(refused.value)
    if edit == "a layer more":
        config.checkpoint.ignore_weights = ["model.layers.2"]
        assert "; 1 more ignored, in" in check_weights(config)
    if edit == "float8":
        config.checkpoint.initial_load_in_hf_quantized = True
        assert "41 of 41 fit (bfloat16, float32, float8_e4m3fn), in" in check_weights(config)


def test_float8_that_torch_would_read_wrong(folders: dict[str, Path], tmp_path: Path):
    tensors = _tensors(folders["deepseek_v3"])
    config = _load("deepseek_v3", tmp_path, initial_load_in_hf_quantized=True)
    _write(tmp_path, _quantized(tensors, block=64))
    with pytest.raises(ValueError, match=r"_scale_inv \[\d, \d\], for blocks of 128 \["):
        check_weights(config)
    quantized = _quantized(tensors)
    _write(tmp_path, {n: t for n, t in quantized.items() if n != f"{Q_A}_scale_inv"})
    with pytest.raises(ValueError, match=rf"{Q_A} \(float8_e4m3fn\); .* a scale of each in"):
        check_weights(config)
    (tmp_path / INDEX).write_text("{")
    for is_quantized in (True, False):
        config.checkpoint.initial_load_in_hf_quantized = is_quantized
        with pytest.raises(ValueError, match=r"cannot be read as .*(JSONDecodeError|JSON \()"):
            check_weights(config)
    config.checkpoint.initial_load_in_hf_quantized = True
    _write(tmp_path, _quantized(_tensors(folders["qwen3_moe"])))
    other = _load("qwen3_moe", tmp_path, initial_load_in_hf_quantized=True)
    with pytest.raises(ValueError, match=r"cannot read them for qwen3: convert them to bfl"):
        check_weights(other)


@pytest.mark.parametrize("pattern", ["model.layers.1", "*.up_proj.wieght"])
def test_what_is_to_be_ignored_is_there(pattern: str, folders: dict[str, Path], tmp_path: Path):
    """And the model does not have it: what it has is loaded."""
    tensors = _tensors(folders["deepseek_v3"])
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(2)
    _write(tmp_path, tensors)
    config = _load("deepseek_v3", tmp_path, ignore_weights=["model.layers.2", pattern])
    with pytest.raises(ValueError, match=rf"has '{re.escape(pattern)}', which matches nothing"):
        check_weights(config)


def test_a_resume_keeps_what_its_first_start_ignored(tmp_path: Path, one_rank: None):
    config = _config("deepseek_v3", tmp_path, last_save_model_only=False)
    _Exporter(config).save()
    ignored: dict[str, Any] = {"ignore_weights": ["model.layers.61"]}
    assert " fit (float32), in " in check_weights(_config("deepseek_v3", tmp_path, **ignored))
    (checkpoint,) = tmp_path.glob("run/checkpoint/step-1")
    other = _config("deepseek_v3", tmp_path, initial_load_path=str(checkpoint), **ignored)
    other.dump_folder = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"has 'model\.layers\.61', which matches nothing there"):
        check_weights(other)


class _NewNames(GptOssStateDictAdapter):
    """With the names that Titan's experts have by now, as its main has mended it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        new = {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}
        for hf, name in self.from_hf_map.items():
            old = name.rpartition(".")[2]
            self.from_hf_map[hf] = f"{name}_{new[old]}" if old in new else name


def test_gpt_oss_is_refused_by_name(tmp_path: Path):
    """As it ships, in MXFP4: 4 bits for a number, 32 numbers a scale; and as transformers saves it.

    A user's adapter may know the names. torch reads 90 columns of the 2880 then.
    """
    shape: dict[str, Any] = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    config = transformers.GptOssConfig(
        **SIZES, **shape, num_local_experts=4, intermediate_size=2880
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    tensors = model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": codes[..., 0].clone()}
    (tmp_path / "mxfp4").mkdir()
    _write(tmp_path / "mxfp4", tensors)

    quantized = _load("gpt_oss", tmp_path / "mxfp4", initial_load_in_hf_quantized=True)
    for of_titan in (quantized, _load("gpt_oss", tmp_path / "bf16")):
        with pytest.raises(ValueError, match=r"has no name for .*inner_experts\.mlp1_weight_EGD"):
            dry_run(of_titan, 1, step=False)
    quantized.model_spec.state_dict_adapter = _NewNames
    blocks = r"model\.layers\.0\.mlp\.experts\.\w+_proj_blocks"
    with pytest.raises(ValueError, match=rf"with codes of which torch .* a part .*: {blocks}"):
        check_weights(quantized)
    quantized.checkpoint.initial_load_in_hf_quantized = False
    with pytest.raises(
        ValueError, match=rf"{blocks} \(uint8\).*; set checkpoint\.initial_load_in_"
    ):
        check_weights(quantized)


def test_files_that_are_cut_short_or_not_there(folders: dict[str, Path], tmp_path: Path):
    tensors = _tensors(folders["deepseek_v3"])
    _write(tmp_path, tensors)
    config = _load("deepseek_v3", tmp_path)
    save_file({BIAS: tensors[BIAS]}, tmp_path / "old.safetensors")
    with pytest.raises(ValueError, match=rf"has {BIAS} in more than one file"):
        check_weights(config)
    (tmp_path / "old.safetensors").unlink()
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"cannot be read as safetensors \({file.name}: "):
        check_weights(config)
    file.unlink()
    with pytest.raises(ValueError, match=r"model: without model\..* and 36 more"):
        check_weights(config)


def test_pieces_of_an_export_are_all_there(folders: dict[str, Path], tmp_path: Path):
    tensors = _tensors(folders["deepseek_v3"])
    gate = tensors.pop(GATE)
    _write(tmp_path, tensors)
    for row in (0, 1, 2, 3):
        offsets = json.dumps({GATE: {"saved_offsets": [row, 0]}})
        about = {"DCP_SHARDING_INFO": offsets}
        save_file({GATE: gate[row : row + 1]}, tmp_path / f"{row}.safetensors", metadata=about)
    config = _load("deepseek_v3", tmp_path)
    assert "41 of 41 fit" in check_weights(config)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"has {GATE} in part, and torch would leave the rest"):
        check_weights(config)


def test_a_head_that_is_tied_may_be_stored(tmp_path: Path):
    run = Run(model="qwen3", layers=1, parallelize="submodule")
    config: Any = make_config(run, tmp_path)
    config.model_spec.model.enable_weight_tying = True
    keys = {"initial_load_in_hf": True, "initial_load_path": str(tmp_path)}
    config.checkpoint = CheckpointManager.Config(enable=True, **keys)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    names = config.model_spec.state_dict_adapter(config.model_spec.model, None)
    weights = {n: torch.ones(t.shape) for n, t in names.to_hf(model.state_dict()).items()}
    assert "lm_head.weight" not in weights
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(64)}
    tied = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    _write(tmp_path, weights | computed | tied)
    assert f"{len(weights)} of {len(weights)} fit" in check_weights(config)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(ValueError, match=r"with lm_head\.weight, which the model does not have"):
        check_weights(config)


def _report(source: Path) -> str:
    config = _load("deepseek_v3", source)
    with as_rank(1, 0):
        return dry_run(config, 1, step=False).report()


def test_a_dry_run_says_which_weights_fit(folders: dict[str, Path], tmp_path: Path):
    (report,) = run_ranks(_report, 1, folders["deepseek_v3"], log_folder=tmp_path)
    assert "\nweights     41 of 41 fit (bfloat16, float32), in /" in report


class _Exporter:
    """Loads a folder, and saves as a run does after its last step."""

    def __init__(self, config: Any, source: Path | None = None) -> None:
        check, spec = HuggingFaceExport(), config.model_spec
        check.before_start(config)
        self.model = spec.model.build()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter)  # memory as it was may be NaN
        self.manager = config.checkpoint.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=spec.state_dict_adapter(spec.model, config.hf_assets_path),
            base_folder=config.dump_folder,
        )
        trainer: Any = SimpleNamespace(config=config, checkpointer=self.manager)
        with check.around_run(trainer):
            if source is not None:
                self.manager.load()
            self.folder = Path(self.manager.folder) / "step-1"

    def save(self) -> Path:
        self.manager.save(1, last_step=True)
        return self.folder


EXPORTED = {
    "deepseek_v3": ("bfloat16", "which this model does not have: not exported"),
    "deepseek_v3 without q LoRA": ("float32", f"lacks model.embed_tokens.weight, {BIAS}: exp"),
    "qwen3_moe": ("bfloat16", ""),
}
"""The dtype of an export, and what is said of an index that is not as it should be."""


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_has_the_files_of_an_index_that_fits(
    name: str,
    folders: dict[str, Path],
    tmp_path: Path,
    one_rank: None,
    caplog: pytest.LogCaptureFixture,
):
    """That transformers opens it is shown below."""
    source, (dtype, said) = folders[name], EXPORTED[name]
    index = json.loads((source / INDEX).read_text())
    files = index["weight_map"]
    if name == "deepseek_v3":  # as it ships: scales, and a layer for MTP in a file of its own
        files |= {f"{weight}_scale_inv": file for weight, file in files.items() if "proj" in weight}
        files["model.layers.2.eh_proj.weight"] = "model-00099-of-00099.safetensors"
    elif said:
        for weight in (BIAS, "model.embed_tokens.weight"):
            del files[weight]
    (tmp_path / INDEX).write_text(json.dumps(index))
    config = _load(name, source, last_save_in_hf=True, export_dtype=dtype)
    config.hf_assets_path, config.dump_folder = str(tmp_path), str(tmp_path)
    folder = _Exporter(config, source).save()
    assert (said in caplog.text) if said else (INDEX not in caplog.text)
    wanted, exported = _tensors(source), _tensors(folder)
    wanted |= {n: t.to(getattr(torch, dtype)) for n, t in wanted.items() if n != BIAS}
    assert {n: t.dtype for n, t in exported.items()} == {n: t.dtype for n, t in wanted.items()}
    assert [n for n in wanted if not torch.equal(exported[n], wanted[n])] == []
    numbers = [int(path.name.split("-")[1]) for path in folder.glob("*.safetensors")]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert len(numbers) > 1


QUICK = "deepseek_v3 in float8"


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)]
)
def test_weights_there_and_back(name: str, folders: dict[str, Path], tmp_path: Path):
    """From transformers into a layout, each whole tensor, and back to a folder that it opens.

    The matrix has other layouts, whose exports are stock's.
    """
    plain = name.removesuffix(" in float8")
    source, wanted = folders[plain], _tensors(folders[plain])
    if name != plain:
        source = tmp_path / "float8"
        source.mkdir()
        quantized = _quantized(wanted)
        _write(source, quantized)
        scaled = [name for name in wanted if f"{name}_scale_inv" in quantized]
        wanted |= {name: quantized[name].float() * 2.0**-9 for name in scaled}
    wanted = {name: tensor.float() for name, tensor in wanted.items()}
    assets = tmp_path / "assets"
    shutil.copytree(default_tokenizer_path(), assets)
    shutil.copy(source / INDEX, assets)
    legs = run_leg(
        _run(name, world=4, ep=2, pp=2),
        tmp_path,
        look=True,
        save_at_once=True,
        change=functools.partial(_with_assets, plain, assets),
        initial_load_path=str(source),
        initial_load_in_hf=True,
        initial_load_in_hf_quantized=name != plain,
        last_save_model_only=True,
        last_save_in_hf=True,
        export_dtype="bfloat16",
    )
    spec = _config(plain, tmp_path).model_spec
    expected = digests_of(spec.state_dict_adapter(spec.model, None).from_hf(dict(wanted)))
    loaded = {n: digest for leg in legs for n, digest in leg.loaded.items() if n in expected}
    assert differing(loaded, expected) == []
    folder = tmp_path / "checkpoint" / "step-0"
    exported = _tensors(folder)
    assert exported.keys() == wanted.keys()
    dtypes = {n: torch.float32 if n == BIAS else torch.bfloat16 for n in wanted}
    wanted = {n: tensor.to(dtypes[n]).float() for n, tensor in wanted.items()}
    assert {n: tensor.dtype for n, tensor in exported.items()} == dtypes
    assert [n for n in wanted if not torch.equal(exported[n].float(), wanted[n])] == []
    shutil.copy(folders[plain] / "config.json", folder)
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened.save_pretrained(tmp_path / "opened")
    again = _tensors(tmp_path / "opened")
    assert [n for n in wanted if not torch.equal(again[n], wanted[n])] == []


def _with_assets(name: str, assets: Path, config: Any) -> None:
    config.hf_assets_path = str(assets)
    _make_small(name, config)


@pytest.mark.parametrize("fault", ["write", "join"])
def test_a_failed_export_leaves_the_weights_in_torchs_format(
    fault: str, tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture
):
    exporter = _Exporter(_config("deepseek_v3", tmp_path, last_save_in_hf=True))
    join = hf_storage.consolidate_safetensors_files

    def without_dtype(*given: Any, **named: Any) -> None:
        """As torch joins what it does not find."""
        join(*given, **named)
        for path in Path(given[1] if given[1:] else named["output_dir"]).glob("*.safetensors"):
            path.write_bytes(path.read_bytes().replace(b'"F32"', b'""   '))

    patch = unittest.mock.patch.object
    if fault == "write":
        broken = patch(HuggingFaceStorageWriter, "write_data", side_effect=OSError("no space"))
        error, words = CheckpointException, "no space"
    else:
        broken = patch(hf_storage, "consolidate_safetensors_files", without_dtype)
        error, words = RuntimeError, "step-1 is not whole: .*model-00001-of-00001.safetensors: "
    with broken, pytest.raises(error, match=words):
        exporter.save()
    assert "The export failed" in caplog.text
    saved = FileSystemReader(exporter.folder).read_metadata().state_dict_metadata
    assert saved.keys() == exporter.model.state_dict().keys()


def test_pieces_of_an_export_that_was_cut_off_are_not_joined(tmp_path: Path, one_rank: None):
    exporter = _Exporter(_config("deepseek_v3", tmp_path, last_save_in_hf=True))
    folder = exporter.save()
    first = _tensors(folder)
    (piece,) = (folder / "sharded").glob("*")
    for rank in range(2, 20):  # torch joins them in the order of the folder
        name = piece.name.replace("00001", f"{rank:05d}", 1)
        piece.with_name(name).write_bytes(piece.read_bytes())
    with torch.no_grad():
        for parameter in exporter.model.parameters():
            parameter.add_(1)
    second = _tensors(exporter.save())
    assert all(torch.equal(second[name], first[name] + 1) for name in first if name != BIAS)


def test_a_tensor_that_the_index_lacks_goes_with_the_one_before_it():
    index = {"a": 3, "c": 5, "not exported": 4}
    assert files_of(["x", "a", "b", "c"], index) == {"x": 1, "a": 1, "b": 1, "c": 2}


def test_an_index_without_numbers_is_refused(tmp_path: Path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {GATE: "model.safetensors"}}))
    config = _config("deepseek_v3", tmp_path, last_save_in_hf=True)
    with pytest.raises(ValueError, match=r"cannot read \(AttributeError.*expected names of files"):
        HuggingFaceExport().before_start(config)


def test_the_bias_of_a_router_stays_in_fp32(tmp_path: Path, one_rank: None):
    """In both formats: it is what the model computes with."""
    config = _config("deepseek_v3", tmp_path, export_dtype="bfloat16")
    folder = _Exporter(config).save()
    saved: Any = FileSystemReader(folder).read_metadata().state_dict_metadata
    dtypes = {name: item.properties.dtype for name, item in saved.items()}
    assert {n for n, dtype in dtypes.items() if dtype == torch.float32} == {
        "layers.1.moe.expert_bias_E"
    }
