"""Peak memory of the trainer rank with the highest need, by part.

In: a RunConfig and a GPU. Out: an :class:`Estimate` for the pipeline stage with the largest total. Pure; no torch.

    weights       2 bytes per parameter (BF16)                            Micikevicius et al., arXiv:1710.03740
    gradients     4 bytes: Megatron-Core's main_grad, reduced in FP32     grad_reduce_in_fp32 of its DDP
    optimizer     12 bytes: FP32 master weight and AdamW's two moments,   Rajbhandari et al., arXiv:1910.02054, stage 1
                  over data x context parallel ranks; of experts over
                  world / (pipeline x expert x expert tensor) ranks;
                  8 with BF16 moments; 7.02, and 8 in a step, with FP8  ``trainer/optimizer/states.py``
    FP8 copies    1 byte and scales, rowwise and columnwise               Transformer Engine keeps both for a whole
                                                                          update (is_first_microbatch)
                  Muon keeps the same states; a matrix's second moment  ``trainer/optimizer/muon.py``
                  stays 0
    adapters      gradients and optimizer states are those of adapters;   ``trainer/model/lora.py``
                  the weights without adapters are in host memory
    shared        weights of linears whose kernels read FP8 copies are    ``trainer/optimizer/shared_memory.py``
                  in the memory of gradients, which are counted 2 bytes
                  less; others of their buffer are there and elsewhere
    activations   see ``activations.py``, times the microbatches in       Narayanan et al., arXiv:2104.04473, 2.2
                  flight: 1F1B: this stage and those after it;
                  interleaved: 2 (stages after) + (v - 1) p + 1 chunks;
                  on the last stage also the inputs of the last norm
                  and of the head
    logits        the head's gradient in FP32 and, at once, two FP32      ``trainer/logprobs.py``
                  chunks of logits, or one BF16 chunk and its
                  gradient; five FP32 chunks of up to 1,024 tokens for
                  a divergence from a teacher over several tokens       ``trainer/divergence.py``

An optimizer that is offloaded is there while it steps, when activations, temporaries and FP8 copies are not
(``trainer/optimizer/offload.py``): the larger counts. With FP32 parameters, weights take 4 bytes and the optimizer 8.
Temporaries of the head and of one layer's backward pass do not coexist; the larger counts. The rowwise FP8 copies live
from the first forward pass after an update to the next update, the columnwise ones from the first backward pass on. An
update with two microbatches has both at its peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.names.registry import padded_vocab_size
from megatron_fp8rl.precision.formats import trainer_format
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice, TrainerKernels
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.preflight.activations import LayerBytes, Tokens, layer_bytes
from megatron_fp8rl.preflight.memory import GIB, WIDENED, Estimate, Gpu, Part
from megatron_fp8rl.preflight.weights import RankWeights, expert_copies, on_trainer_rank

# Allowances: a CUDA context with its modules and cuBLAS workspaces (measured on one H200: 1.7 GiB for a dense model,
# 2.1 for an MoE model), and NCCL's buffers for each process group with more than one rank.
CONTEXT_BYTES = int(1.9 * GIB)
_GROUP_BYTES = int(0.2 * GIB)
FIRST_MOMENT = 1 + 2 / 128  # bytes in FP8, with the scales of ``trainer/optimizer/states.py``


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes per parameter of weights, gradients and optimizer states."""

    weight: int
    gradient: int
    optimizer: float

    @classmethod
    def of(cls, cfg: RunConfig) -> Bytes:
        moments = {"fp32": 8, "bf16": 4, "fp8": 2 + FIRST_MOMENT}[cfg.optim.states]
        if cfg.precision.params == "fp32":
            return cls(weight=4, gradient=4, optimizer=moments)  # FP32 parameters are their own master weights
        return cls(weight=2, gradient=4, optimizer=4 + moments)


def worst_rank(cfg: RunConfig, gpu: Gpu, capacity_bytes: int, routing_imbalance: float = 1.0) -> Estimate:
    kernels = KernelChoice.of(cfg, Hardware(gpu.generation)).trainer
    stages = [
        estimate_stage(cfg, gpu, capacity_bytes, routing_imbalance, stage, kernels)
        for stage in range(cfg.parallel.pipeline)
    ]
    return max(stages, key=lambda estimate: estimate.total_bytes)


def num_microbatches(cfg: RunConfig) -> int:
    """Microbatches of one update on one data-parallel rank if every completion has its full length."""
    sampling = cfg.sampling
    sequences = sampling.prompts_per_step * sampling.completions_per_prompt / cfg.algo.updates_per_step
    tokens = sequences * cfg.max_sequence_tokens
    return max(1, math.ceil(tokens / cfg.parallel.data / cfg.optim.max_tokens_per_microbatch))


