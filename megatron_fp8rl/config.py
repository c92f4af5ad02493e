"""The whole configuration of a run: frozen dataclasses, and one function that names every mistake at once.

A run is a function in ``model_configs/`` that returns a :class:`RunConfig`; the command line overrides single fields
(``--parallel.tensor 2``). This module imports neither torch nor any other heavy package, so that a login node can
check a configuration in a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FP8_BLOCK = 128  # side of a weight block and length of an activation block


Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"]
_QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training, in the terms of config.json.

    ``llama3`` is the rule of the Llama 3.1 release; ``yarn`` that of arXiv:2309.00071 with DeepSeek's two ``mscale``.
    """

    kind: Literal["llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # llama3: wavelengths above original / low_freq_factor are stretched fully
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high_freq_factor are left alone
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a frequency is left alone
    beta_slow: float = 1.0  # yarn: rotations below which a frequency is stretched fully
    mscale: float = 1.0  # yarn: the rotated parts are multiplied by m(mscale) / m(mscale_all_dim) and the softmax
    mscale_all_dim: float = 0.0  # scale by m(mscale_all_dim)^2, where m(s) = 0.1 s ln(factor) + 1


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention: keys and values are projected up from one latent vector for all heads."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a token chooses its experts and weighs what they return."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False  # an FP32 buffer per expert is added to the scores, for the choice alone
    num_groups: int = 1  # of experts; a token chooses experts from its best groups only
    groups_per_token: int = 1
    scaling_factor: float = 1.0  # of the weights
    normalize: bool = True  # the weights of the chosen experts are divided by their sum


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture in the terms of a Hugging Face config.json. ``hf_path`` names trained weights to start from."""

    family: Family
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys; with ``mla`` its qk_head_dim
    vocab_size: int
    ffn_hidden_size: int = 0  # of dense layers; 0 for a model whose layers are all mixtures of experts
    num_experts: int = 0  # 0 for a dense model
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0  # of one expert
    num_shared_experts: int = 0  # that every token uses, as one feed-forward of this many times moe_ffn_hidden_size
    first_dense_layers: int = 0  # of a mixture of experts: layers at the start with a dense feed-forward
    router: RouterConfig = field(default_factory=RouterConfig)
    qkv_bias: bool = False
    qk_norm: bool | None = None  # of each query and key head, before rotation; None becomes what the family does
    mla: MlaConfig | None = None
    num_mtp_layers: int = 0  # multi-token prediction layers behind the last; 0 leaves out those of a checkpoint
    sliding_window: int | None = None  # tokens that attention reaches back; sequences must not be longer
    rotary_fraction: float = 1.0  # of head_dim that is rotated
    rope_scaling: RopeScaling | None = None
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_position_embeddings: int = 4096
    hf_path: str | None = None  # Hugging Face checkpoint to start from; None builds random weights
    initializer_range: float = 0.02

    def __post_init__(self):
        if self.qk_norm is None:
            object.__setattr__(self, "qk_norm", self.family in _QK_NORM_FAMILIES)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that the trainer computes as the model was meant: it always attends to all tokens."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward of a layer (counted over the whole model) is a mixture of experts."""
        return self.is_moe and layer >= self.first_dense_layers


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism of the trainer. The data-parallel degree is what is left of the world."""

    world_size: int = 1  # trainer ranks over all nodes
    tensor: int = 1  # with sequence parallelism whenever it exceeds 1
    pipeline: int = 1
    virtual_stages: int = 1  # model chunks per pipeline rank (interleaved schedule)
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """One object decides both ends, so that the policy that samples and the policy that trains stay one function."""

    trainer: Literal["bf16", "delayed", "tensorwise", "blockwise", "mxfp8"] = "blockwise"
    rollout: Literal["bf16", "blockwise"] = "blockwise"
    scales: Literal["pow2", "fp32"] = "pow2"  # of blockwise FP8, weights and activations, at both ends
    gradients: Literal["e4m3", "e5m2"] = "e4m3"  # format of output gradients
    bf16_first_layers: int = 0  # layers at the start whose matrices stay BF16 at both ends
    bf16_last_layers: int = 0
    amax_history_len: int = 16  # delayed scaling: steps of history
    amax_algorithm: Literal["max", "most_recent"] = "max"
    params: Literal["bf16", "fp32", "fp8"] = "bf16"  # of the trainer; fp8: FP8 linears hold no BF16. fp32 is for tests
    kernels: Literal["auto", "emulated", "te"] = "auto"  # auto: Transformer Engine on a GPU, emulated without one
    linears: Literal["auto", "te", "deep_gemm"] = "auto"  # kernels of FP8 linears but experts'; te: as kernels says
    experts: Literal["auto", "te", "deep_gemm"] = "auto"  # of the experts. auto, of both: see precision/auto_kernels.py
    expert_wgrad: Literal["fp8", "bf16"] = "fp8"  # operands of the experts' weight gradients under deep_gemm
    attention: Literal["auto", "engine"] = "auto"  # engine: the trainer's outputs come from the engine's own kernel


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW over FP32 master weights, sharded by Megatron-Core's distributed optimizer."""

    lr: float = 1e-6
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
    # What "selective" computes again, of what the model has: the feed-forward part of dense layers, of experts' layers.
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = ("mlp", "moe")
    moe_aux_loss_coef: float = 0.0
    logprob_chunk_tokens: int = 4096  # tokens of logits that are held in FP32 at a time
    offload: tuple[Literal["params", "gradients", "optimizer"], ...] = ()  # to host memory while the engines sample


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The vLLM engines and how they are asked."""

    num_replicas: int = 1
    tensor: int = 1  # tensor parallel degree of one replica
    expert: int = 1  # expert parallel degree of one replica: 1, or as large as ``tensor``
    # On the trainer's GPUs, on those behind them, or wherever the agents of a launched job start them.
    placement: Literal["colocated", "separate", "remote"] = "colocated"
    max_replica_restarts: int = 3  # of replicas that died, in one run, all together; not of colocated ones on GPUs
    sleep_level: Literal[0, 1, 2] = 0  # while training, engines keep their memory (0), or move (1) or drop (2) weights
    linear_backend: Literal["auto", "deep_gemm", "cutlass", "triton"] = "auto"  # kernels of FP8 linears on a GPU
    moe_backend: Literal["auto", "deep_gemm", "triton", "flashinfer_cutlass"] = "auto"  # of FP8 experts
    attention_backend: Literal["auto", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"] = "auto"
    batch_invariant: bool = False  # results do not depend on what else is in the batch; slower, and not compiled
    torch_compile: bool = True  # False: CUDA graphs without torch.compile, which starts a minute sooner
    weight_update: Literal["direct", "reload"] = "direct"  # into the kernels' tensors, or through vLLM's loaders
    prompts_per_step: int = 32
    completions_per_prompt: int = 8
    max_prompt_tokens: int = 64
    max_completion_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 samples from the whole vocabulary
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's end token
    stop_strings: tuple[str, ...] = ()
    max_staleness: int = 0  # 0: sampled by the current policy; k: sampled by a policy at most k versions old
    record_routed_experts: bool = False
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_bytes: int | None = None  # per engine worker; None leaves it to gpu_memory_utilization
    gpu_memory_utilization: float = 0.85
    max_num_sequences: int = 256  # decoded at a time by one replica
    enforce_eager: bool = False
    transport: Literal["auto", "shm", "gloo", "ipc", "nccl"] = "auto"  # how weights travel
    bucket_bytes: int = 256 << 20  # of weights in flight
    start_deadline_s: float = 600.0
    request_deadline_s: float = 600.0
    update_deadline_s: float = 300.0
    max_tokens_per_microbatch: int = 4096  # packed tokens in one trainer microbatch, on one data-parallel rank
    replay: str | None = None  # rollouts.jsonl of an earlier run to read instead of sampling


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Group-relative policy optimisation and the correction of the train/rollout mismatch."""

    advantage_std: bool = True  # divide by the standard deviation of the group (GRPO); False: Dr.GRPO
    ratio: Literal["token", "sequence", "detached"] = "token"  # GRPO/DAPO, GSPO, CISPO
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # lower bound multiple for negative advantages, e.g. 3.0
    aggregate: Literal["token", "sequence", "constant"] = "token"  # mean over tokens, over sequence means, or / L max
    updates_per_step: int = 1  # optimizer updates per batch of rollouts
    zero_variance: Literal["keep", "drop", "refill"] = "drop"  # groups whose rewards are all equal
    max_refills: int = 3  # extra rounds of prompts for "refill"
    overlong: Literal["keep", "mask", "penalty"] = "keep"  # completions cut at max_completion_tokens
    overlong_buffer_tokens: int = 0  # "penalty": length before the limit over which the reward falls by 1
    kl_coef: float = 0.0  # weight of KL(trainer || reference); 0 builds no reference model
    entropy_coef: float = 0.0
    correction: Literal["off", "truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_mask"] = "truncate"
    correction_low: float = 0.0  # lower bound of the importance weight (masks)
    correction_high: float = 2.0  # cap or upper bound of the importance weight
    veto_below: float | None = 1e-4  # a sequence with any token weight below this is dropped; None: never
    alarm_abs_logprob_diff: float | None = 0.5  # mean |old - rollout| above this stops the run; None: never
    alarm_kl_k3: float | None = 0.5
    alarm_action: Literal["warn", "stop"] = "warn"


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """One source of problems. ``dataset`` is a reasoning-gym generator; ``options`` are its parameters."""

    dataset: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # share of the prompts
    template: str = "{question}"  # fields: question, and the metadata of the generator


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems, their tokens, and the supervised warm start."""

    environments: tuple[EnvironmentConfig, ...] = (EnvironmentConfig(),)
    tokenizer: str = "character"  # "character", or a directory with a Hugging Face tokenizer
    chat_template: bool = False  # render prompts with the tokenizer's chat template
    num_score_workers: int = 1  # processes that score: of trainer rank 0, or of each score server
    score_servers: int = 0  # that the agents of a launched job start; 0: trainer rank 0 scores by itself
    score_deadline_s: float = 30.0
    sft_steps: int = 0  # supervised steps; 0 when hf_path brings trained weights
    sft_batch_size: int = 128
    sft_lr: float = 1e-3
    sft_wrong_answers: float = 0.0  # share of demonstrations that show another problem's answer, as scraped data do
    sft_stop_pass_rate: float | None = None  # stop early at this expected pass rate on held-out problems


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, relative to the run's folder, and how many are kept."""

    every_steps: int = 0  # 0: only at the end
    keep: int = 2
    resume: bool = True  # continue from the newest complete checkpoint in the run's folder
    export_hf: bool = True  # write the final policy as a Hugging Face checkpoint


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What is shown and written."""

    display: Literal["live", "plain", "none"] = "live"
    tensorboard: bool = True
    wandb_project: str | None = None
    record_rollouts: bool = True
    verify_every: int = 1  # publications between proofs that the engines hold what was sent; 0: never
    eval_every: int = 0  # steps between evaluations on held-out problems; 0: only at start and end
    eval_prompts: int = 128  # held-out problems of an evaluation
    eval_completions: int = 1  # sampled for each of them; above 1 evaluations measure pass@k, too


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run."""

    name: str
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    num_steps: int = 100
    seed: int = 1
    output_dir: str = "runs/{name}"

    @property
    def run_dir(self) -> str:
        return self.output_dir.format(name=self.name)


@dataclass(frozen=True)
class Violation:
    """One mistake in a configuration."""

    field: str
    value: Any
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.problem}. {self.remedy}."


class ConfigError(ValueError):
    """A configuration that cannot run. ``violations`` lists all mistakes; the message shows one on each line."""

    def __init__(self, violations: list[Violation]):
        self.violations = violations
        lines = "\n".join(f"  {i}. {v}" for i, v in enumerate(violations, 1))
        noun = "mistake" if len(violations) == 1 else "mistakes"
        super().__init__(f"{len(violations)} {noun} in the configuration:\n{lines}")
