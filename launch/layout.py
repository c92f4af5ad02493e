"""Assigns trainer ranks and engine workers to nodes. Pure.

The trainer uses the first nodes, with the same number of ranks on each. Engines use separate nodes if the job has
enough, otherwise the free slots after the trainer's ranks. A slot is a GPU, or one rank on nodes without GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

Slots = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Need:
    ranks: int  # trainer ranks; 0 for engines only
    replicas: int  # started by agents
    tensor: int  # engine workers per replica
    slots: int  # per node
    shares_slots: bool = False  # engines and trainer ranks use the same slots in turns


@dataclass(frozen=True, kw_only=True)
class Place:
    """Location of a replica: the same slots on each of its nodes."""

    nodes: tuple[int, ...]
    slots: Slots


@dataclass(frozen=True, kw_only=True)
class Layout:
    nodes: int
    trainer_nodes: tuple[int, ...]
    ranks_per_node: int
    replicas: tuple[Place, ...]


def plan_layout(need: Need, nodes: int | None = None) -> tuple[Layout | None, list[str]]:
    """(layout, []) or (None, problems). ``nodes=None`` takes as few nodes as possible."""
    problems = _problems(need)
    if problems:
        return None, problems
    fewest = next((n for n in _counts(need) if _try(need, n) is not None), None)
    if fewest is None:
        edge = "no replica may cross the edge of a node"
        return None, [f"{_describe(need)} do not fit onto nodes of {need.slots}: {edge}"]
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
    problems = []
    if need.tensor > need.slots and need.replicas and need.tensor % need.slots:
        rule = "a replica that spans nodes must"
        problems.append(f"--engine.tensor {need.tensor} does not fill whole nodes of {need.slots}; {rule}")
    if need.shares_slots and need.replicas * need.tensor > need.ranks:
        engines = f"{need.replicas} replicas x {need.tensor}"
        problems.append(f"{engines} share the slots of {need.ranks} trainer ranks, which are fewer")
    if need.shares_slots and need.tensor > need.slots:
        problems.append(f"--engine.tensor {need.tensor} spans nodes of {need.slots}, which colocated replicas cannot")
    if not need.ranks and not need.replicas:
        problems.append("there is neither a trainer nor a replica to place")
    return problems


def _counts(need: Need) -> range:
    """Node counts to try, up to one node per rank and per replica."""
    spans = max(1, -(-need.tensor // need.slots))
    return range(1, need.ranks + need.replicas * spans + 1)


def _try(need: Need, nodes: int) -> Layout | None:
    """A layout that uses exactly ``nodes`` nodes, with separate engine nodes if possible."""
    engine_nodes = 0 if need.shares_slots or not need.replicas else _fewest_for_engines(need)
    divisors = [t for t in range(1, nodes + 1) if need.ranks and need.ranks % t == 0 and need.ranks // t <= need.slots]
    trainers = divisors if need.ranks else [0]
    separate = [t for t in trainers if nodes - t >= engine_nodes]
    # Separate engine nodes first. The trainer takes as many of the other nodes as possible.
    place = _share if need.shares_slots else _spread
    attempts = [(place, t) for t in sorted(separate, reverse=True)]
    attempts += [] if need.shares_slots else [(_fill, t) for t in sorted(trainers, reverse=True)]
    for place, t in attempts:
        replicas = place(need, t, nodes)
        used = {*range(t), *(node for replica in replicas or () for node in replica.nodes)}
        if replicas is not None and used == set(range(nodes)):
            ranks = need.ranks // t if t else 0
            return Layout(nodes=nodes, trainer_nodes=tuple(range(t)), ranks_per_node=ranks, replicas=tuple(replicas))
    return None


def _fewest_for_engines(need: Need) -> int:
    if need.tensor > need.slots:
        return need.replicas * (need.tensor // need.slots)
    return -(-need.replicas // (need.slots // need.tensor))


def _spread(need: Need, trainers: int, num_nodes: int) -> list[Place] | None:
    """Replicas on nodes without a trainer, as evenly as possible."""
    nodes = range(trainers, num_nodes)
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
    """Replicas on all free slots, first after the trainer's ranks."""
    if need.tensor > need.slots:
        return _spread(need, trainers, nodes)
    used = need.ranks // trainers if trainers else 0
    places = []
    for node in range(nodes):
        first = used if node < trainers else 0
        while first + need.tensor <= need.slots and len(places) < need.replicas:
            places.append(Place(nodes=(node,), slots=tuple(range(first, first + need.tensor))))
            first += need.tensor
    return places if len(places) == need.replicas else None


def _share(need: Need, trainers: int, _: int) -> list[Place] | None:
    """Replicas on the slots of trainer ranks, each within one node."""
    per_node = need.ranks // trainers // need.tensor
    if not per_node or need.replicas > per_node * trainers:
        return None
    places = []
    for replica in range(need.replicas):
        node, k = divmod(replica, per_node)
        places.append(Place(nodes=(node,), slots=tuple(range(k * need.tensor, (k + 1) * need.tensor))))
    return places


def _describe(need: Need) -> str:
    parts = [f"{need.ranks} trainer ranks"] if need.ranks else []
    if need.replicas:
        parts.append(f"{need.replicas} replicas x {need.tensor}")
    return " and ".join(parts)
