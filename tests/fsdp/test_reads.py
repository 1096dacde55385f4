"""Weights that are read past the forward of their own module: served in the head, else refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from tests.helpers.cluster import refusal_of, run_ranks
from tests.helpers.training import small_spec
from titan_ext import api

TOKENS, STEPS = 32, 2


def _forward(model: Any, tokens: Any, positions: Any = None, attention_masks: Any = None) -> Any:
    """A user's: a penalty from the head's weight, and logits without a call of the head."""
    h = model.tok_embeddings(tokens)
    for layer in model.layers.values():
        h = layer(h, attention_masks, positions)
    h = model.norm(h)
    h = h + linear(h, model.lm_head.weight).square().mean().sqrt()
    if model._skip_lm_head:
        return h
    return model.lm_head(h) if model.calls_head else linear(h, model.lm_head.weight)


def _errors_of_gradients(wrap: Any) -> dict[str, float]:
    """The largest error of a gradient beside those of the whole model, by kind of head."""
    dist.init_process_group("gloo")
    Llama3Model.forward = _forward  # type: ignore[method-assign]
    errors = {}
    for chunked, calls_head in ((True, True), (False, True), (False, False)):
        spec = small_spec(1, "llama3")
        parallelism = api.ParallelismConfig(fsdp_wrap=wrap, fsdp_prefetch=0)
        training = api.TrainingConfig(mixed_precision_param="float32")
        torch.manual_seed(0)
        model: Any = api.build_decoder(spec, parallelism=parallelism, training=training)[0]
        whole = spec.model.build()
        whole.load_state_dict(
            {n: p.full_tensor() for n, p in model.named_parameters()}, strict=False
        )
        whole.init_states()  # buffers
        whole.load_state_dict(
            {n: p.full_tensor() for n, p in model.named_parameters()}, strict=False
        )
        worst = 0.0
        for step in range(STEPS):
            tokens = (torch.arange(2 * TOKENS).view(2, -1) * 7 + dist.get_rank() + step) % 2048
            for part in (model, whole):
                part.calls_head, part._skip_lm_head = calls_head, chunked
                part.zero_grad()
                out = part(tokens, positions=torch.arange(TOKENS).expand(2, -1))
                if chunked:
                    chunks = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=2))
                    chunks.set_lm_head(part.lm_head)
                    chunks(out, tokens, torch.tensor(2.0 * TOKENS))[0].backward()
                else:
                    out.square().mean().backward()
            for name, param in whole.named_parameters():
                dist.all_reduce(param.grad)
                found = model.get_parameter(name).grad.full_tensor()
                worst = max(worst, ((found - param.grad).norm() / param.grad.norm()).item())
        errors[f"chunked {chunked}, calls its head {calls_head}"] = worst
    return errors


@pytest.mark.parametrize("wrap", ["submodule", pytest.param("block", marks=pytest.mark.slow)])
def test_a_model_may_read_the_head_after_the_norm(wrap: Any, tmp_path: Path):
    for errors in run_ranks(_errors_of_gradients, 2, wrap, log_folder=tmp_path):
        assert len(errors) == 3
        assert max(errors.values()) < 1e-5, errors


READS = {
    "shard": lambda weight: weight.to_local().sum(),
    "whole": lambda weight: weight.full_tensor().sum(),
    "of DTensor": lambda weight: weight.sum().full_tensor(),
    "mixed": lambda weight: weight.sum(dim=0),
}


def _messages() -> dict[str, str]:
    """What is said of a block that reads its attention's output projection, by kind of read."""
    forward, read = Llama3TransformerBlock.forward, lambda weight: 0.0

    def reading(block: Any, *args: Any) -> Any:
        return forward(block, *args) + read(block.attention.wo.weight)

    Llama3TransformerBlock.forward = reading  # type: ignore[method-assign]
    tokens = torch.arange(TOKENS).view(1, -1)

    def step(model: Any) -> str:
        return refusal_of(lambda: model(tokens, positions=tokens).sum().backward())

    def built(wrap: Any) -> Any:
        spec = small_spec(2, "llama3")
        model: Any = api.build_decoder(spec, parallelism=api.ParallelismConfig(fsdp_wrap=wrap))[0]
        model.register_forward_hook(lambda *_: None)  # a user's, after ours
        return model

    messages = {}
    for name, read in READS.items():  # noqa: B007
        messages[name] = step(built("submodule"))
    read = lambda weight: torch.no_grad()(READS["whole"])(weight)  # noqa: E731
    messages["without gradient"] = step(built("submodule"))
    read = lambda weight: weight.sum()  # noqa: E731
    messages["gathered"] = step(built("block"))
    read = lambda weight: 0.0  # noqa: E731
    model = built("submodule")
    messages["first step"] = step(model)
    left = [type(p) is not DTensor or "_refuse" in vars(p) for p in model.parameters()]
    messages["left"] = str(any(left))
    read = READS["shard"]
    messages["second step"] = step(model)
    Llama3TransformerBlock.forward = forward  # type: ignore[method-assign]
    return messages


def _refused() -> tuple[dict[str, str], tuple[str, float]]:
    dist.init_process_group("gloo")
    return _messages(), _penalised()


def test_a_weight_that_is_read_past_its_module_is_refused_by_name(tmp_path: Path):
    for messages, (message, error) in run_ranks(_refused, 2, log_folder=tmp_path):
        for name in READS:
            assert messages[name].startswith("layers.0 reads layers.0.attention.wo.weight, a weigh")
            assert 'parallelism.fsdp_wrap = "block" gathers it while' in messages[name]
        assert messages["without gradient"] == messages["first step"] == messages["gathered"] == ""
        assert messages["left"] == "False"
        assert "gradient comes to layers.1.attention.wo.weight past FSDP" in messages["second step"]
        # A penalty on weights belongs after backward.
        assert "A gradient comes to" in message
        assert "p.grad.add_(p.detach(), alpha=2 * factor)" in message
        assert error < 1e-6


def _penalised() -> tuple[str, float]:
    """What is said of a penalty on weights, and the error of gradients made as that says."""
    parallelism = api.ParallelismConfig(fsdp_wrap="submodule")
    model: Any = api.build_decoder(small_spec(1, "llama3"), parallelism=parallelism)[0]
    tokens = torch.arange(TOKENS).view(1, -1)

    def loss() -> Any:
        return model(tokens, positions=tokens).float().square().mean()

    loss().backward()
    error = 0.0
    for p in model.parameters():
        expected = p.grad.full_tensor() + 2 * 0.1 * p.detach().full_tensor()
        p.grad.add_(p.detach(), alpha=2 * 0.1)
        error = max(error, (p.grad.full_tensor() - expected).abs().max().item())
    sums = (p.pow(2).sum() for p in model.parameters())
    penalty = 0.1 * sum(getattr(x, "full_tensor", lambda x=x: x)() for x in sums)
    return refusal_of(lambda: (loss() + penalty).backward()), error
