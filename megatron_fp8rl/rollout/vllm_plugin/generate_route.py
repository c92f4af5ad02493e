"""The sampling request: token ids in, token ids and log-probabilities out, in bytes.

In: JSON with ``token_ids`` and vLLM's ``sampling_params``. Out: the answer of :func:`completions.write_answer`. Runs in
the replica's server; ``rollout/vllm_plugin/server.py`` adds it to vLLM's application.

vLLM's own route for token ids, ``/inference/v1/generate``, builds an object with a name, bytes and a list of
alternatives for each log-probability: 43 us per token in the process that also receives every token of every running
completion. If 256 completions of 1,024 tokens end together, nothing is sampled for 11 s.
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from megatron_fp8rl.rollout.completions import GENERATE_PATH, write_answer, write_choice

router = APIRouter()


@router.post(GENERATE_PATH)
@with_cancellation  # a client that disconnects cancels its request
async def generate(body: dict[str, Any], raw_request: Request) -> Response:
    """Sample the completions of one prompt. Status 400 says what is wrong with a request."""
    engine = raw_request.app.state.engine_client
    result = None
    try:
        sampling = SamplingParams(
            **body["sampling_params"],
            output_kind=RequestOutputKind.FINAL_ONLY,  # no message per token inside this process
            flat_logprobs=True,  # lists of numbers, without an object per token
        )
        async for result in engine.generate(tokens_input(body["token_ids"]), sampling, uuid.uuid4().hex):
            pass
    except (KeyError, TypeError, ValueError) as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)
    assert result is not None  # an engine that fails raises, and vLLM's application answers
    prompt = result.prompt_logprobs
    return JSONResponse(
        write_answer(
            [
                write_choice(
                    output.token_ids,
                    None if output.logprobs is None else output.logprobs.logprobs,
                    output.finish_reason,
                    output.routed_experts,
                )
                for output in result.outputs
            ],
            num_cached_tokens=result.num_cached_tokens or 0,
            prompt_logprobs=None if prompt is None else prompt.logprobs,
        )
    )
