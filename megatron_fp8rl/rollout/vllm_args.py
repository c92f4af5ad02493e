"""All vLLM arguments and environment variables of an engine, with reasons. Does not import vLLM.

In: the run's configuration, the kernel choice, the folder of the Hugging Face model (config.json and tokenizer). Out: a
command line and an environment. Runs in the process that starts the engines. An engine starts with dummy weights, and
the first publication replaces them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_fp8rl import upstream
from megatron_fp8rl.config import EngineConfig, ModelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.names import adapted
from megatron_fp8rl.names.blocks import FUSED_INTO
from megatron_fp8rl.names.registry import FAMILIES, hf_tensors, to_hf_config, weights
from megatron_fp8rl.precision.formats import engine_format
from megatron_fp8rl.precision.kernel_choice import EngineKernels, KernelChoice
from megatron_fp8rl.precision.kernel_support import engine_parts
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.rollout.vllm_plugin.plugin import (
    DELTA_NET_VARIABLE,
    EXPERTS_VARIABLE,
    FORMAT_VARIABLE,
    KEPT_VARIABLE,
    LATENT_VARIABLE,
    PARTS_VARIABLE,
    ROUTER_VARIABLE,
    SPECULATION_VARIABLE,
    WEIGHT_TRANSFER_BACKEND,
)

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # sizes of vLLM's buffers for adapters; smaller ranks are padded
CPU_KV_BLOCK_TOKENS = 128  # vLLM's own choice on a CPU
_CPU_KV_LIMIT_BYTES = 4 << 30
_SCHEDULERS = "megatron_fp8rl.rollout.vllm_plugin.patches_scheduler"
CPU_ENVIRONMENT = {
    # vLLM compiles its sampler even in eager mode; that takes half a minute.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Binding asserts a NUMA node per worker.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def modules_not_converted(model: ModelConfig, precision: PrecisionConfig) -> list[str]:
    """Return the names of all modules whose matrix is BF16 in the engine: the complement of the layer table.

    vLLM matches names exactly, for each expert and each part of a fused module. It would read a missing module, such as
    the router, as FP8 and compute garbage without an error.
    """
    table = LayerTable.build(model, precision)
    matrices = (name for name, shape in hf_tensors(model).items() if len(shape) == 2)
    names = [name.removesuffix(".weight") for name in matrices if not table.rollout_format(name).is_quantized]
    in_checkpoint, in_engine = FAMILIES[model.family].module_prefixes
    return names + [name.replace(in_checkpoint, in_engine) for name in names if in_checkpoint and in_checkpoint in name]


def quantization_config(model: ModelConfig, precision: PrecisionConfig) -> dict[str, Any]:
    """Return ``quantization_config`` for config.json. A BF16 engine on a CPU excludes all modules."""
    return engine_format(precision).hf_quantization_config(modules_not_converted(model, precision))


def kv_cache_bytes(cfg: RunConfig, *, cpu: bool) -> int | None:
    """Return one worker's KV cache bytes. CPU default: ``max_num_sequences`` of full length, at most 4 GiB."""
    if cfg.engine.kv_cache_bytes is not None or not cpu:
        return cfg.engine.kv_cache_bytes
    return min(cpu_cache_bytes(cfg, cfg.engine.max_num_sequences), _CPU_KV_LIMIT_BYTES)


