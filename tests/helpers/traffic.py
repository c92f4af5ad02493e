"""The traffic of a publication: bytes and messages by rank, network card and rail, counted from its schedule. Pure.

In:  a :class:`~megatron_fp8rl.weight_sync.schedule.SendSchedule`, the number of replicas, the GPUs of a node.
Out: :class:`Traffic`, and :func:`seconds`, which is arithmetic and no measurement.

Every GPU has a network card of its own, and the cards with one index in their nodes share a switch, the rail. Trainer
ranks fill nodes in order; the engine ranks of all replicas fill others after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fp8rl.weight_sync.plan import Plan
from megatron_fp8rl.weight_sync.schedule import GPUS_PER_NODE, SendSchedule


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes and messages of one publication to all replicas, alignment included.

    Arrays are int64: ``sent`` and ``num_sent`` by trainer rank, ``received`` by engine rank of one replica, ``rails``
    by [rail of the sender, rail of the receiver]. ``largest`` [rounds, 2] has the most that a trainer rank sends and
    that an engine rank receives in a round. ``must_move`` is what the engine ranks keep, counted once for each that
    keeps it.
    """

    sent: np.ndarray
    num_sent: np.ndarray
    received: np.ndarray
    num_received: np.ndarray
    rails: np.ndarray
    largest: np.ndarray
    must_move: int
    packed: int  # bytes that trainer ranks fill: what several engine ranks keep is filled once

    @property
    def overhead(self) -> float:
        """Sent bytes as a multiple of the necessary bytes."""
        return float(self.sent.sum() / self.must_move)

    @property
    def imbalance(self) -> tuple[float, float]:
        """The largest numbers of a trainer rank and of an engine rank, as multiples of the means."""
        return float(self.sent.max() / self.sent.mean()), float(self.received.max() / self.received.mean())

    @property
    def rail_imbalance(self) -> float:
        """The most bytes that the cards of one rail send or receive, as a multiple of the mean."""
        both = [self.rails.sum(axis) for axis in (0, 1)]
        return float(max(result.max() / result.mean() for result in both))


def bytes_that_must_move(plan: Plan, num_replicas: int) -> int:
    """Bytes that the engine ranks of all replicas keep."""
    total = 0
    for transfer in plan.transfers:
        length = transfer.shape[transfer.axis]
        kept = sum(stop - start for start, stop in filter(None, transfer.slices))
        total += sum(tensor.num_bytes for tensor in transfer.wire_tensors()) * kept // length
    return total * num_replicas


def count(plan: Plan, schedule: SendSchedule, num_replicas: int, gpus_per_node: int = GPUS_PER_NODE) -> Traffic:
    """The traffic of a publication to ``num_replicas`` replicas."""
    num_senders, num_receivers = plan.trainer.world_size, schedule.num_engine_ranks
    sent, received = np.zeros(num_senders, np.int64), np.zeros(num_receivers, np.int64)
    num_sent, num_received = np.zeros_like(sent), np.zeros_like(received)
    rails = np.zeros((gpus_per_node, gpus_per_node), np.int64)
    largest = np.zeros((len(schedule.rounds), 2), np.int64)
    packed = 0
    for number, messages in enumerate(schedule.rounds):
        out, into = np.zeros_like(sent), np.zeros_like(received)
        for message in messages.messages:
            ranks = np.array(message.engine_ranks)
            out[message.sender] += message.num_bytes * len(ranks) * num_replicas
            num_sent[message.sender] += len(ranks) * num_replicas
            into[ranks] += message.num_bytes
            num_received[ranks] += 1
            packed += message.num_bytes
            for replica in range(num_replicas):
                places = (replica * num_receivers + ranks) % gpus_per_node
                np.add.at(rails[message.sender % gpus_per_node], places, message.num_bytes)
        largest[number] = out.max(), into.max()
        sent += out
        received += into
    return Traffic(
        sent=sent,
        num_sent=num_sent,
        received=received,
        num_received=num_received,
        rails=rails,
        largest=largest,
        must_move=bytes_that_must_move(plan, num_replicas),
        packed=packed,
    )


def seconds(traffic: Traffic, nic_bytes_per_s: float, message_s: float = 0.0) -> float:
    """Arithmetic: the time in which the cards move a publication, if each round takes as long as its busiest card.

    ``message_s`` is a fixed cost of a message at its busiest end. Cards are full duplex and reach their rate, and the
    network between them never blocks: the assumptions of a rail-optimized fat tree.
    """
    busiest: Sequence[float] = traffic.largest.max(axis=1) / nic_bytes_per_s
    num_messages = max(int(traffic.num_sent.max()), int(traffic.num_received.max()))
    return float(sum(busiest)) + message_s * num_messages