def layers_in_flight(cfg: RunConfig, stage: int, layers: int) -> float:
    """Layers, summed over microbatches, whose activations a rank of ``stage`` with ``layers`` layers holds at once."""
    parallel, microbatches = cfg.parallel, num_microbatches(cfg)
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_stages == 1:
        return layers * min(behind + 1, microbatches)
    chunks = 2 * behind + (parallel.virtual_stages - 1) * parallel.pipeline + 1
    return layers / parallel.virtual_stages * min(chunks, microbatches * parallel.virtual_stages)


def fp8_copy_bytes(cfg: RunConfig, gpu: Gpu) -> float:
    """Bytes of all FP8 copies that a linear keeps, per weight element."""
    recipe = trainer_format(cfg.precision)
    if not recipe.is_quantized:
        return 0.0
    return recipe.bytes_per_value * (2 if recipe.weight_block else gpu.fp8_weight_copies)


def shares_memory(cfg: RunConfig, kernels: TrainerKernels) -> tuple[bool, bool]:
    """Whether BF16 weights lie in the memory of their gradients: of FP8 linears, and of FP8 experts."""
    if cfg.precision.trainer != "blockwise" or cfg.precision.params != "bf16" or cfg.lora.rank:
        return False, False
    return kernels.linears == "deep_gemm", kernels.experts == "deep_gemm"


def estimate_stage(
    cfg: RunConfig,
    gpu: Gpu,
    capacity_bytes: int,
    routing_imbalance: float,
    stage: int,
    kernels: TrainerKernels | None = None,
) -> Estimate:
    """Peak memory of a rank of one pipeline stage; all ranks of the stage need the same if routing is balanced."""
    tokens = Tokens.of(cfg, routing_imbalance)
    layout = TrainerLayout.from_config(cfg.parallel)
    indices = [i for i in range(cfg.model.num_layers) if layout.stage(i, cfg.model.num_layers) == stage]
    kernels = kernels or KernelChoice.of(cfg, Hardware(gpu.generation)).trainer
    table = LayerTable.build(cfg.model, cfg.precision)
    kinds = {i: (cfg.model.layers[i], table.first_fp8_layer <= i < table.end_fp8_layer) for i in indices}
    examples = {kind: i for i, kind in kinds.items()}
    sizes = {kind: layer_bytes(cfg, i, tokens, kernels) for kind, i in examples.items()}
    layers = [sizes[kind] for kind in kinds.values()]
    parts = (
        *_states(cfg, gpu, on_trainer_rank(cfg, stage), kernels),
        _activations(cfg, layers, tokens, stage, kernels),
        _temporaries(cfg, layers, tokens, stage),
        _overhead(cfg, tokens),
    )
    where = f"pipeline stage {stage} of {cfg.parallel.pipeline}" if cfg.parallel.pipeline > 1 else "every rank"
    return Estimate(title=f"trainer, {where}", parts=parts, capacity_bytes=capacity_bytes, turns=_turns(cfg))


def _turns(cfg: RunConfig) -> tuple[frozenset[str], ...]:
    """An offloaded optimizer is in memory only after activations, and the FP8 copies that it changes, have gone."""
    of_step, of_gradients = frozenset({WIDENED}), frozenset({"activations", "temporaries"})
    if "optimizer" in cfg.optim.offload:
        of_step |= {"optimizer states"}
        of_gradients |= set() if cfg.precision.params == "fp8" else {"FP8 copies"}
    return (of_step, of_gradients) if "optimizer" in cfg.optim.offload or cfg.optim.states == "fp8" else ()


def _states(cfg: RunConfig, gpu: Gpu, weights: RankWeights, kernels: TrainerKernels) -> tuple[Part, ...]:
    parallel, per = cfg.parallel, Bytes.of(cfg)
    dense_ranks = parallel.data * parallel.context
    expert_ranks = expert_copies(parallel)
    optimizer = per.optimizer * weights.divided(parallel)
    copies = fp8_copy_bytes(cfg, gpu)
    weight_bytes, how = per.weight * (weights.trained + weights.frozen) + 4 * weights.buffers, cfg.precision.trainer
    linears, experts = shares_memory(cfg, kernels)
    fp8_dense, fp8_expert = linears * weights.fp8_fitting, experts * weights.fp8_expert
    shared = bool(fp8_dense) * weights.dense + bool(fp8_expert) * weights.expert  # whole buffers
    twice = shared - fp8_dense - fp8_expert
    kept_bytes = weight_bytes + per.weight * twice
    formula = f"{weights.trained / 1e9:.2f} G parameters x {per.weight} B"
    formula += f", {twice / 1e9:.2f} G twice" if twice else ""
    if cfg.lora.rank:
        formula = f"({weights.frozen / 1e9:.2f} G frozen and {weights.trained / 1e6:.1f} M "
        formula += f"of adapters) x {per.weight} B"
    if cfg.precision.params == "fp8":  # rowwise bytes are the weights themselves, columnwise bytes their copy
        copies, how = copies / 2, "in columns"
        kept_bytes += int((copies - per.weight) * weights.fp8)
        formula += f", of these {weights.fp8 / 1e9:.2f} G in FP8 x {copies:.3g} B"
    less = f", less {shared / 1e9:.2f} G weights in their memory" if shared else ""
    shards = f"{weights.dense / 1e9:.2f} G over {dense_ranks}"
    if weights.expert:
        shards += f", experts {weights.expert / 1e9:.2f} G over {expert_ranks}"
    fp8 = f"{weights.fp8 / 1e9:.2f} G FP8 weights x {copies:.3g} B ({how})"
    parts = [
        Part("weights", kept_bytes, formula),
        Part("gradients", per.gradient * weights.trained - per.weight * shared, f"FP32, x {per.gradient} B{less}"),
        Part("optimizer states", int(optimizer), f"x {per.optimizer:.4g} B, sharded: {shards} ranks"),
        Part("FP8 copies", int(copies * weights.fp8), fp8),
    ]
    if cfg.optim.states == "fp8":
        parts.append(Part(WIDENED, int((2 - FIRST_MOMENT) * weights.divided(parallel)), "in BF16, while Adam steps"))
    if cfg.algo.kl_coef > 0 and not cfg.lora.rank:
        # A second copy of the weights; its linears run forward only and keep the rowwise FP8 copy.
        reference = weight_bytes + int(min(copies, 1.0) * weights.fp8)
        parts.append(Part("reference model", reference, "algo.kl_coef > 0: a frozen copy"))
    return tuple(parts)


