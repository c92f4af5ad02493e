"""An OpenAI-compatible endpoint in front of the engines: any agent that takes a ``base_url`` can be trained.

In: requests to ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` whose API key names a session. Out:
sampled completions. Runs on trainer rank 0, on the fleet's event loop.

The API key gives access to one session until it ends. Append ``.1``, ``.2``, ... to the key for side conversations,
which are not trained on. A program with one key for all requests can send the session's key as ``user`` instead.

Tokens are trained under the distribution that they were sampled from. So the gateway replaces a request's temperature,
top_p, top_k and seed, and rejects other parameters that would change the distribution. Streamed requests get their
answer in one piece. If a client disconnects, its request is cancelled. An answer that a client does not get is not
trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_fp8rl.data.conversation import ConversationError
from megatron_fp8rl.envs.agent_session import ASIDE
from megatron_fp8rl.rollout.agents.session import Session, SessionEndedError, SessionError, SessionLimitError
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls
from megatron_fp8rl.rollout.errors import EngineError
from megatron_fp8rl.types import Completion

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 32 << 20
_START_S = 10.0
_NUM_ROUNDS = 4
# Parameters that change the distribution of tokens, with their neutral values.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "use_beam_search": (None, False),
    "ignore_eos": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
}
_STATUS = {SessionEndedError: 410, SessionLimitError: 429, SessionError: 409, ConversationError: 400, EngineError: 503}


class Gateway:
    def __init__(self, model: str, tools: ToolCalls, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._model, self._tools = model, tools
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # keys of the last sessions that ended
        self._socket = socket.create_server((host, port), backlog=1024)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        end = time.monotonic() + _START_S
        while not self._server.started and time.monotonic() < end:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Refuse further requests, and stop. Later calls do nothing."""
        for key in list(self._sessions):
            self.close_session(key)
        if self._task is not None:
            self._server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._socket.close()

    def open_session(self, session: Session) -> str:
        """Open a session; return its API key."""
        key = f"session-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close_session(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session.end()
            self._ended[key] = None
            while len(self._ended) > 10_000:
                del self._ended[next(iter(self._ended))]

    # ---- the endpoint

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_route("/v1/chat/completions", partial(_delivered, self._chat), methods=["POST"])
        app.add_route("/v1/completions", partial(_delivered, self._complete), methods=["POST"])
        return app

    async def _models(self, request: Request) -> Response:
        if isinstance(found := self._session(_key(request)), Response):
            return found
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "trainer"}]})

    async def _chat(self, request: Request) -> Response:
        if isinstance(asked := await self._asked(request), Response):
            return asked
        session, body = asked
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            return _error(400, "messages is not a list of messages")
        if body.get("tool_choice") == "none":
            tools = []

        async def sample() -> tuple[Completion, dict[str, Any]]:
            completion, turn = await session.chat(messages, tools=tools, **_sampling(body))
            request.state.turn = session, turn
            message = self._tools.message(_told(completion, body), tools)
            session.record_answer(turn, message)
            return completion, message

        outcome = await _until_disconnect(request, sample())
        if isinstance(outcome, Response):
            return outcome
        completion, message = outcome
        reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
        choice_base = {"index": 0, "finish_reason": reason, "logprobs": _chat_logprobs(completion, body)}
        if not body.get("stream"):
            choice = choice_base | {"message": {"role": "assistant", **message}}
            return JSONResponse(self._answer("chat.completion", [choice], completion))
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
        delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        chunks = [[{"index": 0, "delta": delta, "finish_reason": None}], [choice_base | {"delta": {}}]]
        return self._stream("chat.completion.chunk", chunks, completion, body)

    async def _complete(self, request: Request) -> Response:
        if isinstance(asked := await self._asked(request), Response):
            return asked
        session, body = asked
        prompt = body.get("prompt")
        is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
        if not is_ids and not (isinstance(prompt, str) and prompt):
            return _error(400, "prompt is neither a text nor a list of token ids; send one prompt in a request")
        outcome = await _until_disconnect(request, session.complete(prompt, **_sampling(body)))
        if isinstance(outcome, Response):
            return outcome
        completion, turn = outcome
        request.state.turn = session, turn
        rows = None
        if body.get("logprobs") is not None:
            rows = {"token_logprobs": list(completion.rollout_logprobs), "tokens": _names(completion)}
        choice = {"index": 0, "text": _told(completion, body), "logprobs": rows}
        choice["finish_reason"] = completion.finish_reason
        if not body.get("stream"):
            return JSONResponse(self._answer("text_completion", [choice], completion))
        return self._stream("text_completion", [[choice]], completion, body)

    async def _asked(self, request: Request) -> tuple[Session, dict[str, Any]] | Response:
        """Return the session and the body of a request, or an error response."""
        session, body = self._session(_key(request)), await _body(request)
        if isinstance(session, Response) and isinstance(body, dict) and isinstance(user := body.get("user"), str):
            session = self._session(user)
        if isinstance(session, Response):
            return session
        return body if isinstance(body, Response) else (session, body)

    def _session(self, key: str) -> Session | Response:
        key, _, aside = key.partition(ASIDE)
        if (session := self._sessions.get(key)) is not None and (not aside or aside.isdecimal()):
            try:
                return session.aside(int(aside or 0))
            except SessionLimitError as error:
                return _error(_STATUS[SessionLimitError], str(error))
        if key in self._ended:
            return _error(410, "the session of this API key has ended")
        return _error(401, "the API key names no session")

    def _answer(self, kind: str, choices: Sequence[Mapping[str, Any]], completion: Completion) -> dict[str, Any]:
        num_sampled, num_prompt = len(completion.token_ids), completion.num_prompt_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
        }
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": list(choices),
            "usage": usage,
        }

    def _stream(
        self, kind: str, chunks: Sequence[Any], completion: Completion, body: Mapping[str, Any]
    ) -> StreamingResponse:
        whole = self._answer(kind, [], completion)
        usage = whole.pop("usage")

        async def events() -> AsyncIterator[str]:
            for choices in chunks:
                yield f"data: {json.dumps(whole | {'choices': choices})}\n\n"
            if (body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps(whole | {'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"

        return _Stream(events(), media_type="text/event-stream")


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


async def _body(request: Request) -> dict[str, Any] | Response:
    """Return the JSON object of a request, or an error response."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > _MAX_BODY_BYTES:
        return _error(413, f"the request has {length} bytes, more than {_MAX_BODY_BYTES}")
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            return _error(413, f"the request has more than {_MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(content)
    except ValueError as error:
        return _error(400, f"the request is no JSON: {error}")
    if not isinstance(body, dict):
        return _error(400, "the request is no JSON object")
    for name, harmless in _REFUSED.items():
        if body.get(name) not in harmless:
            return _error(
                400,
                f"{name} = {json.dumps(body[name])[:200]} would sample from another distribution than the one that is "
                "trained; leave it out",
            )
    if not isinstance(body.get("stop") or "", str | list):
        return _error(400, "stop is neither a text nor a list of texts")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        return _error(400, f"max_tokens = {limit!r} is no positive number")
    return body


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    return {"max_tokens": body.get("max_completion_tokens") or body.get("max_tokens"), "stop": stop}


def _told(completion: Completion, body: Mapping[str, Any]) -> str:
    """Return the text before the first stop string, whose tokens are trained too."""
    text = completion.text
    for stop in _sampling(body)["stop"]:
        text = text.partition(stop)[0]
    return text


def _chat_logprobs(completion: Completion, body: Mapping[str, Any]) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    rows = zip(_names(completion), completion.rollout_logprobs, strict=True)
    return {"content": [{"token": name, "logprob": value, "bytes": None, "top_logprobs": []} for name, value in rows]}


def _names(completion: Completion) -> list[str]:
    return [f"token_id:{token}" for token in completion.token_ids]


class _Stream(StreamingResponse):
    """A streamed answer; calls ``withdraw`` if the client disconnects before all of it is sent."""

    withdraw: Callable[[], None] = staticmethod(lambda: None)
    is_sent = False

    async def stream_response(self, send: Send) -> None:
        await super().stream_response(send)
        self.is_sent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self.is_sent:
                self.withdraw()


async def _delivered(handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """Call a handler. Withdraw the turn that it took if the client does not get the answer, so that it is not trained:
    after an error, or if the client has disconnected."""
    is_delivered = False
    try:
        response = await handler(request)
        for _ in range(_NUM_ROUNDS):  # of the event loop, so that the server notices a disconnected client
            await asyncio.sleep(0)
        if isinstance(response, _Stream):
            response.withdraw = partial(_withdraw, request)
        is_delivered = response.status_code == 200 and not await request.is_disconnected()
        return response
    finally:
        if not is_delivered:
            _withdraw(request)


def _withdraw(request: Request) -> None:
    session, turn = getattr(request.state, "turn", (None, 0))
    if session is not None:
        session.withdraw(turn)


async def _until_disconnect(request: Request, sampling: Any) -> Any:
    """Await a coroutine; return its result or an error response. Cancel it if the client disconnects."""
    task = asyncio.ensure_future(sampling)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)
        return task.result()
    except tuple(_STATUS) as error:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        return _error(status, str(error))
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _error(status: int, message: str) -> JSONResponse:
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    # Clients retry some statuses automatically, which helps only if an engine comes back.
    return JSONResponse({"error": body}, status_code=status, headers={"x-should-retry": str(status == 503).lower()})
