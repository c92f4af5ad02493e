"""Router replay: gives the routers of a pass the experts that another pass chose for the same tokens.

In: expert ids of a microbatch (``routed_experts_T``), from the engine or from the trainer's earlier pass. Out: one
:class:`Routes` per microbatch, which the layers get with the packed-sequence parameters, and the share of tokens for
which both passes choose the same experts. Runs on: every trainer rank.

``algo.router_replay`` = "rollout" replays the engine's experts in the pass for old log-probabilities and in the update;
"old" replays the experts of that pass in the update. The ids belong to a microbatch, not to a layer: several
microbatches are in flight at once, and recomputation needs the same ids. The reference model always chooses.

Shapes: T = tokens of a packed microbatch, R = tokens that this rank routes (its slice under context and sequence
parallelism), L = layers of the whole model, K = experts of a token.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import AlgoConfig, ModelConfig
from megatron_fp8rl.trainer.logprobs import zigzag_indices
from megatron_fp8rl.trainer.model.packed_sequences import Routes, upload
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.types import Microbatch

_NO_EXPERT = -1


def for_old_logprobs(
    algo: AlgoConfig, parallel: Parallel, mb: Microbatch, agreement_L2: Tensor | None
) -> Routes | None:
    """Routes of the pass for old log-probabilities; None if nothing is replayed, compared or recorded. Counts agreement
    in ``agreement_L2`` if the microbatch has the engine's experts."""
    mode = algo.router_replay
    if mb.routed_experts_T is None and mode != "old":
        return None
    own = {} if mode == "old" else None
    return _routes(mb, parallel, replays=mode == "rollout", agreement_L2=agreement_L2, own=own)


def for_update(algo: AlgoConfig, parallel: Parallel, mb: Microbatch) -> Routes | None:
    """Routes of the update: the microbatch's experts are replayed. None without them and with "off"."""
    if mb.routed_experts_T is None or algo.router_replay == "off":
        return None
    return _routes(mb, parallel, replays=True)


def _routes(mb: Microbatch, parallel: Parallel, **fields) -> Routes:
    """Cut the microbatch's experts to the tokens of this rank, on its device."""
    rows_R = torch.arange(mb.tokens_T.numel(), device=mb.tokens_T.device)
    if parallel.cp_size > 1:
        rows_R = zigzag_indices(mb.cu_seqlens_S, parallel.cp_size, parallel.cp_rank)
    rows_R = rows_R.chunk(parallel.tp_size)[parallel.tp_rank]  # sequence parallelism cuts in rank order
    recorded_RLK = None
    if mb.routed_experts_T is not None:
        recorded_RLK = upload(mb.routed_experts_T.index_select(0, rows_R), parallel.device)
    return Routes(rows_R=upload(rows_R, parallel.device), recorded_RLK=recorded_RLK, **fields)


def recorded(routes: Routes, num_tokens: int, model: ModelConfig, parallel: Parallel) -> Tensor:
    """Collective over the data-parallel replica: routers' choices, int16 [T, L, K]; -1 for layers without experts."""
    shape = (num_tokens, model.num_layers, model.experts_per_token)
    whole_TLK = torch.full(shape, _NO_EXPERT, dtype=torch.int32, device=parallel.device)  # NCCL has no int16
    for layer, router_RK in routes.own.items():
        whole_TLK[routes.rows_R, layer] = router_RK.int()
    groups = (
        (parallel.tp_size, parallel.tp_group),
        (parallel.cp_size, parallel.cp_group),
        (parallel.pp_size, parallel.pp_group),
    )
    for size, group in groups:
        if size > 1:
            dist.all_reduce(whole_TLK, op=dist.ReduceOp.MAX, group=group)
    return whole_TLK.to(torch.int16)


def agreement_metrics(agreement_L2: Tensor, world_size: int) -> dict[str, float]:
    """Collective over all trainer ranks: share of tokens whose set of experts agrees, over all layers and of each. No
    two ranks may count the same layer and token in ``agreement_L2``."""
    if world_size > 1:
        dist.all_reduce(agreement_L2)
    counts = enumerate(agreement_L2.tolist())
    shares = {layer: agree / compared for layer, (agree, compared) in counts if compared}
    if not shares:
        return {}
    return {
        "router/agreement/mean": sum(shares.values()) / len(shares),
        "router/agreement/min": min(shares.values()),
        **{f"router/agreement_layer_{layer}/mean": share for layer, share in shares.items()},
    }
