"""Run packed microbatches through Megatron-Core's pipeline schedules.

In: microbatches (the same on every rank of a data-parallel replica) and the model chunks of this pipeline rank. Out:
log-probabilities on every rank of the replica, or gradients in the chunks' buffers, and losses and metrics on the ranks
of the last pipeline stage. Runs on: every trainer rank.

Megatron-Core chooses the schedule: none, 1F1B, or interleaved 1F1B over virtual stages. The last stage computes
log-probabilities without materializing all logits. Loss functions get the whole microbatch in every parallel layout.
The output head runs on loss tokens only; elsewhere both values are 0.

Shapes: T = packed tokens of one microbatch, N = loss tokens of this context-parallel rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.trainer.divergence import divergence, most_likely
from megatron_fp8rl.trainer.logprobs import HeadShard, gather_context, token_logprobs, zigzag_indices
from megatron_fp8rl.trainer.model.build import unwrap
from megatron_fp8rl.trainer.model.packed_sequences import PackedSequences, Routes, upload
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.router_replay import for_update
from megatron_fp8rl.types import LossInputs, Microbatch, Taught, TrainBatch

type LossFn = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]
"""inputs -> (loss, metrics), as algo/losses.py defines them."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchResult:
    index: int
    loss: Tensor  # scalar, detached
    entropy_sum: Tensor  # scalar, detached, over loss tokens
    metrics: dict[str, Tensor]
    logprobs_T: Tensor  # float32 [T], detached; 0 outside the loss mask


@dataclass(frozen=True, kw_only=True)
class _Input:
    index: int
    microbatch: Microbatch
    tokens: Tensor  # int64 [1, T / cp]
    positions: Tensor  # int64 [1, T / cp]
    loss_rows_N: Tensor  # int64 [N] local positions of loss tokens
    targets_N: Tensor  # int64 [N]
    kept: KeptEntries | None  # [N]; None: the whole vocabulary
    packed: PackedSequences
    places_N: Tensor  # positions of loss tokens in the microbatch, on the host
    drafted_n: Tensor  # int64 [n] loss tokens that drafts can predict, with two tokens before them
    taught: tuple[tuple[Tensor, Taught], ...]  # with indices of the loss tokens
    order_T: Tensor | None  # packed positions of the tokens of all context-parallel ranks; None for one rank


