"""``python -m megatron_fp8rl show CONFIG``: formats and kernels of every group of layers, with reasons.

Reads the layer table and the kernel choice, from which the trainer is built and the engines are started. Exit status 0,
or 2 with the mistakes of a configuration that would be refused there. Needs neither a GPU nor torch.
"""

from dataclasses import astuple, dataclass
from typing import Literal

from megatron_fp8rl.config import RunConfig, Violation
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.precision.formats import rollout_format
from megatron_fp8rl.precision.hardware import Generation, Hardware
from megatron_fp8rl.precision.kernel_choice import TABLE, KernelChoice
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.parameters import entries
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.doctor import Table, plain_table, wrapped
from megatron_fp8rl.preflight.findings import Checks
from megatron_fp8rl.preflight.memory import GPUS
from megatron_fp8rl.preflight.precision_table import kind_of
from megatron_fp8rl.preflight.shapes import check_degrees, check_model

_MATRICES = ("attention projections", "feed-forward, dense", "routed experts", "shared experts", "input of a layer")
_KINDS = ("embedding", *_MATRICES, "router", "norms, biases", "attention", "output head")
_PLACES = ("embedding", "first layers", "layers", "last layers", "prediction layers", "everywhere", "output head")
_ROLES = {"routed experts": "experts", "router": "router", "norms, biases": "norms", "attention": "attention"}
_WIRE_SCALES = {
    False: "FP32, one for each 128x128 block of a matrix; pow2 are powers of two",
    True: "E8M0, powers of two in one byte, one for 32 values of a row",
}
_COLUMNS = ("group", "layers", "trainer", "trainer kernel", "wire", "engine kernel")


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The machine the run is meant for."""

    gpu: Literal["h100", "h200", "b200", "cpu"] = "h200"

    @property
    def generation(self) -> Generation:
        return "cpu" if self.gpu == "cpu" else GPUS[self.gpu].generation


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    layers: str  # "0-47"; "-" outside layers
    trainer: str  # format
    trainer_kernel: str
    wire: str
    engine_kernel: str


def run(cfg: RunConfig, options: ShowOptions) -> int:
    violations = rules.check(cfg, accelerator=options.generation)
    print(text(cfg, options, violations))
    return 2 if violations else 0


def text(cfg: RunConfig, options: ShowOptions, violations: list[Violation]) -> str:
    """The printed text. Without groups if the degrees do not divide the model, because then no kernel can be chosen."""
    checks, blocks = Checks(cfg), []
    if check_degrees(checks, check_model(checks)):
        choice = KernelChoice.of(cfg, Hardware(options.generation))
        rows = tuple(astuple(group) for group in groups(cfg, choice))
        title = f"{cfg.name} on {options.gpu.upper()}: what computes what"
        blocks = [
            plain_table(Table(title, _COLUMNS, rows)),
            _lines("Why", [f"precision.exact: {choice.exact_text()}", *reasons(cfg, choice)]),
        ]
        if cfg.precision.rollout != "bf16":
            blocks[0] += f"\n  scales on the wire: {_WIRE_SCALES[rollout_format(cfg.precision).scale_kind == 'e8m0']}"
        if (untried := choice.untried(cfg)) is not None:
            blocks.append(_lines("Never run", [untried]))
    if violations:
        blocks.append(_lines("Refused", [str(violation) for violation in violations]))
    return "\n\n".join(blocks)


def _lines(title: str, lines: list[str]) -> str:
    return "\n".join([title, *map(wrapped, lines)])


def groups(cfg: RunConfig, choice: KernelChoice) -> list[Group]:
    """All groups, from the embedding to the output head. The degrees of ``cfg`` must divide its model."""
    table, everywhere = LayerTable.build(cfg.model, cfg.precision), set(range(cfg.model.num_layers))
    layers: dict[tuple[int, int], set[int]] = {(_PLACES.index("everywhere"), _KINDS.index("attention")): everywhere}
    weights: dict[tuple[int, int], list[tuple[str, Weight]]] = {}
    for entry in entries(cfg.model):
        for name, shape in () if entry.is_buffer else entry.weight.parts:
            kind = kind_of(name, len(shape))
            if kind == "attention projections" and ".self_attn." not in name and ".linear_attn." not in name:
                kind = "input of a layer"  # of multi-token prediction
            place = _place(table, entry.layer) if kind in _MATRICES else kind if kind in _PLACES else "everywhere"
            key = _PLACES.index(place), _KINDS.index(kind)
            layers.setdefault(key, set()).add(entry.layer)
            weights.setdefault(key, []).append((name, entry.weight))
    return [_group(cfg, choice, table, _KINDS[key[1]], layers[key], weights.get(key, [])) for key in sorted(layers)]


def _place(table: LayerTable, layer: int) -> str:
    if layer >= table.num_layers:
        return "prediction layers"
    if layer < table.first_fp8_layer:
        return "first layers"
    return "layers" if layer < table.end_fp8_layer else "last layers"


def _group(
    cfg: RunConfig,
    choice: KernelChoice,
    table: LayerTable,
    kind: str,
    layers: set[int],
    weights: list[tuple[str, Weight]],
) -> Group:
    trainer_fp8 = any(table.trainer_format(name).is_quantized for name, _ in weights)
    engine_fp8 = any(table.rollout_format(name).is_quantized for name, _ in weights)
    bf16 = "FP32" if cfg.precision.params == "fp32" else "BF16"
    first, last = min(layers), max(layers)
    return Group(
        name=kind,
        layers="-" if last < 0 else f"{first}" if first == last else f"{max(first, 0)}-{last}",
        trainer=f"FP8 {cfg.precision.trainer}" if trainer_fp8 else bf16,
        trainer_kernel=_trainer_kernel(
            cfg, choice, kind, [weight for name, weight in weights if table.trainer_format(name).is_quantized]
        ),
        wire=f"E4M3 + {table.rollout.scale_kind} scales" if engine_fp8 else "BF16" if weights else "-",
        engine_kernel=_engine_kernel(choice, kind, engine_fp8),
    )


def _trainer_kernel(cfg: RunConfig, choice: KernelChoice, kind: str, in_fp8: list[Weight]) -> str:
    """A description; for linears, of the kernels of all shards on a rank."""
    if kind in _ROLES:
        return choice.text(f"trainer.{_ROLES[kind]}")
    if not in_fp8:
        return _fixed_order(choice, kind) or "PyTorch"
    shapes = {slicing.shard_shape(weight, cfg.model, cfg.parallel.tensor) for weight in in_fp8}
    kernels = {choice.trainer.linear_kernel(rows, columns) for rows, columns in shapes}
    return ", ".join(sorted(choice.text("trainer.linears", kernel) for kernel in kernels))


def _engine_kernel(choice: KernelChoice, kind: str, in_fp8: bool) -> str:
    stock = "vLLM" if choice.hardware.is_gpu else "PyTorch"
    if kind == "routed experts":
        return choice.text("engine.experts") if in_fp8 or choice.hardware.is_gpu else stock
    if kind in ("norms, biases", "attention"):
        return choice.text(f"engine.{_ROLES[kind]}")
    return choice.text("engine.linears") if in_fp8 else _fixed_order(choice, kind) or stock


def _fixed_order(choice: KernelChoice, kind: str) -> str | None:
    """The kernel of BF16 linears at both ends of an exact run on GPUs."""
    is_used = choice.exact == "on" and choice.hardware.is_gpu and kind in _MATRICES
    return choice.text("trainer.norms", "batch_invariant") if is_used else None


def reasons(cfg: RunConfig, choice: KernelChoice) -> list[str]:
    """The reason for each role that the model and the formats have."""
    absent = {"formats", "exact"}
    if not cfg.model.is_moe:
        absent |= {"trainer.experts", "trainer.router", "trainer.combine", "engine.experts"}
    if cfg.precision.trainer == "bf16":
        absent.add("trainer.linears")
    if cfg.precision.rollout == "bf16":
        absent.add("engine.linears")
    return [
        f"{key.partition('.')[0]}, {role.words}: {choice.text(key)}: {choice.reasons[key]}"
        for key, role in TABLE.items()
        if key not in absent
    ]
