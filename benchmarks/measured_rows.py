"""Rows that GPUs have measured, and what they say: is FP8 faster than BF16 for a shape?

Rows are JSON lines of ``benchmarks/experts.py`` and ``benchmarks/linears.py``, which write them to docs/measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.record import KEPT, Row
from megatron_fp8rl.precision.matmul_shapes import Experts, Linear

Shape = Experts | Linear

NOISE = 0.02  # of a ratio of two times; what differs by less is called equal


def rows(name: str) -> list[Row]:
    """Rows of a benchmark, older ones first; empty when it was never run."""
    path = KEPT / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def is_of(gpu: str, device: str) -> bool:
    """Whether words of a kind of GPU are in the name that the driver gives a device: an H200 is no GH200."""
    return f" {gpu} ".casefold() in f" {device} ".casefold()


def span(numbers: Sequence[int]) -> str:
    """Ascending numbers by the first and the last, in words."""
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def is_bf16(arm: str) -> bool:
    """Whether an arm of a benchmark multiplies in BF16, forward and backward."""
    return arm.endswith(" bf16")


@dataclass(frozen=True)
class Answer:
    """The fastest FP8 arm against the fastest BF16 one; milliseconds of forward and backward."""

    fp8: str
    fp8_ms: float
    bf16: str
    bf16_ms: float

    @classmethod
    def of(cls, ms: Mapping[str, float]) -> Answer | None:
        """By arm; None without an arm of each kind."""
        in_bf16 = {arm: time for arm, time in ms.items() if is_bf16(arm)}
        in_fp8 = {arm: time for arm, time in ms.items() if arm not in in_bf16}
        if not in_bf16 or not in_fp8:
            return None
        slow, fast = min(in_bf16, key=in_bf16.get), min(in_fp8, key=in_fp8.get)
        return cls(fast, in_fp8[fast], slow, in_bf16[slow])

    @property
    def gain(self) -> float:
        """How many times as fast FP8 is."""
        return self.bf16_ms / self.fp8_ms

    def __str__(self) -> str:
        if self.gain > 1 + NOISE:
            answer = "FP8 pays"
        else:
            answer = "FP8 does not pay" if self.gain < 1 - NOISE else "FP8 makes no difference"
        return f"{answer}: {self.fp8} {self.fp8_ms:.2f} ms, {self.bf16} {self.bf16_ms:.2f} ms, {self.gain:.2f}x"


@dataclass(frozen=True)
class Measured:
    """What one device took for one shape: milliseconds of forward and backward by arm."""

    shape: Shape  # as it was measured
    device: str
    pattern: str  # of routing; empty for linears
    ms: Mapping[str, float]

    def distance(self, tokens: int) -> float:
        """How far the measured tokens are from ``tokens``; 1 is a factor of two."""
        return abs(math.log2(self.shape.tokens / tokens))


def of_shape(found: Iterable[Row], shape: Shape) -> list[Measured]:
    """All measurements of a shape, with whatever number of tokens; of an arm that was timed twice the newer time."""
    what, fixed = ("experts" if isinstance(shape, Experts) else "linears"), asdict(shape)
    del fixed["tokens"]
    groups: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in found:
        is_time = row.get("measured") == what and "ms" in row and "device" in row
        if is_time and all(row.get(name) == fixed[name] for name in fixed):
            key = row["device"], row.get("pattern", ""), row["tokens"]
            groups.setdefault(key, {})[row["arm"]] = row["ms"]
    return [
        Measured(replace(shape, tokens=tokens), device, pattern, ms) for (device, pattern, tokens), ms in groups.items()
    ]


def nearest(
    found: Iterable[Row], shape: Shape, gpu: str, arms: Callable[[str], bool] = lambda arm: True
) -> Measured | None:
    """The measurement that comes closest to a shape, of the arms that ``arms`` accepts; None without FP8 or BF16.

    Rows of another device are taken only when there is none of ``gpu``. Then the number of tokens decides, then
    routing: balanced before all other patterns.
    """
    candidates = [
        replace(m, ms={arm: ms for arm, ms in m.ms.items() if is_bf16(arm) or arms(arm)})
        for m in of_shape(found, shape)
    ]

    def order(m: Measured) -> tuple:
        return not is_of(gpu, m.device), m.distance(shape.tokens), m.pattern not in ("", "balanced"), m.pattern

    return min((m for m in candidates if Answer.of(m.ms)), key=order, default=None)


def nearest_of_others(
    found: Sequence[Row], shape: Experts, gpu: str, arms: Callable[[str], bool] = lambda arm: True
) -> Measured | None:
    """The same of other numbers of such experts: what comes closest in the tokens of each, then in their number."""
    kin = []
    for number in {row["experts"] for row in found if row.get("measured") == "experts"} - {shape.experts}:
        tokens = max(1, shape.tokens * number // shape.experts)
        if (one := nearest(found, replace(shape, experts=number, tokens=tokens), gpu, arms)) is not None:
            kin.append((not is_of(gpu, one.device), one.distance(tokens), abs(math.log2(number / shape.experts)), one))
    return min(kin, key=lambda entry: entry[:3], default=(None,))[-1]


def thresholds(found: Iterable[Row], measured: str, names: Sequence[str]) -> list[Row]:
    """Shapes that one run has timed with at least three numbers of tokens, and from which of those on FP8 pays.

    "from 2,048" says that it pays at 2,048 and at all larger ones, and not at the next smaller one.
    """
    groups: dict[tuple, dict[int, dict[str, float]]] = {}
    for row in found:
        if row["measured"] == measured and "ms" in row:
            key = tuple(row.get(name) for name in ("run", *names))
            groups.setdefault(key, {}).setdefault(row["tokens"], {})[row["arm"]] = row["ms"]
    lines = []
    for key, ms in groups.items():
        answers = {tokens: answer for tokens in sorted(ms) if (answer := Answer.of(ms[tokens]))}
        if len(answers) >= 3:
            wins = [tokens for tokens, answer in answers.items() if answer.gain > 1 + NOISE]
            line = dict(zip(("run", *names), key, strict=True)) | {"tokens": span(list(answers))}
            lines.append(line | {"FP8 pays": _where(wins, list(answers))})
    return lines


def _where(wins: Sequence[int], timed: Sequence[int]) -> str:
    if len(wins) in (0, len(timed)):
        return "everywhere" if wins else "nowhere"
    first = None  # of the last ones, without a gap
    for tokens in reversed(timed):
        if tokens not in wins:
            break
        first = tokens
    scattered = [f"{tokens:,}" for tokens in wins if first is None or tokens < first]
    return ", ".join(scattered + ([f"from {first:,}"] if first is not None else []))
