"""Selects the transport for ``weight_sync.transport``, including ``auto``."""

from collections.abc import Callable, Sequence

import torch

from megatron_fp8rl.weight_sync.schedule import SendSchedule
from megatron_fp8rl.weight_sync.transports.base import Peer, Transport
from megatron_fp8rl.weight_sync.transports.cuda_ipc import IpcTransport
from megatron_fp8rl.weight_sync.transports.process_group import GlooTransport, NcclTransport
from megatron_fp8rl.weight_sync.transports.signed_store import SignedStore

TRANSPORTS: dict[str, type[Transport]] = {"ipc": IpcTransport, "nccl": NcclTransport, "gloo": GlooTransport}


def resolve(kind: str, *, on_gpu: bool, one_host: bool, colocated: bool) -> str:
    """Replace ``weight_sync.transport`` = auto by a transport; return other values unchanged."""
    if kind != "auto":
        return kind
    if one_host:
        return "ipc"
    return "nccl" if on_gpu and not colocated else "gloo"  # NCCL does not accept two processes on one GPU


def open_transport(
    kind: str,
    peer: Peer,
    store: SignedStore,
    device: torch.device,
    timeout_s: float,
    schedules: Sequence[SendSchedule],
    *,
    watch: Callable[[], None] = lambda: None,
) -> Transport:
    """Collective over all trainer ranks and engine workers: open a transport whose buffers fit each of ``schedules``.
    Waits call ``watch`` periodically, which may raise other errors."""
    transport = TRANSPORTS[kind](peer, store, device, timeout_s)
    transport.watch = watch
    try:
        transport.connect(schedules)
    except Exception as error:
        transport.fail(f"{type(error).__name__}: {error}")  # otherwise others would wait until the deadline
        raise
    return transport