class Forward:
    def __init__(self, cfg: RunConfig, parallel: Parallel) -> None:
        self.cfg = cfg
        self.parallel = parallel

    def logprobs(
        self,
        chunks: Sequence[torch.nn.Module],
        microbatches: Sequence[Microbatch],
        routes: Sequence[Routes | None] | None = None,
    ) -> tuple[Tensor, ...]:
        """Collective over the data-parallel replica: target log-probabilities, FP32 [T] per microbatch, on all ranks.

        Computed at ``sampling.temperature`` without gradients, in evaluation mode, which leaves FP8 scaling state
        unchanged. ``routes`` has each microbatch's experts to replay, compare or record; None: routers choose.
        """
        training = [chunk.training for chunk in chunks]
        try:
            for chunk in chunks:
                chunk.eval()
            with torch.no_grad():
                results = self._run(chunks, microbatches, routes, self._keep_logprobs, forward_only=True)
        finally:
            for chunk, mode in zip(chunks, training, strict=True):
                chunk.train(mode)
        return self._from_last_stage(dict(results), [mb.tokens_T.numel() for mb in microbatches])

    @torch.no_grad()
    def distributions(
        self, chunks: Sequence[torch.nn.Module], microbatches: Sequence[Microbatch], vocab_size: int, top_k: int
    ) -> dict[int, Taught]:
        """Collective over the data-parallel replica: distributions at loss tokens, by the microbatch's index; empty but
        on the last pipeline stage. Of the first ``vocab_size`` tokens the ``top_k`` most likely; 0: hidden states."""

        found: dict[int, Taught] = {}  # not an output of the model, which would be cast to FP32

        def head(*, hidden_states: Tensor, output_layer, output_weight, context: _Input, **unused) -> Tensor:
            hidden_NH, weight, shard = self._states(hidden_states, output_layer, output_weight, context, vocab_size)
            values: dict[str, Tensor] = {"hidden_nH": hidden_NH.cpu(), "head": weight.detach()}
            if top_k:
                pair = most_likely(hidden_NH, weight, top_k, shard, context.kept)
                values = dict(zip(("ids_nK", "logprobs_nK"), (x.cpu() for x in pair), strict=True))
            found[context.index] = Taught(positions_n=context.places_N, **values)
            return hidden_NH.new_zeros(())

        def keep(item: _Input, output: Tensor):
            return output, torch.zeros_like(output, dtype=torch.int), None

        self._run(chunks, microbatches, None, keep, forward_only=True, head=head)
        return found

    def gradients(
        self, chunks: Sequence[torch.nn.Module], batch: TrainBatch, loss_fn: LossFn
    ) -> list[MicrobatchResult]:
        """Collective over all ranks: accumulate the gradients of the batch's loss in the chunks' gradient buffers.
        Returns one result per microbatch on the last pipeline stage, and an empty list elsewhere."""
        routes = [for_update(self.cfg.algo, self.parallel, mb) for mb in batch.microbatches]
        return self._run(chunks, batch.microbatches, routes, partial(self._loss, batch, loss_fn), forward_only=False)

    def logprobs_of(
        self, results: Sequence[MicrobatchResult], microbatches: Sequence[Microbatch]
    ) -> tuple[Tensor, ...]:
        """Collective over the pipeline: the log-probabilities of a pass with gradients, as :meth:`logprobs`."""
        logprobs = {result.index: result.logprobs_T for result in results}
        return self._from_last_stage(logprobs, [mb.tokens_T.numel() for mb in microbatches])

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        microbatches: Sequence[Microbatch],
        routes: Sequence[Routes | None] | None,
        finish: Callable,
        *,
        forward_only: bool,
        head: Callable | None = None,
    ) -> list:
        routes = routes or [None] * len(microbatches)
        inputs = [self._input(index, *both) for index, both in enumerate(zip(microbatches, routes, strict=True))]
        iterators = [iter(inputs) for _ in chunks]
        step = partial(self._step, finish, head or self._head)
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(inputs),
            seq_length=max(mb.tokens_T.numel() for mb in microbatches),  # stages exchange the actual lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _step(self, finish: Callable, head: Callable, iterator, chunk: torch.nn.Module):
        """Megatron-Core's forward step: (output of the stage, loss function for the last stage)."""
        item: _Input = next(iterator)
        output = chunk(
            item.tokens,
            item.positions,
            None,
            packed_seq_params=item.packed,
            padding_mask=self._padding(item, chunk),
            output_processor=partial(head, chunk=chunk),
            output_processor_context=item,
        )
        return output, partial(finish, item)

    def _padding(self, item: _Input, chunk: torch.nn.Module) -> Tensor | None:
        """bool [1, tokens], True at padding, for the load-balancing loss; None if the model has none. Megatron-Core
        0.19 shards the mask over tensor-parallel ranks on the first stage only; other stages need it sharded already.
        Remove once GPTModel shards it on every stage."""
        if not self.cfg.optim.moe_aux_loss_coef:
            return None
        padding = ~item.packed.is_token_T[None]
        if get_attr_wrapped_model(chunk, "pre_process"):
            return padding
        return padding.chunk(self.parallel.tp_size, dim=1)[self.parallel.tp_rank]

    def _head(
        self,
        *,
        hidden_states: Tensor,
        output_layer,
        output_weight: Tensor | None,
        context: _Input,
        chunk: torch.nn.Module,
        **unused,
    ) -> tuple[Tensor, ...]:
        """GPTModel's output processor: (log-probabilities, entropy) of the loss tokens, FP32 [N] each; with gradients
        also their divergences from teachers, if there are any, and their log-probabilities as drafts."""
        hidden_NH, weight, shard = self._states(
            hidden_states, output_layer, output_weight, context, self.cfg.model.vocab_size
        )
        values = token_logprobs(hidden_NH, weight, context.targets_N, shard, context.kept)
        if not torch.is_grad_enabled():
            return values
        if self.cfg.model.num_mtp_layers:
            values = *values, self._draft_logprobs(unwrap(chunk), hidden_states, weight.detach(), context, shard)
        if not context.taught:
            return values
        divergence_N = torch.zeros_like(values[0])
        for rows_n, taught in context.taught:
            kept = None if context.kept is None else context.kept.select(rows_n.cpu().numpy())
            value_n = divergence(hidden_NH.index_select(0, rows_n), weight, taught, shard, kept)
            divergence_N = divergence_N.index_copy(0, rows_n, value_n)
        return *values, divergence_N

    def _draft_logprobs(
        self, model: GPTModel, hidden_states: Tensor, weight: Tensor, item: _Input, shard: HeadShard
    ) -> Tensor:
        """Log-probabilities of the loss tokens as drafts, FP32 [N], 0 where none is possible. At a position, the
        multi-token prediction layer reads the next token and predicts the one after it. Only that layer has gradients.
        """
        rows_n = item.loss_rows_N.index_select(0, item.drafted_n) - 1
        next_tokens = item.tokens.roll(-1, dims=1)  # a sequence's last position has no loss
        (layer,) = model.mtp.layers
        states = layer(model.embedding, hidden_states, next_tokens, item.positions, item.packed)
        targets_n = item.targets_N.index_select(0, item.drafted_n)
        logprobs_n, _ = token_logprobs(states[:, 0].index_select(0, rows_n), weight, targets_n, shard)
        return logprobs_n.new_zeros(item.targets_N.shape).index_copy(0, item.drafted_n, logprobs_n)

    def _states(
        self, hidden_states: Tensor, output_layer, output_weight: Tensor | None, context: _Input, vocab_size: int
    ) -> tuple[Tensor, Tensor, HeadShard]:
        """(last hidden states of the loss tokens [N, H], this rank's rows of the head, its shard)."""
        group = self.parallel.tp_group if self.parallel.tp_size > 1 else None
        if group is not None and output_layer.sequence_parallel:
            # Backward: each rank has the gradient of its vocabulary shard only, so the slices are summed.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=group
            )
        elif group is not None:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        weight = output_layer.weight if output_weight is None else output_weight
        shard = HeadShard.of(
            num_rows=weight.shape[0],
            vocab_size=vocab_size,
            temperature=self.cfg.sampling.temperature,
            chunk_tokens=self.cfg.optim.logprob_chunk_tokens,
            group=group,
            is_shared=output_weight is not None,
        )
        return hidden_states[:, 0].index_select(0, context.loss_rows_N), weight, shard

    def _whole(self, item: _Input, values_N: Tensor) -> Tensor:
        """Scatter values of this rank's loss tokens to the whole microbatch, [T]; 0 outside the loss mask."""
        local = values_N.new_zeros(item.tokens.shape[1]).index_copy(0, item.loss_rows_N, values_N)
        return local if item.order_T is None else gather_context(local, item.order_T, self.parallel.cp_group)

    def _keep_logprobs(self, item: _Input, output: tuple[Tensor, Tensor]):
        nothing = torch.zeros((), device=output[0].device)  # no loss in a forward-only pass
        return nothing, nothing.int(), (item.index, self._whole(item, output[0]))

    def _loss(self, batch: TrainBatch, loss_fn: LossFn, item: _Input, output: tuple[Tensor, ...]):
        logprobs_T, entropy_T, *others = (self._whole(item, values) for values in output)
        draft_logprobs_T = others.pop(0) if self.cfg.model.num_mtp_layers else None
        loss, metrics = loss_fn(
            LossInputs(
                mb=item.microbatch,
                batch=batch,
                trainer_logprobs_T=logprobs_T,
                entropy_T=entropy_T,
                cfg=self.cfg.algo,
                max_completion_tokens=self.cfg.sampling.max_completion_tokens,
                divergence_T=others[0] if others else None,
            )
        )
        result = MicrobatchResult(
            index=item.index,
            loss=loss.detach().clone(),
            entropy_sum=entropy_T.detach().sum(),
            metrics=metrics,
            logprobs_T=logprobs_T.detach(),
        )
        if draft_logprobs_T is not None:
            metrics["speculation/draft_loss/mean"] = -draft_logprobs_T.sum()
            loss = loss - draft_logprobs_T.sum() / max(batch.num_loss_tokens, 1)
        # Megatron-Core would divide by the token count; this loss is already normalized.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    def _from_last_stage(self, logprobs: dict[int, Tensor], lengths: list[int]) -> tuple[Tensor, ...]:
        """Collective over the pipeline: broadcast the last stage's tensors to all stages."""
        if self.parallel.pp_size == 1:
            return tuple(logprobs[index] for index in range(len(lengths)))
        if self.parallel.is_last_stage:
            flat = torch.cat([logprobs[index] for index in range(len(lengths))])
        else:
            flat = torch.empty(sum(lengths), dtype=torch.float32, device=self.parallel.device)
        group = self.parallel.pp_group
        dist.broadcast(flat, src=dist.get_global_rank(group, self.parallel.pp_size - 1), group=group)
        return flat.split(lengths)

    def _input(self, index: int, mb: Microbatch, routes: Routes | None) -> _Input:
        cp_size, num_tokens = self.parallel.cp_size, mb.tokens_T.numel()
        if num_tokens % (cp_size * self.parallel.tp_size):
            raise ValueError(
                f"microbatch {index} has {num_tokens} tokens, which do not divide over {cp_size} context-parallel and "
                f"{self.parallel.tp_size} tensor-parallel ranks. Pack with Alignment.of(parallel)"
            )
        # index_select, not x[i], on the host: from 3,000 elements on, x[i] uses all OpenMP threads (up to 10 ms).
        order_T = local = None
        tokens_t, positions_t, targets_t, mask_t = mb.tokens_T, mb.positions_T, mb.targets_T, mb.loss_mask_T
        is_token_t = is_token(mb)
        if cp_size > 1:
            parts = [zigzag_indices(mb.cu_seqlens_S, cp_size, rank) for rank in range(cp_size)]
            local = parts[self.parallel.cp_rank]
            tokens_t, positions_t, targets_t, mask_t, is_token_t = (
                x.index_select(0, local) for x in (tokens_t, positions_t, targets_t, mask_t, is_token_t)
            )
            order_T = upload(torch.cat(parts), self.parallel.device)
        rows_N = mask_t.nonzero()[:, 0]
        device, kept = self.parallel.device, None
        places_N = rows_N if local is None else local.index_select(0, rows_N)
        if mb.kept is not None and self.parallel.is_last_stage:
            kept = mb.kept.select(places_N.cpu().numpy())
        return _Input(
            index=index,
            microbatch=to_device(mb, device),
            tokens=upload(tokens_t[None], device),
            positions=upload(positions_t[None], device),
            loss_rows_N=upload(rows_N, device),
            targets_N=upload(targets_t.index_select(0, rows_N), device),
            kept=kept,
            places_N=places_N.cpu(),
            drafted_n=upload(positions_t.index_select(0, rows_N).nonzero()[:, 0], device),
            taught=tuple(_taught_at(part, places_N.cpu(), num_tokens, device) for part in mb.taught),
            packed=PackedSequences.of(mb.cu_seqlens_S, device, is_token_t, routes),
            order_T=order_T,
        )


