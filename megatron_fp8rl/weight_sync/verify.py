"""Compare the engines' weights with those sent: digests by name, slice by slice, on trainer rank 0.

Raises :class:`WeightMismatch`, which names every wrong tensor, its worker, and the difference: older weights are
recognized by the digests of the previous publication.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_fp8rl.precision.formats import weight_of_scales
from megatron_fp8rl.types import KVScales
from megatron_fp8rl.weight_sync.digest import combine

Kind = Literal["missing", "extra", "corrupted", "stale", "mis-scaled", "version"]

_MEANING = {
    "missing": "was sent, but the engine does not have it",
    "extra": "exists in the engine, but was not sent",
    "corrupted": "differs from what was sent",
    "stale": "is that of the previous publication",
    "mis-scaled": "has the right bytes, but other scales",
}


@dataclass(frozen=True)
class Mismatch:
    name: str  # Hugging Face name; empty for a wrong version
    worker: str  # "replica 0 rank 1"
    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "version":
            return f"{self.worker}: {self.detail}"
        return f"{self.name} in {self.worker}: {self.kind}, it {_MEANING[self.kind]}"


class WeightMismatch(RuntimeError):
    """An engine's weights differ from those published. ``mismatches`` lists all; the message shows the first ten."""

    def __init__(self, version: int, mismatches: Sequence[Mismatch]):
        self.version = version
        self.mismatches = tuple(mismatches)
        lines = [f"  {m}" for m in self.mismatches[:10]]
        if len(self.mismatches) > 10:
            lines.append(f"  and {len(self.mismatches) - 10} more")
        super().__init__(
            f"policy version {version}: the engines' weights differ from those published\n" + "\n".join(lines)
        )

    def __reduce__(self):
        return type(self), (self.version, self.mismatches)


class KVScaleMismatch(RuntimeError):
    """A worker's FP8 KV cache scales differ from those sent; the message names the first ten."""


@dataclass
class Expected:
    """Digests of one publication, by engine rank, then by Hugging Face name."""

    version: int
    by_rank: list[Mapping[str, str]] = field(default_factory=list)


def _kind(name: str, actual: Mapping[str, str], expected: Mapping[str, str], previous: Mapping[str, str]) -> Kind:
    if actual[name] == previous.get(name):
        return "stale"
    weight = weight_of_scales(name)
    if weight is not None and actual.get(weight) == expected.get(weight):
        return "mis-scaled"
    return "corrupted"


def _compare(
    worker: str, actual: Mapping[str, str], expected: Mapping[str, str], previous: Mapping[str, str]
) -> list[Mismatch]:
    mismatches = [Mismatch(name, worker, "missing") for name in expected if name not in actual]
    mismatches += [Mismatch(name, worker, "extra") for name in actual if name not in expected]
    for name in expected:
        if name in actual and actual[name] != expected[name]:
            kind = _kind(name, actual, expected, previous)
            # A mis-scaled weight is reported under the name of the weight.
            weight = weight_of_scales(name) if kind == "mis-scaled" else None
            mismatches.append(Mismatch(weight or name, worker, kind))
    return mismatches


def all_match(replicas: Sequence[Sequence[Mapping[str, Any]]], expected: Expected) -> bool:
    """Whether all workers report the expected version and combined digest; else the slower :func:`verify` names all."""
    wanted = [(rank, expected.version, combine(digests)) for rank, digests in enumerate(expected.by_rank)]
    return all(
        wanted == [(r["rank"], r["version"], r["combined"]) for r in sorted(workers, key=lambda report: report["rank"])]
        for workers in replicas
    )


def verify(
    replicas: Sequence[Sequence[Mapping[str, Any]]], expected: Expected, previous: Expected | None = None
) -> None:
    """Compare the report of each worker of each replica (``WorkerExtension.weight_digests``) with ``expected``. Raises
    WeightMismatch with all differences. If a worker has another version, lists only the version."""
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
                detail = f"has policy version {report['version']}, not {expected.version}"
                mismatches.append(Mismatch("", worker, "version", detail))
                continue
            before = previous.by_rank[report["rank"]] if previous else {}
            mismatches += _compare(worker, report["digests"], expected.by_rank[report["rank"]], before)
    if mismatches:
        raise WeightMismatch(expected.version, mismatches)


def verify_kv_scales(replicas: Sequence[Sequence[Mapping[str, Any]]], sent: KVScales, version: int) -> None:
    """Compare float32 scales of workers (``WorkerExtension.set_kv_scales``) exactly. Raises KVScaleMismatch."""
    wrong = []
    for index, workers in enumerate(replicas):
        for report in workers:
            actual = {int(layer): tuple(row) for layer, row in report["scales"].items()}
            wrong += [
                f"  layer {layer} in replica {index} rank {report['rank']}: has {actual.get(layer)}, "
                f"sent {sent.get(layer)}"
                for layer in sorted(sent.keys() | actual.keys())
                if actual.get(layer) != sent.get(layer)
            ]
    if wrong:
        more = [f"  and {len(wrong) - 10} more"] if len(wrong) > 10 else []
        lines = "\n".join([*wrong[:10], *more])
        raise KVScaleMismatch(
            f"policy version {version}: the engines' (query, key, value) scales of the KV cache differ from those "
            f"published\n{lines}"
        )
