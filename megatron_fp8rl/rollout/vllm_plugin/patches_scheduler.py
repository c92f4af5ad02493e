"""vLLM's scheduler with less work per token: a short path for decoding, and few messages to the server.

Steps and tokens are those of vLLM's scheduler. vLLM's engine core loads a class by name (``--scheduler-cls``).

vLLM sends every sampled token to its server at once, and checks each request for prompts, images, drafts, grammars and
cache transfers in every step. The GPU waits for this Python thread: 5.7 ms per step of 128 sequences, 3.1 ms with this
scheduler (20 layers of Qwen3-8B's shape in BF16, vLLM 0.26.0, one H100; the GPU took 8 ms). There are two changes:

- The scheduler buffers tokens and log-probabilities of requests with ``RequestOutputKind.FINAL_ONLY``, such as all of
  ours. It sends them at every :data:`BUFFERED_TOKENS`-th token, at the last token, and on abort. A single message at
  the end would delay all of the server's work per token until then.
- Steps in which every running request decodes one token, and none ends, take a short path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from megatron_fp8rl.rollout.vllm_plugin.patches_kept import stack
from megatron_fp8rl.upstream import patches

BUFFERED_TOKENS = 32  # a request's buffer is sent when its length is a multiple of this


@dataclass(slots=True)
class TokenBuffer:
    """A request's buffer of sampled tokens that are not yet sent."""

    request: Request
    token_ids: list[int]  # the request's list of output tokens, which vLLM extends
    stops: frozenset[int]  # tokens that may end it
    last: int  # number of tokens before its last possible token
    has_logprobs: bool
    num_sent: int = 0  # of token_ids
    logprobs: list[float] = field(default_factory=list)  # of the tokens not yet sent
    ranks: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(
        default_factory=list
    )  # with kept entries (patches_kept.py), if the engine reports them
    prefill_stats: object = None

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> TokenBuffer:
        sampling = request.sampling_params
        return cls(
            request,
            request._output_token_ids,
            frozenset((*(sampling.stop_token_ids or ()), sampling.eos_token_id)),
            min(request.max_tokens, max_model_len - request.num_prompt_tokens) - 1,
            sampling.num_logprobs is not None,
        )

    def is_due(self) -> bool:
        return len(self.request._all_token_ids) % BUFFERED_TOKENS == 0

    def into(self, output: EngineCoreOutput) -> EngineCoreOutput:
        output.new_token_ids = self.token_ids[self.num_sent :]
        output.prefill_stats, self.prefill_stats = output.prefill_stats or self.prefill_stats, None
        if self.logprobs:
            output.new_logprobs = LogprobsLists(
                stack(self.ids) if self.ids else np.array(output.new_token_ids, np.int32)[:, None],
                np.array(self.logprobs, np.float32)[:, None],
                np.array(self.ranks, np.int32),
            )
        self.num_sent = len(self.token_ids)
        self.logprobs, self.ranks, self.ids = [], [], []
        return output


