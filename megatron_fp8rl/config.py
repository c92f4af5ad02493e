"""Run configuration: frozen dataclasses, and the error that reports all mistakes at once.

A run is defined by a function in ``model_configs/`` that returns a :class:`RunConfig`; the command line overrides
single fields (``--parallel.tensor 2``). This module imports nothing heavy: a login node checks a run in a second.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral",
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "olmo2", "olmo3", "gemma3_text", "qwen3_next", "gpt_oss",
    "phi3", "qwen3_5_text", "qwen3_5_moe_text",
]  # fmt: skip
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe", "olmo2", "olmo3", "gemma3_text")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling beyond the pre-training context, with the field names of config.json.

    ``llama3`` is the rule of the Llama 3.1 release, ``yarn`` is arXiv:2309.00071 with DeepSeek's two ``mscale`` fields,
    ``linear`` divides every position by the factor. ``longrope`` (arXiv:2402.13753) divides the frequency of each pair
    by a number of one of two lists, which the longest sequence of a run selects.
    """

    kind: Literal["llama3", "yarn", "linear", "longrope"]
    factor: float  # longrope: max_position_embeddings / original_max_position_embeddings, unless config.json has one
    original_max_position_embeddings: int  # linear: the model's max_position_embeddings
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low_freq_factor are scaled fully
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high_freq_factor are unchanged
    beta_fast: float = 32.0  # yarn: frequencies with more rotations over the original context are unchanged
    beta_slow: float = 1.0  # yarn: frequencies with fewer rotations are scaled fully
    mscale: float = 1.0  # yarn: scales the rotated dims by m(mscale) / m(mscale_all_dim)
    mscale_all_dim: float = 0.0  # yarn: scales the softmax by m(mscale_all_dim)^2, where m(s) = 0.1 s ln(factor) + 1
    attention_factor: float | None = None  # yarn, longrope: scales the rotated dims instead of other fields
    truncate: bool = True  # yarn: round the first and the last feature of the ramp to whole features
    short_factor: tuple[float, ...] = ()  # longrope: by pair, in runs of at most the original positions
    long_factor: tuple[float, ...] = ()  # longrope: by pair, in other runs

    def __post_init__(self):
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def magnitude(self, mscale: float) -> float:
        """m(mscale) = 0.1 mscale ln(factor) + 1, or 1 if factor <= 1 (DeepSeek's ``yarn_get_mscale``)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def amplitude(self) -> float:
        """Factor applied to cosines and sines: 1, or the attention factor of YaRN or longrope."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            growth = math.log(self.factor) / math.log(self.original_max_position_embeddings) if self.factor > 1 else 0.0
            return math.sqrt(1 + growth)
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)

    def divisors(self, longest: int) -> tuple[float, ...]:
        """Of longrope: what divides the frequency of each pair in a run whose longest sequence has ``longest`` tokens,
        as in vLLM. Empty for other kinds."""
        return self.long_factor if longest > self.original_max_position_embeddings else self.short_factor


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention: keys and values of all heads are projected up from one latent vector."""

    q_lora_rank: int | None  # None: queries are projected directly from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class GdnConfig:
    """Gated delta net (arXiv:2412.06464): a causal convolution, and one state per value head that tokens update."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4  # tokens that the convolution reads


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """MoE router: how a token's experts are selected and weighted."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False  # add an FP32 bias per expert to the scores, for expert selection only
    num_groups: int = 1  # expert groups; a token selects experts from its best groups only
    groups_per_token: int = 1
    scaling_factor: float = 1.0  # multiplies the router weights
    normalize: bool = True  # divide the weights of the selected experts by their sum


_MIXERS: dict[str, Literal["gdn"]] = {"linear_attention": "gdn"}  # by layer_types, where it decides


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The parts of a layer. The names of weights, the trainer, the planner and the precision rules read them."""

    mixer: Literal["attention", "mla", "gdn"]  # how a token reads the tokens before it
    feed_forward: Literal["dense", "moe"]
    window: int | None = None  # tokens that the mixer reads; None: all

    @property
    def is_moe(self) -> bool:
        return self.feed_forward == "moe"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model architecture, as in a Hugging Face config.json. ``hf_path`` names the pretrained weights to start from."""

    family: Family
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys; with ``mla``, its qk_head_dim
    vocab_size: int
    ffn_hidden_size: int = 0  # of dense layers; 0 if all layers are MoE layers
    num_experts: int = 0  # 0 for a dense model
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0  # of one expert
    num_shared_experts: int = 0  # used by every token, as one MLP of width num_shared_experts * moe_ffn_hidden_size
    first_dense_layers: int = 0  # MoE models: number of leading layers with a dense MLP
    router: RouterConfig = field(default_factory=RouterConfig)
    qkv_bias: bool = False
    qk_norm: bool | None = None  # normalize each query and key head before RoPE; None: the family's default
    mla: MlaConfig | None = None
    gdn: GdnConfig | None = None  # of the layers whose layer_types is linear_attention
    num_mtp_layers: int = 0  # multi-token prediction layers after the last layer; 0 ignores those of a checkpoint
    sliding_window: int | None = None  # tokens that a token attends to, with itself, in layers with a window
    # As in config.json, repeated over the layers; empty: a window in all layers if sliding_window is set, else in none.
    layer_types: tuple[Literal["full_attention", "sliding_attention", "linear_attention"], ...] = ()
    rotary_fraction: float = 1.0  # fraction of head_dim that is rotated
    rope_scaling: RopeScaling | None = None
    rope_theta: float = 1_000_000.0
    local_rope_theta: float | None = None  # of layers with a window, which have no rope_scaling; None: as the others
    query_pre_attn_scalar: int | None = None  # the softmax scale is its inverse square root; None: head_dim
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_position_embeddings: int = 4096
    hf_path: str | None = None  # Hugging Face checkpoint to start from; None: random initialization
    random: bool = False  # start from random weights; the grpo command: not from those of the folder
    initializer_range: float = 0.02  # standard deviation of random weights
    embedding_range: float | None = (
        None  # of an embedding that is not tied to the output layer; None: initializer_range
    )

    def __post_init__(self):
        if self.qk_norm is None:
            object.__setattr__(self, "qk_norm", self.family in QK_NORM_FAMILIES)
        object.__setattr__(self, "layer_types", (tuple(self.layer_types) * self.num_layers)[: self.num_layers])

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @functools.cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, and then of each multi-token prediction layer."""
        types = self.layer_types or ("sliding_attention",)  # a window only if sliding_window is set
        return tuple(
            LayerKind(
                mixer=_MIXERS.get(types[index % len(types)], "attention" if self.mla is None else "mla"),
                feed_forward="moe" if self.is_moe and index >= self.first_dense_layers else "dense",
                window=self.sliding_window if types[index % len(types)] == "sliding_attention" else None,
            )
            for index in range(self.num_layers + self.num_mtp_layers)
        )

    @property
    def is_gated(self) -> bool:
        """Whether attention outputs and shared experts have sigmoid gates. Models with gated delta nets have both."""
        return self.gdn is not None

    def has(self, part: str) -> bool:
        """Whether a layer has this mixer or feed-forward."""
        return any(part in (kind.mixer, kind.feed_forward) for kind in self.layers)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that trainer and engines compute: with YaRN or linear scaling, vLLM takes the original
        positions times the factor."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind in ("llama3", "longrope"):
            return self.max_position_embeddings
        longest = int(scaling.original_max_position_embeddings * scaling.factor)
        return longest if self.local_rope_theta is None else min(longest, self.max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism of the trainer. The data-parallel size follows from ``world_size`` and the other degrees."""

    world_size: int = 1  # trainer ranks over all nodes
    tensor: int = 1  # tensor-parallel size; above 1, sequence parallelism is on
    pipeline: int = 1  # pipeline stages
    virtual_stages: int = 1  # model chunks per pipeline rank (interleaved schedule)
    context: int = 1  # context-parallel size
    expert: int = 1  # expert-parallel size
    expert_tensor: int = 1  # tensor-parallel size of experts
    dispatch: Literal["auto", "alltoall", "gather", "deepep", "hybridep"] = "auto"  # how tokens get to their experts

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)


# The roles of ``precision.kernels`` and their values. precision/kernel_choice.py defines "auto", the default of each.
KERNELS: dict[str, tuple[str, ...]] = {
    "trainer": ("auto", "emulated", "te"),  # norms and FP8 linears; auto: Transformer Engine on a GPU
    "linears": ("auto", "te", "deep_gemm"),  # the trainer's FP8 linears except experts; te follows ``trainer``
    "experts": ("auto", "te", "deep_gemm"),  # the trainer's experts
    "attention": ("auto", "engine"),  # engine: the trainer's forward pass runs the engine's attention kernel
    # Engines use these kernels on a GPU only; emulated: MXFP8 without Blackwell.
    "engine_linears": ("auto", "deep_gemm", "cutlass", "triton", "emulated"),
    "engine_experts": ("auto", "deep_gemm", "triton"),
    "engine_attention": ("auto", "FP8_CACHE", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"),
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision of trainer and engines: one section, so that both compute the same policy."""

    trainer: Literal["bf16", "delayed", "tensorwise", "blockwise", "mxfp8"] = "blockwise"
    rollout: Literal["bf16", "blockwise", "mxfp8"] = "blockwise"
    scales: Literal["pow2", "fp32"] = "pow2"  # blockwise FP8 scales of weights and activations, in trainer and engine
    gradients: Literal["e4m3", "e5m2"] = "e4m3"  # format of output gradients
    bf16_first_layers: int = 0  # leading layers whose matrices stay BF16 in trainer and engine
    bf16_last_layers: int = 0
    params: Literal["bf16", "fp32", "fp8"] = "bf16"  # trainer; fp8: FP8 linears keep no BF16 copy; fp32 is for tests
    # Kernels by role, where ``auto`` is not wanted: {"experts": "te"}. KERNELS has the roles and their values.
    kernels: dict[str, str] = field(default_factory=dict)
    # Trainer and engine compute the same bits: kernels that are "auto" are chosen for it. The first update of a step
    # measures every token, and a difference stops the run. There is no pass for old log-probabilities. "auto": True on
    # Hopper GPUs and on CPUs unless another field forbids it; precision/kernel_choice.py:resolved decides.
    exact: Literal["auto"] | bool = "auto"

    def kernel(self, role: str) -> str:
        """The kernel that the user chose for a role of :data:`KERNELS`; "auto" if none."""
        return self.kernels.get(role, "auto")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on frozen weights: W = W0 + alpha / rank * B A, with BF16 A [rank, in] and B [out, rank]."""

    rank: int | None = None  # None: no adapters; all weights are trained
    alpha: float = 32.0
    # Linears with adapters; "dense" is the MLP of dense layers and of shared experts. Empty: all that the model has.
    targets: tuple[Literal["attention", "dense", "experts"], ...] = ()
    # Engines load the merged weights after each update. False: they keep the base, and load only A and B.
    merge: bool = True


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or Muon over FP32 master weights, sharded by Megatron-Core's distributed optimizer."""

    optimizer: Literal["adam", "muon"] = "adam"  # muon: of matrices; AdamW of embeddings, head, routers and vectors
    # Adam's moments between steps. fp8: the first in FP8 with a scale for each block, the second in BF16.
    states: Literal["fp32", "bf16", "fp8"] = "fp32"
    lr: float = 1e-6  # after the warmup, the highest
    warmup_steps: int = 0  # linear, from 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    overlap_grad_reduce: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    # Modules that "selective" recomputes, where present: mlp is the MLP of dense layers, moe that of MoE layers.
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = ("mlp", "moe")
    moe_aux_loss_coef: float = 0.0  # weight of the loss that balances experts
    max_tokens_per_microbatch: int = 4096  # packed tokens per trainer microbatch on one data-parallel rank
    logprob_chunk_tokens: int = 8192  # tokens whose logits exist at a time; larger microbatches compute logits twice
    offload: tuple[Literal["params", "gradients", "optimizer"], ...] = ()  # to host memory during sampling


# Seconds to wait for an engine, with ``engine.deadline_scale`` = 1.
START_S, REQUEST_S, UPDATE_S = 600.0, 600.0, 300.0
HANG_S = 30.0  # a replica that does not answer for so long is killed


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The vLLM engines: replicas, parallelism, placement, memory and kernels."""

    num_replicas: int = 1  # engines, each with a whole copy of the model
    tensor: int = 1  # tensor-parallel size of one replica
    data: int = 1  # attention data-parallel size of one replica; a replica has ``data`` * ``tensor`` ranks
    expert: int = 1  # expert-parallel size of one replica: 1 or ``data`` * ``tensor``
    # On the trainer's GPUs, on the GPUs after them, or where the agents of a launched job start the engines.
    placement: Literal["colocated", "separate", "remote"] = "colocated"
    max_replica_restarts: int = 3  # restarts of dead replicas per run, in total; not for colocated replicas on GPUs
    sleep_level: Literal[0, 1, 2] = 0  # during training: 0 keeps engine memory, 1 offloads and 2 discards weights
    batch_invariant: bool = False  # results do not depend on the rest of the batch; slower, no torch.compile
    # torch.compile and CUDA graphs; "plain": CUDA graphs of decoding without torch.compile, starts a minute sooner;
    # "none": neither. A CPU engine has neither.
    graphs: Literal["compiled", "plain", "none"] = "compiled"
    record_routed_experts: bool = False  # return the experts of each token, for algo.router_replay = rollout
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_bytes: int | None = None  # per engine worker; None: sized by gpu_memory_utilization
    gpu_memory_utilization: float = 0.85  # fraction of a GPU for weights, activations and KV cache of an engine
    max_num_sequences: int = 256  # sequences that one replica decodes concurrently
    deadline_scale: float = 1.0  # multiplies all waits for an engine; above 1 for slow clusters and long completions
    # "ngram": drafts are the tokens that followed the last tokens earlier in the sequence. "mtp": drafts are from the
    # model's multi-token prediction layer, which is trained, too. One step verifies drafts. The sampled distribution
    # does not change.
    speculation: Literal["none", "ngram", "mtp"] = "none"
    draft_tokens: int = 4  # drafts of a sequence in one step
    lookup_min: int = 2  # fewest last tokens that have to occur earlier
    lookup_max: int = 4  # most last tokens to compare; longer matches come first

    @property
    def ranks(self) -> int:
        """GPUs, or processes, of one replica."""
        return self.data * self.tensor

    @property
    def start_s(self) -> float:
        return START_S * self.deadline_scale

    @property
    def request_s(self) -> float:
        return REQUEST_S * self.deadline_scale

    @property
    def update_s(self) -> float:
        return UPDATE_S * self.deadline_scale

    @property
    def hang_s(self) -> float:
        return HANG_S * self.deadline_scale


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of a step: prompts, completions, lengths, and the age of the policy."""

    prompts_per_step: int = 32
    completions_per_prompt: int = 8
    max_prompt_tokens: int = 64
    max_completion_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 samples from the whole vocabulary
    min_p: float = 0.0  # drops entries below this fraction of the largest probability
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end tokens
    stop_strings: tuple[str, ...] = ()
    max_staleness: int = 0  # 0: sample from the current policy; k: from a policy at most k versions old
    window_groups: int = 0  # groups sampled ahead and trained when complete; 0: max_staleness + 1 steps, in order
    replay: str | None = None  # folder "rollouts" of an earlier run, read instead of sampling

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Weight updates from the trainer to the engines."""

    transport: Literal["auto", "ipc", "nccl", "gloo"] = "auto"  # transport of weight updates
    bucket_bytes: int = 256 << 20  # bytes of weights sent per round
    # Second copy of an engine worker's weights, which arrives during sampling: in GPU memory or pinned host memory.
    spare_weights: Literal["none", "device", "host"] = "none"
    verify_every: int = 1  # weight updates between comparisons of the engines' weights with the sent ones; 0: none


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Sessions of agents: several turns of the policy, with messages of tools, users or environments between them."""

    max_tokens: int | None = None  # of a whole session; None: max_prompt_tokens + max_completion_tokens
    max_turns: int = 16
    deadline_s: float = 600.0  # seconds that one session may take
    num_workers: int = 1  # processes that run agents, many sessions each
    max_running: int = 256  # concurrent sessions
    endpoint: str = "127.0.0.1:0"  # HOST:PORT where sessions are served, as agents reach it; port 0: any that is free
    tool_parser: str = ""  # vLLM's parser of tool calls: hermes, llama3_json, mistral, ...; "": none


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Group-relative policy optimization and the correction of the train/rollout mismatch."""

    loss: str = "dapo"  # grpo, dapo, dr_grpo, gspo, cispo or sft from algo/losses.py, or module:function
    loss_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the loss, e.g. dual_clip
    advantage: str = "grpo"  # grpo or dr_grpo from algo/advantages.py, or module:function
    advantage_options: dict[str, Any] = field(default_factory=dict)
    advantage_unit: Literal["trajectory", "turn"] = "trajectory"  # turn: compare the rewards that follow each turn
    clip_low: float = 0.2
    clip_high: float = 0.2
    updates_per_step: int = 1  # optimizer updates per batch of rollouts
    zero_variance: Literal["keep", "drop", "refill"] = "drop"  # groups whose rewards are all equal
    overlong: Literal["keep", "mask", "penalty"] = "keep"  # completions truncated at max_completion_tokens
    overlong_buffer_tokens: int = 0  # "penalty": tokens before the limit over which the penalty rises from 0 to 1
    kl_coef: float = 0.0  # weight of KL(trainer || reference); 0 builds no reference model
    # KL of a distillation at each token: estimated from the sampled token, over the teacher's ``teacher_top_k`` most
    # likely tokens and all others together, or over the full vocabulary.
    teacher_kl: Literal["sampled", "top_k", "full"] = "sampled"
    teacher_top_k: int = 64  # the tokens of teacher_kl top_k
    entropy_coef: float = 0.0
    # Experts of a token. "off": the trainer's router selects them. "old": an update uses those of the pass for old
    # log-probabilities. "rollout": this pass and the update use those that the engine recorded.
    router_replay: Literal["off", "old", "rollout"] = "off"
    # What is done about the mismatch between rollout and trainer (algo/mismatch.py).
    correction: Literal["off", "truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_mask"] = "truncate"
    correction_low: float = 0.0  # lower bound of the importance weight (masks)
    correction_high: float = 2.0  # cap (truncate) or upper bound (masks) of the importance weight
    # Choose the bounds in each step so that this fraction of its tokens (sequences) is outside; None: bounds as above.
    correction_quantile: float | None = None
    veto_below: float | None = 1e-4  # drop a sequence with any token weight below this; None: never
    alarm_action: Literal["warn", "stop"] = "warn"  # when a mean of the mismatch is above its limit (algo/mismatch.py)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward of a source of rows. A completion's reward is the weighted sum over all rewards of its source."""

    function: str = "exact"  # exact, number, choice, math, format, length, code, judge, model, or FILE.py:function
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the reward
    sandbox: bool = (
        False  # run a user's function without network, disk and other processes; the reward "code" always does
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """One source of problems: rows of files, an environment class, or a reasoning-gym generator."""

    # A .jsonl (.gz, .zst) or .parquet file, a folder or glob of them, a folder of datasets.save_to_disk, hub:NAME,
    # env:module:Class, or the name of a reasoning-gym generator.
    dataset: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)  # of the generator or class; for hub:NAME of load_dataset
    weight: float = 1.0  # relative share of the prompts
    template: str = "{question}"  # fields: question and the columns of the row, or the generator's metadata
    system_prompt: str = ""
    prompt_column: str = ""  # column with the prompt, text or a list of messages; "": the column with a known name
    answer_column: str = ""  # column with the reference answer; "": the column with a known name
    eval: str = ""  # held-out rows, named like ``dataset``; "": an eighth of a generator's questions, and no rows
    rewards: tuple[RewardConfig, ...] = ()  # of rows without an agent that returns rewards
    teacher: str = ""  # of a distillation: folder of a model, or URL of a vLLM server, with the student's tokenizer
    agent: str = ""  # FILE.py:function or module:function that plays a session per completion; "": one answer
    agent_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the agent


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Sources of problems, and the tokenizer."""

    environments: tuple[EnvironmentConfig, ...] = (EnvironmentConfig(),)
    max_dropped: float = 0.01  # largest fraction of rows that may be too long, empty or impossible to encode
    # "character", or a folder with a Hugging Face tokenizer. A run that starts from model.hf_path uses that folder's.
    tokenizer: str = "character"
    chat_template: bool | None = None  # render prompts with the tokenizer's chat template; None: if there is one
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)  # such as {"enable_thinking": false}


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """The supervised warm start before reinforcement learning."""

    steps: int = 0  # supervised steps; 0 if hf_path provides trained weights
    batch_size: int = 128
    lr: float = 1e-3
    wrong_answers: float = 0.0  # fraction of demonstrations that show the answer of another problem
    stop_pass_rate: float | None = None  # stop early at this expected pass rate on held-out problems


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Processes that compute rewards."""

    num_workers: int = 1  # scoring processes of trainer rank 0
    deadline_s: float = 30.0  # seconds that one score may take
    memory_gib: float = 16.0  # address space of a scoring process; code that needs more gets a MemoryError
    variables: tuple[str, ...] = ()  # further environment variables that scoring processes see, such as HF_TOKEN


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every_steps: int = 0  # steps between checkpoints; 0: only every_minutes and at the end
    every_minutes: float = 0.0  # minutes after which the next step writes a checkpoint; 0: none
    keep: int = 2  # complete checkpoints; older ones are deleted
    resume: bool = True  # continue from the newest complete checkpoint in the run's folder
    export_hf: bool = True  # write the final policy as a Hugging Face checkpoint


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Display, logging, verification and evaluation."""

    display: Literal["live", "plain", "none"] = "live"
    wandb_project: str | None = None
    # Space for recorded rollouts. When it is full, the oldest steps are deleted, except the first. 0 records none.
    rollouts_gib: float = 100.0
    eval_every: int = 0  # steps between evaluations on held-out problems; 0: only at start and end
    eval_prompts: int = 128  # held-out problems per evaluation; 0: no evaluation
    eval_completions: int = 1  # completions sampled per held-out problem; above 1 also measures pass@k


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete configuration of a run."""

    name: str
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    num_steps: int = 100  # steps of reinforcement learning
    seed: int = 1
    output_dir: str = "runs/{name}"

    @property
    def run_dir(self) -> str:
        return self.output_dir.format(name=self.name)

    def value(self, path: str) -> Any:
        """The field at a dotted path, such as ``precision.kernels.experts``; "auto" for a kernel that is not set."""
        node: Any = self
        for name in path.split("."):
            node = node.get(name, "auto") if isinstance(node, dict) else getattr(node, name)
        return node

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that is sampled and trained."""
        return max(self.sampling.max_prompt_tokens + self.sampling.max_completion_tokens, self.session.max_tokens or 0)


@dataclass(frozen=True)
class Violation:
    """One mistake in a configuration. Programs read ``code`` and ``choices``; the texts are for people."""

    field: str
    value: Any
    problem: str
    remedy: str
    code: Literal["invalid", "range", "divisor", "untiled_size", "untiled_shard"] = "invalid"  # kind of mistake
    choices: tuple[Any, ...] = ()  # values of the field to try, the best first; empty: no value is known

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.problem}. {self.remedy}."


class ConfigError(ValueError):
    """An invalid configuration. ``violations`` lists all mistakes; the message shows one per line."""

    def __init__(self, violations: list[Violation]):
        self.violations = violations
        lines = "\n".join(f"  {i}. {v}" for i, v in enumerate(violations, 1))
        super().__init__(f"{len(violations)} mistake{'s' * (len(violations) > 1)} in the configuration:\n{lines}")
