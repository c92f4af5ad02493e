"""Kinds of tensors, and whether the precisions of both ends are one quantized function. Pure."""

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.preflight.findings import Finding
from megatron_fp8rl.preflight.memory import Gpu

_KINDS = (
    ("attention projections", (".self_attn.",)),
    ("feed-forward, dense", (".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")),
    ("routed experts", (".experts.",)),
    ("shared experts", (".shared_expert",)),
    ("router", (".mlp.gate.", ".block_sparse_moe.gate.", ".mlp.router.", ".shared_expert_gate.")),
    ("norms, biases", ("norm", ".bias", ".conv1d.")),
    ("embedding", ("embed_tokens",)),
    ("output head", ("lm_head",)),
)


def kind_of(name: str, axes: int) -> str:
    """The kind of a tensor with a Hugging Face name and so many axes."""
    if axes == 1:
        return "router" if name.endswith("e_score_correction_bias") else "norms, biases"
    for kind, marks in reversed(_KINDS):
        if any(mark in name for mark in marks):
            return kind
    return "attention projections" if ".layers." in name else "embedding"


def findings(cfg: RunConfig, gpu: Gpu) -> list[Finding]:
    """Where the two ends differ, and how the GPU treats scales. Impossible settings are refused by ``rules.py``."""
    precision, result, correction = cfg.precision, [], cfg.algo.correction
    if precision.trainer != precision.rollout:
        problem = f"the trainer computes in {precision.trainer} and the engine in {precision.rollout}: two different "
        problem += "quantized functions, so that the mismatch is larger than with one"
        remedy, change = "Use one recipe at both ends, or correct the mismatch", ("algo.correction", "truncate")
        if correction != "off":
            remedy = f"algo.correction = {correction} weighs it; one recipe at both ends removes most of it"
            change = ("precision.trainer", precision.rollout)
        severity = "warning" if correction == "off" else "note"
        result.append(Finding(severity, "--precision.trainer", problem, remedy, change=(change,)))
    if precision.trainer == "delayed" and (precision.bf16_first_layers or precision.bf16_last_layers):
        problem = "delayed scaling with BF16 edge layers is chosen per linear, from the layer table; Megatron-Core's "
        problem += "switch refuses the combination"
        result.append(Finding("note", "--precision.trainer", problem))
    if "blockwise" in (precision.trainer, precision.rollout) and precision.scales == "fp32":
        problem = "with FP32 scales every kernel divides in its own order: scales differ in the last bit between "
        problem += f"trainer and engine, bytes in about one of a thousand ({gpu.name.upper()} takes both kinds)"
        remedy = "Powers of two make all bytes and scales equal"
        result.append(Finding("note", "--precision.scales", problem, remedy, change=(("precision.scales", "pow2"),)))
    choice = KernelChoice.of(cfg, Hardware(gpu.generation))
    result.append(Finding("note", "--precision.exact", choice.exact_text()))
    if cfg.engine.kv_cache_dtype == "fp8" and choice.exact == "off":
        problem = "the engine stores keys and values in FP8, with scales that are measured at every step. The trainer "
        problem += "rounds its keys and values alike, but attends with another kernel"
        remedy, change = (
            "Watch mismatch/abs_logprob_diff/mean, or keep the cache in BF16",
            ("engine.kv_cache_dtype", "auto"),
        )
        result.append(Finding("warning", "--engine.kv_cache_dtype", problem, remedy, change=(change,)))
    if (untried := choice.untried(cfg)) is not None:
        field = "--model.family" if cfg.model.has("gdn") else "--precision.trainer"
        result.append(Finding("warning", field, untried))
    # The only matrix that DeepGEMM cannot multiply; ``rules.py`` refuses all others.
    mla, kernels = cfg.model.mla, choice.trainer
    rows = 0 if mla is None else mla.kv_lora_rank + mla.qk_rope_head_dim
    if kernels.linear_kernel(rows, BLOCK) != kernels.linears:
        problem = (
            f"kv_a_proj_with_mqa has {rows} rows, no multiple of {BLOCK // 2}: DeepGEMM does not multiply it, and the "
        )
        problem += "trainer takes the kernels of precision.kernels.trainer for it"
        result.append(Finding("note", "--precision.kernels.linears", problem))
    return result