def cpu_cache_bytes(cfg: RunConfig, num_sequences: int) -> int:
    """Return the cache bytes of one worker on a CPU for sequences of full length."""
    block, layers = CPU_KV_BLOCK_TOKENS, cfg.model.layers
    token_bytes = kv_token_bytes(cfg.model, cfg.engine, expanded=cfg.precision.exact is not True)
    layer_token_bytes = token_bytes // max(1, _num_caching_layers(cfg.model))
    # A state of a gated delta net takes a block of its own. Blocks have one size, in groups of equally many layers.
    states = sum(kind.mixer == "gdn" for kind in layers)
    block *= -(-_state_bytes(cfg.model) // (block * layer_token_bytes)) or 1
    per_group = min(states, len(layers) - states) or len(layers)
    attending, keeping = -(-(len(layers) - states) // per_group), -(-states // per_group)
    blocks_per_sequence = attending * -(-cfg.max_sequence_tokens // block) + keeping
    num_blocks = num_sequences * blocks_per_sequence + 1  # vLLM reserves one block for padding
    return num_blocks * block * layer_token_bytes * per_group


def _num_caching_layers(model: ModelConfig) -> int:
    """Layers that cache keys and values, with those that draft."""
    return sum(kind.mixer != "gdn" for kind in model.layers)


def _state_bytes(model: ModelConfig) -> int:
    """Bytes of what a request keeps in one gated delta net: float32 states, and BF16 inputs of the convolution."""
    if (gdn := model.gdn) is None:
        return 0
    keys, values = gdn.num_key_heads * gdn.key_head_dim, gdn.num_value_heads * gdn.value_head_dim
    return 4 * gdn.key_head_dim * values + 2 * (gdn.conv_width - 1) * (2 * keys + values)


def kv_token_bytes(model: ModelConfig, engine: EngineConfig, *, expanded: bool) -> int:
    """Return the KV cache bytes of one token on one worker, over all layers. With more ranks than heads, vLLM
    replicates key and value heads. Latent attention caches the latent vector and the rotated key on every rank;
    ``expanded``, on a CPU without exactness, it caches keys and values (VLLM_MLA_DISABLE, below)."""
    if model.mla is not None and not expanded:
        values = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    else:
        values = 2 * max(1, model.num_key_value_heads // engine.tensor) * model.head_dim
    return _num_caching_layers(model) * values * (1 if engine.kv_cache_dtype == "fp8" else 2)


def max_batched_tokens(cfg: RunConfig) -> int:
    per_step = 1 + (cfg.engine.draft_tokens if cfg.engine.speculation != "none" else 0)
    return max(8192, cfg.max_sequence_tokens, cfg.engine.max_num_sequences * per_step)


def engine_arguments(cfg: RunConfig, hf_dir: Path | str, kernels: KernelChoice) -> dict[str, Any]:
    """Return vLLM's command-line options without dashes. A flag has the value True; a dict becomes JSON."""
    engine, cpu = cfg.engine, not kernels.hardware.is_gpu
    drafts = engine.speculation != "none"
    arguments: dict[str, Any] = {
        "model": str(hf_dir),
        "served-model-name": cfg.name,
        "dtype": "bfloat16",
        "load-format": "dummy",
        "seed": cfg.seed,
        "tensor-parallel-size": engine.tensor,
        "data-parallel-size": engine.data,
        "max-model-len": cfg.max_sequence_tokens,
        "max-num-seqs": engine.max_num_sequences,
        "max-num-batched-tokens": max_batched_tokens(cfg),
        "kv-cache-dtype": engine.kv_cache_dtype,
        # Log-probabilities after temperature, top-p and top-k, as sampled. vLLM's default is before them.
        "logprobs-mode": "processed_logprobs",
        # Sampling defaults come from our requests, never from a generation_config.json in the model folder.
        "generation-config": "vllm",
        "worker-extension-cls": "megatron_fp8rl.rollout.vllm_plugin.worker.WorkerExtension",
        "weight-transfer-config": {"backend": WEIGHT_TRANSFER_BACKEND},
        # One line for each of hundreds of requests per step would bury important messages.
        "disable-uvicorn-access-log": True,
        "disable-log-stats": True,
        "disable-fastapi-docs": True,
    }
    # On a CPU a BF16 engine has an FP8 config that excludes every module: this selects our BF16 method, which keeps
    # weights readable.
    # The same replaces MXFP4, in which gpt-oss is published.
    if cpu or cfg.precision.rollout != "bf16" or FAMILIES[cfg.model.family].fused_experts:
        arguments["hf-overrides"] = {"quantization_config": quantization_config(cfg.model, cfg.precision)}
    names = FAMILIES[cfg.model.family].for_engines
    if cfg.model.rope_scaling is not None:
        names = (*names, "rope_parameters")  # vLLM does not read attention_factor, nor a factor without a point
    if cfg.model.hf_path is not None and names:
        written = to_hf_config(cfg.model)
        arguments["hf-overrides"] = arguments.get("hf-overrides", {}) | {name: written[name] for name in names}
    if cfg.model.has("gdn"):
        arguments["mamba-ssm-cache-dtype"] = "float32"  # as in the trainer
    if cpu:
        arguments["enforce-eager"] = True
        arguments["kv-cache-memory-bytes"] = kv_cache_bytes(cfg, cpu=True)
        # One worker runs inside the engine core; a separate process would cost one more hop per token.
        arguments["distributed-executor-backend"] = "uni" if engine.tensor == 1 else "mp"
    else:
        arguments["gpu-memory-utilization"] = engine.gpu_memory_utilization
        arguments["enforce-eager"] = engine.graphs == "none"
        if engine.kv_cache_bytes is not None:
            arguments["kv-cache-memory-bytes"] = engine.kv_cache_bytes
        # torch.compile would replace the batch-invariant norms with other kernels.
        is_compiled = engine.graphs == "compiled" and kernels.engine.norms != "batch_invariant"
        if not is_compiled and engine.graphs != "none":
            # Graphs of whole decoding steps need no compiler; piecewise graphs, used for prompts, do.
            arguments["compilation-config"] = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}
        arguments["enable-sleep-mode"] = engine.sleep_level > 0
        arguments |= kernel_backends(cfg.model, cfg.precision, kernels.engine)
        if cfg.model.has("gdn"):
            # vLLM's choice on Hopper, FlashInfer, is compiled at the start. Triton's chunks need no compiler.
            arguments["gdn-prefill-backend"] = "triton"
    if engine.expert > 1:
        arguments["enable-expert-parallel"] = True
    if drafts:
        drafts_of = {"method": engine.speculation, "num_speculative_tokens": engine.draft_tokens}
        if engine.speculation == "ngram":
            drafts_of |= {"prompt_lookup_min": engine.lookup_min, "prompt_lookup_max": engine.lookup_max}
        arguments["speculative-config"] = drafts_of
        # Verification needs tokens and drafts on the host, so steps are not scheduled ahead. With "mtp" vLLM would do
        # so, and BufferingScheduler would get no drafts.
        arguments["no-async-scheduling"] = True
    if cfg.lora.rank and not cfg.lora.merge:
        arguments |= {"enable-lora": True, "max-loras": 1, "max-lora-rank": padded_rank(cfg.lora.rank)}
        arguments["lora-target-modules"] = _adapted_modules(cfg)
    if engine.record_routed_experts:
        arguments["enable-return-routed-experts"] = True
    elif upstream.applies("BufferingScheduler"):
        decode = "DecodeScheduler" if not cpu and upstream.applies("DecodeScheduler") else "BufferingAsyncScheduler"
        arguments["scheduler-cls"] = f"{_SCHEDULERS}.{'BufferingScheduler' if cpu or drafts else decode}"
    return arguments


def padded_rank(rank: int) -> int:
    return next(size for size in ADAPTER_RANKS if size >= rank)


def _adapted_modules(cfg: RunConfig) -> list[str]:
    """The last names of the engine's modules with adapters; other modules stay as they are."""
    chosen = (weight for weight in weights(cfg.model).values() if adapted.is_adapted(weight.name, cfg.lora))
    leaves = {part.split(".")[-2] for weight in chosen for part, _ in weight.parts}
    return sorted({FUSED_INTO.get(leaf, leaf) for leaf in leaves})


def kernel_backends(model: ModelConfig, precision: PrecisionConfig, kernels: EngineKernels) -> dict[str, str]:
    """Name vLLM's kernels on a GPU explicitly, because vLLM's "auto" depends on installed packages."""
    backends: dict[str, str] = {}
    if precision.rollout != "bf16":
        backends["linear-backend"] = "emulation" if kernels.linears == "emulated" else kernels.linears
    if model.is_moe:
        backends["moe-backend"] = kernels.experts
    if kernels.attention != "vllm":
        # The name under which vllm_plugin/plugin.py registers ours.
        backends["attention-backend"] = "CUSTOM" if kernels.attention == "FP8_CACHE" else kernels.attention
    return backends


def engine_environment(cfg: RunConfig, kernels: KernelChoice) -> dict[str, str]:
    """Return variables to add to the trainer's environment after server_process.py removed torchrun's variables."""
    fmt, cpu = engine_format(cfg.precision), not kernels.hardware.is_gpu
    environment = {
        FORMAT_VARIABLE: fmt.name,
        "VLLM_SERVER_DEV_MODE": "1",  # adds endpoints that pause, update weights and call workers
        "VLLM_NO_USAGE_STATS": "1",
        # A request on a connection that the server has closed fails; keep connections through a training step.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
        "VLLM_LOGGING_COLOR": "0",  # logs go to files
        "TOKENIZERS_PARALLELISM": "false",
        # One switch for every GPU kernel: activation scales, and no requantization of weights.
        "VLLM_USE_DEEP_GEMM_E8M0": "0" if fmt.scale_kind == "fp32" else "1",
    }
    if cfg.sampling.truncates:
        environment[KEPT_VARIABLE] = "1"
    if cfg.engine.speculation != "none":
        environment[SPECULATION_VARIABLE] = "1"
    if cfg.model.has("gdn"):
        environment[DELTA_NET_VARIABLE] = "1"
    if cfg.model.has("mla"):
        is_absorbed = kernels.exact == "on"
        environment[LATENT_VARIABLE] = "absorbed" if is_absorbed else "vllm"
        if cpu or is_absorbed:
            # vLLM has no kernel for latent attention on a CPU, and two forms on a GPU. With this setting it projects
            # keys and values up first; in exact runs latent_layers.py replaces that.
            environment["VLLM_MLA_DISABLE"] = "1"
    if FAMILIES[cfg.model.family].fused_experts:
        environment[EXPERTS_VARIABLE] = "1"
    if kernels.exact == "on" and (num_parts := engine_parts(cfg)):
        environment[PARTS_VARIABLE] = str(num_parts)
    if not cpu:
        environment |= {
            # Without DeepGEMM, vLLM ignores the switch above; Triton's experts read it too.
            "VLLM_USE_DEEP_GEMM": "1",
            "VLLM_MOE_USE_DEEP_GEMM": "1" if kernels.engine.experts == "deep_gemm" else "0",
            # vLLM compiles for every batch size in one process, for minutes; deep_gemm_warmup.py uses many.
            "VLLM_DEEP_GEMM_WARMUP": "skip",
            # The V1 runner, vLLM's default for Qwen3 MoE, samples requests with seeds one by one, and all of our
            # requests have seeds. The V2 runner, its default for dense models, cannot record routed experts and has no
            # n-gram drafts.
            "VLLM_USE_V2_MODEL_RUNNER": "0"
            if cfg.engine.record_routed_experts or cfg.engine.speculation != "none"
            else "1",
        }
        if kernel_backends(cfg.model, cfg.precision, kernels.engine).get("linear-backend") == "deep_gemm":
            # Imported here because a check of a configuration must not import torch.
            from megatron_fp8rl.rollout.deep_gemm_warmup import LINEARS_VARIABLE, to_env

            # Trainer ranks on other nodes have other folders.
            is_shared = kernels.trainer.linears == "deep_gemm" and cfg.engine.placement != "remote"
            environment[LINEARS_VARIABLE] = to_env(cfg, max_batched_tokens(cfg), with_trainer=is_shared)
        if kernels.engine.norms == "batch_invariant":
            environment["VLLM_BATCH_INVARIANT"] = "1"
            if cfg.model.router.score == "sigmoid":
                environment[ROUTER_VARIABLE] = "1"
        if "flashinfer" not in kernels.hardware.packages:
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM would import it
    if cpu:
        num_workers = cfg.engine.num_replicas * cfg.engine.ranks
        environment |= {
            **CPU_ENVIRONMENT,
            # Half of the cores: OpenMP threads that share a core with the trainer's wait for each other.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (2 * num_workers))),
            # Allows the "uni" executor with the asynchronous front end.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if cfg.engine.ranks == 1 else "1",
        }
    return environment


def server_command(arguments: dict[str, Any], *, listen_fd: int) -> list[str]:
    """Return the command of a server that listens on an inherited, bound socket and ends with this process."""
    command = [sys.executable, "-m", "megatron_fp8rl.rollout.vllm_plugin.server"]
    command += [f"--listen-fd={listen_fd}", f"--parent-pid={os.getpid()}"]
    for name, value in arguments.items():
        if value is True:
            command.append(f"--{name}")
        elif isinstance(value, dict):
            command += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            command += [f"--{name}", *value]
        elif value is not False and value is not None:
            command += [f"--{name}", str(value)]
    return command
