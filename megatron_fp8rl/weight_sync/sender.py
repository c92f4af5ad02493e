"""Send this trainer rank's shards to the engine workers that keep them.

In: this rank's parameters, the plan's inputs, and on rank 0 the engines. Out: delivered and loaded messages, and the
digests of every engine rank's expected weights. Runs on every trainer rank; only rank 0 makes requests, one per
publication. The GPU quantizes round n + 2 while round n + 1 is in transit and the engines load round n.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.address import local_address
from megatron_fp8rl.runtime.gc_pause import gc_paused
from megatron_fp8rl.weight_sync.agreement import together
from megatron_fp8rl.weight_sync.digest import NamedDigests, Names, headers_of, terms_of_words, values_of_sums
from megatron_fp8rl.weight_sync.engines import Engines, TransportError
from megatron_fp8rl.weight_sync.pack import LocalShards, RoundPacker
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.schedule import Round, SendSchedule
from megatron_fp8rl.weight_sync.transports.base import DeliveryError, Peer, Transport
from megatron_fp8rl.weight_sync.transports.choose import open_transport
from megatron_fp8rl.weight_sync.transports.signed_store import SignedStore, open_store

_GRACE_S = 10.0  # after a failure, time for the error that names the replica


class ShardSender:
    """Sends the shards of one trainer rank by the transport ``kind``. ``receivers`` are the engines on rank 0, None
    elsewhere. ``group`` is a gloo group of all trainer ranks (None: one rank)."""

    def __init__(
        self,
        kind: str,
        inputs: PlanInputs,
        parameters: Mapping[str, Tensor],
        receivers: Engines | None,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self.kind = kind
        self.inputs = inputs
        self.rank = rank
        self.pack_s = 0.0  # host time of the last publication
        self.send_s = 0.0
        self._receivers = receivers
        self._group = group
        self._device = device
        self._deadline_s = inputs.engine.update_s
        # Shorter than the request's deadline, so that the engine's error arrives, which names both sides of the wait.
        self._timeout_s = 0.9 * self._deadline_s
        self._slices = inputs.slices()
        # Key True: whole tensors for vLLM's loaders, only of the layers that the engines name.
        self._schedules: dict[bool, SendSchedule] = {False: self._slices}
        self._shards = LocalShards(parameters, TrainerLayout.from_config(inputs.parallel), inputs.model, rank)
        self._packers: dict[bool, list[RoundPacker]] = {}  # likewise
        self._addresses: list[int] = []
        self._transport: Transport | None = None
        self._requests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-requests")
        self._request: Future[None] | None = None
        self._num_attempts = 0
        self._num_replicas = inputs.engine.num_replicas
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @gc_paused()
    def check(self) -> None:
        """Raise RuntimeError or ValueError if this rank's model lacks tensors that it must send."""
        for number in self._slices.rounds:
            for message in number.sent_by(self.rank):
                for part in message.parts:
                    if part.transfer.quantize != "gathered" and not part.is_scale:
                        self._shards.pieces(part.transfer, part.start, part.stop)
            for gathering in number.gatherings:
                for source in gathering.sources:
                    if source.rank == self.rank:
                        self._shards.pieces(gathering.transfer, source.start, source.stop)

    def warm_up(self) -> None:
        """Compile the kernels by filling the messages of one round in temporary memory."""
        rounds = [number for number in self._slices.rounds if number.sent_by(self.rank)]
        if rounds:
            number = rounds[len(rounds) // 2]  # the first may contain only the embedding
            num_bytes = max(m.out_offset + m.num_bytes for m in number.sent_by(self.rank))
            self._packer(number, torch.empty(num_bytes, dtype=torch.uint8, device=self._device)).fill()

    # ---- connection

    @gc_paused()
    def connect(self, num_replicas: int) -> None:
        """Collective over all trainer ranks: connect them to all engine workers. Repeat when the workers change."""
        self._num_replicas = num_replicas
        self._request = None
        self._close_transport()
        if self._receivers is not None:  # a request to lost engines may still run
            self._requests.shutdown(wait=False, cancel_futures=True)
            self._requests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-requests")
        store, address = together(self._offer, self._group)
        carried: list[Any] = [address]
        if self._group is not None:
            dist.broadcast_object_list(carried, src=0, group=self._group)
        (host, port, secret), layers = carried[0]
        self._schedules[True] = self.inputs.whole(layers)
        together(lambda: self._join(store, host, port, secret, layers), self._group)

    def _offer(self) -> tuple[SignedStore | None, Any]:
        """On rank 0: open a store; return it, its (host, port, secret), and the layers for vLLM's loaders."""
        if self._receivers is None:
            return None, None
        layers, host, secret = self._receivers.proof_layers(), local_address(), auth.new_token()
        store = open_store(host, 0, self._timeout_s, is_master=True, secret=secret)
        return store, ((host, store.port, secret), layers)

    def _join(self, store: SignedStore | None, host: str, port: int, secret: str, layers: list[int]) -> None:
        parallel = self.inputs.parallel
        peer = Peer(
            rank=self.rank,
            num_trainers=parallel.world_size,
            num_replicas=self._num_replicas,
            num_engine_ranks=self.inputs.plan.engine.size,
        )
        if self._receivers is not None:
            shared = {
                "kind": self.kind,
                "config": self.inputs.to_json(),
                "host": host,
                "port": port,
                "secret": secret,
                "proof_layers": layers,
                "num_trainers": peer.num_trainers,
                "num_replicas": peer.num_replicas,
                "timeout_s": self._timeout_s,
            }
            infos = [
                shared | {"rank_offset": peer.num_trainers + i * peer.num_engine_ranks}
                for i in range(peer.num_replicas)
            ]
            self._request = self._requests.submit(self._receivers.init_transfer, infos)
        store = store or open_store(host, port, self._timeout_s, is_master=False, secret=secret)
        with self._errors_named("connecting to the engines"):
            schedules = tuple(self._schedules.values())
            self._transport = open_transport(
                self.kind, peer, store, self._device, self._timeout_s, schedules, watch=self._raise_request_error
            )

    # ---- publication

    def send(self, version: int, mode: str) -> Tensor:
        """Send everything and wait until the engines have loaded it; return the sums of this rank's parts. Raises, on
        this rank alone, TransportError if any process fails or is late, ValueError if a weight is not finite."""
        assert self._transport is not None
        self._num_attempts += 1
        is_whole = mode == "reload"
        schedule, packers = self._schedules[is_whole], self._packers[is_whole]
        self._transport.begin(self._num_attempts, schedule.rounds)
        if self._receivers is not None:
            info = {"version": version, "mode": mode, "attempt": self._num_attempts}
            self._request = self._requests.submit(self._receivers.update_weights, info)
        with self._errors_named(f"policy version {version}"), self._on_stream():
            sums = self._send_rounds(schedule, packers)
            self._settle_request()
        return sums

    @gc_paused()
    def prepare(self, modes: Sequence[str]) -> None:
        """Compute the packers for publications in ``modes``, and wait until the engines are prepared; before the pause.

        Computes again only after parameters have moved. Raises RuntimeError or ValueError if parameters do not match
        the model, TransportError if an engine fails.
        """
        addresses = self._shards.addresses()
        wanted = {mode == "reload" for mode in modes}
        if addresses != self._addresses:
            self._packers.clear()
            self._addresses = addresses
        for is_whole in self._packers.keys() - wanted:
            del self._packers[is_whole]  # frees the memory of gathered tensors
        for is_whole in wanted - self._packers.keys():
            self._packers[is_whole] = self._made(self._schedules[is_whole])
        if self._receivers is not None:
            _ = self._slots_of_sums
            self._settle_request()

    def _made(self, schedule: SendSchedule) -> list[RoundPacker]:
        assert self._transport is not None
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        slots = (self._transport.slot(i) if r.sent_by(self.rank) else nothing for i, r in enumerate(schedule.rounds))
        return list(map(self._packer, schedule.rounds, slots))

    def _packer(self, number: Round, slot: Tensor) -> RoundPacker:
        return RoundPacker(number, slot, self._shards, rank=self.rank, group=self._group)

    def _send_rounds(self, schedule: SendSchedule, packers: list[RoundPacker]) -> Tensor:
        """Send all rounds; return the sums of this rank's parts in order, int64 on the CPU."""
        assert self._transport is not None
        self.pack_s = self.send_s = 0.0
        sums: list[Tensor] = []
        finite: list[Tensor] = []
        for number, (packer, content) in enumerate(zip(packers, schedule.rounds)):
            started = time.perf_counter()
            self._transport.reserve(number)
            reserved = time.perf_counter()
            part_sums, is_finite = packer()
            sums.append(part_sums.to(self._device))
            finite.append(is_finite.to(self._device))
            packed = time.perf_counter()
            self._transport.send(number, content.sent_by(self.rank))
            self.pack_s += packed - reserved
            self.send_s += time.perf_counter() - packed + reserved - started
        started = time.perf_counter()
        self._transport.finish()
        self.send_s += time.perf_counter() - started
        if not torch.stack(finite).all():
            self._raise_not_finite(packers)
        return torch.cat(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)

    def _raise_not_finite(self, packers: list[RoundPacker]) -> None:
        """Fill the messages again, one by one, and raise ValueError with the names of non-finite tensors."""
        wrong: list[str] = []
        for packer in packers:
            packer()
            wrong += packer.not_finite()
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"published weights contain NaN or infinity: {', '.join(wrong[:5])}{more}; the engines stay paused; "
            "lower optim.lr and resume from the last checkpoint"
        )

    def digests(self, sums: Tensor) -> list[NamedDigests]:
        """Collective: return each engine rank's expected digests, from all ranks' sums, on rank 0; [] elsewhere."""
        by_rank: list[Any] = [sums.numpy()]
        if self._group is not None:
            gathered = [None] * self.inputs.parallel.world_size if self.rank == 0 else None
            dist.gather_object(by_rank[0], gathered, dst=0, group=self._group)
            by_rank = gathered or []
        if self.rank != 0:
            return []
        slots = self._slots_of_sums
        totals = np.zeros(slots.num_slots, dtype=np.int64)
        for of_sender, values in zip(slots.by_sender, by_rank, strict=True):
            np.add.at(totals, of_sender, values)  # modulo 2^64
        np.add.at(totals, slots.of_words, terms_of_words(totals[slots.words], slots.word_places))
        values = values_of_sums(totals[slots.names], slots.headers)
        return [NamedDigests(names, values[chosen]) for names, chosen in slots.of_engine]

    @functools.cached_property
    def _slots_of_sums(self) -> Slots:
        num_trainers = self.inputs.parallel.world_size
        return Slots(self._slices, num_trainers)

    # ---- errors

    def _settle_request(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.result(timeout=self._deadline_s + _GRACE_S)

    def _raise_request_error(self) -> None:
        """Raise the error of a failed request, which names the replica, before the deadline of a wait."""
        if self._request is not None and self._request.done():
            self._request.result()

    @contextmanager
    def _errors_named(self, what: str) -> Iterator[None]:
        """Notify other processes of an error in the block, and raise the engine's error or TransportError."""
        try:
            yield
        except BaseException as error:
            if self._transport is not None:
                self._transport.fail(f"{type(error).__name__}: {error}")
            request, self._request = self._request, None
            if not isinstance(error, RuntimeError) or isinstance(error, TransportError):
                raise
            if request is not None:
                try:
                    request.result(timeout=_GRACE_S)
                except TransportError:
                    raise
                except Exception:  # of the executor; the transport's error says more
                    pass
            if isinstance(error, DeliveryError) or self._transport is None:
                raise TransportError(f"{what}: {error}") from error
            raise

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._close_transport()

    def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        self._packers.clear()
        if transport is not None:
            transport.close()


class Slots:
    """Accumulators for the sums of the senders' parts (see ``part_sums.py``). A slot is the sum of one tensor for the
    engine ranks that keep the same range, or a word that parts share."""

    def __init__(self, schedule: SendSchedule, num_trainers: int):
        self._audiences: dict[tuple[int, ...], int] = {}
        kinds: dict[tuple[int, str], tuple[torch.dtype, tuple[int, ...]]] = {}
        index: dict[tuple[int, str, int], int] = {}  # by audience, name, and word; -1: the sum
        self.by_sender = [self._of_sender(schedule, sender, index, kinds) for sender in range(num_trainers)]
        self.num_slots = len(index)
        names = [(audience, name) for audience, name, word in index if word < 0]
        word_keys = [key for key in index if key[2] >= 0]
        self.names = np.array([index[audience, name, -1] for audience, name in names], dtype=np.int64)
        self.headers = headers_of(kinds[key] for key in names)
        self.words = np.array([index[key] for key in word_keys], dtype=np.int64)
        self.word_places = np.array([word for _, _, word in word_keys], dtype=np.int64)
        self.of_words = np.array([index[audience, name, -1] for audience, name, _ in word_keys], dtype=np.int64)
        of_rank: list[dict[str, int]] = [{} for _ in range(schedule.num_engine_ranks)]
        ranks_of = list(self._audiences)
        for position, (audience, name) in enumerate(names):
            for rank in ranks_of[audience]:
                of_rank[rank][name] = position
        self.of_engine: list[tuple[Names, np.ndarray]] = []
        for positions in of_rank:
            sorted_names = Names(positions)
            self.of_engine.append(
                (sorted_names, np.array([positions[name] for name in sorted_names.ordered], dtype=np.int64))
            )

    def _of_sender(self, schedule: SendSchedule, sender: int, index: dict, kinds: dict) -> np.ndarray:
        """Return the slot of each of a sender's numbers by round: sums of its parts, then the words that they cut."""
        slots = []
        for number in schedule.rounds:
            cut = []
            for message in number.sent_by(sender):
                audience = self._audiences.setdefault(message.engine_ranks, len(self._audiences))
                for part in message.parts:
                    slots.append(index.setdefault((audience, part.name, -1), len(index)))
                    # float32 values are digested as int64 words: see weight_sync/part_sums.py
                    dtype = torch.int64 if part.dtype == "float32" else getattr(torch, part.dtype)
                    kinds[audience, part.name] = dtype, part.kept_shape
                    cut += [(audience, part.name, word) for word in part.cut_words]
            slots += [index.setdefault(key, len(index)) for key in cut]
        return np.array(slots, dtype=np.int64)
