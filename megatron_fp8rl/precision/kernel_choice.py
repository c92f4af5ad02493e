"""Choose the kernel of every role in the trainer and the engines. Pure; no torch.

:data:`TABLE` has a row for each role: the field that selects its kernel, the kernels and the meaning of ``auto``. A
kernel's ``supports(cfg, hardware)`` returns None or a refusal. Only :func:`choose` evaluates the table.

The roles ``linears`` and ``experts`` of ``precision.kernels`` select Transformer Engine or DeepGEMM once for the whole
run, from the shapes of a full microbatch (``matmul_shapes.py``). The choice must not depend on the batch, because the
two sum products in different orders. Old log-probabilities and the first update use microbatches of different sizes,
and their ratio must be 1. All ranks and resumed runs make the same choice.

``precision.exact`` is such a field, too: :func:`resolved` alone reads its ``auto``. With it, ``auto`` of the other
fields selects kernels that are equal at both ends; without it, the fastest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from megatron_fp8rl.config import ConfigError, EngineConfig, PrecisionConfig, RunConfig, Violation
from megatron_fp8rl.precision import kernel_support as support
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_support import Supports
from megatron_fp8rl.precision.matmul_shapes import DEEP_GEMM_IS_FASTER, Field, deciding_work, fits_deep_gemm

End = Literal["trainer", "engine"]
Auto = Callable[[RunConfig, Hardware], tuple[str, str]]  # the meaning of "auto", and why


@dataclass(frozen=True)
class Kernel:
    text: str  # a description for tables and records
    supports: Supports = support.always
    text_on_cpu: str = ""  # if a CPU computes the same in another way
    marks: tuple[str, ...] = ()  # of an engine: lower-case substrings of the names of vLLM's classes


@dataclass(frozen=True)
class Role:
    """An operation and its kernels. ``path``: the field that selects the kernel; None if other fields determine it."""

    words: str
    kernels: Mapping[str, Kernel]
    auto: Auto
    path: str | None = None

    def named(self, cfg: RunConfig, hardware: Hardware) -> str | None:
        """The kernel that the configuration selects, if it belongs to this role; None if the choice is left open."""
        name = cfg.value(self.path) if self.path else "auto"
        return name if name in self.kernels else None

    def kernel(self, cfg: RunConfig, hardware: Hardware) -> str:
        return self.named(cfg, hardware) or self.auto(cfg, hardware)[0]


def resolved(cfg: RunConfig, hardware: Hardware) -> RunConfig:
    """The configuration with True or False in place of ``precision.exact`` = "auto"."""
    if cfg.precision.exact != "auto":
        return cfg
    return replace(cfg, precision=replace(cfg.precision, exact=support.forbids_exact(cfg, hardware) is None))


def _exact(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if cfg.precision.exact:
        fp8 = replace(cfg, engine=replace(cfg.engine, kv_cache_dtype="fp8"))
        if hardware.is_gpu and cfg != fp8 and not support.forbids_exact(fp8, hardware):
            return "on", "--engine.kv_cache_dtype fp8 would make it faster"
        return "on", "trainer and engine compute the same bits"
    if wrong := support.forbids_exact(cfg, hardware):
        name, problem = wrong.field.removeprefix("--"), wrong.problem.removeprefix("precision.exact: ")
        return "off", problem if name == "precision.exact" else f"{name} = {wrong.value!r}: {problem}"
    return "off", "the configuration says False"


def _base(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if (chosen := cfg.precision.kernel("trainer")) != "auto":
        return chosen, f"precision.kernels.trainer = {chosen}"
    return ("te", "a GPU multiplies in FP8") if hardware.is_gpu else ("emulated", "a CPU does not multiply in FP8")


def is_invariant(engine: EngineConfig, precision: PrecisionConfig, hardware: Hardware) -> bool:
    """Whether engines are batch-invariant; ``precision.exact`` requires it on a GPU."""
    return engine.batch_invariant or (precision.exact and hardware.is_gpu)


def _faster(name: Field) -> Auto:
    """The faster kernel: by the largest linear, because all use one kind, or by the mean tokens per expert."""

    def auto(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
        base, why = _base(cfg, hardware)
        if name == "experts" and cfg.parallel.dispatch == "gather":
            return "deep_gemm", "parallel.dispatch = gather: they read tokens by index"
        if not hardware.is_gpu or (name == "experts" and not cfg.model.is_moe):
            return base, why
        if cfg.precision.exact and cfg.precision.trainer != "bf16":
            return "deep_gemm", "precision.exact: the engine's products"
        if wrong := TABLE[f"trainer.{name}"].kernels["deep_gemm"].supports(cfg, hardware):
            return base, f"not DeepGEMM: {wrong.problem}"
        tokens, sides = deciding_work(name, cfg)
        threshold = DEEP_GEMM_IS_FASTER[name, cfg.precision.trainer]
        if sides and threshold.contains(tokens, *sides):
            return "deep_gemm", f"the faster one at {tokens:,.0f} tokens"
        return base, f"DeepGEMM is not the faster one at {tokens:,.0f} tokens" if sides else "no FP8 matrix is left"

    return auto


def _always(kernel: str, why: str) -> Auto:
    return lambda cfg, hardware: (kernel, why)


def _norms(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    kernels, why = _base(cfg, hardware)
    if kernels == "te" and is_invariant(cfg.engine, cfg.precision, hardware) and cfg.precision.params != "fp32":
        return "batch_invariant", "the engine is batch-invariant"
    return kernels, why


def _attention(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if not hardware.is_gpu:
        return "torch", "there is no GPU"
    if "transformer_engine" not in hardware.packages:
        return "torch", "transformer_engine is not installed"
    if cfg.precision.exact and not cfg.model.has("mla"):  # whose gradients alone are of this kernel
        return "engine", "precision.exact"
    return "cudnn", "the fastest with a backward pass"


def _router(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if hardware.is_gpu and is_invariant(cfg.engine, cfg.precision, hardware):
        return "batch_invariant", "the engine is batch-invariant"
    return "torch", "float32 is cheap here"


def _dispatch(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if not hardware.is_gpu or cfg.precision.exact:
        return "alltoall", "precision.exact: same order of sums as the engine's"
    if support.gather(cfg, hardware) or TABLE["trainer.experts"].kernel(cfg, hardware) != "deep_gemm":
        return "alltoall", "the experts' kernel needs sorted tokens"
    if cfg.parallel.expert > cfg.model.experts_per_token:
        return "alltoall", f"a token has {cfg.model.experts_per_token} experts, fewer than there are ranks"
    return "gather", "each rank gets every token once"


def _combine(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if cfg.parallel.dispatch in ("deepep", "hybridep"):
        return "experts", f"parallel.dispatch = {cfg.parallel.dispatch} adds outputs without weights"
    if hardware.is_gpu and TABLE["engine.experts"].kernel(cfg, hardware) == "deep_gemm":
        return "sum", "the engine's DeepGEMM experts apply router weights in the sum"
    if not hardware.is_gpu:
        return "sum", "a CPU engine applies router weights in the sum"
    return "experts", "the engine rounds each weighted output"


def _engine(on_gpu: str, why: str) -> Auto:
    """For linears or experts: the emulation on a CPU, otherwise vLLM's ``on_gpu``."""

    def auto(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
        return (on_gpu, why) if hardware.is_gpu else ("emulated", "there is no GPU")

    return auto


def _engine_linears(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if hardware.is_gpu and cfg.precision.rollout == "mxfp8":
        return "flashinfer_cutlass", "keeps weights in the wire format"
    # DeepGEMM's are the only ones that round activations to the power-of-two scales of ``precision.scales``.
    return _engine("deep_gemm", "rounds activations as the trainer does")(cfg, hardware)


def _engine_norms(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    invariant = is_invariant(cfg.engine, cfg.precision, hardware)
    return ("batch_invariant", "engine.batch_invariant") if invariant else ("vllm", "vLLM's own")


def _engine_experts(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if cfg.precision.exact and hardware.is_gpu and cfg.model.is_moe:
        return "deep_gemm", "precision.exact: batch-invariant, and the trainer uses it, too"
    if hardware.is_gpu and cfg.model.is_moe and cfg.precision.rollout == "mxfp8":
        return "deep_gemm", "stores MXFP8 weights in the wire format"
    return _engine("triton", "stores gate, up and down in the wire format")(cfg, hardware)


def _engine_attention(cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if not hardware.is_gpu:
        return "emulated", "there is no GPU"
    if support.takes_cache_attention(cfg, hardware):
        return "FP8_CACHE", "the fastest, and does not round queries"
    return "vllm", "vLLM chooses by GPU"


class _EngineRole(Role):
    def named(self, cfg: RunConfig, hardware: Hardware) -> str | None:
        return super().named(cfg, hardware) if hardware.is_gpu else None


_TE = Kernel("Transformer Engine", support.te)
_EMULATED = Kernel("PyTorch (emulated)")
_INVARIANT = Kernel("Triton, invariant", support.batch_invariant)

TABLE: dict[str, Role] = {
    "formats": Role("number formats", {"given": Kernel("", support.formats)}, _always("given", "")),
    "exact": Role("bitwise equality", {"on": Kernel("on", support.exact), "off": Kernel("off")}, _exact),
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
        "precision.kernels.linears",
    ),
    "trainer.experts": Role(
        "expert linears",
        {
            "te": Kernel("Transformer Engine (grouped)", support.te),
            "emulated": Kernel("PyTorch"),
            "deep_gemm": Kernel("DeepGEMM (grouped)", support.deep_gemm_experts, "PyTorch (as DeepGEMM)"),
        },
        _faster("experts"),
        "precision.kernels.experts",
    ),
    "trainer.norms": Role("norms", {"te": _TE, "emulated": Kernel("PyTorch"), "batch_invariant": _INVARIANT}, _norms),
    "trainer.attention": Role(
        "attention",
        {
            "engine": Kernel("engine forward, cuDNN backward", support.engine_attention),
            "cudnn": Kernel("cuDNN"),
            "torch": Kernel("PyTorch"),
        },
        _attention,
        "precision.kernels.attention",
    ),
    "trainer.router": Role("router", {"torch": Kernel("PyTorch"), "batch_invariant": _INVARIANT}, _router),
    "trainer.combine": Role(
        "router weights", {"experts": Kernel("in the experts"), "sum": Kernel("in the sum of a token")}, _combine
    ),
    "trainer.dispatch": Role(
        "tokens to experts",
        {
            "alltoall": Kernel("all-to-all"),
            "gather": Kernel("all-gather", support.gather),
            "deepep": Kernel("DeepEP", support.deep_ep),
            "hybridep": Kernel("HybridEP", support.hybrid_ep),
        },
        _dispatch,
        "parallel.dispatch",
    ),
    "engine.linears": _EngineRole(
        "FP8 linears",
        {
            "deep_gemm": Kernel("DeepGEMM", support.engine_blocks, marks=("deepgemm",)),
            "flashinfer_cutlass": Kernel("FlashInfer CUTLASS", marks=("flashinfercutlass",)),
            "cutlass": Kernel("CUTLASS", support.engine_fp32_scales, marks=("cutlass",)),
            "triton": Kernel("Triton", support.engine_fp32_scales, marks=("triton",)),
            "emulated": Kernel("PyTorch (emulated)", support.engine_emulation, marks=("emulat",)),
        },
        _engine_linears,
        "precision.kernels.engine_linears",
    ),
    "engine.experts": _EngineRole(
        "experts",
        {
            "deep_gemm": Kernel("DeepGEMM (grouped)", support.engine_deep_gemm_experts, marks=("deepgemm",)),
            "triton": Kernel("Triton", support.engine_triton_experts, marks=("triton",)),
            "emulated": Kernel("PyTorch (emulated)", marks=("emulated", "readable")),
        },
        # Their gate, up and down are in the wire format in every layout. A weight change allocates nothing, so CUDA
        # graphs stay valid.
        _engine_experts,
        "precision.kernels.engine_experts",
    ),
    "engine.norms": Role("norms", {"vllm": Kernel("vLLM"), "batch_invariant": _INVARIANT}, _engine_norms),
    "engine.attention": _EngineRole(
        "attention",
        {
            "FP8_CACHE": Kernel("ours for FP8 caches", support.fp8_cache_attention, marks=("custom",)),
            "FLASH_ATTN": Kernel("FlashAttention", marks=("flash_attn",)),
            "TRITON_ATTN": Kernel("Triton", marks=("triton",)),
            "FLASHINFER": Kernel("FlashInfer", support.flashinfer_attention, marks=("flashinfer",)),
            "vllm": Kernel("what vLLM takes"),
            "emulated": Kernel("PyTorch (emulated)"),
        },
        _engine_attention,
        "precision.kernels.engine_attention",
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
    dispatch: str

    def linear_kernel(self, rows: int, columns: int) -> str:
        """The kernel of an FP8 linear with shape [rows, columns] on a rank."""
        is_possible = self.linears != "deep_gemm" or fits_deep_gemm(rows, columns)
        return self.linears if is_possible else self.kernels


@dataclass(frozen=True, kw_only=True)
class EngineKernels:
    """The engines' kernel of each role, by the names in :data:`TABLE`."""

    linears: str
    experts: str
    norms: str
    attention: str

    @property
    def rounds_queries(self) -> bool:
        """Whether attention over an FP8 cache rounds queries to E4M3, too."""
        return self.attention not in ("FP8_CACHE", "emulated")


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    hardware: Hardware
    exact: str  # "on" or "off": precision.exact
    trainer: TrainerKernels
    engine: EngineKernels
    reasons: Mapping[str, str] = field(compare=False)  # by key of TABLE

    @classmethod
    def of(cls, cfg: RunConfig, hardware: Hardware) -> KernelChoice:
        """The choice, unchecked. Degrees of parallelism must divide the model."""
        cfg = resolved(cfg, hardware)
        picked = {key: _pick(role, cfg, hardware) for key, role in TABLE.items()}
        ends: dict[str, dict[str, str]] = defaultdict(dict)
        for key, (kernel, _) in picked.items():
            ends[key.partition(".")[0]][key.partition(".")[2]] = kernel
        return cls(
            hardware=hardware,
            exact=picked["exact"][0],
            trainer=TrainerKernels(**ends["trainer"]),
            engine=EngineKernels(**ends["engine"]),
            reasons={key: why for key, (_, why) in picked.items()},
        )

    def text(self, key: str, name: str | None = None) -> str:
        """A description of a role's kernel: the chosen one, or another of the role by ``name``."""
        kernel = TABLE[key].kernels[name or attrgetter(key)(self)]
        return kernel.text if self.hardware.is_gpu else kernel.text_on_cpu or kernel.text

    def untried(self, cfg: RunConfig) -> str | None:
        """A warning about formats and kernels that never ran on the chosen hardware."""
        if self.hardware.is_gpu and cfg.model.has("gdn"):
            return (
                "Gated delta nets have not run on GPUs yet. On CPUs the trainer's chunked form was compared with the "
                "recurrence. Run tests/gpu/test_delta_net_gpu.py first"
            )
        if self.hardware.generation != "blackwell" or "mxfp8" not in (cfg.precision.trainer, cfg.precision.rollout):
            return None
        return (
            "MXFP8 has never run on hardware. Its code was compared with the sources of Transformer Engine 2.16 and "
            "vLLM 0.26. Run `python -m benchmarks.mxfp8_first_run` first"
        )

    def record(self) -> dict[str, str]:
        keys = ("trainer.linears", "trainer.experts", "trainer.norms", "trainer.attention")
        return {"precision.exact": self.exact_text()} | {
            f"trainer kernel, {TABLE[key].words}": self.text(key) for key in keys
        }

    def exact_text(self) -> str:
        """Whether ``precision.exact`` is on, and why not, such as "off: sampling.top_p = 0.9: ..."."""
        return f"{self.exact}: {self.reasons['exact']}"

    def disagreements(self, in_use: Mapping[str, Sequence[str]]) -> list[str]:
        """One sentence per role whose engine kernel differs from the chosen one. ``in_use``: names of vLLM classes by
        role (``rollout/vllm_plugin/kernels_in_use.py``)."""
        messages = []
        for name, classes in in_use.items():
            key = f"engine.{name}"
            marks = TABLE[key].kernels[attrgetter(key)(self)].marks
            others = [each for each in classes if marks and not any(mark in each.lower() for mark in marks)]
            if others:
                chosen = f"{TABLE[key].path}: {self.text(key)} was chosen for the engine's {TABLE[key].words}"
                messages.append(f"{chosen}, but the engine uses {', '.join(others)}")
        return messages


def _pick(role: Role, cfg: RunConfig, hardware: Hardware) -> tuple[str, str]:
    """(kernel, reason). For the trainer's linears and experts, "te" means ``precision.kernels.trainer``."""
    named = role.named(cfg, hardware)
    if named is None:
        return role.auto(cfg, hardware)
    if named == "te":
        return _base(cfg, hardware)
    return named, f"{role.path} = {named}"


def refusals(cfg: RunConfig, hardware: Hardware, end: End | None = None) -> list[Violation]:
    """Reasons why selected kernels do not support the configuration, at one ``end`` or both; empty if they do.

    Kernels that ``auto`` selects are always supported, except that of ``trainer``, the fallback of other roles.
    Parallel degrees need not divide the model.
    """
    return list(dict.fromkeys(_refusals(cfg, hardware, end)))  # two roles may share a reason


def _refusals(cfg: RunConfig, hardware: Hardware, end: End | None) -> Iterator[Violation]:
    cfg = resolved(cfg, hardware)
    for key, role in TABLE.items():
        if end is not None and key not in ("formats", "exact") and not key.startswith(end):
            continue
        named = role.named(cfg, hardware)
        if role.path is None:
            named, _ = role.auto(cfg, hardware)
        if named in (None, "te") and role.path is not None:
            continue  # covered by the row of "trainer.kernels"
        if key == "exact":
            yield from support.inexact(cfg, hardware)
            continue
        if named is not None and (wrong := role.kernels[named].supports(cfg, hardware)):
            yield wrong


def choose(cfg: RunConfig, hardware: Hardware, end: End | None = None) -> KernelChoice:
    """The kernel of every role, at both ends or one. Raises ConfigError with all :func:`refusals`."""
    if wrong := refusals(cfg, hardware, end):
        raise ConfigError(wrong)
    return KernelChoice.of(cfg, hardware)
