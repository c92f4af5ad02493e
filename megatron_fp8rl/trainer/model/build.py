"""Build this rank's Megatron-Core GPTModel chunks with per-layer precision, and load their weights.

Random weights depend only on the seed and the parameter's global name, so they are equal in every parallel layout.
"""

import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_fp8rl.config import ConfigError, ModelConfig, RunConfig, Violation
from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.data.model_files import FP8, FP8_DTYPE, SCALE, is_finite, read_entries
from megatron_fp8rl.data.safetensors_file import Files
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.blocks import EMBEDDING
from megatron_fp8rl.names.layouts import layers_per_chunk
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.precision.kernel_choice import choose
from megatron_fp8rl.precision.quantizers import dequantize
from megatron_fp8rl.precision.recipes import finish_step
from megatron_fp8rl.trainer.distributed_weights import is_distributed, load_distributed
from megatron_fp8rl.trainer.model.dispatcher import has_fused_permutation
from megatron_fp8rl.trainer.model.draft_layer import DraftLayers
from megatron_fp8rl.trainer.model.layers import LayerFactory
from megatron_fp8rl.trainer.model.linear import GroupedLinear, QuantizableLinear
from megatron_fp8rl.trainer.model.weight_cache import clear_weight_caches
from megatron_fp8rl.trainer.parallel import Parallel

logging.getLogger(GPTModel.__module__).setLevel(logging.ERROR)  # GPTModel is deprecated: see docs/extending.md

_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}

Get = Callable[[str], Tensor]  # returns a Hugging Face tensor by name


def transformer_config(cfg: RunConfig, parallel: Parallel) -> TransformerConfig:
    """Megatron-Core's configuration of the model. FP8 is configured in ``layers.py`` instead."""
    model, optim = cfg.model, cfg.optim
    dtype = torch.float32 if cfg.precision.params == "fp32" else torch.bfloat16
    virtual_stages = parallel.config.virtual_stages
    settings = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size or model.moe_ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=bool(model.qk_norm) and not registry.norms_all_heads(model),
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[registry.FAMILIES[model.family].activation],
        add_bias_linear=registry.has_biases(model),
        add_qkv_bias=model.qkv_bias,
        attention_output_gate=model.is_gated,
        hetereogenous_dist_checkpoint=model.has("gdn"),  # layers of two kinds are stored separately
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.initializer_range,
        tensor_model_parallel_size=parallel.tp_size,
        sequence_parallel=parallel.tp_size > 1,
        pipeline_model_parallel_size=parallel.pp_size,
        pipeline_model_parallel_layout=_pipeline_layout(model.num_layers, parallel.pp_size * virtual_stages),
        virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=parallel.etp_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # build_chunks fills every parameter
        variable_seq_lengths=True,  # packed microbatches differ in length; stages exchange it
        calculate_per_token_loss=True,  # losses are already normalized
        overlap_p2p_comm=virtual_stages > 1,
        batch_p2p_comm=virtual_stages == 1,
        **_moe_settings(cfg, parallel.device),
        **_plain_torch_settings(),
    )
    if optim.recompute == "full":
        settings |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif optim.recompute == "selective":
        settings |= dict(recompute_granularity="selective", recompute_modules=list(optim.recompute_modules))
    if model.mla is None:
        return TransformerConfig(**settings)
    # trainer/model/rotary.py computes the softmax scale and the rotation, so the rope settings here are unused.
    return MLATransformerConfig(
        **settings,
        q_lora_rank=model.mla.q_lora_rank,
        kv_lora_rank=model.mla.kv_lora_rank,
        qk_head_dim=model.mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=model.mla.qk_rope_head_dim,
        v_head_dim=model.mla.v_head_dim,
        rope_type="rope",
    )


