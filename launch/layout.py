"""Which node carries which ranks and which engine workers. Pure.

In: how many of each there are, and what a node takes. Out: a :class:`Layout`, or sentences that say why there is none.

The trainer has the first nodes, the same number of ranks on each. Engines follow: behind the trainer's ranks where
slots are left and nothing else was asked for, on nodes of their own when the job is given more nodes than it needs.
A slot is a GPU, or on nodes without GPUs the room of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

Slots = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Need:
    """What has to be placed."""

    ranks: int  # of the trainer; 0 for a job with engines alone
    replicas: int  # that agents start
    tensor: int  # engine workers of one replica
    slots: int  # of one node
    shares_slots: bool = False  # engines use the slots of trainer ranks, in turns


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one replica is: these slots of each of these nodes."""

    nodes: tuple[int, ...]
    slots: Slots


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything is."""

    nodes: int
    trainer_nodes: tuple[int, ...]
    ranks_per_node: int
    replicas: tuple[Place, ...]


def plan_layout(need: Need, nodes: int | None = None) -> tuple[Layout | None, list[str]]:
    """(layout, problems), one of them empty. ``nodes=None`` takes as few as possible."""
    problems = _problems(need)
    if problems:
        return None, problems
    fewest = next((n for n in _counts(need) if _try(need, n) is not None), None)
    if fewest is None:
        edge = "no replica may cross the edge of a node"
        return None, [f"{_describe(need)} do not go onto nodes of {need.slots}: {edge}"]
    if nodes is None:
        return _try(need, fewest), []
    if nodes < fewest:
        return None, [f"--nodes {nodes} is too few: {_describe(need)} take {fewest} nodes of {need.slots}"]
    layout = _try(need, nodes)
    if layout is None:
        fitting = [n for n in _counts(need) if n >= fewest and _try(need, n) is not None]
        shown = ", ".join(map(str, fitting[:8]))
        return None, [f"--nodes {nodes} leaves nodes without work: {_describe(need)} can take {shown}"]
    return layout, []


def _problems(need: Need) -> list[str]:
    found = []
    if need.tensor > need.slots and need.replicas and need.tensor % need.slots:
        whole = "a replica that spans nodes has to"
        found.append(f"--engine.tensor {need.tensor} does not fill whole nodes of {need.slots}; {whole}")
    if need.shares_slots and need.replicas * need.tensor > need.ranks:
        found.append(
            f"{need.replicas} replicas x {need.tensor} share the slots of {need.ranks} trainer ranks, which are fewer"
        )
    if need.shares_slots and need.tensor > need.slots:
        found.append(f"--engine.tensor {need.tensor} spans nodes of {need.slots}, which colocated replicas cannot")
    if not need.ranks and not need.replicas:
        found.append("there is neither a trainer nor a replica to place")
    return found


def _counts(need: Need) -> range:
    """Numbers of nodes worth a try: with the most, every rank and every replica has its own."""
    spans = max(1, -(-need.tensor // need.slots))
    return range(1, need.ranks + need.replicas * spans + 1)


def _try(need: Need, nodes: int) -> Layout | None:
    """Exactly ``nodes`` nodes, none without work: engines on their own nodes if possible, else behind the trainer."""
    own = 0 if need.shares_slots or not need.replicas else _fewest_for_engines(need)
    divisors = [t for t in range(1, nodes + 1) if need.ranks and need.ranks % t == 0 and need.ranks // t <= need.slots]
    trainers = divisors if need.ranks else [0]
    apart = [t for t in trainers if nodes - t >= own]
    # Engines that can be apart are; the trainer takes what they leave.
    for t in sorted(apart, reverse=True):
        replicas = _share(need, t) if need.shares_slots else _spread(need, range(t, nodes))
        if replicas is not None and _all_work(nodes, t, replicas):
            return _layout(need, nodes, t, replicas)
    for t in sorted(trainers, reverse=True):
        replicas = None if need.shares_slots else _fill(need, t, nodes)
        if replicas is not None and _all_work(nodes, t, replicas):
            return _layout(need, nodes, t, replicas)
    return None


def _layout(need: Need, nodes: int, trainers: int, replicas: list[Place]) -> Layout:
    ranks = need.ranks // trainers if trainers else 0
    return Layout(nodes=nodes, trainer_nodes=tuple(range(trainers)), ranks_per_node=ranks, replicas=tuple(replicas))


def _fewest_for_engines(need: Need) -> int:
    if need.tensor > need.slots:
        return need.replicas * (need.tensor // need.slots)
    return -(-need.replicas // (need.slots // need.tensor))


def _spread(need: Need, nodes: range) -> list[Place] | None:
    """Replicas on nodes of their own, as evenly as they go."""
    if not need.replicas:
        return []
    if need.tensor > need.slots:
        span = need.tensor // need.slots
        if len(nodes) < need.replicas * span:
            return None
        starts = (nodes[0] + replica * span for replica in range(need.replicas))
        return [Place(nodes=tuple(range(s, s + span)), slots=tuple(range(need.slots))) for s in starts]
    if not len(nodes):
        return None
    places = []
    each, more = divmod(need.replicas, len(nodes))
    for index, node in enumerate(nodes):
        for k in range(each + (index < more)):
            if (k + 1) * need.tensor > need.slots:
                return None
            places.append(Place(nodes=(node,), slots=tuple(range(k * need.tensor, (k + 1) * need.tensor))))
    return places


def _fill(need: Need, trainers: int, nodes: int) -> list[Place] | None:
    """Replicas wherever slots are left, first behind the trainer's ranks."""
    if need.tensor > need.slots:
        return _spread(need, range(trainers, nodes))
    used = need.ranks // trainers if trainers else 0
    places = []
    for node in range(nodes):
        first = used if node < trainers else 0
        while first + need.tensor <= need.slots and len(places) < need.replicas:
            places.append(Place(nodes=(node,), slots=tuple(range(first, first + need.tensor))))
            first += need.tensor
    return places if len(places) == need.replicas else None


def _share(need: Need, trainers: int) -> list[Place] | None:
    """Replicas on the slots of trainer ranks, none over the edge of a node."""
    per_node = need.ranks // trainers // need.tensor
    if not per_node or need.replicas > per_node * trainers:
        return None
    places = []
    for replica in range(need.replicas):
        node, k = divmod(replica, per_node)
        places.append(Place(nodes=(node,), slots=tuple(range(k * need.tensor, (k + 1) * need.tensor))))
    return places


def _all_work(nodes: int, trainers: int, replicas: list[Place]) -> bool:
    return {*range(trainers), *(node for place in replicas for node in place.nodes)} == set(range(nodes))


def _describe(need: Need) -> str:
    parts = [f"{need.ranks} trainer ranks"] if need.ranks else []
    if need.replicas:
        parts.append(f"{need.replicas} replicas x {need.tensor}")
    return " and ".join(parts)
