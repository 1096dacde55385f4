"""Adapters of Titan's LoRA in the ``peft`` library: same logits as Titan's model has.

peft and transformers take seconds to import, so the functions that need them do it: ranks and the
workers of pytest import this file too.
"""

import json
import re
import shutil
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel_non_fused_qkv

from tests.helpers.cluster import run_line
from tests.helpers.training import deepseek_v3_layers, set_num_experts, titan_config
from titan_ext.base import no_accelerator
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, default_tokenizer_path, make_corpus
from titan_ext.components.lora import export_adapters
from titan_ext.config_registry.commands import main
from titan_ext.config_registry.resolve import load
from titan_ext.parallelize.model_spec import balance_all_blocks
from titan_ext.run.trainer import extend_config

WEIGHTS = "adapter_model.safetensors"
TOLERANCE = 1e-5
"""Of the largest logit. Both sides are fp32, with sums in other orders: 6e-7 was seen."""
TOKENS = torch.arange(64).view(2, 32) * 31 % 2048


def _deepseek_v3() -> Any:
    """671B in small, with transformers' epsilon."""
    config = titan_config("deepseek_v3")
    model: Any = config.model_spec.model
    model.layers = deepseek_v3_layers(model.dim)
    for _, norm, _, _ in model.traverse(RMSNorm.Config, recurse=True):
        norm.eps = 1e-6  # type: ignore[attr-defined]  # that of transformers; Titan's is 1e-5
    return config


def _titan_config(name: str, linears: list[str] | None, folder: Path) -> Any:
    """A config of ours for a run in ``folder``: 2 layers, adapters of rank 4 and alpha 12."""
    config: Any = {
        "deepseek_v3": _deepseek_v3,
        "qwen3_unfused": qwen3_debugmodel_non_fused_qkv,
    }.get(name, lambda: titan_config(name))()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    if name == "qwen3_moe":
        set_num_experts(model, 16)
    converter = LoRAConverter.Config(rank=4, alpha=12.0, target_modules=linears).build()
    config.model_spec.model = converter.convert(model)
    config.checkpoint = CheckpointManager.Config(enable=True)
    config.dump_folder = str(folder)
    return extend_config(config)


def hf_config(name: str, layers: int, **changes: Any) -> Any:
    """What transformers calls the same model, with ``changes`` of its experts."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "attn_implementation": "eager",
    }
    qwen3 = sizes | {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    if name in ("qwen3", "qwen3_unfused"):
        return transformers.Qwen3Config(**qwen3, intermediate_size=3072, tie_word_embeddings=True)
    if name == "qwen3_moe":
        experts: dict[str, Any] = {
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        }
        return transformers.Qwen3MoeConfig(**qwen3, moe_intermediate_size=768, **experts | changes)
    if name == "llama3":
        return transformers.LlamaConfig(
            **sizes,
            num_attention_heads=16,
            intermediate_size=768,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
    experts: dict[str, Any] = {
        "q_lora_rank": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    }
    return transformers.DeepseekV3Config(
        **sizes,
        **experts | changes,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _save_base(name: str, folder: Path, layers: int = 2) -> None:
    """Random weights in safetensors, with norms and routing biases that are not all the same."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(name, layers), dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif key.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)


def _base_state(config: Any, base: Path) -> dict[str, torch.Tensor]:
    """Safetensors under Titan's names."""
    spec = config.model_spec
    (file,) = base.glob("*.safetensors")
    return spec.state_dict_adapter(spec.model, None).from_hf(load_file(file))