def _taught_at(taught: Taught, places_N: Tensor, num_tokens: int, device: torch.device) -> tuple[Tensor, Taught]:
    """(indices of the loss tokens at ``places_N`` with a distribution, their distributions), on the device."""
    index_T = torch.full((num_tokens,), -1)
    index_T[taught.positions_n] = torch.arange(taught.positions_n.numel())
    index_N = index_T.index_select(0, places_N)
    rows_n = (index_N >= 0).nonzero()[:, 0]
    kept = {"positions_n": places_N.index_select(0, rows_n), "head": taught.head}
    for name in ("ids_nK", "logprobs_nK", "hidden_nH"):
        values = getattr(taught, name)
        kept[name] = None if values is None else upload(values.index_select(0, index_N.index_select(0, rows_n)), device)
    return upload(rows_n, device), Taught(**kept)


def to_device(mb: Microbatch, device: torch.device) -> Microbatch:
    tensors = {field.name: value for field in fields(mb) if isinstance(value := getattr(mb, field.name), Tensor)}
    moved = {name: upload(tensor, device) for name, tensor in tensors.items()}
    return replace(mb, **moved) if any(moved[name] is not tensors[name] for name in tensors) else mb


def is_token(mb: Microbatch) -> Tensor:
    """bool [T], False at padding: positions after the last token of their sequence."""
    num_sequences = mb.cu_seqlens_S.numel() - 1
    predicts_T = torch.where(mb.completion_positions_T >= 0, mb.positions_T, -1)
    # The last position that predicts a token is followed by the sequence's last token; filler sequences have neither.
    last_S = torch.full((num_sequences,), -1).scatter_reduce(0, mb.sequence_ids_T, predicts_T, "amax")
    last_S = torch.where(last_S >= 0, last_S + 1, -1)
    return mb.positions_T <= last_S.index_select(0, mb.sequence_ids_T)