def can_buffer(request: Request) -> bool:
    """Whether a request needs only its final output, and vLLM's server needs no token to detect its end."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.stop
        and sampling.num_logprobs in (None, 0)
        and sampling.prompt_logprobs is None
        and sampling.repetition_detection is None
        and not request.resumable
        and not request.use_structured_output
    )


@patches(
    "vllm",
    why="vLLM sends every token as an object, although the server needs none before the last "
    "(Scheduler.update_from_output; EngineCoreProc._send_finish_outputs_to_client ends the requests of a pause by a "
    "message without tokens)",
    remove_when="vLLM's scheduler buffers the tokens of requests that need only their final output",
    optional=True,
)
class BufferingScheduler(Scheduler):
    """vLLM's scheduler with buffered tokens, for engines without asynchronous scheduling."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _send_buffered_tokens_on_abort()
        self.buffers: dict[str, TokenBuffer] = {}  # by id, of running requests
        self.ended: dict[str, TokenBuffer] = {}  # of aborted requests; the engine core may send these

    def take_buffer(self, request_id: str) -> TokenBuffer | None:
        return self.buffers.pop(request_id, None) or self.ended.pop(request_id, None)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.ended.clear()
        return super().schedule(throttle_prefills)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if can_buffer(request):
            self.buffers[request.request_id] = TokenBuffer.of(request, self.max_model_len)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            if buffer := self.buffers.pop(request.request_id, None):
                self.ended[request.request_id] = buffer
        return finished

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in by_client.values():
            outputs.outputs = list(self._due(outputs.outputs))
        return by_client

    def _due(self, outputs: list[EngineCoreOutput]) -> Iterator[EngineCoreOutput]:
        for output in outputs:
            name = output.request_id
            buffer = self.buffers.get(name) or self.ended.get(name)
            if buffer is not None:
                if (logprobs := output.new_logprobs) is not None:
                    buffer.logprobs += logprobs.logprobs[:, 0].tolist()
                    buffer.ranks += logprobs.sampled_token_ranks.tolist()
                    if logprobs.logprob_token_ids.shape[1] > 1:
                        buffer.ids.append(logprobs.logprob_token_ids)
                buffer.prefill_stats = buffer.prefill_stats or output.prefill_stats
                if output.finish_reason is not None:
                    self.take_buffer(name)
                elif not buffer.is_due():
                    continue
                buffer.into(output)
            yield output


def _send_buffered_tokens_on_abort() -> None:
    """Make the engine core send the buffered tokens of requests that a pause ends."""

    def send(core: EngineCoreProc, request_ids: list[str], client_index: int, finish_reason: Any) -> None:
        outputs = [EngineCoreOutput(request_id, [], finish_reason=finish_reason) for request_id in request_ids]
        for output in outputs:
            if (buffer := core.scheduler.take_buffer(output.request_id)) is not None:
                buffer.into(output)
        message = EngineCoreOutputs(finished_requests=request_ids, outputs=outputs)
        core.output_queue.put_nowait((client_index, message))

    EngineCoreProc._send_finish_outputs_to_client = send


class BufferingAsyncScheduler(BufferingScheduler, AsyncScheduler):
    """:class:`BufferingScheduler` for engines with asynchronous scheduling."""


class DecodeStep(SchedulerOutput):
    """A step of the short path: every request decodes one token."""