def _plain_titan_model(config: Any) -> Any:
    """Titan's own model, on one rank, initialised."""
    no_accelerator.enable()
    with torch.device("meta"):
        model: Any = config.model_spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def _fp32_experts(self: Any, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> Any:
    """Titan's routed experts without its casts to bfloat16."""
    parts = x_RD.split(num_tokens_per_expert_E.tolist())
    return torch.cat(
        [
            (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            for x, w1, w2, w3 in zip(parts, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True)
        ]
    )


def _saved_state(config: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    """What the model has in a checkpoint, as whole tensors."""
    state = _plain_titan_model(config).state_dict()
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def _titan_logits(config: Any, checkpoint: Path) -> torch.Tensor:
    model = _plain_titan_model(config)
    model.load_state_dict(_saved_state(config, checkpoint))
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.forward = MethodType(_fp32_experts, module)  # type: ignore[method-assign]
    with torch.no_grad():
        return model(TOKENS)


def _assert_same_function(titan: torch.Tensor, adapted: Any) -> None:
    """Logits of Titan's model are those of PEFT's model, and not those of the base alone."""
    with torch.no_grad():
        peft = adapted(TOKENS).logits
        with adapted.disable_adapter():
            alone = adapted(TOKENS).logits
    largest = titan.abs().max()
    print("logits", (titan - peft).abs().max() / largest, (titan - alone).abs().max() / largest)
    assert (titan - peft).abs().max() < TOLERANCE * largest
    assert (titan - alone).abs().max() > 1000 * TOLERANCE * largest


def _peft(base: Path, adapters: Path) -> Any:
    from peft import PeftModel
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapters)


@pytest.mark.parametrize(
    ("name", "linears", "modules", "parameters"),
    [
        # Embeddings are tied: safetensors have no lm_head.
        (
            "qwen3",
            None,
            [
                "lm_head",
                *("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"),
                *(f"self_attn.{part}_proj" for part in "koqv"),
            ],
            [],
        ),
        ("qwen3_unfused", ["wkv"], ["self_attn.k_proj", "self_attn.v_proj"], []),
        ("qwen3_moe", ["wqkv", "wo"], [f"self_attn.{part}_proj" for part in "koqv"], []),
        ("llama3", ["wqkv", "w2"], ["mlp.down_proj", *(f"self_attn.{p}_proj" for p in "kqv")], []),
        (
            "deepseek_v3",
            ["wq_b", "wkv_b", "wo", "w1", "w3"],
            ["self_attn.kv_b_proj", "self_attn.o_proj", "self_attn.q_b_proj"],
            [
                f"mlp.{place}{part}_proj.weight"
                for place in ("", "shared_experts.")
                for part in ("gate", "up")
            ],
        ),
    ],
)
def test_peft_computes_what_titan_does(
    name: str, linears: list[str] | None, modules: list[str], parameters: list[str], tmp_path: Path
):
    base, run = tmp_path / "base", tmp_path / "run"
    _save_base(name, base)
    config = _titan_config(name, linears, run)
    state = _plain_titan_model(config).state_dict() | _base_state(config, base)
    for key, tensor in state.items():
        if ".lora_" in key:
            torch.nn.init.normal_(tensor, std=0.05)
    checkpoint = run / "checkpoint" / "step-3"
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    out = export_adapters(config, base_model="org/name")
    assert out == run / "peft" / "step-3"
    settings = json.loads((out / "adapter_config.json").read_text())
    assert sorted(settings.pop("target_parameters")) == sorted(parameters)
    assert settings == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/name",
        "r": 4,
        "lora_alpha": 12.0,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": modules,
    }
    _assert_same_function(_titan_logits(config, checkpoint), _peft(base, out))


def _save_adapters(config: Any, step: int, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of random adapters, without the base, which an export does not read."""
    state = {
        name: torch.randn(tensor.shape).to(dtype)
        for name, tensor in _plain_titan_model(config).state_dict().items()
        if ".lora_" in name
    }
    folder = Path(config.dump_folder) / "checkpoint" / f"step-{step}"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_is_chosen_and_its_dtype_kept(tmp_path: Path):
    config = _titan_config("qwen3", ["wo"], tmp_path)
    config.checkpoint.load_step = 100
    for step, dtype in ((100, torch.bfloat16), (200, torch.float32)):
        _save_adapters(config, step, dtype)
    weights = load_file(export_adapters(config) / WEIGHTS)
    state = {f"layers.{i}.attention.wo.lora_b.weight": torch.empty(256, 4) for i in range(2)}
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint" / "step-100", no_dist=True)
    for i in range(2):
        exported = weights[f"base_model.model.model.layers.{i}.self_attn.o_proj.lora_B.weight"]
        assert exported.dtype == torch.bfloat16
        assert torch.equal(exported, state[f"layers.{i}.attention.wo.lora_b.weight"])


def test_what_cannot_be_exported(tmp_path: Path):
    config = _titan_config("qwen3", ["wo"], tmp_path)
    with pytest.raises(ValueError, match=rf"in torch's format; {tmp_path}/checkpoint has none\."):
        export_adapters(config)
    _save_adapters(config, 100)
    config.checkpoint.load_step = 7
    with pytest.raises(ValueError, match=r"in torch's format; .*/checkpoint has steps 100\."):
        export_adapters(config)
    for linears in (["wo", "w2"], ["w1"]):
        other = _titan_config("qwen3", linears, tmp_path)
        with pytest.raises(ValueError, match=r"step-100 does not have the adapters of this config"):
            export_adapters(other)
    config.checkpoint.load_step = 100
    for nameless in (lambda self, state: {}, lambda self, state: {}[""]):
        adapter = config.model_spec.state_dict_adapter
        config.model_spec.state_dict_adapter = type("Nameless", (adapter,), {"to_hf": nameless})
        with pytest.raises(ValueError, match=r"Hugging Face name for layers\.0\.attention\.wo"):
            export_adapters(config)
    plain = extend_config(titan_config("qwen3"))
    with pytest.raises(
        ValueError, match=r"qwen3 has no LoRA adapters; expected one \[\[model\.conv"
    ):
        export_adapters(plain)
    config.model_spec.state_dict_adapter = None
    with pytest.raises(ValueError, match=r"no Hugging Face names for qwen3"):
        export_adapters(config)


def test_a_mistake_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["peft", "deepseek_v3_16"]) == 1
    assert "deepseek_v3_16: neither a TOML file, nor" in capsys.readouterr().err
    (folder / "run.toml").write_text('extends = "qwen3.qwen3_debugmodel"')
    assert main(["peft", "run.toml", "--dump_folder", "elsewhere"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("qwen3 has no LoRA adapters")


def test_the_bias_of_frozen_routers_is_frozen():
    balanced: Any = extend_config(titan_config("deepseek_v3")).model_spec
    assert balanced.post_optimizer_build_fn is balance_all_blocks
    adapted = _titan_config("deepseek_v3", ["wo"], Path())
    assert adapted.model_spec.post_optimizer_build_fn is None


DOC = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()


def test_the_documented_way(folder: Path):
    """docs/lora.md from its TOML to its Python, on a small model of the same kind and 2 ranks."""
    section = DOC[DOC.index("## LoRA") : DOC.index("## QLoRA")]
    section = section.replace("Qwen/Qwen3-14B", "assets/hf/Qwen3-14B")
    (toml,) = re.findall(r"```toml\n(.*?)```", section, flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    train, export = re.findall(r"^    (.*)$", section, flags=re.MULTILINE)
    (folder / "small.toml").write_text(
        'extends = "my_lora.toml"\n[model]\nflavor = "debugmodel"\n'
        f'[dataloader]\ndataset = "{STDLIB_CORPUS}"\n'
        "[training]\nsteps = 2\nseq_len = 32\nlocal_batch_size = 2\n"
        "[lr_scheduler]\nwarmup_steps = 0\n"
    )
    (folder / "my_lora.toml").write_text(toml)
    base = folder / "assets" / "hf" / "Qwen3-14B"
    _save_base("qwen3", base, layers=8)
    make_corpus()
    shutil.copytree(default_tokenizer_path(), base, dirs_exist_ok=True)
    train = train.replace("--nproc_per_node=8", "--nproc_per_node=2")
    for rank in run_line(folder, train.replace("my_lora.toml", "small.toml")):
        assert rank.code == 0, rank.error[-3000:]
    (exported,) = run_line(folder, export.replace("my_lora.toml", "small.toml"))
    assert (exported.code, exported.out) == (0, "my_adapters\n"), exported.error[-3000:]
    names: dict[str, Any] = {}
    exec(code, names)
    config = load("small.toml")
    checkpoint = folder / "outputs" / "my_lora" / "checkpoint" / "step-2"
    _assert_same_function(_titan_logits(config, checkpoint), names["model"])
