"""The results of preflight: violations of single fields, and findings about a whole run. Pure."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_fp8rl.config import RunConfig, Violation

# The interval of every number. The rules add bounds that depend on other fields. None is always allowed.
RANGES = {
    "[0, inf)": """
        num_steps
        model.num_experts model.ffn_hidden_size
        precision.bf16_first_layers precision.bf16_last_layers
        optim.warmup_steps optim.min_lr optim.weight_decay optim.moe_aux_loss_coef
        sampling.window_groups
        sampling.top_k engine.max_replica_restarts
        algo.kl_coef algo.entropy_coef algo.overlong_buffer_tokens algo.correction_low
        warm_start.steps
        checkpoint.every_steps checkpoint.every_minutes weight_sync.verify_every observe.eval_every observe.eval_prompts
        observe.rollouts_gib
    """,
    "[1, inf)": """
        model.num_layers model.hidden_size model.num_attention_heads model.num_key_value_heads model.head_dim
        model.gdn.num_key_heads model.gdn.num_value_heads model.gdn.key_head_dim model.gdn.value_head_dim
        model.gdn.conv_width
        model.vocab_size model.max_position_embeddings model.router.num_groups model.router.groups_per_token
        parallel.world_size parallel.tensor parallel.pipeline parallel.virtual_stages parallel.context parallel.expert
        parallel.expert_tensor
        lora.rank
        optim.logprob_chunk_tokens
        engine.data engine.tensor engine.expert engine.max_num_sequences weight_sync.bucket_bytes
        optim.max_tokens_per_microbatch
        session.max_tokens session.max_turns session.deadline_s session.max_running
        algo.updates_per_step warm_start.batch_size scoring.deadline_s checkpoint.keep observe.eval_completions
    """,
    "[0, 4294967295]": "seed",
    "[1, 10000000]": "sampling.max_prompt_tokens sampling.max_completion_tokens",
    "[1, 1000000]": "sampling.prompts_per_step",
    "[1, 65536]": "sampling.completions_per_prompt engine.num_replicas",
    "[1, 4096]": "scoring.num_workers session.num_workers",
    "[1, 16]": "engine.draft_tokens engine.lookup_min engine.lookup_max",
    "[0, 1000]": "sampling.max_staleness",
    "[0.01, 100]": "sampling.temperature",
    "(0, inf)": """
        model.norm_eps model.rope_theta model.local_rope_theta model.embedding_range model.query_pre_attn_scalar
        lora.alpha
        optim.lr optim.eps optim.clip_grad_norm engine.deadline_scale
        algo.clip_high scoring.memory_gib warm_start.lr
    """,
    "[0, 1)": "optim.beta1 optim.beta2",
    "[0, 1]": "warm_start.wrong_answers data.max_dropped sampling.min_p",
    "(0, 1]": """
        model.rotary_fraction sampling.top_p engine.gpu_memory_utilization warm_start.stop_pass_rate
    """,
    "(0, 1)": "algo.veto_below",
    "(0, 0.5)": "algo.correction_quantile",
}
INTERVALS = {path: interval for interval, paths in RANGES.items() for path in paths.split()}


def _outside(value: float | None, interval: str) -> tuple[str, str, tuple[int, ...]] | None:
    """(problem, remedy, values to try) of a number outside ``interval``; None inside. NaN is outside."""
    low, high = map(float, interval[1:-1].split(","))
    if value is None:
        return None
    above = value >= low if interval[0] == "[" else value > low
    if above and (value <= high if interval[-1] == "]" else value < high):
        return None
    if math.isfinite(high):
        bounds = [low] * (interval[0] == "[") + [high] * (interval[-1] == "]")
        return f"is outside {interval}", f"Choose a value in {interval}", tuple(map(int, bounds))
    if value == high:
        return "is infinite", "Set a finite number", ()
    if interval[0] == "[":
        return f"is below {low:g}", f"Set it to {low:g} or more", (int(low),)
    return f"is not above {low:g}", "Set a positive number", ()


@dataclass
class Checks:
    """Collects the violations of one configuration. Fields are dotted paths from ``RunConfig``."""

    cfg: RunConfig
    violations: list[Violation] = field(default_factory=list)
    _in_range: dict[str, bool] = field(default_factory=dict)  # by path, for the fields already checked

    def value(self, path: str) -> Any:
        return self.cfg.value(path)

    def refuse(
        self,
        path: str,
        problem: str,
        remedy: str = "",
        choices: Sequence[Any] = (),
        *,
        value: Any = None,
        code: str = "invalid",
    ) -> None:
        """Add a violation of a field; without a remedy, it names the choices. ``code``: see :class:`Violation`."""
        shown = self.value(path) if value is None else value
        if not remedy:
            remedy = ("Choose one of " if len(choices) > 1 else "Set ") + ", ".join(map(str, choices))
        self.violations.append(Violation(f"--{path}", shown, problem, remedy, code=code, choices=tuple(choices)))

    def within(self, path: str, interval: str) -> bool:
        """Refuse a number outside an interval such as ``[0, 1)``; return whether it is inside or not set."""
        wrong = _outside(self.value(path), interval)
        if wrong is not None:
            self.refuse(path, *wrong, code="range")
        return wrong is None

    def in_range(self, *paths: str) -> bool:
        """Refuse every field outside its interval in ``RANGES``, once; a section selects all of its fields. Returns
        whether all fields are inside."""
        selected = [path for path in INTERVALS if path in paths or path.rpartition(".")[0] in paths]
        new = [path for path in selected if path not in self._in_range]
        self._in_range |= {path: self.within(path, INTERVALS[path]) for path in new}
        return all(self._in_range[path] for path in selected)

    def divides(self, path: str, whole: int, noun: str) -> bool:
        """Refuse a degree that does not divide ``whole``; return whether it does."""
        if whole % self.value(path) == 0:
            return True
        choices = [divisor for divisor in range(1, whole + 1) if whole % divisor == 0]
        self.refuse(path, f"does not divide the {whole} {noun}", "", choices, code="divisor")
        return False


Severity = Literal["error", "warning", "note"]
Change = tuple[tuple[str, Any], ...]  # (dotted field, value), in the order in which they are typed


def apply(cfg: RunConfig, change: Change) -> RunConfig:
    for path, value in change:
        cfg = _replaced(cfg, path.split("."), value)
    return cfg


def _replaced(node: Any, names: Sequence[str], value: Any) -> Any:
    name, rest = names[0], names[1:]
    if isinstance(node, dict):
        return {**node, name: value}
    return dataclasses.replace(node, **{name: _replaced(getattr(node, name), rest, value) if rest else value})


def arguments(overrides: Sequence[str], change: Change) -> str:
    """``overrides`` followed by ``change``, as command-line arguments; a field set by both keeps the new value only."""
    fields = {path for path, _ in change}
    kept: list[str] = []
    is_old = False  # the following arguments are values of a field that ``change`` sets
    for argument in overrides:
        if argument.startswith("--"):
            is_old = argument[2:].partition("=")[0].replace("-", "_") in fields
        if not is_old:
            kept.append(argument)
    new = []
    for path, value in change:
        new += [f"--{path}", *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join([*kept, *new])


@dataclass(frozen=True)
class Finding:
    severity: Severity  # error: the run cannot work; warning: it may fail or be slow; note: information
    subject: str  # a field of the configuration, a package, or a process
    problem: str
    remedy: str = ""  # a sentence
    change: Change = ()  # a change of the configuration that applies the remedy; in an Assessment a proposal
    command: str = ""  # applies ``change``, or a command that does not concern the configuration
    code: str = ""  # the code of a violation; "memory" if a GPU has too little
    choices: tuple[Any, ...] = ()  # values to try for the field ``subject``, the best first
    is_of_layout: bool = False  # a warning that another layout may avoid
