"""Publish from shard to shard: every trainer rank sends what it holds to the engine workers that keep it.

In:  this rank's parameters, the plan's inputs, and on rank 0 the engines.
Out: messages delivered and loaded, digests of what every engine rank has to hold.
Runs on every trainer rank; rank 0 alone makes requests, one for a whole publication. While the GPU quantizes a round,
the one before travels, and the engines load the one before that.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.weight_sync.digest import NamedDigests, Names, headers_of, values_of_sums
from megatron_fp8rl.weight_sync.gather import together
from megatron_fp8rl.weight_sync.pack import Holdings, RoundPacker
from megatron_fp8rl.weight_sync.plan import TrainerLayout
from megatron_fp8rl.weight_sync.schedule import Exchange
from megatron_fp8rl.weight_sync.transport import Receivers, TransportError, own_address
from megatron_fp8rl.weight_sync.transports.base import Fabric, FabricError, Place, open_fabric, open_store
from megatron_fp8rl.weight_sync.wire import PlanInputs

_GRACE_S = 10.0  # for the error that names a failed replica to arrive after the first sign of trouble


class ShardSender:
    """A trainer rank's end of the transports ipc and nccl.

    ``receivers`` are the engines on rank 0, None elsewhere; ``group`` is a gloo group of all trainer ranks (None: one).
    """

    def __init__(
        self,
        kind: str,
        inputs: PlanInputs,
        parameters: Mapping[str, Tensor],
        receivers: Receivers | None,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self.kind = kind
        self.inputs = inputs
        self.rank = rank
        self.pack_s = 0.0  # of the last publication, by this rank's host
        self.send_s = 0.0
        self._receivers = receivers
        self._group = group
        self._device = device
        self._deadline_s = inputs.rollout.update_deadline_s
        # Less than a request has, so that the error that says who waited for whom comes back with it.
        self._timeout_s = 0.9 * self._deadline_s
        self._slices, self._whole = inputs.exchanges()
        self._holdings = Holdings(parameters, TrainerLayout.from_config(inputs.parallel), inputs.model, rank)
        self._packers: dict[bool, list[RoundPacker]] = {}
        self._addresses: list[int] = []
        self._fabric: Fabric | None = None
        self._requests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-requests")
        self._request: Future[None] | None = None
        self._num_attempts = 0
        self._num_replicas = inputs.rollout.num_replicas
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        """Bytes that one replica receives in a publication."""
        return self._slices.num_bytes

    def check(self) -> None:
        """Raise when this rank's model does not hold what it has to send, or a tensor cannot be sent in parts."""
        for number in self._slices.rounds:
            for message in number.sent_by(self.rank):
                for part in message.parts:
                    assert part.words  # PlanError for parts that cut words
                    if part.transfer.quantize != "gathered" and not part.is_scale:
                        self._holdings.pieces(part.transfer, part.start, part.stop)

    # ---- connection

    def connect(self, num_replicas: int) -> None:
        """Collective over all trainer ranks and, by way of a request, all engine workers; again when they are others."""
        self._num_replicas = num_replicas
        self._request = None
        self._close_fabric()
        if self._receivers is not None:  # a request to engines that have gone may still be under way
            self._requests.shutdown(wait=False, cancel_futures=True)
            self._requests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-requests")
        address: list[Any] = [None]
        store = None
        if self.rank == 0:
            host = own_address()
            store = open_store(host, 0, self._timeout_s, is_master=True)
            address = [(host, store.port)]
        if self._group is not None:
            dist.broadcast_object_list(address, src=0, group=self._group)
        host, port = address[0]
        together(lambda: self._join(store, host, port), self._group)

    def _join(self, store: dist.TCPStore | None, host: str, port: int) -> None:
        parallel, rollout = self.inputs.parallel, self.inputs.rollout
        place = Place(
            rank=self.rank,
            num_trainers=parallel.world_size,
            num_replicas=self._num_replicas,
            num_engine_ranks=rollout.tensor,
        )
        if self._receivers is not None:
            shared = {
                "kind": self.kind,
                "config": self.inputs.to_json(),
                "host": host,
                "port": port,
                "world_size": place.world_size,
                "num_trainers": place.num_trainers,
                "num_replicas": place.num_replicas,
                "timeout_s": self._timeout_s,
            }
            infos = [
                shared | {"rank_offset": place.num_trainers + i * place.num_engine_ranks}
                for i in range(place.num_replicas)
            ]
            self._request = self._requests.submit(self._receivers.init_transfer, infos)
        store = store or open_store(host, port, self._timeout_s, is_master=False)
        with self._errors_named("connecting to the engines"):
            exchanges = (self._slices, self._whole)
            self._fabric = open_fabric(
                self.kind, place, store, self._device, self._timeout_s, exchanges, watch=self._raise_request_error
            )

    # ---- a publication

    def send(self, version: int, mode: str) -> Tensor:
        """Send everything, and wait until the engines have loaded it; the sums of what this rank sent.

        Raises TransportError on this rank when anyone fails or is late, ValueError when a weight is not finite. The
        caller makes the ranks agree on the error.
        """
        assert self._fabric is not None
        self._num_attempts += 1
        exchange = self._whole if mode == "reload" else self._slices
        packers = self._prepare(mode == "reload", exchange)
        self._fabric.begin(self._num_attempts, exchange.rounds)
        if self._receivers is not None:
            info = {"version": version, "mode": mode, "attempt": self._num_attempts}
            self._request = self._requests.submit(self._receivers.update_weights, info)
        with self._errors_named(f"policy version {version}"), self._on_stream():
            sums = self._send_rounds(exchange, packers)
            if self._request is not None:
                self._request.result(timeout=self._deadline_s + _GRACE_S)
                self._request = None
        return sums

    def _prepare(self, whole: bool, exchange: Exchange) -> list[RoundPacker]:
        addresses = self._holdings.addresses()
        if addresses != self._addresses:
            self._packers.clear()
            self._addresses = addresses
        if whole not in self._packers:
            assert self._fabric is not None
            nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._packers = {  # one at a time: the other's gathered tensors take memory
                whole: [
                    RoundPacker(
                        number,
                        self._fabric.slot(i) if number.sent_by(self.rank) else nothing,
                        self._holdings,
                        scales=self.inputs.precision.scales,
                        rank=self.rank,
                        group=self._group,
                        in_canonical_form=self.inputs.loaders_requantize and self._device.type == "cuda",
                    )
                    for i, number in enumerate(exchange.rounds)
                ]
            }
        return self._packers[whole]

    def _send_rounds(self, exchange: Exchange, packers: list[RoundPacker]) -> Tensor:
        """All rounds; the sums of this rank's parts in order, int64 on the CPU."""
        assert self._fabric is not None
        self.pack_s = self.send_s = 0.0
        sums: list[Tensor] = []
        finite: list[Tensor] = []
        for number, (packer, content) in enumerate(zip(packers, exchange.rounds)):
            started = time.perf_counter()
            self._fabric.reserve(number)
            reserved = time.perf_counter()
            found, is_finite = packer()
            sums.append(found.to(self._device))
            finite.append(is_finite.to(self._device))
            packed = time.perf_counter()
            self._fabric.send(number, content.sent_by(self.rank))
            self.pack_s += packed - reserved
            self.send_s += time.perf_counter() - packed + reserved - started
        started = time.perf_counter()
        self._fabric.finish()
        self.send_s += time.perf_counter() - started
        if not torch.stack(finite).all():
            self._raise_not_finite(packers)
        return torch.cat(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)

    def _raise_not_finite(self, packers: list[RoundPacker]) -> None:
        """Fill the messages again, one after another, to find the names."""
        wrong: list[str] = []
        for packer in packers:
            packer()
            wrong += packer.not_finite()
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"the engines were not resumed, for what was sent holds NaN or infinity: {', '.join(wrong[:5])}{more}; "
            "lower optim.lr and resume from the last checkpoint"
        )

    def digests(self, sums: Tensor) -> list[NamedDigests]:
        """Collective: on rank 0 what every engine rank has to hold, from the sums of all ranks; [] elsewhere."""
        by_rank: list[Any] = [sums.numpy()]
        if self._group is not None:
            gathered = [None] * self.inputs.parallel.world_size if self.rank == 0 else None
            dist.gather_object(by_rank[0], gathered, dst=0, group=self._group)
            by_rank = gathered or []
        if self.rank != 0:
            return []
        places, headers, of_engine = self._sums_of_names
        totals = np.zeros(len(headers), dtype=np.int64)
        for of_sender, values in zip(places, by_rank, strict=True):
            np.add.at(totals, of_sender, values)  # modulo 2^64
        values = values_of_sums(totals, headers)
        return [NamedDigests(names, values[chosen]) for names, chosen in of_engine]

    @functools.cached_property
    def _sums_of_names(self) -> tuple[list[np.ndarray], np.ndarray, list[tuple[Names, np.ndarray]]]:
        """By sender the places that its sums are added to; their headers; by engine rank its names and their places."""
        kinds: dict[tuple[int, str], tuple[torch.dtype, tuple[int, ...]]] = {}
        index: dict[tuple[int, str], int] = {}
        places: list[np.ndarray] = []
        for sender in range(self.inputs.parallel.world_size):
            of_sender = []
            for message in (m for number in self._slices.rounds for m in number.sent_by(sender)):
                for part in message.parts:
                    key = message.engine_rank, part.name
                    of_sender.append(index.setdefault(key, len(index)))
                    # float32 numbers are digested as int64 words: see weight_sync/partial.py
                    dtype = torch.int64 if part.dtype == "float32" else getattr(torch, part.dtype)
                    kinds[key] = dtype, part.kept_shape
            places.append(np.array(of_sender, dtype=np.int64))
        of_engine = []
        for rank in range(self._slices.num_engine_ranks):
            names = Names(name for engine_rank, name in index if engine_rank == rank)
            of_engine.append((names, np.array([index[rank, name] for name in names.ordered], dtype=np.int64)))
        return places, headers_of(kinds[key] for key in index), of_engine

    # ---- errors

    def _raise_request_error(self) -> None:
        """While waiting: a request that has failed names the replica, which is better than a deadline."""
        if self._request is not None and self._request.done():
            self._request.result()

    def _errors_named(self, what: str) -> AbstractContextManager[None]:
        return _Named(self, what)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Release memory and connections. Harmless when called again, or after an error."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._close_fabric()

    def _close_fabric(self) -> None:
        fabric, self._fabric = self._fabric, None
        self._packers.clear()
        if fabric is not None:
            fabric.close()


class _Named:
    """Turns what a fabric raises into TransportError, after telling the others; an engine's own error comes first."""

    def __init__(self, sender: ShardSender, what: str):
        self._sender = sender
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        sender = self._sender
        if sender._fabric is not None:
            sender._fabric.fail(f"{type(error).__name__}: {error}")
        request, sender._request = sender._request, None
        if isinstance(error, FabricError | RuntimeError) and not isinstance(error, TransportError):
            if request is not None:
                try:
                    request.result(timeout=_GRACE_S)
                except TransportError:
                    raise
                except Exception:  # of the executor; the first error says more
                    pass
            if isinstance(error, FabricError) or sender._fabric is None:
                raise TransportError(f"{self._what}: {error}") from error


def resolve(kind: str, *, on_gpu: bool, one_host: bool, colocated: bool) -> str:
    """What ``rollout.transport`` auto means here; other values mean themselves."""
    if kind != "auto":
        return kind
    if not on_gpu:
        return "ipc" if one_host else "gloo"
    if one_host:
        return "ipc"
    return "gloo" if colocated else "nccl"  # NCCL does not take two processes on one GPU