def _activations(cfg: RunConfig, layers: list[LayerBytes], tokens: Tokens, stage: int, kernels: TrainerKernels) -> Part:
    mean = sum(layer.kept for layer in layers) / len(layers)
    in_flight = layers_in_flight(cfg, stage, len(layers))
    formula = f"{in_flight:g} layers in flight x {mean / 2**20:.0f} MiB (recompute {cfg.optim.recompute})"
    last = 0.0
    if stage == cfg.parallel.pipeline - 1:
        last = (tokens.sequence + tokens.context) * cfg.model.hidden_size * Bytes.of(cfg).weight
        formula += f", last norm and head {last / 2**20:.0f} MiB"
        if cfg.model.num_mtp_layers:  # it is not recomputed, and its logits wait for the policy's
            whole = replace(cfg, optim=replace(cfg.optim, recompute="none"))
            drafts = layer_bytes(whole, cfg.model.num_layers, tokens, kernels).kept + head_bytes(cfg, tokens)
            last += drafts
            formula += f", draft layer and its logits {drafts / 2**20:.0f} MiB"
    return Part("activations", int(mean * in_flight + last), formula)


def _temporaries(cfg: RunConfig, layers: list[LayerBytes], tokens: Tokens, stage: int) -> Part:
    layer = max(layer.recomputed + layer.workspace for layer in layers)
    head = head_bytes(cfg, tokens) if stage == cfg.parallel.pipeline - 1 else 0.0
    formula = f"backward of one layer {layer / GIB:.1f} GiB"
    if head:
        formula = f"larger of logits {head / GIB:.1f} GiB and {formula}"
    return Part("temporaries", int(max(layer, head)), formula)


def head_bytes(cfg: RunConfig, tokens: Tokens) -> float:
    """Temporaries of the backward pass of log-probabilities: see ``trainer/logprobs.py``.

    A chunk of logits, which their gradient overwrites, and the gradient of the hidden states. A head that the embedding
    shares sums its gradient in separate FP32 memory and rounds it. With FP32 parameters, logits and their gradient are
    separate, and so is the product that is added to the head's gradient.
    """
    rows = padded_vocab_size(cfg.model, cfg.parallel.tensor) / cfg.parallel.tensor
    element = Bytes.of(cfg).weight
    logits, head = min(cfg.optim.logprob_chunk_tokens, tokens.context) * rows * element, rows * cfg.model.hidden_size
    widest = logits if element == 2 else logits + max(logits, head * element)
    if cfg.model.tie_embeddings:
        widest = head * 4 + max(widest, head * element)
    if cfg.algo.teacher_kl != "sampled":  # see trainer/divergence.py
        widest += 20 * min(1024, cfg.optim.logprob_chunk_tokens, tokens.context) * rows
    return widest + tokens.context * cfg.model.hidden_size * element


def _overhead(cfg: RunConfig, tokens: Tokens) -> Part:
    parallel = cfg.parallel
    names = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
    groups, stage_buffers = sum(getattr(parallel, name) > 1 for name in names), 0.0
    if parallel.pipeline > 1:
        stage_buffers = 4 * tokens.sequence * cfg.model.hidden_size * 2  # sent and received, in both directions, BF16
    formula = f"allowance: context {CONTEXT_BYTES / GIB:.1f} GiB, {groups} process groups x "
    formula += f"{_GROUP_BYTES / GIB:.1f} GiB"
    return Part("communication, CUDA", int(CONTEXT_BYTES + groups * _GROUP_BYTES + stage_buffers), formula)