def _pipeline_layout(num_layers: int, num_chunks: int) -> list[list[str]] | None:
    """Megatron-Core's layout for chunks with unequal numbers of layers; None if they are equal."""
    if num_layers % num_chunks == 0:
        return None
    layout = [["decoder"] * size for size in layers_per_chunk(num_layers, num_chunks)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def _moe_settings(cfg: RunConfig, device: torch.device) -> dict:
    """MoE settings. trainer/model/router.py does the routing; the router settings serve the load-balancing loss."""
    model = cfg.model
    if not model.is_moe:
        return dict(moe_token_dispatcher_type="alltoall")  # required by variable lengths, for dense models too
    coefficient = cfg.optim.moe_aux_loss_coef
    # With a list, Megatron-Core stores layers separately in checkpoints, as heterogeneous layers require.
    kinds = [int(kind.is_moe) for kind in model.layers[: model.num_layers]]
    return dict(
        num_moe_experts=model.num_experts,
        moe_layer_freq=1 if all(kinds) else kinds,
        moe_router_topk=model.experts_per_token,
        moe_router_score_function=model.router.score,
        moe_router_pre_softmax=model.experts_per_token == 1,  # only to pass a check: trainer/model/router.py routes
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=model.num_shared_experts * model.moe_ffn_hidden_size or None,
        moe_shared_expert_gate=model.is_gated,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if coefficient else "none",
        moe_aux_loss_coeff=coefficient,
        moe_grouped_gemm=True,
        moe_permute_fusion=has_fused_permutation(device),
        **_dispatch_settings(cfg.parallel.dispatch),
    )


def _dispatch_settings(dispatch: str) -> dict:
    if dispatch not in ("deepep", "hybridep"):
        return dict(moe_token_dispatcher_type="alltoall")
    return dict(
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=dispatch,
        moe_hybridep_pad_uneven_dispatch_inputs=True,  # packed microbatches of data-parallel ranks differ in length
    )


def _plain_torch_settings() -> dict:
    """Disable fusions that need Transformer Engine, Apex or a GPU."""
    return dict(
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def build_chunks(cfg: RunConfig, parallel: Parallel) -> list[nn.Module]:
    """Build this rank's model chunks, one per virtual pipeline stage, in the precision of ``cfg``.

    Weights are random; with ``cfg.model.hf_path`` they are uninitialized until :func:`load_hf`. BF16 chunks are wrapped
    in Megatron-Core's Float16Module, which returns FP32 logits on the last stage. Raises ConfigError if the configured
    kernels do not support the model on this hardware.
    """
    model_parallel_cuda_manual_seed(cfg.seed, force_reset_rng=True)
    factory = LayerFactory(cfg, parallel, choose(cfg, local_hardware(), "trainer"))
    config = transformer_config(cfg, parallel)
    virtual_stages = parallel.config.virtual_stages
    chunks: list[nn.Module] = []
    for stage in range(virtual_stages):
        vp_stage = stage if virtual_stages > 1 else None
        vp_size = virtual_stages if virtual_stages > 1 else None
        chunk: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=factory.stage(config, vp_stage),
            vocab_size=registry.padded_vocab_size(cfg.model, parallel.tp_size),
            max_sequence_length=cfg.model.max_position_embeddings,
            pre_process=is_vp_first_stage(vp_stage, vp_size) and is_pp_first_stage(parallel.pp_group),
            post_process=is_vp_last_stage(vp_stage, vp_size) and is_pp_last_stage(parallel.pp_group),
            parallel_output=True,
            share_embeddings_and_output_weights=cfg.model.tie_embeddings,
            position_embedding_type="none",  # trainer/model/attention.py applies rotary embedding
            vp_stage=vp_stage,
        )
        if registry.FAMILIES[cfg.model.family].scales_embedding and chunk.pre_process:
            scale = torch.tensor(cfg.model.hidden_size**0.5, dtype=config.params_dtype)
            chunk.embedding.register_forward_hook(lambda module, inputs, output, scale=scale: output * scale)
        if cfg.model.num_mtp_layers:
            chunk.mtp = DraftLayers(config, factory)
        chunks.append(chunk.to(parallel.device))
    if cfg.model.hf_path is None:
        _fill_randomly(chunks, cfg.model, cfg.seed, parallel)
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks


def finish_fp8_step(chunks: Sequence[nn.Module], parallel: Parallel) -> None:
    """Collective over all trainer ranks: advance the amax histories of delayed scaling; call after an optimizer step.

    Reduces the step's amax over ranks with shards of the same tensors: tensor, context and data parallel, or for
    experts expert tensor and expert data parallel. A no-op under other recipes.
    """
    plain, expert = [], []
    for module in (module for chunk in chunks for module in chunk.modules()):  # not named_modules: names are slow
        if isinstance(module, QuantizableLinear) and module.history is not None:
            (expert if isinstance(module, GroupedLinear) else plain).append(module.history)

    def reducer(*groups: dist.ProcessGroup) -> Callable[[Tensor], None]:
        def reduce_max(flat: Tensor) -> None:
            for group in groups:
                dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)

        return reduce_max

    finish_step(plain, reducer(parallel.tp_group, parallel.dp_cp_group))
    finish_step(expert, reducer(parallel.etp_group, parallel.expert_dp_group))


def named_global_parameters(chunks: Sequence[nn.Module], parallel: Parallel) -> Iterator[tuple[str, nn.Parameter]]:
    """(global Megatron name, this rank's shard of the parameter) for chunks with or without wrappers."""
    for chunk in map(unwrap, chunks):
        for name, parameter in chunk.named_parameters():
            yield _global_name(name, chunk, parallel), parameter


def named_global_tensors(chunks: Sequence[nn.Module], parallel: Parallel) -> Iterator[tuple[str, Tensor]]:
    """(global Megatron name, tensor) for everything in a Hugging Face checkpoint: parameters and router biases, without
    adapters."""
    named = named_global_parameters(chunks, parallel)
    yield from ((name, parameter) for name, parameter in named if ".adapter." not in name)
    for chunk in map(unwrap, chunks):
        for name, buffer in chunk.named_buffers():
            if name.endswith(".router.expert_bias"):
                yield _global_name(name, chunk, parallel), buffer


