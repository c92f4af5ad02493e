"""Compare what the engines hold with what was sent: digests by name, slice by slice.

In:  the trainer's digests of what it sent, in this publication and the previous one, and the digests that every engine
     worker computed of its kernel parameters.
Out: nothing, or :class:`WeightMismatch`, which names every wrong tensor, the worker that holds it, and the difference.
Pure; runs on trainer rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_fp8rl.precision.formats import SCALE_SUFFIX
from megatron_fp8rl.types import KVScales
from megatron_fp8rl.weight_sync.digest import combine

Kind = Literal["missing", "extra", "corrupted", "stale", "mis-scaled", "version"]

_MEANING = {
    "missing": "was sent, but the engine does not hold it",
    "extra": "is held by the engine, but was not sent",
    "corrupted": "differs from what was sent",
    "stale": "is that of the previous publication",
    "mis-scaled": "has the right bytes, but other scales",
}


@dataclass(frozen=True)
class Mismatch:
    """One wrong tensor in one engine worker."""

    name: str  # Hugging Face name; empty for a wrong version
    worker: str  # "replica 0 rank 1"
    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "version":
            return f"{self.worker}: {self.detail}"
        return f"{self.name} in {self.worker}: {self.kind}, it {_MEANING[self.kind]}"


class WeightMismatch(RuntimeError):
    """An engine does not hold what was published. ``mismatches`` lists all differences; the message shows the first
    ten.
    """

    def __init__(self, version: int, mismatches: Sequence[Mismatch]):
        self.version = version
        self.mismatches = tuple(mismatches)
        lines = [f"  {m}" for m in self.mismatches[:10]]
        if len(self.mismatches) > 10:
            lines.append(f"  and {len(self.mismatches) - 10} more")
        super().__init__(f"policy version {version}: the engines do not hold what was published\n" + "\n".join(lines))

    def __reduce__(self):
        return type(self), (self.version, self.mismatches)


class KVScaleMismatch(RuntimeError):
    """An engine worker holds other scales of its FP8 KV cache than were sent; the message names the first ten."""


@dataclass
class Expected:
    """Digests of one publication: by engine rank, then by Hugging Face name."""

    version: int
    by_rank: list[Mapping[str, str]] = field(default_factory=list)


def _kind(name: str, held: Mapping[str, str], expected: Mapping[str, str], previous: Mapping[str, str]) -> Kind:
    """How the tensor held differs from the expected one."""
    if held[name] == previous.get(name):
        return "stale"
    if name.endswith(SCALE_SUFFIX):
        weight = name.removesuffix(SCALE_SUFFIX)
        if held.get(weight) == expected.get(weight):
            return "mis-scaled"
    return "corrupted"


def _compare(
    worker: str, held: Mapping[str, str], expected: Mapping[str, str], previous: Mapping[str, str]
) -> list[Mismatch]:
    found = [Mismatch(name, worker, "missing") for name in expected if name not in held]
    found += [Mismatch(name, worker, "extra") for name in held if name not in expected]
    for name in expected:
        if name in held and held[name] != expected[name]:
            kind = _kind(name, held, expected, previous)
            # A mis-scaled weight is reported under the name of the weight.
            found.append(Mismatch(name.removesuffix(SCALE_SUFFIX) if kind == "mis-scaled" else name, worker, kind))
    return found


def holds_all(replicas: Sequence[Sequence[Mapping[str, Any]]], expected: Expected) -> bool:
    """Whether every worker of every replica reports the version and the combined digest of everything sent to it.

    If not, :func:`verify` finds the differences in reports that name every tensor, which take far longer.
    """
    wanted = [(rank, expected.version, combine(held)) for rank, held in enumerate(expected.by_rank)]
    return all(
        wanted == [(r["rank"], r["version"], r["combined"]) for r in sorted(workers, key=lambda report: report["rank"])]
        for workers in replicas
    )


def verify(
    replicas: Sequence[Sequence[Mapping[str, Any]]], expected: Expected, previous: Expected | None = None
) -> None:
    """Compare the report of each worker of each replica (``WorkerExtension.weight_digests``) with ``expected``.

    Raises WeightMismatch with all differences; if a worker holds another version, with that alone.
    """
    mismatches: list[Mismatch] = []
    for index, workers in enumerate(replicas):
        ranks = sorted(report["rank"] for report in workers)
        if ranks != list(range(len(expected.by_rank))):
            detail = f"workers {ranks} reported, {len(expected.by_rank)} were expected"
            mismatches.append(Mismatch("", f"replica {index}", "version", detail))
            continue
        for report in workers:
            worker = f"replica {index} rank {report['rank']}"
            if report["version"] != expected.version:
                detail = f"holds policy version {report['version']}, not {expected.version}"
                mismatches.append(Mismatch("", worker, "version", detail))
                continue
            before = previous.by_rank[report["rank"]] if previous else {}
            mismatches += _compare(worker, report["digests"], expected.by_rank[report["rank"]], before)
    if mismatches:
        raise WeightMismatch(expected.version, mismatches)


def verify_kv_scales(replicas: Sequence[Sequence[Mapping[str, Any]]], sent: KVScales, version: int) -> None:
    """Compare the scales that each worker of each replica reads (``WorkerExtension.set_kv_scales``) with those sent.

    Exact, because scales are float32 at both ends. Raises KVScaleMismatch.
    """
    wrong = []
    for index, workers in enumerate(replicas):
        for report in workers:
            held = {int(layer): tuple(row) for layer, row in report["scales"].items()}
            wrong += [
                f"  layer {layer} in replica {index} rank {report['rank']}: holds {held.get(layer)}, "
                f"sent {sent.get(layer)}"
                for layer in sorted(sent.keys() | held.keys())
                if held.get(layer) != sent.get(layer)
            ]
    if wrong:
        more = [f"  and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        lines = "\n".join([*wrong[:10], *more])
        raise KVScaleMismatch(
            f"policy version {version}: the engines do not hold the (query, key, value) scales of the KV cache that "
            f"were published\n{lines}"
        )