@patches(
    "vllm",
    why="a step in which every request decodes one token costs as much per request as any other step "
    "(Scheduler.schedule, AsyncScheduler._update_after_schedule, Scheduler.update_from_output)",
    remove_when="vLLM has a short path for such steps",
    optional=True,
)
class DecodeScheduler(BufferingAsyncScheduler):
    """Asynchronous scheduling with a short path for steps in which all requests decode. For vLLM's V2 model runner."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        cache = self.kv_cache_manager
        self._is_plain = (
            self.use_v2_model_runner
            and self.pp_size == 1
            and self.connector is None
            and self.ec_connector is None
            and self.lora_config is None
            and not self.num_spec_tokens
            and not self.has_mamba_layers
            and not self.needs_kv_cache_zeroing
            and not self.enable_return_routed_experts
            and not self.log_stats
            and self.num_sampled_tokens_per_step == 1
            and isinstance(cache.coordinator, UnitaryKVCacheCoordinator)
            and isinstance(spec := self.kv_cache_config.kv_cache_groups[0].kv_cache_spec, FullAttentionSpec)
            and spec.sliding_window is None
            and spec.attention_chunk_size is None
        )
        self._all_decode = False  # the prompts of all running requests are computed

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._is_plain and self._all_decode and self._is_decoding():
            return self._schedule_decoding()
        output = super().schedule(throttle_prefills)
        self._all_decode = all(
            not request.is_prefill_chunk and request.num_output_placeholders > 0 and not request.spec_token_ids
            for request in self.running
        )
        return output

    def _is_decoding(self) -> bool:
        """Whether the next step decodes one token of each running request, and there are enough free blocks."""
        running = self.running
        return (
            bool(running)
            and not self.waiting
            and not self.skipped_waiting
            and not self.reset_preempted_req_ids
            and self._pause_state != PauseState.PAUSED_ALL
            and len(running) <= self.max_num_scheduled_tokens
            and self.kv_cache_manager.block_pool.get_num_free_blocks() >= len(running)
        )

    def _schedule_decoding(self) -> SchedulerOutput:
        """Schedule such a step like :meth:`Scheduler.schedule`, with AsyncScheduler's bookkeeping."""
        self.ended.clear()
        self.current_step += 1
        cache, block_size, next_step = self.kv_cache_manager, self.block_size, self.current_step + 1
        cache.new_step_starts()
        last_position = self.max_model_len - 1
        names: list[str] = []
        blocks: list[tuple[list[int], ...] | None] = []
        computed_tokens: list[int] = []
        output_tokens: list[int] = []
        for request in self.running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if placeholders > 0 and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue  # the previous step samples its last token
            if computed >= last_position:
                continue
            if computed % block_size:
                blocks.append(None)
            else:
                blocks.append(cache.allocate_slots(request, 1).get_block_ids(allow_none=True))
            names.append(request.request_id)
            computed_tokens.append(computed)
            output_tokens.append(len(request._output_token_ids) + placeholders)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders = placeholders + 1
            request.next_decode_eligible_step = next_step
        cache.take_new_block_ids()
        step = DecodeStep(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=computed_tokens,
                num_output_tokens=output_tokens,
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=cache.get_num_common_prefix_blocks(self.running[0].request_id),
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
            num_spec_tokens_to_schedule=self.num_spec_tokens,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(scheduler_output, DecodeStep):
            due = self._update_decoding(model_runner_output)
            if due is not None:
                return due
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_decoding(self, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs] | None:
        """Return the messages of a step in which each request got one token and continues; otherwise None."""
        tokens, logprobs = result.sampled_token_ids, result.logprobs
        if not tokens or result.num_nans_in_logits or result.kv_connector_output or self.finished_req_ids_dict:
            return None
        buffers, steps = self.buffers, []
        for name, new in zip(result.req_ids, tokens, strict=True):
            buffer = buffers.get(name)
            if buffer is None or len(new) != 1 or new[0] in buffer.stops or len(buffer.token_ids) >= buffer.last:
                return None
            request = buffer.request
            if request.status is not RequestStatus.RUNNING or request.async_tokens_to_discard:
                return None
            steps.append((buffer, request, new[0]))
        due: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        num_tokens = len(steps)
        rows = repeat(0.0, num_tokens) if logprobs is None else logprobs.logprobs[:, 0].tolist()
        ranks = repeat(0, num_tokens) if logprobs is None else logprobs.sampled_token_ranks.tolist()
        has_kept = logprobs is not None and logprobs.logprob_token_ids.shape[1] > 1
        block_size, hash_block_size = self.block_size, self.hash_block_size
        for index, ((buffer, request, token), logprob, rank) in enumerate(zip(steps, rows, ranks, strict=True)):
            buffer.token_ids.append(token)
            all_token_ids = request._all_token_ids
            all_token_ids.append(token)
            if len(all_token_ids) % hash_block_size == 0:
                request.update_block_hashes()
            request.num_in_flight_tokens -= 1
            placeholders = request.num_output_placeholders = request.num_output_placeholders - 1
            known = request.num_computed_tokens - placeholders
            if known % block_size == 0:
                self.kv_cache_manager.cache_blocks(request, known)
            if buffer.has_logprobs:
                buffer.logprobs.append(logprob)
                buffer.ranks.append(rank)
                if has_kept:
                    buffer.ids.append(logprobs.logprob_token_ids[index : index + 1])
            if buffer.is_due():
                due[request.client_index].append(buffer.into(EngineCoreOutput(request.request_id, [])))
        return {client: EngineCoreOutputs(outputs=outputs) for client, outputs in due.items()}
