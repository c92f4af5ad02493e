"""The limits of each kernel: functions ``supports(cfg, hardware)`` for the table of ``kernel_choice.py``. Pure.

A function returns None, or a violation: the field to change, its value, the problem and the remedy. Installed packages
matter only on GPUs: a CPU computes everything in torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_fp8rl import upstream
from megatron_fp8rl.config import EngineConfig, ParallelConfig, PrecisionConfig, RunConfig, Violation
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.hardware import Hardware, Package
from megatron_fp8rl.precision.matmul_shapes import fits_deep_gemm, linears_of

# Optional patches of upstream.py that a feature needs.
INVARIANT_PATCHES = ("fuse_norms", "make_logprobs_order_independent")
_LATENT_PATCHES = ("absorb_projections", "KeysOnlyAttention", "normalize_latents_as_published")
LATENT_PATCHES = (*_LATENT_PATCHES, "KeysOnlyBackend")  # on a CPU
LATENT_PATCHES_ON_GPU = (*_LATENT_PATCHES, "LatentAttention", "LatentBackend", "Metadata")
FP8_CACHE_PATCHES = ("FP8CacheBackend", "FP8CacheAttention", "Metadata")

Supports = Callable[[RunConfig, Hardware], Violation | None]


def _wrong(cfg: RunConfig, path: str, problem: str, remedy: str, choices: tuple[Any, ...] = ()) -> Violation:
    return Violation(f"--{path}", cfg.value(path), problem, remedy, choices=choices)


def _untested(cfg: RunConfig, path: str, patches: Sequence[str], remedy: str) -> Violation | None:
    """Return a violation if patches that a kernel needs do not apply to the installed versions."""
    if upstream.applies(*patches):
        return None
    return _wrong(
        cfg, path, f"needs the patches {', '.join(patches)}, which were not tested with the installed versions", remedy
    )


def always(cfg: RunConfig, hardware: Hardware) -> None:
    """Supports every configuration."""


def formats(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if wrong := _mxfp8(cfg, hardware):
        return wrong
    precision, ends = cfg.precision, (cfg.precision.trainer, cfg.precision.rollout)
    if "blockwise" in ends and precision.scales == "fp32" and hardware.generation == "blackwell":
        problem = (
            "Blackwell kernels round block scales to powers of two, so trainer and engine would use different scales"
        )
        return _wrong(cfg, "precision.scales", problem, "Choose pow2")
    if hardware.generation == "ampere" and ends != ("bf16", "bf16"):
        path = "precision.trainer" if precision.trainer != "bf16" else "precision.rollout"
        remedy = "Choose bf16 at both ends, or Hopper or newer"
        return _wrong(cfg, path, "this GPU has no FP8 tensor cores", remedy)
    needs_flashinfer = precision.rollout == "mxfp8" and precision.kernel("engine_linears") != "emulated"
    if needs_flashinfer and hardware.is_gpu and "flashinfer" not in hardware.packages:
        problem = "the engine multiplies MXFP8 with the package flashinfer, which is not installed"
        return _wrong(cfg, "precision.rollout", problem, "Install flashinfer-python, or choose blockwise")
    return None


def _mxfp8(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """MXFP8 on GPUs: each end on Blackwell, engines with FlashInfer, or emulated."""
    precision, on_blackwell = cfg.precision, hardware.generation == "blackwell"
    if precision.rollout == "mxfp8" and cfg.model.has("gdn"):
        problem, formats = "is not supported with gated delta nets", ("blockwise", "bf16")
        return _wrong(cfg, "precision.rollout", problem, f"Choose one of {', '.join(formats)}", formats)
    if not hardware.is_gpu:
        if precision.rollout != "mxfp8":
            return None
        return _untested(cfg, "precision.rollout", ["register_config", "EmulatedMxfp8LinearMethod"], "Choose blockwise")
    problem = f"only Blackwell's tensor cores read a scale for 32 values; this machine is {hardware.generation!r}"
    if precision.trainer == "mxfp8" and not on_blackwell and precision.kernel("trainer") != "emulated":
        remedy = "Choose blockwise, or --precision.kernels.trainer emulated, which is slow"
        return _wrong(cfg, "precision.trainer", problem, remedy, ("blockwise",))
    if precision.rollout != "mxfp8" or precision.kernel("engine_linears") == "emulated":
        return None  # engine_emulation checks the latter
    if not on_blackwell:
        remedy = "Choose blockwise or bf16, or to study a dense model --precision.kernels.engine_linears emulated"
        return _wrong(cfg, "precision.rollout", problem, remedy, ("blockwise", "bf16"))
    for path in ("precision.bf16_first_layers", "precision.bf16_last_layers"):
        if cfg.model.is_moe and cfg.value(path):
            problem = "one engine backend computes all experts, and its MXFP8 backend has no BF16 experts"
            return _wrong(cfg, path, problem, "Set 0, or choose --precision.rollout blockwise", (0,))
    return _untested(cfg, "precision.rollout", ["keep_scales_readable"], "Choose blockwise")


def te(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if not hardware.is_gpu:
        problem = "Transformer Engine needs a GPU, and this machine has none"
        return _wrong(cfg, "precision.kernels.trainer", problem, "Choose auto")
    if "transformer_engine" not in hardware.packages:
        remedy = (
            "Run `FP8RL_EXTRA=gpu make install`, or pip install 'transformer-engine[pytorch]' built for this PyTorch. "
            "Or choose --precision.kernels.trainer emulated, which is exact and slow"
        )
        return _wrong(cfg, "precision.kernels.trainer", "transformer_engine is not installed", remedy)
    return None


def fp8_parameters(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    precision, keep = cfg.precision, "Choose --precision.params bf16"
    otherwise = "or --precision.params bf16"
    if cfg.lora.rank:
        return _wrong(cfg, "precision.params", "without BF16 weights, adapters cannot be merged into them", keep)
    if hardware.generation != "hopper":
        problem = f"only Hopper kernels read blocks of {BLOCK} without conversion; this machine is "
        return _wrong(cfg, "precision.params", f"{problem}{hardware.generation!r}", keep)
    if precision.trainer != "blockwise":
        problem = "FP8 parameters need 128x128 blocks, but this recipe uses one scale per weight"
        if precision.trainer == "bf16":
            problem = "precision.trainer = 'bf16' has no FP8 linears"
        return _wrong(cfg, "precision.params", problem, f"{keep}, or --precision.trainer blockwise")
    if precision.rollout != "blockwise":
        problem = "FP8 parameters are sent to engines without conversion"
        return _wrong(cfg, "precision.rollout", problem, f"Choose blockwise, {otherwise}", ("blockwise",))
    if precision.kernel("trainer") == "emulated":
        problem = "the emulation supports only BF16 and FP32 parameters"
        return _wrong(cfg, "precision.kernels.trainer", problem, f"Choose auto, {otherwise}")
    if cfg.model.has("attention") and cfg.model.head_dim % BLOCK:
        problem = (
            f"heads of {cfg.model.head_dim} rows do not fill blocks of {BLOCK}. Blocks of Megatron's QKV matrix would "
            "mix rows of two projections, unlike the engine's blocks"
        )
        return _wrong(cfg, "precision.params", problem, keep)
    return None


def deep_gemm_linears(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Linears outside experts. Matrices that do not fit are allowed: they use ``precision.kernels.trainer``."""
    if wrong := _deep_gemm(cfg, hardware, "linears", "DeepGEMM's linear kernels", ("blockwise",)):
        return wrong
    if cfg.precision.gradients != "e4m3":
        return _wrong(cfg, "precision.gradients", "DeepGEMM's linear kernels support only E4M3", "Choose e4m3")
    if cfg.precision.params == "fp32":
        return _wrong(cfg, "precision.params", "DeepGEMM's linear kernels need BF16 activations", "Choose bf16")
    return _deep_gemm_is_there(cfg, hardware, "linears")


