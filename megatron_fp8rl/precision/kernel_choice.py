"""Choose the kernel of every role in the trainer and the engines. Pure; no torch.

:data:`TABLE` has a row for each role: the field that names its kernel, the kernels that there are, for each of them
``supports(cfg, hardware)``, which is None or says what is wrong, and what ``auto`` stands for. :func:`choose` reads the
table for one configuration and one kind of hardware. The trainer is built from its answer, the engines are started with
it, and preflight, memory estimates, the run's record and ``show`` ask it; nothing else decides.

``precision.linears`` and ``precision.experts`` choose Transformer Engine or DeepGEMM. The choice is a function of the
configuration: it is made once, from the shapes of a full microbatch (``matmul_shapes.py``), and holds for every pass of
the run, however many tokens a microbatch has.

It must not follow the batch. Transformer Engine and DeepGEMM add the same products in different orders, so their
results differ in the last bits. Old log-probabilities and the first update compute the same sequences in microbatches
of different sizes; with a choice per microbatch their ratio would no longer be 1 before anything was learned, and the
forward pass would be the engine's in some microbatches alone. Within one choice nothing depends on the number of
tokens: a row of DeepGEMM's products has the same bits whatever rows are computed beside it. All ranks have the same
configuration, so they choose alike, and so does a run that is resumed with the same thresholds.

``auto`` optimizes speed, not bitwise equality. Set ``deep_gemm`` for the forward pass of vLLM's DeepGEMM kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from megatron_fp8rl.config import FP8_BLOCK, ConfigError, RunConfig, Violation
from megatron_fp8rl.precision import kernel_support as support
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_support import Supports
from megatron_fp8rl.precision.matmul_shapes import experts_of, linears_of

End = Literal["trainer", "engine"]
Field = Literal["linears", "experts"]  # of PrecisionConfig
Auto = Callable[[RunConfig, Hardware], tuple[str, str]]  # what "auto" stands for, and why


@dataclass(frozen=True)
class Kernel:
    """One kernel of a role."""

    text: str  # in words, for tables and records
    supports: Supports = support.always
    text_on_cpu: str = ""  # where a CPU computes the same in another way
    marks: tuple[str, ...] = ()  # of an engine: what the name of vLLM's class for it has in it, in lower case


@dataclass(frozen=True)
class Role:
    """What is computed, and the kernels that can. ``path``: the field that names one; None: all follows from others."""

    words: str
    kernels: Mapping[str, Kernel]
    auto: Auto
    path: str | None = None

    def named(self, cfg: RunConfig, hardware: Hardware) -> str | None:
        """The kernel that the configuration names and that is this role's; None where it leaves the choice."""
        name = attrgetter(self.path)(cfg) if self.path else "auto"
        return name if name in self.kernels else None


@dataclass(frozen=True)
class Range:
    """Where DeepGEMM is the faster one: tokens that one matrix multiplies in a full microbatch, ends included."""

    first: float
    last: float = math.inf
    smallest_side: int = FP8_BLOCK  # of the matrix, rows or columns

    def holds(self, tokens: float, *sides: int) -> bool:
        return self.first <= tokens <= self.last and min(sides) >= self.smallest_side


# The thresholds, all of them, by field and the trainer's recipe; DeepGEMM multiplies in no others. They are set from
# what `benchmarks.experts` and `benchmarks.linears` measured on H200s (docs/measured.md), forward and backward.
DEEP_GEMM_IS_FASTER: dict[tuple[Field, str], Range] = {
    # Four layers of Qwen3-8B, and its feed-forward part by itself.
    ("linears", "blockwise"): Range(2048),
    # 8 to 256 experts with 1 to 8,192 tokens each, after a busy queue as well as with the host's share.
    ("experts", "blockwise"): Range(0),
    # 1 to 1,024 tokens each. With 2,048 and more Transformer Engine's loop over experts is the faster one: what
    # DeepGEMM saves in launches is less than its BF16 weight gradients take longer.
    ("experts", "bf16"): Range(0, last=1024),
}