@torch.no_grad()
def load_hf(chunks: Sequence[nn.Module], source: str | Path | Get, model: ModelConfig, parallel: Parallel) -> None:
    """Load the chunks from a Hugging Face checkpoint folder, or from a function that returns tensors by name.

    Reads only the tensors of this rank's layers and experts. A folder that checkpoint_tools converted for Megatron-Core
    also works, but collectively. Raises CheckpointError, KeyError or ValueError (wrong shape), with the name.
    """
    clear_weight_caches()
    if not callable(source) and is_distributed(source):
        load_distributed([unwrap(chunk) for chunk in chunks], source, model)
        return
    get = source if callable(source) else _open_checkpoint(Path(source))
    _fill(chunks, lambda name: registry.from_hf(name, get, model), model, parallel)


def unwrap(chunk: nn.Module) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def named_linears(
    chunks: Sequence[nn.Module], parallel: Parallel
) -> Iterator[tuple[tuple[str, ...], QuantizableLinear]]:
    """(global names of its weights, linear) for each linear of this rank that can be FP8; grouped ones have several."""
    for chunk in map(unwrap, chunks):
        for prefix, module in chunk.named_modules():
            if isinstance(module, QuantizableLinear):
                if isinstance(module, GroupedLinear):  # registers its parameters in reverse order
                    weights = [f"{prefix}.weight{index}" for index in range(module.num_gemms)]
                else:
                    named = module.named_parameters(prefix=prefix, recurse=False)
                    weights = [name for name, parameter in named if parameter.ndim == 2]
                yield tuple(_global_name(name, chunk, parallel) for name in weights), module


def _global_name(local_name: str, chunk: GPTModel, parallel: Parallel) -> str:
    layer_offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
    num_local_experts = (chunk.config.num_moe_experts or 0) // parallel.ep_size
    return registry.global_name(local_name, layer_offset, parallel.ep_rank * num_local_experts)


def _fill(chunks: Sequence[nn.Module], full: Get, model: ModelConfig, parallel: Parallel) -> None:
    """Set every parameter and router bias to this rank's shard of ``full(global name)``."""
    for name, parameter in named_global_tensors(chunks, parallel):
        expert = registry.is_expert(name)
        size, rank = (parallel.etp_size, parallel.etp_rank) if expert else (parallel.tp_size, parallel.tp_rank)
        piece = registry.shard(name, full(name), model, size, rank)
        if piece.shape != parameter.shape:
            raise ValueError(
                f"{name}: this rank's shard has shape {tuple(piece.shape)}, the parameter {tuple(parameter.shape)}"
            )
        parameter.copy_(piece)


@torch.no_grad()
def _fill_randomly(chunks: Sequence[nn.Module], model: ModelConfig, seed: int, parallel: Parallel) -> None:
    """Norms multiply by 1, biases are 0, matrices normal; std / sqrt(2 * layers) for outputs to the residual stream
    (GPT-2). CPU and GPU values differ. In a wide random model, attention outputs, averages over tokens, exceed
    embeddings of std 0.02 after one layer. Routers then choose the same few experts for all tokens; ``embedding_range =
    1`` avoids this."""
    device = parallel.device
    residual_std = model.initializer_range / math.sqrt(2 * model.num_layers)

    def draw(name: str) -> Tensor:
        shape = registry.weight(name, model).shape
        if len(shape) == 1 and not name.endswith(".A_log"):
            is_added = registry.FAMILIES[model.family].zero_centred_norms and not name.endswith(".out_norm.weight")
            is_zero = (name.endswith(("bias", "softmax_offset")) or is_added) and not name.endswith(".dt_bias")
            return torch.zeros(shape) if is_zero else torch.ones(shape)
        # A tied output layer must draw the same values as the embedding.
        canonical = registry.weight(name, model).name
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{canonical}".encode()))
        if name.endswith(".A_log"):  # as transformers: decay rates between 0.01 and 16
            return torch.rand(shape, generator=generator, device=device).mul_(16).clamp_min_(0.01).log_()
        adds_to_residual = name.endswith(("linear_proj.weight", "out_proj.weight", "linear_fc2.weight"))
        std = residual_std if adds_to_residual else model.initializer_range
        if canonical == EMBEDDING:
            std = model.embedding_range or std
        return torch.randn(shape, generator=generator, device=device).mul_(std)

    _fill(chunks, draw, model, parallel)


def _open_checkpoint(folder: Path) -> Get:
    entries, problems, _ = read_entries(folder)
    if problems:
        raise CheckpointError(folder, problems)
    files = Files()

    def get(name: str) -> Tensor:
        if (entry := entries.get(name)) is None:
            raise KeyError(f"{name}: not in the checkpoint {folder}, which has {len(entries)} tensors")
        tensor = files.rows(entry)
        if tensor.dtype.itemsize > 1 and not is_finite(tensor):
            problem = f"{name}: NaN or infinity in {entry.file.name}"
            raise ConfigError([Violation("--model.hf_path", str(folder), problem, "Restore the file, or name another")])
        if tensor.dtype == FP8_DTYPE and name + SCALE in entries:
            tensor = dequantize(tensor, get(name + SCALE).float(), FP8).to(torch.bfloat16)
        return tensor

    return get