def deep_gemm_experts(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if wrong := _deep_gemm(cfg, hardware, "experts", "DeepGEMM's grouped kernels", ("bf16", "blockwise")):
        return wrong
    if cfg.precision.trainer == "blockwise" and cfg.precision.gradients != "e4m3":
        return _wrong(cfg, "precision.gradients", "DeepGEMM's grouped kernels support only E4M3", "Choose e4m3")
    if cfg.precision.params == "fp32":
        return _wrong(cfg, "precision.params", "DeepGEMM's grouped kernels need BF16 activations", "Choose bf16")
    if not cfg.model.is_moe:
        return _deep_gemm_is_there(cfg, hardware, "experts")
    if wrong := _biased_experts(cfg, "precision.kernels.experts", "te"):
        return wrong
    if cfg.lora.rank and "experts" in (cfg.lora.targets or ("experts",)):
        problem = "DeepGEMM's grouped kernels run both linears of an expert at once, without adapters (lora.targets)"
        remedy = "Choose te, or adapters on other --lora.targets"
        return _wrong(cfg, "precision.kernels.experts", problem, remedy, ("te",))
    if cfg.model.hidden_size % BLOCK:
        problem = f"DeepGEMM's grouped kernels need a multiple of {BLOCK}"
        return _wrong(cfg, "model.hidden_size", problem, "Choose another size, or --precision.kernels.experts te")
    features, ranks = cfg.model.moe_ffn_hidden_size, cfg.parallel.expert_tensor
    if ranks >= 1 and features % ranks == 0 and features // ranks % BLOCK:
        problem = (
            f"gives each rank {features // ranks} features of an expert, but grouped kernels need a multiple of {BLOCK}"
        )
        return _wrong(cfg, "parallel.expert_tensor", problem, "Lower it, or choose --precision.kernels.experts te")
    return _deep_gemm_is_there(cfg, hardware, "experts")


def _biased_experts(cfg: RunConfig, path: str, other: str) -> Violation | None:
    if not registry.has_biases(cfg.model):
        return None
    problem = f"DeepGEMM's grouped kernels have neither the biases nor the activation of {cfg.model.family}'s experts"
    return _wrong(cfg, path, problem, f"Choose {other}", (other,))


def _deep_gemm(
    cfg: RunConfig, hardware: Hardware, name: str, kernels: str, recipes: tuple[str, ...]
) -> Violation | None:
    path, precision = f"precision.kernels.{name}", cfg.precision
    if hardware.generation not in ("cpu", "hopper"):
        problem = f"{kernels} need Hopper; this machine is {hardware.generation!r}"
        return _wrong(cfg, path, problem, "Choose te", ("te",))
    if precision.kernel("trainer") == "emulated" and hardware.is_gpu:
        return _wrong(cfg, path, "precision.kernels.trainer = 'emulated' excludes DeepGEMM", "Choose te", ("te",))
    if precision.trainer not in recipes:
        return _wrong(cfg, path, f"{kernels} do not support the recipe {precision.trainer!r}", "Choose te", ("te",))
    if precision.params == "fp8":
        problem = "DeepGEMM's linears and experts quantize BF16 parameters, but precision.params = 'fp8'"
        return _wrong(cfg, path, problem, "Choose te, or --precision.params bf16", ("te",))
    return None


def _deep_gemm_is_there(cfg: RunConfig, hardware: Hardware, name: str) -> Violation | None:
    """Return a violation if DeepGEMM is not installed. Checked last, so that it hides no other violation."""
    if hardware.is_gpu and "deep_gemm" not in hardware.packages:
        path = f"precision.kernels.{name}"
        problem = "DeepGEMM is not installed; it is part of vLLM for CUDA"
        return _wrong(cfg, path, problem, f"Install vLLM, or choose --{path} te", ("te",))
    return None


def may_gather(parallel: ParallelConfig, precision: PrecisionConfig) -> bool:
    """Whether some hardware could gather tokens; packing and plans do not know the hardware."""
    return parallel.dispatch in ("auto", "gather") and parallel.expert_tensor == 1 and precision.exact is not True


def row_parts(engine: EngineConfig, parallel: ParallelConfig) -> int:
    """The partial products of a row-parallel linear that exact ends round and add in order: the finer end's degree. 0:
    each end's own collectives add, with equal sums, because both have the same two ranks at most."""
    alike = engine.ranks <= 2 and parallel.tensor == engine.tensor
    return 0 if alike else max(parallel.tensor, engine.tensor)


def engine_parts(cfg: RunConfig) -> int:
    """:func:`row_parts` of an engine. With shared experts two ranks need it, too: vLLM adds them before it rounds."""
    adds_shared = cfg.model.num_shared_experts and cfg.engine.ranks > 1
    return row_parts(cfg.engine, cfg.parallel) or (cfg.engine.tensor if adds_shared else 0)


def gather(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Every rank of an expert parallel group gets every token once; grouped kernels read them by index."""
    path, remedy = "parallel.dispatch", "Choose auto"
    if not cfg.model.is_moe:
        return _wrong(cfg, path, "this model has no experts", remedy)
    if cfg.parallel.expert_tensor > 1:
        return _wrong(
            cfg, path, "gather cannot add the partial outputs of experts divided by parallel.expert_tensor", remedy
        )
    if (experts := cfg.precision.kernel("experts")) not in ("auto", "deep_gemm"):
        problem = f"precision.kernels.experts = {experts!r} needs tokens sorted by expert"
        return _wrong(cfg, path, problem, remedy)
    return deep_gemm_experts(cfg, hardware) or _untested(cfg, path, ["GatherDispatcher"], "Choose alltoall")


def deep_ep(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Megatron-Core's flex dispatcher on DeepEP kernels."""
    return _flex(cfg, hardware, "deep_ep", "DeepEP", "of https://github.com/deepseek-ai/DeepEP")


def hybrid_ep(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Megatron-Core's flex dispatcher on HybridEP kernels."""
    return _flex(
        cfg, hardware, "hybrid_ep", "HybridEP", "of the branch hybrid-ep of https://github.com/deepseek-ai/DeepEP"
    )


def _flex(cfg: RunConfig, hardware: Hardware, package: Package, name: str, source: str) -> Violation | None:
    path, remedy = "parallel.dispatch", "Choose alltoall"
    if not hardware.is_gpu:
        return _wrong(cfg, path, f"{name} needs a GPU, and this machine has none", remedy)
    if hardware.generation == "ampere":
        return _wrong(cfg, path, f"{name} needs Hopper or newer", remedy)
    if cfg.parallel.expert * cfg.parallel.expert_tensor == 1 or not cfg.model.is_moe:
        return _wrong(cfg, path, "every rank has all experts, so no tokens are exchanged", remedy)
    if package not in hardware.packages:
        return _wrong(
            cfg, path, f"{name} is not installed", f"Install the package deep_ep {source}, or choose alltoall"
        )
    return None


def engine_attention(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """The engine's attention in the trainer's forward pass. Over an FP8 cache it is that of FP8_CACHE, if it can be."""
    path, head_dim = "precision.kernels.attention", cfg.model.head_dim
    if not hardware.is_gpu:
        return _wrong(cfg, path, "needs a GPU, and this machine has none", "Choose auto")
    if cfg.model.has("mla"):
        return _wrong(cfg, path, "the engine uses a different kernel for latent attention", "Choose auto")
    if registry.has_sinks(cfg.model):
        problem = f"the attention sinks of {cfg.model.family} are not measured in the engine's kernels yet"
        return _wrong(cfg, path, problem, "Choose auto")
    is_ours = takes_cache_attention(cfg, hardware)
    if not is_ours and any(kind.window and kind.window < cfg.max_sequence_tokens for kind in cfg.model.layers):
        problem = (
            f"sequences exceed model.sliding_window = {cfg.model.sliding_window}: 'engine' is not measured with it"
        )
        remedy = "Choose auto, or with an FP8 cache --precision.kernels.engine_attention FP8_CACHE"
        return _wrong(cfg, path, problem, remedy)
    if not is_ours and not 96 < head_dim <= 128:
        problem = f"'engine' is bitwise equal only for model.head_dim from 97 to 128; this model has {head_dim}"
        return _wrong(cfg, path, problem, "Choose auto")
    if "transformer_engine" not in hardware.packages:
        problem = "requires transformer_engine (cuDNN backward), which is not installed"
        return _wrong(cfg, path, problem, "Install transformer_engine, or choose auto")
    return None if is_ours else _untested(cfg, path, ["vllm_flash_attention"], "Choose auto")


def batch_invariant(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Engine kernels whose results do not depend on the rest of the batch."""
    if not hardware.is_gpu:
        problem = "needs a GPU, and this machine has none"
        return _wrong(cfg, "engine.batch_invariant", problem, "Set False")
    if cfg.engine.batch_invariant and cfg.precision.rollout == "mxfp8":
        problem = "norms of batch-invariant engines quantize their outputs in blocks of 128"
        return _wrong(cfg, "engine.batch_invariant", problem, "Set False", (False,))
    if cfg.engine.batch_invariant and cfg.model.has("gdn"):
        problem = "is not measured with gated delta nets"
        return _wrong(cfg, "engine.batch_invariant", problem, "Set False", (False,))
    path = "precision.exact" if cfg.precision.exact else "engine.batch_invariant"
    return _untested(cfg, path, INVARIANT_PATCHES, "Set False")


def invariant_nccl(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Refuse NCCL between a trainer and batch-invariant engines on GPUs."""
    transport = cfg.weight_sync.transport
    if not hardware.is_gpu or not (transport == "nccl" or (transport == "auto" and cfg.engine.placement == "remote")):
        return None
    problem = (
        "takes NCCL. Batch-invariant vLLM sets another NCCL algorithm and protocol than the trainer, and ranks "
        "that differ in these can deadlock"
    )
    return _wrong(cfg, "weight_sync.transport", problem, "Set gloo, or ipc on one host", ("gloo", "ipc"))


def forbids_exact(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """The first field that forbids ``precision.exact``, whatever its value; None if it can be on. On GPUs ``auto`` does
    not turn on what is not measured there yet; True does. Of BF16 layers the cost is not measured: their kernel has
    tiles of 128 x 128 and does not divide sums, so few programs run in a decode step."""
    exact = replace(cfg, precision=replace(cfg.precision, exact=True))
    if wrong := next(iter(inexact(exact, hardware)), None) or invariant_nccl(cfg, hardware):
        return wrong
    if not hardware.is_gpu:
        return None
    in_bf16 = _in_bf16(cfg)
    has_many = 4 * len(in_bf16.layers) > cfg.model.num_layers
    has_fp32_scales = cfg.precision.rollout == "blockwise" and cfg.precision.scales == "fp32"
    for path, is_used, what in (
        (in_bf16.field, has_many, "costs of exact BF16 products in more than a quarter of the layers"),
        (_divided(cfg), engine_parts(cfg), "ordered sums of its ranks"),
        ("precision.scales", has_fp32_scales and cfg.model.is_moe, "experts with FP32 scales"),
        ("model.family", cfg.model.has("mla"), "shared kernels of latent attention"),
        ("model.family", registry.FAMILIES[cfg.model.family].zero_centred_norms, "shared kernels of Gemma 3"),
    ):
        if is_used:
            problem, remedy = f"{what} are not measured on GPUs yet", "Set --precision.exact True to use them"
            return _wrong(cfg, path, problem, remedy)
    return None


def exact(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Under ``precision.exact``, return the first reason why trainer and engine would compute different bits."""
    return next(iter(inexact(cfg, hardware)), None)


def inexact(cfg: RunConfig, hardware: Hardware) -> list[Violation]:
    """Under ``precision.exact``, every field whose value makes trainer and engine compute different bits. Limits of the
    model and of kernels are checked after the fields, and only the first is returned."""
    if cfg.precision.exact is not True:
        return []
    wrong = []
    for path, allowed, problem in (*_EXACT, *(_EXACT_ON_GPU if hardware.is_gpu else ())):
        if cfg.value(path) not in allowed:
            shown = " or ".join(map(str, allowed))
            remedy = f"Set {shown}, or --precision.exact False"
            wrong.append(_wrong(cfg, path, f"precision.exact: {problem}", remedy, allowed))
    precision = cfg.precision
    if precision.trainer != precision.rollout:
        problem = f"precision.exact: the engine's recipe differs (precision.rollout = {precision.rollout!r})"
        remedy = f"Set {precision.rollout}, or --precision.exact False"
        wrong.append(_wrong(cfg, "precision.trainer", problem, remedy, (precision.rollout,)))
    if wrong:
        return wrong
    limit = _exact_sums(cfg, hardware) or (_exact_on_gpu(cfg, hardware) if hardware.is_gpu else _exact_on_cpu(cfg))
    if limit is not None and limit.value == "auto":  # the field asks for nothing: precision.exact does
        problem = f"{limit.field.removeprefix('--')}: {limit.problem}"
        limit = _wrong(cfg, "precision.exact", problem, "Set False")
    return [] if limit is None else [limit]


def _exact_on_cpu(cfg: RunConfig) -> Violation | None:
    if not cfg.model.has("mla"):
        return None
    return _untested(cfg, "precision.exact", LATENT_PATCHES, "Set False")


def _exact_on_gpu(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    precision, model = cfg.precision, cfg.model
    if model.has("gdn"):
        problem = "precision.exact: the trainer computes gated delta nets in chunks, engines decode by the recurrence"
        return _wrong(cfg, "precision.exact", problem, "Set False")
    if hardware.generation != "hopper":
        problem = f"precision.exact: the shared kernels need Hopper; this machine is {hardware.generation!r}"
        return _wrong(cfg, "precision.exact", problem, "Set False")
    if model.has("mla") and (wrong := _latent_on_gpu(cfg)):
        return wrong
    in_bf16 = _in_bf16(cfg)
    if in_bf16.has_experts:
        problem, fp8 = "precision.exact: BF16 experts are multiplied by other kernels in the engine", precision.rollout
        allowed: tuple = (0,) if fp8 != "bf16" else ("blockwise",)
        return _wrong(cfg, in_bf16.field, problem, f"Set {allowed[0]}", allowed)
    if cfg.engine.record_routed_experts and cfg.sampling.truncates:
        problem = "precision.exact: kept entries with recorded experts are not measured on GPUs yet"
        return _wrong(cfg, "engine.record_routed_experts", problem, "Set False", (False,))
    if registry.norms_all_heads(model) and cfg.engine.tensor > 1:
        problem = "precision.exact: ranks add the squares of all heads in an order of their own"
        return _wrong(cfg, "engine.tensor", problem, "Set 1, or --precision.exact False", (1,))
    if model.is_moe and model.router.score == "sigmoid" and (wrong := _sigmoid_router(cfg)):
        return wrong
    if cfg.engine.kv_cache_dtype == "fp8":
        if precision.kernel("engine_attention") == "FLASH_ATTN":
            problem = "precision.exact: over an FP8 cache, FlashAttention decodes by another function than it prefills"
            return _wrong(cfg, "precision.kernels.engine_attention", problem, "Set auto", ("auto", "FP8_CACHE"))
        if wrong := fp8_cache_attention(cfg, hardware):
            return wrong
    sides = (*(use.shape for use in linears_of(cfg)),)
    if odd := next((s for s in sides if not fits_deep_gemm(s.rows, s.columns)), None):
        problem = f"precision.exact: a {odd.rows} x {odd.columns} matrix does not consist of blocks of {BLOCK}"
        return _wrong(cfg, "precision.kernels.linears", problem, "Use --precision.exact False")
    checks = [
        *([] if model.has("mla") else [engine_attention]),
        *([deep_gemm_linears] if precision.rollout != "bf16" else []),
        *([deep_gemm_experts, engine_deep_gemm_experts] if model.is_moe else []),
        batch_invariant,
    ]
    softmax = model.is_moe and model.router.score == "softmax"
    if softmax and (wrong := _untested(cfg, "precision.exact", ["vllm_topk_softmax"], "Set False")):
        return wrong
    return next((wrong for check in checks if (wrong := check(cfg, hardware))), None)


def _latent_on_gpu(cfg: RunConfig) -> Violation | None:
    """Sizes that ``kernels/triton/latent.py`` supports."""
    mla = cfg.model.mla
    assert mla is not None
    latent, rotated = mla.kv_lora_rank, mla.qk_rope_head_dim
    for path, least, is_supported in (
        ("kv_lora_rank", "a power of two from 64 to 512", latent.bit_count() == 1 and 64 <= latent <= 512),
        ("qk_rope_head_dim", "a power of two from 16 on", rotated.bit_count() == 1 and rotated >= 16),
        ("qk_nope_head_dim", "a multiple of 64", mla.qk_nope_head_dim % 64 == 0),
    ):
        if not is_supported:
            problem = f"precision.exact: the shared kernel of latent attention needs {least}"
            return _wrong(cfg, f"model.mla.{path}", problem, "Use --precision.exact False")
    return _untested(cfg, "precision.exact", LATENT_PATCHES_ON_GPU, "Set False")


class _InBf16(NamedTuple):
    field: str  # that asks for them
    layers: Sequence[int]
    has_experts: bool


def _in_bf16(cfg: RunConfig) -> _InBf16:
    """The layers whose linears are in BF16 in the engine."""
    precision, num_layers = cfg.precision, cfg.model.num_layers
    first, last = precision.bf16_first_layers, precision.bf16_last_layers
    field, layers = "precision.bf16_first_layers" if first else "precision.bf16_last_layers", range(num_layers)
    if precision.rollout == "bf16":
        field = "precision.rollout"
    else:
        layers = [layer for layer in layers if layer < first or layer >= num_layers - last]
    return _InBf16(field, layers, any(cfg.model.layers[layer].is_moe for layer in layers))


def _sigmoid_router(cfg: RunConfig) -> Violation | None:
    """Routers of patches_routers.py, which have a bias."""
    if not cfg.model.router.correction_bias:
        problem = "precision.exact: the trainer lacks the engine's kernel for this router"
        return _wrong(cfg, "model.router.score", problem, "Use --precision.exact False")
    return _untested(cfg, "precision.exact", ["route_as_the_trainer"], "Set False")


def _exact_sums(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Refuse layouts whose partial sums, which each engine rank rounds before they are added, differ between the ends.

    Both ends divide a row-parallel product into the parts of the finer end and add them in order (:func:`row_parts`).
    """
    model, engine, trainer = cfg.model, cfg.engine, cfg.parallel.tensor
    equal = f"Set {engine.tensor}, or --precision.exact False"
    if max(trainer, engine.tensor) % min(trainer, engine.tensor):
        problem = f"precision.exact: neither divides nor is a multiple of engine.tensor = {engine.tensor}"
        return _wrong(cfg, "parallel.tensor", problem, equal, (engine.tensor,))
    if trainer != engine.tensor and hardware.is_gpu:
        problem = f"precision.exact: the engine adds {engine.tensor} rounded partial sums (engine.tensor) on a GPU"
        return _wrong(cfg, "parallel.tensor", problem, equal, (engine.tensor,))
    if trainer < engine.tensor and cfg.precision.kernel("linears") == "deep_gemm":
        problem = f"precision.exact: DeepGEMM's linears do not divide a product into {engine.tensor} partial sums"
        remedy = f"Set auto, or --parallel.tensor {engine.tensor}"
        return _wrong(cfg, "precision.kernels.linears", problem, remedy, ("auto",))
    if engine.tensor > 1 and registry.has_biases(model):
        problem = "precision.exact: the engine adds a bias to a partial sum, and the trainer to the whole"
        return _wrong(cfg, "engine.tensor", problem, "Set 1, or --precision.exact False", (1,))
    if model.is_moe and engine.expert != engine.ranks:
        problem = "precision.exact: the engine divides each expert and adds several experts' parts before rounding"
        return _wrong(cfg, "engine.expert", problem, f"Set {engine.ranks}, or --precision.exact False", (engine.ranks,))
    divides_twice = engine.tensor > 1 and engine.data > 1
    if divides_twice and (model.family not in _DIVIDES_TOKENS or model.num_shared_experts):
        problem = (
            f"precision.exact: with engine.tensor = {engine.tensor}, vLLM adds experts of this model in two stages"
        )
        return _wrong(cfg, "engine.data", problem, "Set 1, or --precision.exact False", (1,))
    if engine_parts(cfg) and not cfg.lora.merge:
        problem = "precision.exact: vLLM's linears with adapters do not add partial products in order (engine.tensor)"
        return _wrong(cfg, "lora.merge", problem, "Set True, or --precision.exact False", (True,))
    if engine_parts(cfg):
        return _untested(cfg, _divided(cfg), ["add_in_rank_order"], "Set 1, or --precision.exact False")
    return None


def _divided(cfg: RunConfig) -> str:
    return "engine.tensor" if cfg.engine.tensor > 1 else "engine.data"


# Families whose ranks of one tensor-parallel group divide the tokens of an expert layer, if engine.data is above 1 too.
_DIVIDES_TOKENS = ("qwen3_moe",)

# (field, values, why others are not exact)
_EXACT: tuple[tuple[str, tuple, str], ...] = (
    ("algo.correction_quantile", (None,), "an exact run has no noise that could set the bounds"),
    ("algo.router_replay", ("off",), "both routers choose the same experts, so replay has no effect"),
    ("sampling.replay", (None,), "recorded rollouts come from another engine"),
    ("parallel.expert_tensor", (1,), "ranks round their partial sums before they are added"),
    ("parallel.dispatch", ("auto", "alltoall"), "other dispatchers sum a token's experts in a different order"),
    ("precision.params", ("bf16",), "engines use BF16 weights, or FP8 weights quantized from BF16"),
)
_EXACT_ON_GPU: tuple[tuple[str, tuple, str], ...] = (
    ("precision.rollout", ("blockwise", "bf16"), "MXFP8 has no kernels that sum products in a fixed order"),
    ("precision.kernels.trainer", ("auto", "te"), "the emulation rounds at other points than the engine"),
    ("precision.kernels.linears", ("auto", "deep_gemm"), "the engine uses DeepGEMM"),
    ("precision.kernels.experts", ("auto", "deep_gemm"), "the engine uses DeepGEMM"),
    ("precision.kernels.engine_linears", ("auto", "deep_gemm"), "the trainer uses DeepGEMM"),
    ("precision.kernels.engine_experts", ("auto", "deep_gemm"), "the trainer uses DeepGEMM"),
    ("precision.kernels.engine_attention", ("auto", "FLASH_ATTN", "FP8_CACHE"), "the trainer has no such kernel"),
    ("engine.speculation", ("none",), "attention over several drafts is not compared with decoding on GPUs yet"),
    ("lora.merge", (True,), "vLLM's kernels of adapters round at other points than the trainer"),
)


def engine_blocks(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """Kernels of blockwise linears."""
    if cfg.precision.rollout == "mxfp8":
        return _wrong(cfg, "precision.kernels.engine_linears", "does not read MXFP8 scales", "Set auto", ("auto",))
    return None


def engine_emulation(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """The linears of ``emulate_linears`` in rollout/vllm_plugin/patches_mxfp8.py."""
    path = "precision.kernels.engine_linears"
    if cfg.precision.rollout != "mxfp8":
        return _wrong(cfg, path, "emulates only MXFP8", "Set auto, or --precision.rollout mxfp8", ("auto",))
    if cfg.model.is_moe:
        problem = "emulates linears but no experts, and vLLM's MXFP8 experts need Blackwell"
        return _wrong(cfg, path, problem, "Choose a dense model, or auto and --precision.rollout blockwise")
    return _untested(cfg, path, ["emulate_linears"], "Choose --precision.rollout blockwise and auto")


def engine_fp32_scales(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if wrong := engine_blocks(cfg, hardware):
        return wrong
    if cfg.precision.rollout != "bf16" and cfg.precision.scales == "pow2":
        problem = "does not round activation scales to powers of two, but the trainer does"
        return _wrong(
            cfg,
            "precision.kernels.engine_linears",
            problem,
            "Set deep_gemm, or --precision.scales fp32",
            ("deep_gemm",),
        )
    return None


def engine_experts(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if not cfg.model.is_moe:
        return _wrong(
            cfg, "precision.kernels.engine_experts", "applies only to experts, but the model is dense", "Set auto"
        )
    return None


def engine_triton_experts(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if cfg.precision.rollout == "mxfp8":
        problem = "converts MXFP8 experts to BF16"
        return _wrong(cfg, "precision.kernels.engine_experts", problem, "Set deep_gemm", ("deep_gemm",))
    return engine_experts(cfg, hardware)


def engine_deep_gemm_experts(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    if wrong := engine_experts(cfg, hardware):
        return wrong
    path = "precision.kernels.engine_experts"
    if wrong := _biased_experts(cfg, path, "triton"):
        return wrong
    if _in_bf16(cfg).has_experts:
        return _wrong(cfg, path, "supports only FP8, but some experts are BF16", "Set triton", ("triton",))
    if cfg.engine.batch_invariant or cfg.precision.exact:
        remedy = "Set triton, or --engine.batch_invariant False and --precision.exact False"
        return _untested(cfg, path, ["accept_deep_gemm_experts"], remedy)
    return None


def fp8_cache_attention(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    """The engine's attention of rollout/vllm_plugin/patches_attention.py."""
    path, model = "precision.kernels.engine_attention", cfg.model
    if cfg.engine.kv_cache_dtype != "fp8":
        return _wrong(cfg, path, "supports only an FP8 KV cache", "Set auto, or --engine.kv_cache_dtype fp8")
    if hardware.is_gpu and hardware.generation != "hopper":
        return _wrong(cfg, path, f"runs only on Hopper; this machine is {hardware.generation!r}", "Set auto")
    if any(kind.mixer != "attention" for kind in model.layers):
        return _wrong(cfg, path, "supports neither latent attention nor gated delta nets", "Set auto")
    if registry.has_sinks(model):
        return _wrong(cfg, path, f"does not support the attention sinks of {model.family}", "Set auto")
    group = model.num_attention_heads // max(1, model.num_key_value_heads)
    if model.head_dim not in (64, 96, 128, 256) or group > 16:
        problem = (
            "supports head_dim 64, 96, 128 or 256 and up to 16 query heads per group; "
            f"the model has head_dim {model.head_dim} and {group} heads per group"
        )
        return _wrong(cfg, path, problem, "Set auto")
    return _untested(cfg, path, FP8_CACHE_PATCHES, "Set auto")


def takes_cache_attention(cfg: RunConfig, hardware: Hardware) -> bool:
    """Whether engines use FP8_CACHE: by name, or by ``auto`` wherever it can be."""
    named = cfg.precision.kernel("engine_attention")
    return named == "FP8_CACHE" or (named == "auto" and not fp8_cache_attention(cfg, hardware))


def flashinfer_attention(cfg: RunConfig, hardware: Hardware) -> Violation | None:
    path = "precision.kernels.engine_attention"
    if cfg.engine.kv_cache_dtype == "fp8":
        problem = "reads FP8 KV cache scales only at startup, so later scales would have no effect"
        return _wrong(cfg, path, problem, "Set auto or FLASH_ATTN")
    if "flashinfer" not in hardware.packages:
        problem = "the package flashinfer is not installed"
        return _wrong(cfg, path, problem, "Use auto, which selects FLASH_ATTN on Hopper")
    return None
