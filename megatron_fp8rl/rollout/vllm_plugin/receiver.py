"""vLLM's weight-transfer engine of this package: how an engine worker receives weights and loads them.

In:  requests of vLLM's weight-update API: ``init`` once; ``start``, ``update`` and ``finish`` for each publication.
Out: the model's kernel tensors, changed in place.
Runs in every engine worker; ``rollout/vllm_plugin/plugin.py`` registers the engine.

Bytes arrive in one of two ways (``InitInfo.kind``):

    shm, gloo   buckets of whole tensors from trainer rank 0, one request for each
    ipc, nccl   messages from every trainer rank with what this worker keeps; one request for all of them, in which the
                worker runs the rounds of the same exchange that the trainer ranks compute (``weight_sync/transports/base.py``)

and are loaded in one of three (``UpdateInfo.mode``):

    reload      by vLLM's layerwise reload, which slices and fuses tensors of a checkpoint as a fresh load does
    compare     into the tensors that the kernels read, after a look whether vLLM's loaders had put the same there
    direct      into the tensors that the kernels read

An engine's first publication takes the first two, which proves where every weight lies; later ones are direct.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_fp8rl.kernels.blockwise import canonical
from megatron_fp8rl.rollout.vllm_plugin.kernel_table import DerivedTensors, KernelTable, UnwritableKernel, narrowed
from megatron_fp8rl.rollout.vllm_plugin.patches import forget_loaded_weights, quiet_reload
from megatron_fp8rl.upstream import patches
from megatron_fp8rl.weight_sync.copies import Copies
from megatron_fp8rl.weight_sync.schedule import Exchange, Message, Part
from megatron_fp8rl.weight_sync.transports.base import Fabric, Place, open_fabric, open_store
from megatron_fp8rl.weight_sync.wire import BucketInfo, GlooGroup, PlanInputs, read_file, unpack


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How weights will come. Without a ``config`` an engine can only reload.

    ``rank_offset`` is the rank of the first worker of this replica among all processes that take part: trainer rank 0
    (gloo) or all ``num_trainers`` trainer ranks (ipc, nccl) come first.
    """

    kind: str = "shm"
    config: dict[str, Any] | None = None  # of PlanInputs
    host: str = ""
    port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    num_trainers: int = 1
    num_replicas: int = 1
    timeout_s: float = 0.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket: the fields of :class:`BucketInfo`, and the file that holds the bytes when they travel in one.

    Or a whole publication over a fabric: ``attempt`` counts them, and there is one "bucket" without content.
    """

    version: int
    mode: str = "reload"
    attempt: int = 0
    bucket: int = 0
    num_buckets: int = 1
    num_bytes: int = 0
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    path: str = ""

    @property
    def info(self) -> BucketInfo:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BucketInfo)}
        return BucketInfo(**fields)


@patches(
    "vllm",
    ">=0.25.1,<0.27",
    why="builds on vLLM's weight-transfer API and its layerwise reload, which change from release to release",
    remove_when="the API is declared stable",
)
class TransferEngine(WeightTransferEngine):
    """Loads publications and keeps count of their buckets.

    ``version`` is the policy version whose weights were loaded last, or None before the first publication. An update
    that fails or loses a bucket leaves no version. ``load_s`` is what the last one spent in this worker;
    ``num_reloads`` counts how often vLLM's loaders may have bound other tensors to the model.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        self.load_s = 0.0
        self.num_reloads = 0
        self._incoming: int | None = None
        self._mode = "reload"
        self._is_reloading = False  # vLLM's loaders hold the model in pieces
        self._num_received = 0
        self._num_expected = 0
        self._init = InitInfo()
        self._inputs: PlanInputs | None = None
        self._group: GlooGroup | None = None
        self._fabric: Fabric | None = None
        self._table: KernelTable | None = None
        self._derived: DerivedTensors | None = None
        self._slices: dict[str, tuple[int, tuple[int, int]]] = {}
        self._copies: list[Copies] = []
        quiet_reload()

    @property
    def _engine_rank(self) -> int:
        return self.parallel_config.rank

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Collective but for shm: joins the trainer and the workers of all replicas. A second call starts anew."""
        self.shutdown()
        self._init = init_info
        self._inputs = None if init_info.config is None else PlanInputs.from_json(init_info.config)
        self._table = None
        self._copies = []
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        if init_info.kind == "gloo":
            self._group = GlooGroup(
                host=init_info.host,
                port=init_info.port,
                rank=rank,
                world_size=init_info.world_size,
                timeout_s=init_info.timeout_s,
            )
        elif init_info.kind in ("ipc", "nccl"):
            assert self._inputs is not None
            self._slice_exchange, self._whole_exchange = self._inputs.exchanges()
            place = Place(
                rank=rank,
                num_trainers=init_info.num_trainers,
                num_replicas=init_info.num_replicas,
                num_engine_ranks=parallel.world_size,
            )
            store = open_store(init_info.host, init_info.port, init_info.timeout_s, is_master=False)
            exchanges = (self._slice_exchange, self._whole_exchange)
            self._fabric = open_fabric(init_info.kind, place, store, self.device, init_info.timeout_s, exchanges)

    def start_weight_update(self) -> None:
        self.version = self._incoming = None
        self._num_received = self._num_expected = 0
        self.load_s = 0.0
        if self._derived is None:
            self._derived = DerivedTensors(self.model, self.model_config.dtype)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket, or everything that comes over a fabric.

        Raises RuntimeError when it is not the next bucket of the update, FabricError when a trainer rank fails or is
        late, and UnwritableKernel when weights cannot be written directly.
        """
        if update_info.bucket != self._num_received or self._incoming not in (None, update_info.version):
            raise RuntimeError(
                f"bucket {update_info.bucket} of policy version {update_info.version} arrived where bucket "
                f"{self._num_received} of version {self._incoming} was due; publish again from the start"
            )
        started = time.perf_counter()
        if self._num_received == 0:
            self._mode = update_info.mode
            if self._mode == "reload":
                self._is_reloading = True
                initialize_layerwise_reload(self.model)
        self._incoming = update_info.version
        if self._fabric is None:
            self._load_bucket(update_info)
        else:
            self._load_rounds(update_info.attempt)
        self._num_received += 1
        self._num_expected = update_info.num_buckets
        self.load_s += time.perf_counter() - started

    def finish_weight_update(self) -> None:
        """Complete the update. Raises RuntimeError when a bucket is missing."""
        if self._incoming is None or self._num_received != self._num_expected:
            raise RuntimeError(
                f"policy version {self._incoming}: {self._num_received} of {self._num_expected} buckets have arrived; "
                "publish again from the start"
            )
        if self._mode == "reload":
            self._end_reload()
        else:
            assert self._derived is not None
            self._derived.refresh()
        self.version = self._incoming

    def abandon(self) -> None:
        """Give up an update that has begun, and the connections that it came by. There is no version then."""
        self.shutdown()
        self.version = self._incoming = None
        if self._is_reloading:
            forget_loaded_weights(self.model)
            self._end_reload()

    def _end_reload(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_reloading = False
        self.num_reloads += 1
        assert self._derived is not None
        self._derived.keep_in_place()

    def shutdown(self) -> None:
        if self._fabric is not None:
            self._fabric.close()
        self._group = self._fabric = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer sends through megatron_fp8rl.weight_sync.transport")

    # ---- buckets of whole tensors

    def _load_bucket(self, update_info: UpdateInfo) -> None:
        if self._init.kind == "gloo":
            if self._group is None:
                raise RuntimeError("weights arrived before init_weight_transfer_engine set up the gloo group")
            buffer = torch.empty(update_info.num_bytes, dtype=torch.uint8)
            self._group.broadcast(buffer)
        else:
            buffer = read_file(update_info.path, update_info.num_bytes)
        # The reload keeps references until the last tensor of a module has come, so the bytes are this engine's own.
        tensors = unpack(buffer.to(self.device), update_info.info)
        if self._mode == "reload":
            self.model.load_weights(tensors)
        else:
            self._write(self._own_slices(tensors))

    def _own_slices(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, what this worker keeps of a tensor, where its kernels hold it)."""
        if not self._slices:
            self._slices = self._require_inputs().kept_by(self._engine_rank)
        for name, tensor in tensors:
            if name in self._slices:
                axis, kept = self._slices[name]
                source = narrowed(tensor, axis, kept)
                yield name, source, self._place(name, source.dtype, source.shape, axis, 0, source.shape[axis])

    def _require_inputs(self) -> PlanInputs:
        if self._inputs is None:
            raise RuntimeError("weights can be written directly only after an init that brought the trainer's config")
        return self._inputs

    def _place(self, *part: Any) -> Tensor:
        if self._table is None:
            self._table = KernelTable(self.model)
        return self._table.place(*part)

    def _write(self, entries: Iterator[tuple[str, Tensor, Tensor]]) -> None:
        found = list(entries)
        with torch.inference_mode():
            if self._mode == "compare":
                compare(found)
            Copies([(target, source) for _, source, target in found])()

    # ---- messages of all trainer ranks

    def _load_rounds(self, attempt: int) -> None:
        assert self._fabric is not None
        exchange = self._whole_exchange if self._mode == "reload" else self._slice_exchange
        try:
            self._fabric.begin(attempt, exchange.rounds)
            with torch.inference_mode():
                if self._mode == "reload":
                    self._reload_rounds(exchange, self._fabric)
                else:
                    self._write_rounds(exchange, self._fabric)
            self._fabric.finish()
        except Exception as error:
            self._fabric.fail(f"{type(error).__name__}: {error}")
            raise

    def _write_rounds(self, exchange: Exchange, fabric: Fabric) -> None:
        if not self._copies:
            self._copies = [Copies(pairs) for pairs in self._pairs(exchange, fabric)]
        for number, copies in enumerate(self._copies):
            fabric.receive(number)
            if self._mode == "compare":
                for message in exchange.rounds[number].received_by(self._engine_rank):
                    compare([(part.name, s, self._target(part)) for part, s in _parts(message, fabric, number)])
            copies()
            fabric.release(number)

    def _pairs(self, exchange: Exchange, fabric: Fabric) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """For each round (target, source) of everything that comes. Raises when a weight would get nothing."""
        named = set()
        for number, messages in enumerate(exchange.rounds):
            pairs = []
            for message in messages.received_by(self._engine_rank):
                for part, source in _parts(message, fabric, number):
                    pairs.append((self._target(part), source))
                    named.add(part.name)
            yield pairs
        assert self._table is not None
        forgotten = sorted(self._table.names() - named)
        if forgotten:
            raise UnwritableKernel(f"{', '.join(forgotten[:5])}: held by the engine, but not part of a publication")

    def _target(self, part: Part) -> Tensor:
        dtype, axis = getattr(torch, part.dtype), part.transfer.axis
        return self._place(part.name, dtype, part.kept_shape, axis, part.start - part.kept[0], part.stop - part.start)

    def _reload_rounds(self, exchange: Exchange, fabric: Fabric) -> None:
        """Put whole tensors together and hand them to vLLM's loaders as they become complete."""
        incomplete: dict[str, tuple[Tensor, int]] = {}
        for number, messages in enumerate(exchange.rounds):
            fabric.receive(number)
            complete: list[tuple[str, Tensor]] = []
            for message in messages.received_by(self._engine_rank):
                for part, source in _parts(message, fabric, number):
                    whole, missing = incomplete.pop(part.name, (None, 0))
                    if whole is None:
                        whole = torch.empty(part.kept_shape, dtype=source.dtype, device=self.device)
                        missing = whole.numel()
                    whole.narrow(part.transfer.axis, part.start, part.stop - part.start).copy_(source)
                    missing -= source.numel()
                    if missing:
                        incomplete[part.name] = whole, missing
                    else:
                        complete.append((part.name, whole))
            fabric.release(number)
            if complete:
                self.model.load_weights(iter(complete))
        assert not incomplete, f"parts of {sorted(incomplete)[:5]} did not come"


def _parts(message: Message, fabric: Fabric, number: int) -> Iterator[tuple[Part, Tensor]]:
    """The parts of a message that has come, as tensors."""
    inbox = fabric.inbox(message, number)
    for part in message.parts:
        data = inbox[part.offset : part.offset + part.num_bytes]
        yield part, data.view(getattr(torch, part.dtype)).view(part.shape)


def compare(entries: list[tuple[str, Tensor, Tensor]]) -> None:
    """Raise UnwritableKernel unless the kernels already hold (name, what came, what they hold) of each entry.

    That is so right after vLLM's loaders took the same weights, and shows that these places are the right ones. FP8
    blocks count as equal when their values are, for vLLM may give them another scale.
    """
    sent = {name: (source, held) for name, source, held in entries}
    for name, (source, held) in sent.items():
        if _same(source, held):
            continue
        weight = name.removesuffix("_scale_inv")
        scale = f"{weight}_scale_inv"
        if weight in sent and scale in sent:
            came, there = (canonical(sent[weight][i].contiguous(), sent[scale][i].contiguous()) for i in (0, 1))
            if all(map(_same, came, there)):
                continue
        raise UnwritableKernel(
            f"{name}: the engine's kernels do not hold what vLLM's own loaders were given, so they keep it in a form "
            "that cannot be written directly; choose rollout.weight_update reload, or other kernels "
            "(rollout.linear_backend, rollout.moe_backend)"
        )


def _same(source: Tensor, held: Tensor) -> bool:
    if source.dtype == torch.float8_e4m3fn:
        return held.dtype == source.dtype and torch.equal(source.view(torch.uint8), held.view(torch.uint8))
    return torch.equal(source.float(), held.float())
