"""Weight-transfer engine for vLLM: receives published weights in an engine worker and loads them.

In: requests of vLLM's weight-update API: ``init`` once; ``start``, ``update`` and ``finish`` for each publication. Out:
the model's kernel tensors, changed in place. Runs in every engine worker.

One request covers a whole publication: messages from every trainer rank with this worker's slices. The worker computes
the same schedule as the trainer ranks (``weight_sync/transports/base.py``) and loads each round in one of four modes
(``UpdateInfo.mode``):

    reload      through vLLM's layerwise reload, which slices and fuses checkpoint tensors: the first layer of each
                kind, and all tensors outside layers
    compare     into the tensors that the kernels read, after a check that vLLM's loaders wrote the same data there
    direct      into the tensors that the kernels read
    switch      like direct, from spare memory that was filled while the engine sampled (``spare_weights.py``)

An engine's first publication uses reload and then compare, which proves the address of every weight, because layers of
a kind are alike. Later ones are direct, or with ``weight_sync.spare_weights`` staged and then switched to. Reload alone
would be slow: vLLM's loaders take 1.5 ms per tensor, half a minute for the experts of 48 layers.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_fp8rl.names.registry import layer_of
from megatron_fp8rl.precision.quantizers import same_values
from megatron_fp8rl.rollout.vllm_plugin.kernel_weights import (
    DerivedTensors,
    KernelDigests,
    KernelTable,
    UnwritableKernel,
    draft_model_of,
    engine_module_of,
    has_kernel_weights,
    named_behind_wrappers,
    named_layers,
)
from megatron_fp8rl.rollout.vllm_plugin.patches import discard_loaded_weights
from megatron_fp8rl.rollout.vllm_plugin.spare_weights import SpareWeights
from megatron_fp8rl.runtime.gc_pause import gc_paused
from megatron_fp8rl.upstream import patches
from megatron_fp8rl.weight_sync.copies import Copies, parts_in
from megatron_fp8rl.weight_sync.digest import NamedDigests
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.schedule import Part, SendSchedule
from megatron_fp8rl.weight_sync.transports.base import Peer, Transport
from megatron_fp8rl.weight_sync.transports.choose import open_transport
from megatron_fp8rl.weight_sync.transports.signed_store import open_store

Placed = tuple[Part, Tensor, Tensor]  # (part, tensor that the kernels read, received bytes)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How a worker connects to the store of trainer rank 0 at ``host`` and ``port``. ``rank_offset`` is the rank of
    this replica's first worker among all processes; the ``num_trainers`` trainer ranks come first."""

    kind: str  # value of weight_sync.transport
    config: dict[str, Any]  # of PlanInputs
    host: str
    port: int
    secret: str  # signs values in the store
    proof_layers: list[int]  # layers for vLLM's loaders
    rank_offset: int
    num_trainers: int
    num_replicas: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Describes a whole publication. ``attempt`` is its number."""

    version: int
    mode: str
    attempt: int


@patches(
    "vllm",
    why="builds on vLLM's weight-transfer API and its layerwise reload, which change from release to release",
    remove_when="the API is declared stable",
)
class TransferEngine(WeightTransferEngine):
    """Loads publications. ``version`` is the policy version of the weights; None before the first publication and after
    a failed update. ``load_s`` is the time of the last load in this worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        self.load_s = 0.0
        self._loaded: int | None = None  # the version received in the current update
        self._mode = "reload"
        self._proving: frozenset[int] = frozenset()  # layers that vLLM's loaders load
        self._num_reloads = 0  # each may have bound other tensors to the model
        self._kernel_digests = KernelDigests()
        self._reloading: Reloaded | None = None  # modules that vLLM's reload has not finished
        self._transport: Transport | None = None
        self._table: KernelTable | None = None
        self._derived: DerivedTensors | None = None
        self._copies: list[Copies] = []  # by round
        self._proofs: list[list[Placed]] = []
        self._spare: SpareWeights | None = None
        self._switch: Copies | None = None

    @property
    def engine_rank(self) -> int:
        """Rank in the replica, counted through data-parallel groups of tensor-parallel ranks."""
        parallel = self.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    @gc_paused()
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Collective: connect to the trainer and all workers. A second call connects again."""
        self.shutdown()
        self._switch = None
        inputs = PlanInputs.from_json(init_info.config)
        self._slices, self._whole = inputs.slices(), inputs.whole(init_info.proof_layers)
        self._proving = frozenset(init_info.proof_layers)
        self._timeout_s = init_info.timeout_s
        if inputs.weight_sync.spare_weights != "none" and self._spare is None:
            on_host = inputs.weight_sync.spare_weights == "host"
            self._spare = SpareWeights(self._slices, self.engine_rank, self.device, on_host=on_host)
        peer = Peer(
            rank=init_info.rank_offset + self.engine_rank,
            num_trainers=init_info.num_trainers,
            num_replicas=init_info.num_replicas,
            num_engine_ranks=self._slices.num_engine_ranks,
        )
        store = open_store(
            init_info.host, init_info.port, init_info.timeout_s, is_master=False, secret=init_info.secret
        )
        schedules = (self._slices, self._whole)
        self._transport = open_transport(init_info.kind, peer, store, self.device, init_info.timeout_s, schedules)
        # Here the trainer prepares too, and no publication waits.
        self._find_places(self._transport)
        self.digests()

    @gc_paused()
    def _find_places(self, transport: Transport) -> None:
        self._table = self._kernel_digests.table(self.model, self._num_reloads)
        placed, proving = list(self._placed(transport)), {None, *self._proving}
        self._copies = [Copies([(target, source) for _, target, source in parts]) for parts in placed]
        self._proofs = [[item for item in parts if layer_of(item[0].name) in proving] for parts in placed]

    @torch.inference_mode()
    def digests(self) -> NamedDigests:
        return self._kernel_digests(self.model, self._num_reloads)

    def start_weight_update(self) -> None:
        self.version = self._loaded = None
        self.load_s = 0.0
        if self._derived is None:
            self._derived = DerivedTensors(self.model, self.model_config.dtype)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load a whole publication. Raises RuntimeError if no trainer has connected, DeliveryError if a
        trainer rank fails or is late, and UnwritableKernel if weights cannot be written directly."""
        if self._transport is None:
            raise RuntimeError(
                "weights arrived before this worker connected to the trainer; call init_weight_transfer_engine first"
            )
        started = time.perf_counter()
        self._mode = update_info.mode
        if self._mode == "reload":
            self._reloading = Reloaded(self.model, self._proving)
            initialize_layerwise_reload(self._reloading)
        if self._mode == "switch":
            self._switch_to(update_info.version)
        else:
            self._load_rounds(update_info.attempt, self._transport)
        self._loaded = update_info.version
        self.load_s += time.perf_counter() - started

    def stage(self, version: int, attempt: int) -> None:
        """Start to receive a publication in spare memory while the engine samples."""
        if self._transport is None or self._spare is None:
            raise RuntimeError("cannot stage weights: this engine has no spare memory; set weight_sync.spare_weights")
        if self._switch is None:
            placed = self._placed(self._spare)
            self._switch = Copies([(target, source) for parts in placed for _, target, source in parts])
        self._spare.start(self._transport, attempt, version)

    def is_staged(self) -> bool:
        """Whether all weights have arrived in spare memory. Raises the error of the thread that receives them."""
        return self._spare is not None and self._spare.is_complete()

    def _switch_to(self, version: int) -> None:
        if self._spare is None or self._switch is None or self._spare.version != version:
            raise RuntimeError(f"cannot activate policy version {version}: it was not received in spare memory")
        self._spare.wait(self._timeout_s)
        with torch.inference_mode():
            self._switch()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def finish_weight_update(self) -> None:
        """Complete the update. Raises RuntimeError if no weights were received."""
        if self._loaded is None:
            raise RuntimeError("the update ended without weights; publish again from the start")
        if self._mode == "reload":
            self._end_reload()
        else:
            assert self._derived is not None
            self._derived.refresh()
        self.version = self._loaded

    def abandon(self) -> None:
        """Cancel an update in progress and close its connections. ``version`` is then None."""
        self.shutdown()
        self.version = self._loaded = None
        if self._reloading is not None:
            discard_loaded_weights(self._reloading.modules())
            self._end_reload()

    def _end_reload(self) -> None:
        finalize_layerwise_reload(self._reloading, self.model_config)
        self._reloading = None
        self._num_reloads += 1
        assert self._derived is not None
        self._derived.keep_in_place()

    def shutdown(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer sends through megatron_fp8rl.weight_sync.publish")

    def _load_rounds(self, attempt: int, transport: Transport) -> None:
        schedule = self._whole if self._mode == "reload" else self._slices
        try:
            transport.begin(attempt, schedule.rounds)
            with torch.inference_mode():
                if self._mode == "reload":
                    self._reload_rounds(schedule, transport)
                else:
                    self._write_rounds(transport)
            transport.finish()
        except Exception as error:
            transport.fail(f"{type(error).__name__}: {error}")
            raise

    def _write_rounds(self, transport: Transport) -> None:
        if self._mode == "compare" and self._kernel_digests.table(self.model, self._num_reloads) is not self._table:
            self._find_places(transport)  # vLLM's loaders may have bound other tensors
        for number, (copies, proofs) in enumerate(zip(self._copies, self._proofs, strict=True)):
            transport.receive(number)
            if self._mode == "compare":
                compare(proofs)
            copies()
            transport.release(number)

    def _placed(self, transport: Transport | SpareWeights) -> Iterator[list[Placed]]:
        """Yield all slices, by round. Raises UnwritableKernel if a weight would receive nothing."""
        named = set()
        for number, messages in enumerate(self._slices.rounds):
            placed = []
            for message in messages.received_by(self.engine_rank):
                for part, source in parts_in(transport.inbox(message, number), message):
                    placed.append((part, self._target(part), source))
                    named.add(part.name)
            yield placed
        assert self._table is not None
        forgotten = sorted(self._table.names() - named)
        if forgotten:
            raise UnwritableKernel(f"{', '.join(forgotten[:5])}: in the engine, but not in a publication")

    def _target(self, part: Part) -> Tensor:
        dtype, axis = getattr(torch, part.dtype), part.transfer.axis
        assert self._table is not None
        first, size = part.start - part.kept[0], part.stop - part.start
        return self._table.place(part.name, dtype, part.kept_shape, axis, first, size)

    def _reload_rounds(self, schedule: SendSchedule, transport: Transport) -> None:
        """Assemble whole tensors and pass each to vLLM's loaders when it is complete."""
        incomplete: dict[str, tuple[Tensor, int]] = {}
        for number, messages in enumerate(schedule.rounds):
            transport.receive(number)
            complete: list[tuple[str, Tensor]] = []
            for message in messages.received_by(self.engine_rank):
                for part, source in parts_in(transport.inbox(message, number), message):
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
            transport.release(number)
            if complete:  # by module, because vLLM stores unfinished modules twice
                complete.sort(key=lambda named: engine_module_of(named[0]))
                self._load(complete)
        assert not incomplete, f"parts of {sorted(incomplete)[:5]} did not arrive"

    def _load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Pass whole tensors to vLLM's loaders: of the model, or of its multi-token prediction layers."""
        num_layers = self.model_config.hf_text_config.num_hidden_layers
        of_drafts = [(name, part) for name, part in tensors if (layer_of(name) or 0) >= num_layers]
        drafted = {name for name, _ in of_drafts}
        others = [(named_behind_wrappers(self.model, name), part) for name, part in tensors if name not in drafted]
        self.model.load_weights(others)
        if of_drafts:
            drafts = draft_model_of(self.model)
            assert drafts is not None
            drafts.load_weights(of_drafts)


class Reloaded:
    """Modules for vLLM's layerwise reload: those with weights, in ``layers`` or in no layer."""

    def __init__(self, model: nn.Module, layers: Collection[int]):
        wanted = {None, *layers}
        named = ((path, module) for path, module in named_layers(model) if layer_of(path) in wanted)
        self._chosen = [module for _, module in named if has_kernel_weights(module)]

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._chosen)


def compare(placed: Sequence[Placed]) -> None:
    """Raise UnwritableKernel unless the kernels' tensors equal the received data of one round, just loaded by vLLM's
    loaders. FP8 blocks are equal if their dequantized values are, because vLLM may choose another scale."""
    scales = {(part.name, part.start): (target, source) for part, target, source in placed if part.is_scale}
    for part, target, source in placed:
        if part.is_scale:
            continue  # compared together with its weight
        transfer, pairs = part.transfer, [(target, source)]
        if transfer.is_fp8:
            pairs.append(scales[transfer.scale_name, part.blocks[0]])
        if all(_same(*pair) for pair in pairs):
            continue
        if transfer.is_fp8 and same_values(*zip(*pairs, strict=True), transfer.format):
            continue
        raise UnwritableKernel(
            f"{part.name}: the kernels' tensor differs from the checkpoint tensor that vLLM loaded, so it cannot be "
            "written directly; choose other kernels (precision.kernels)"
        )


def _same(target: Tensor, source: Tensor) -> bool:
    if source.dtype.itemsize == 1:
        return target.dtype == source.dtype and torch.equal(source.view(torch.uint8), target.view(torch.uint8))
    return torch.equal(source.float(), target.float())
