"""Step time of activation checkpointing policies, in turn with stock selective's, in one run.

    python benchmarks/step_time.py --cuda                # GPU: DeepSeek-V3 16B geometry, 4 layers
    python benchmarks/step_time.py --toy                 # the same program, tiny, on the CPU

On a GPU the model is 4 layers of the 16B geometry with embedding and head, 8 sequences of 4096
tokens. On a CPU times mean little (host_and_memory.py has those of a whole step).
Figures are tokens per second, peak memory, and both as ratios to stock selective. A round runs
every arm, one after the other. Ratios are of one round; the median is printed. ``--graph`` then
times each step as a CUDA graph, which no Python slows down: on a CPU the step itself.
``--gradients`` times nothing: it compares the gradients of one step with stock selective's.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn as nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.utils import set_default_dtype

from benchmarks.activation_bytes import ARMS
from titan_ext.components.dispatch import replace_configs
from titan_ext.components.early_scores import use_early_scores

STOCK = "stock-selective"
GIB = 2**30


@dataclass(frozen=True)
class Size:
    """What a GPU times. ``blocks``: MoE layers alone, without embedding and head."""

    geometry: str = "16B"
    layers: int = 4
    batch: int = 8
    tokens: int = 4096
    blocks: bool = False
    device: str = "cuda"


def model_step(
    arm: str, size: Size, after: Callable[[nn.Module], None] | None = None
) -> Callable[[], None]:
    """One forward and backward of the first layers of a DeepSeek-V3 model, bf16.

    ``after`` gets the model with its gradients.
    """
    from torchtitan.models.deepseek_v3 import model_registry

    spec = model_registry(size.geometry)
    config = cast(Decoder.Config, spec.model)
    first = 1 if size.blocks else 0  # the first layer is dense
    config.layers = config.layers[first : first + size.layers]
    replace_configs(spec, FlexAttention.Config, lambda _: ScaledDotProductAttention.Config())
    ac_config = ARMS[arm]()
    if getattr(ac_config, "score_before_last_gemm", False):
        use_early_scores(spec)
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        model = cast(Any, config.build())
    if size.blocks:
        model.tok_embeddings = model.norm = model.lm_head = None
    if ac_config is not None:
        ac_config.build().apply(model)
    model.to_empty(device=size.device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(size.device))
        # Alike for all arms, and by a function that torch 2.11, too, has right in bf16.
        for _, parameter in sorted(model.named_parameters(), key=lambda x: canonical_fqn(x[0])):
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    shape = (size.batch, size.tokens)
    ids_BL = torch.randint(config.vocab_size, (shape[0], shape[1] + 1), device=size.device)
    h_BLD = torch.randn(*shape, config.dim, device=size.device).bfloat16().requires_grad_()

    def step() -> None:
        if size.blocks:
            model(h_BLD, None, None).float().mean().backward()
            h_BLD.grad = None
        else:
            logits_BLV = model(ids_BL[:, :-1])
            loss = nn.functional.cross_entropy
            loss(logits_BLV.flatten(0, 1).float(), ids_BL[:, 1:].flatten()).backward()
        if after is not None:
            after(model)
        model.zero_grad()

    return step


def seconds(step: Callable[[], None], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(arms: list[str], *, rounds: int, warm_up: int, size: Size) -> dict[str, list[float]]:
    """Seconds of a step by arm, one value a round."""
    cuda = size.device == "cuda"
    steps = {arm: model_step(arm, size) for arm in arms}
    for step in steps.values():
        for _ in range(warm_up):
            step()
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, step in steps.items():
            times[arm].append(seconds(step, cuda))
    return times


def captured(step: Callable[[], None], device: str) -> Callable[[], None]:
    """``step`` as a CUDA graph that is replayed; a CPU has none."""
    if device != "cuda":
        return step
    aside = torch.cuda.Stream()  # torch asks for a warm-up there
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def replay_lines(arms: list[str], rounds: int, size: Size) -> Iterator[str]:
    """A line for each arm; one graph at a time, for each keeps its memory."""
    stock = None
    for arm in arms:
        if "offload" in arm:
            yield f"{arm} is not captured: a replay runs no Python, so nothing would be offloaded"
            continue
        try:
            replay = captured(model_step(arm, size), size.device)
        except RuntimeError as error:
            yield f"{arm} cannot be captured: {str(error).splitlines()[0]}"
            continue
        times = [seconds(replay, size.device == "cuda") for _ in range(rounds + 1)][1:]
        ms = 1e3 * statistics.median(times)
        yield f"{arm}: ms a step as a graph = {ms:.3f}"
        if arm == STOCK:
            stock = ms
        elif stock is not None:
            yield f"{arm}: step time of stock selective's, as graphs = {ms / stock:.3f}"
        del replay
        gc.collect()  # the model is a cycle


def gradient_lines(arms: list[str], size: Size) -> Iterator[str]:
    """The least cosine of a gradient with stock selective's, for each arm, and its parameter.

    Stock runs a second time as the last arm: what differs there is noise of the device's kernels.
    """

    def gradients(arm: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        def keep(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[canonical_fqn(name)] = parameter.grad.detach().clone()

        model_step(arm, size, keep)()
        gc.collect()  # the model is a cycle
        return found

    stock = gradients(STOCK)
    for arm in [*(arm for arm in arms if arm != STOCK), STOCK]:
        others = gradients(arm)
        if others.keys() != stock.keys():
            yield f"{arm}: gradients of other parameters: {sorted(others.keys() ^ stock.keys())}"
            continue
        flat = nn.functional.cosine_similarity
        cosines = {
            name: flat(one.flatten().double(), others[name].flatten().double(), 0).item()
            for name, one in stock.items()
        }
        equal = sum(one.equal(others[name]) for name, one in stock.items())
        worst = min(cosines, key=lambda name: cosines[name])
        label = arm if arm != STOCK else f"{STOCK}, again"
        yield f"{label}: least cosine of a gradient with stock selective's = {cosines[worst]:.6f}"
        yield f"{label}: gradients equal to stock selective's in every bit = {equal}"
        yield f"{label}: worst of {len(cosines)} gradients is {worst}"


def peak_bytes(arm: str, size: Size) -> int:
    """Peak memory of two steps on the GPU, the model of this arm alone."""
    gc.collect()  # the last arm's model is a cycle, and would count
    step = model_step(arm, size)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = parser.add_mutually_exclusive_group(required=True)
    device.add_argument("--cuda", action="store_true", help="16B geometry, 4 layers, on a GPU")
    device.add_argument("--toy", action="store_true", help="what --cuda runs, tiny, on the CPU")
    parser.add_argument("--blocks", action="store_true", help="on a GPU: MoE layers alone")
    parser.add_argument("--layers", type=int, default=4, help="on a GPU, or of --toy (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="on a GPU: sequences (%(default)s)")
    parser.add_argument("--arms", nargs="+", default=["fp8-memory", "fp8-speed"], choices=ARMS)
    parser.add_argument("--graph", action="store_true", help="and as CUDA graphs")
    parser.add_argument("--gradients", action="store_true", help="beside stock's; nothing is timed")
    parser.add_argument("--tokens", type=int, default=4096, help="on a GPU (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.cuda and not torch.cuda.is_available():
        parser.error("--cuda needs a GPU, and torch sees none here.")

    size = Size("16B", args.layers, args.batch, args.tokens, args.blocks)
    if args.toy:
        size = Size("debugmodel", args.layers, 2, 16, args.blocks, device="cpu")
    arms = [STOCK, *(arm for arm in args.arms if arm != STOCK)]
    if args.gradients:
        for line in gradient_lines(arms, size):
            print(line, flush=True)
        return
    # One after another, before the timed models are all there together.
    peaks = {arm: peak_bytes(arm, size) for arm in arms} if args.cuda else {}
    times = measure(arms, rounds=args.rounds, warm_up=2, size=size)
    name = torch.cuda.get_device_name() if args.cuda else "CPU"
    batch, tokens = f"{size.batch} x {size.tokens} tokens", size.batch * size.tokens
    print(f"{name}, torch {torch.__version__}, {batch}, {args.rounds} rounds")
    for arm, values in times.items():
        ratios = [a / b for a, b in zip(values, times[STOCK], strict=True)]
        line = (
            f"{arm:20} {tokens / statistics.median(values):10.0f} tokens/s, step time "
            f"{statistics.median(ratios):.3f} of stock ({min(ratios):.3f} to {max(ratios):.3f})"
        )
        if peaks:
            line += f", peak {peaks[arm] / GIB:.2f} GiB, {peaks[arm] / peaks[STOCK]:.3f} of stock"
        print(line, flush=True)
    if args.graph:
        for line in replay_lines(arms, args.rounds, size):
            print(line, flush=True)


if __name__ == "__main__":
    main()
