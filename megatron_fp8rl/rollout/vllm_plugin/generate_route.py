"""HTTP route for sampling requests: token ids in, token ids and log-probabilities out, as bytes.

In: JSON with vLLM's ``sampling_params`` and ``token_ids``, whose first ``num_prompt_tokens`` are the prompt.
``dropped_token_ids`` are not part of a text; ``adapter`` is the version of a loaded one, if any. Out: the answer of
:func:`completions.write_answer`. Runs in the replica's server (``server.py``).

vLLM's route for token ids, ``/inference/v1/generate``, builds an object with a name, bytes and alternatives for each
log-probability. That takes 43 us per token, in the process that also receives all tokens. If 256 completions of 1,024
tokens end together, nothing is sampled for 11 s.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from megatron_fp8rl.data.tokenizer import decode
from megatron_fp8rl.rollout.completions import GENERATE_PATH, Answer, Segment, write_answer
from megatron_fp8rl.rollout.vllm_plugin.drafts import counts_of_drafts
from megatron_fp8rl.rollout.vllm_plugin.patches_adapters import adapter_request
from megatron_fp8rl.rollout.vllm_plugin.patches_kept import kept_entries_of

router = APIRouter()


@router.post(GENERATE_PATH)
@with_cancellation  # a client that disconnects cancels its request
async def generate(body: dict[str, Any], raw_request: Request) -> Response:
    """Sample the completions of one prompt. Status 400 explains an invalid request."""
    engine = raw_request.app.state.engine_client
    result = None
    try:
        sampling = SamplingParams(
            **body["sampling_params"],
            output_kind=RequestOutputKind.FINAL_ONLY,  # no message per token inside this process
            flat_logprobs=True,  # lists of numbers, without an object per token
        )
        sampled = body["token_ids"][body["num_prompt_tokens"] :]
        dropped = frozenset(body["dropped_token_ids"])
        adapter = None if body.get("adapter") is None else adapter_request(body["adapter"])
        tokens, name = tokens_input(body["token_ids"]), uuid.uuid4().hex
        async for result in engine.generate(tokens, sampling, name, lora_request=adapter):  # noqa: B007
            pass
    except (KeyError, TypeError, ValueError) as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)
    assert result is not None  # an engine that fails raises, and vLLM's application answers
    prompt, tokenizer = result.prompt_logprobs, engine.get_tokenizer()
    answer = Answer(
        segments=[_segment(output, sampled, tokenizer, dropped) for output in result.outputs],
        num_cached_tokens=result.num_cached_tokens or 0,
        prompt_logprobs=None if prompt is None else prompt.logprobs,
    )
    return Response(write_answer(answer), media_type="application/octet-stream")


def _segment(output: Any, sampled: Sequence[int], tokenizer: Any, dropped: frozenset[int]) -> Segment:
    """Return one completion; if it is finished, with the text of all tokens, starting with ``sampled``."""
    is_whole = output.finish_reason != "abort"
    num_drafts, num_accepted = (0, 0) if output.logprobs is None else counts_of_drafts(output.logprobs.ranks)
    return Segment(
        token_ids=output.token_ids,
        rollout_logprobs=() if output.logprobs is None else output.logprobs.logprobs,
        finish_reason=output.finish_reason,
        routed_experts=output.routed_experts,
        text=decode(tokenizer, [*sampled, *output.token_ids], dropped) if is_whole else None,
        kept=kept_entries_of(output.logprobs),
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_accepted,
    )