def _base(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if cfg.precision.kernels != "auto":
        return cfg.precision.kernels, f"precision.kernels = {cfg.precision.kernels}"
    return ("te", "a GPU multiplies in FP8") if hardware.is_gpu else ("emulated", "a CPU does not multiply in FP8")


def _faster(name: Field) -> Auto:
    """Linears are judged by the largest, which takes the most time: they are multiplied by one kind of kernels;
    experts by the tokens of each with balanced routing."""

    def auto(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
        base, why = _base(cfg, hardware)
        if not hardware.is_gpu or (name == "experts" and not cfg.model.is_moe):
            return base, why
        if wrong := TABLE[f"trainer.{name}"].kernels["deep_gemm"].supports(cfg, hardware):
            return base, f"not DeepGEMM: {wrong.problem}"
        tokens, sides = _work(name, cfg)
        threshold = DEEP_GEMM_IS_FASTER[name, cfg.precision.trainer]
        if sides and threshold.holds(tokens, *sides):
            return "deep_gemm", f"the faster one at {tokens:,.0f} tokens"
        return base, f"DeepGEMM is not the faster one at {tokens:,.0f} tokens" if sides else "no FP8 matrix is left"

    return auto


def _work(name: Field, cfg: RunConfig) -> tuple[float, tuple[int, ...]]:
    """(tokens of a full microbatch, sides) of what the choice depends on; no sides where there is nothing of it."""
    if name == "experts":
        experts = experts_of(cfg)
        assert experts is not None  # _faster has asked
        return experts.tokens / experts.experts, (experts.hidden, experts.width)
    shapes = [use.shape for use in linears_of(cfg)]
    if not shapes:
        return 0, ()
    largest = max(shapes, key=lambda shape: shape.num_operations)
    return largest.tokens, (largest.rows, largest.columns)


def _always(kernel: str, why: str) -> Auto:
    return lambda cfg, hardware: (kernel, why)


def _norms(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    kernels, why = _base(cfg, hardware)
    if kernels == "te" and cfg.rollout.batch_invariant and cfg.precision.params != "fp32":
        return "batch_invariant", "rollout.batch_invariant"
    return kernels, why


def _attention(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if not hardware.is_gpu:
        return "torch", "there is no GPU"
    if "transformer_engine" not in hardware.packages:
        return "torch", "transformer_engine is not installed"
    return "cudnn", "the fastest with a backward pass"


def _router(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if hardware.is_gpu and cfg.rollout.batch_invariant:
        return "batch_invariant", "rollout.batch_invariant"
    return "torch", "float32 is cheap here"


def _combine(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if hardware.is_gpu and cfg.rollout.moe_backend == "deep_gemm":
        return "sum", "rollout.moe_backend = deep_gemm weighs where it adds"
    return "experts", "the engine rounds each weighted output"


def _engine(on_gpu: str, why: str) -> Auto:
    """Of linears or experts: the emulation on a CPU, and what vLLM calls ``on_gpu`` otherwise."""

    def auto(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
        return (on_gpu, why) if hardware.is_gpu else ("emulated", "there is no GPU")

    return auto


def _engine_norms(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    is_invariant = cfg.rollout.batch_invariant
    return ("batch_invariant", "rollout.batch_invariant") if is_invariant else ("vllm", "vLLM's own")


class _EngineRole(Role):
    """Fields of engines name kernels of GPUs."""

    def named(self, cfg: RunConfig, hardware: Hardware) -> str | None:
        return super().named(cfg, hardware) if hardware.is_gpu else None


_TE = Kernel("Transformer Engine", support.te)
_EMULATED = Kernel("PyTorch (emulated)")
_INVARIANT = Kernel("batch-invariant Triton", support.batch_invariant)

TABLE: dict[str, Role] = {
    "formats": Role("number formats", {"given": Kernel("", support.formats)}, _always("given", "")),
    "trainer.params": Role(
        "parameters",
        {"bf16": Kernel("BF16"), "fp32": Kernel("FP32"), "fp8": Kernel("FP8", support.fp8_parameters)},
        _always("bf16", ""),
        "precision.params",
    ),
    "trainer.kernels": Role("norms, and linears by default", {"te": _TE, "emulated": _EMULATED}, _base),
    "trainer.linears": Role(
        "FP8 linears",
        {
            "te": _TE,
            "emulated": _EMULATED,
            "deep_gemm": Kernel("DeepGEMM", support.deep_gemm_linears, "PyTorch (as DeepGEMM)"),
        },
        _faster("linears"),
        "precision.linears",
    ),
    "trainer.experts": Role(
        "expert linears",
        {
            "te": Kernel("Transformer Engine (grouped)", support.te),
            "emulated": Kernel("PyTorch"),
            "deep_gemm": Kernel("DeepGEMM (grouped)", support.deep_gemm_experts, "PyTorch (as DeepGEMM)"),
        },
        _faster("experts"),
        "precision.experts",
    ),
    "trainer.norms": Role(
        "norms", {"te": _TE, "emulated": Kernel("PyTorch"), "batch_invariant": _INVARIANT}, _norms
    ),
    "trainer.attention": Role(
        "attention",
        {
            "engine": Kernel("the engine's forward, cuDNN backward", support.engine_attention),
            "cudnn": Kernel("cuDNN"),
            "torch": Kernel("PyTorch"),
        },
        _attention,
        "precision.attention",
    ),
    "trainer.router": Role("router", {"torch": Kernel("PyTorch"), "batch_invariant": _INVARIANT}, _router),
    "trainer.combine": Role(
        "weights of experts", {"experts": Kernel("in the experts"), "sum": Kernel("in the sum of a token")}, _combine
    ),
    "engine.linears": _EngineRole(
        "FP8 linears",
        {
            "deep_gemm": Kernel("DeepGEMM", marks=("deepgemm",)),
            "cutlass": Kernel("CUTLASS", support.engine_fp32_scales, marks=("cutlass",)),
            "triton": Kernel("Triton", support.engine_fp32_scales, marks=("triton",)),
            "emulated": Kernel("PyTorch (emulated)", marks=("emulated",)),
        },
        # The only ones that round activations to the power-of-two scales of ``precision.scales``.
        _engine("deep_gemm", "rounds activations as the trainer does"),
        "rollout.linear_backend",
    ),
    "engine.experts": _EngineRole(
        "experts",
        {
            "deep_gemm": Kernel("DeepGEMM (grouped)", support.engine_deep_gemm_experts, marks=("deepgemm",)),
            "triton": Kernel("Triton", support.engine_experts, marks=("triton",)),
            "emulated": Kernel("PyTorch (emulated)", marks=("emulated", "readable")),
        },
        # They hold gate, up and down as they are sent at every degree of parallelism, and allocate nothing when weights
        # change, so CUDA graphs stay valid.
        _engine("triton", "holds gate, up and down as they are sent"),
        "rollout.moe_backend",
    ),
    "engine.norms": Role("norms", {"vllm": Kernel("vLLM"), "batch_invariant": _INVARIANT}, _engine_norms),
    "engine.attention": _EngineRole(
        "attention",
        {
            "FLASH_ATTN": Kernel("FlashAttention", marks=("flash_attn",)),
            "TRITON_ATTN": Kernel("Triton", marks=("triton",)),
            "FLASHINFER": Kernel("FlashInfer", support.flashinfer_attention, marks=("flashinfer",)),
            "vllm": Kernel("what vLLM takes"),
        },
        _always("vllm", "vLLM knows the GPU"),
        "rollout.attention_backend",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TrainerKernels:
    """The trainer's kernel of each role, by the names in :data:`TABLE`."""

    params: str
    kernels: str
    linears: str
    experts: str
    norms: str
    attention: str
    router: str
    combine: str

    def of_matrix(self, rows: int, columns: int) -> str:
        """The kernel of an FP8 linear that has [rows, columns] on a rank: DeepGEMM multiplies whole blocks alone."""
        is_whole = rows % FP8_BLOCK == 0 and columns % FP8_BLOCK == 0
        return self.linears if is_whole or self.linears != "deep_gemm" else self.kernels


@dataclass(frozen=True, kw_only=True)
class EngineKernels:
    """The engines' kernel of each role, by the names in :data:`TABLE`."""

    linears: str
    experts: str
    norms: str
    attention: str


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The kernel of every role at both ends. Made by :func:`choose`."""

    hardware: Hardware
    trainer: TrainerKernels
    engine: EngineKernels
    reasons: Mapping[str, str] = field(compare=False)  # by key of TABLE

    @classmethod
    def of(cls, cfg: RunConfig, hardware: Hardware) -> KernelChoice:
        """The choice without asking whether it can work. Degrees of parallelism have to divide the model."""
        picked = {key: _pick(role, cfg, hardware) for key, role in TABLE.items()}
        ends = {
            end: {key.partition(".")[2]: kernel for key, (kernel, _) in picked.items() if key.startswith(end)}
            for end in ("trainer.", "engine.")
        }
        return cls(
            hardware=hardware,
            trainer=TrainerKernels(**ends["trainer."]),
            engine=EngineKernels(**ends["engine."]),
            reasons={key: why for key, (_, why) in picked.items()},
        )

    def text(self, key: str, name: str | None = None) -> str:
        """The kernel of a role in words: the chosen one, or another of the role by its ``name``."""
        kernel = TABLE[key].kernels[name or attrgetter(key)(self)]
        return kernel.text if self.hardware.is_gpu else kernel.text_on_cpu or kernel.text

    def record(self) -> dict[str, str]:
        """What computes each part of a training step, for the record of a run."""
        keys = ("trainer.linears", "trainer.experts", "trainer.norms", "trainer.attention")
        return {f"trainer kernel, {TABLE[key].words}": self.text(key) for key in keys}

    def disagreements(self, in_use: Mapping[str, Sequence[str]]) -> list[str]:
        """Where an engine computes with another kernel than was chosen, in sentences.

        ``in_use``: by role the names of vLLM's classes, as ``rollout/vllm_plugin/kernels_in_use.py`` reads them.
        """
        found = []
        for name, classes in in_use.items():
            key = f"engine.{name}"
            marks = TABLE[key].kernels[attrgetter(key)(self)].marks
            others = [each for each in classes if marks and not any(mark in each.lower() for mark in marks)]
            if others:
                found.append(
                    f"{TABLE[key].path}: {self.text(key)} was chosen for {TABLE[key].words} of the engine, and it "
                    f"computes with {', '.join(others)}"
                )
        return found


def _pick(role: Role, cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    """(kernel, why). Of the trainer's linears and experts "te" means what ``precision.kernels`` says."""
    named = role.named(cfg, hardware)
    if named is None:
        return role.auto(cfg, hardware)
    if named == "te":
        return _base(cfg, hardware)
    return named, f"{role.path} = {named}"


def refusals(cfg: RunConfig, hardware: Hardware, end: End | None = None) -> list[Violation]:
    """Why kernels that the configuration asks for cannot compute what it asks of them; empty when they can. Of one
    ``end``, or of both.

    What ``auto`` stands for can, except for ``precision.kernels``, which the rest falls back on. Answers for any
    configuration, also for one whose degrees do not divide its model.
    """
    return list(dict.fromkeys(_refusals(cfg, hardware, end)))  # two roles may share a reason


def _refusals(cfg: RunConfig, hardware: Hardware, end: End | None) -> Iterator[Violation]:
    for key, role in TABLE.items():
        if end is not None and key != "formats" and not key.startswith(end):
            continue
        named = role.named(cfg, hardware)
        if role.path is None:
            named, _ = role.auto(cfg, hardware)
        if named in (None, "te") and role.path is not None:
            continue  # the row of "trainer.kernels" speaks for it
        if named is not None and (wrong := role.kernels[named].supports(cfg, hardware)):
            yield wrong


def choose(cfg: RunConfig, hardware: Hardware, end: End | None = None) -> KernelChoice:
    """The kernel of every role at both ends. Raises ConfigError with all :func:`refusals`, of both ends or of the one
    that is built here."""
    if wrong := refusals(cfg, hardware, end):
        raise ConfigError(wrong)
    return KernelChoice.of(cfg, hardware)
