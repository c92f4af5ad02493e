"""An OpenAI-compatible endpoint in front of the engines: any agent that takes a ``base_url`` can be trained.

In: requests to ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` whose API key names a session. Out:
sampled completions. Runs on trainer rank 0, on the fleet's event loop.

The API key gives access to one session until it ends. Append ``.1``, ``.2``, ... to the key for side conversations,
which are not trained on. A program with one key for all requests can send the session's key as ``user`` instead.

Tokens are trained under the distribution that they were sampled from. So the gateway replaces a request's temperature,
top_p, top_k and min_p, and rejects other parameters that would change the distribution (``request_fields.py``).
Streamed requests get their answer in one piece. If a client disconnects, its request is cancelled. An answer that a
client does not get is not trained.

Clients repeat requests after some statuses. Status 429 and 503 with ``Retry-After`` stand for what may pass. A request
that is wrong, or whose session is at its limit, gets 400, 401, 410 or 413.
"""

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
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from megatron_fp8rl.data.conversation import ConversationError
from megatron_fp8rl.envs.agent_session import ASIDE
from megatron_fp8rl.rollout.agents.request_fields import RequestError, Surface, check_request
from megatron_fp8rl.rollout.agents.session import Session, SessionEndedError, SessionError, SessionLimitError
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls, before_stop
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineError, RequestLostError
from megatron_fp8rl.types import Completion

_log = logging.getLogger(__name__)

_MAX_DIGITS = 4300  # of an integer in a request, as Python allows by default
_MAX_BODY_BYTES = 32 << 20
_START_S = 10.0
_NUM_ROUNDS = 4
_RETRY_S = 1


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
        for path, verb, handler in (
            ("/v1/models", "GET", self._models),
            ("/v1/chat/completions", "POST", self._chat),
            ("/v1/completions", "POST", self._complete),
        ):
            app.add_route(path, partial(_delivered, partial(_answered, handler)), methods=[verb])
        served = "/v1/chat/completions, /v1/completions and /v1/models"

        async def not_found(request: Request, error: HTTPException) -> Response:
            problem = f"there is no {request.method} {request.url.path}"
            return _error(error.status_code, f"{problem}; this endpoint serves {served}")

        app.add_exception_handler(404, not_found)
        app.add_exception_handler(405, not_found)
        return app

    async def _models(self, request: Request) -> Response:
        self._session(_key(request))
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "trainer"}]})

    async def _chat(self, request: Request) -> Response:
        session, body = await self._asked(request, "chat")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools", [])
        arguments = dict(body.get("chat_template_kwargs", {}))
        if "reasoning_effort" in body:
            arguments["reasoning_effort"] = body["reasoning_effort"]

        async def sample() -> tuple[Completion, dict[str, Any]]:
            completion, turn = await session.chat(body["messages"], tools=tools, arguments=arguments, **_sampling(body))
            request.state.turn = session, turn
            message = self._tools.message(_told(completion, body), tools)
            if body.get("parallel_tool_calls") is False and "tool_calls" in message:
                message["tool_calls"] = message["tool_calls"][:1]
            session.record_answer(turn, message)
            return completion, message

        completion, message = await _until_disconnect(request, sample())
        reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
        choice_base = {"index": 0, "finish_reason": reason, "logprobs": _chat_logprobs(completion, body)}
        if not body.get("stream"):
            choice = choice_base | {"message": {"role": "assistant", **message}}
            return JSONResponse(self._answer("chat.completion", [choice], completion, body))
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
        delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        chunks = [[{"index": 0, "delta": delta, "finish_reason": None}], [choice_base | {"delta": {}}]]
        return self._stream("chat.completion.chunk", chunks, completion, body)

    async def _complete(self, request: Request) -> Response:
        session, body = await self._asked(request, "completions")
        prompt = body["prompt"]
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            (prompt,) = prompt  # a list of one prompt
        completion, turn = await _until_disconnect(request, session.complete(prompt, **_sampling(body)))
        request.state.turn = session, turn
        rows = None
        if body.get("logprobs") is not None:
            rows = {"token_logprobs": list(completion.rollout_logprobs), "tokens": _names(completion)}
        choice = {"index": 0, "text": _told(completion, body), "logprobs": rows}
        choice["finish_reason"] = completion.finish_reason
        if not body.get("stream"):
            return JSONResponse(self._answer("text_completion", [choice], completion, body))
        return self._stream("text_completion", [[choice]], completion, body)

    async def _asked(self, request: Request, surface: Surface) -> tuple[Session, dict[str, Any]]:
        """Return the session and the fields of a request. Raises _Refused or RequestError."""
        body = await _body(request)
        user = body.get("user") if isinstance(body, dict) else None
        try:
            session = self._session(_key(request))
        except _Refused:
            if not isinstance(user, str):
                raise
            session = self._session(user)
        return session, check_request(body, surface)

    def _session(self, key: str) -> Session:
        key, _, aside = key.partition(ASIDE)
        if (session := self._sessions.get(key)) is not None and (not aside or aside.isdecimal()):
            return session.aside(int(aside or 0))
        if key in self._ended:
            raise _Refused(410, "the session of this API key has ended")
        raise _Refused(401, "the API key names no session")

    def _answer(
        self, kind: str, choices: Sequence[Mapping[str, Any]], completion: Completion, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        num_sampled, num_prompt = len(completion.token_ids), completion.num_prompt_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
        }
        return {
            "id": f"cmpl-{body.get('request_id') or uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": list(choices),
            "usage": usage,
        }

    def _stream(
        self, kind: str, chunks: Sequence[Any], completion: Completion, body: Mapping[str, Any]
    ) -> StreamingResponse:
        whole = self._answer(kind, [], completion, body)
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


async def _body(request: Request) -> Any:
    """Return the JSON value of a request. Raises _Refused."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > _MAX_BODY_BYTES:
        raise _Refused(413, f"the request has {length} bytes, more than {_MAX_BODY_BYTES}")
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise _Refused(413, f"the request has more than {_MAX_BODY_BYTES} bytes")
    try:
        return json.loads(content, parse_int=_integer)
    except ValueError as error:
        raise _Refused(400, f"the request is no JSON: {error}") from None
    except RecursionError:
        raise _Refused(400, "the JSON of the request is nested too deeply") from None


def _integer(digits: str) -> int:
    """Python's limit may be off, because rows have longer integers. Reading one takes time quadratic in its digits."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, more than {_MAX_DIGITS}")
    return int(digits)


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    return {"max_tokens": max_tokens, "stop": stop, "seed": body.get("seed")}


def _told(completion: Completion, body: Mapping[str, Any]) -> str:
    """Return the text before the stop string, whose tokens are trained too."""
    return before_stop(completion.text, _sampling(body)["stop"], included=bool(body.get("include_stop_str_in_output")))


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
    """Call a handler. Withdraw the turn that it took if the client does not get the answer: after an error, or if the
    client has disconnected. It is then not trained."""
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
    """Await a coroutine and return its result. Cancel it and raise _Refused if the client disconnects."""
    task = asyncio.ensure_future(sampling)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Refused(499, "the client has disconnected")
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class _Refused(Exception):
    """The answer to a request is an error with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _answered(handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """Call a handler; return its answer, or the answer that describes its error."""
    try:
        return await handler(request)
    except _Refused as error:
        return _error(error.status, str(error))
    except ClientDisconnect:
        return _error(499, "the client has disconnected")
    except RequestError as error:
        return _error(400, str(error), field=error.field)
    except ConversationError as error:
        return _error(400, str(error))
    except SessionLimitError as error:
        is_length = "--session.max_tokens" in str(error)  # clients know this code, and shorten their messages
        return _error(400, str(error), code="context_length_exceeded" if is_length else "session_limit")
    except SessionEndedError as error:
        return _error(410, str(error))
    except SessionError as error:  # too many requests at once
        return _error(429, str(error), may_pass=True)
    except EngineError as error:
        if isinstance(error, RequestLostError):
            return _error(400, error.summary)
        if isinstance(error, EngineDeadError):  # no replica is left
            return _error(503, error.summary)
        if error.status is None:
            return _error(503, error.summary, may_pass=True)
        return _error(400 if error.status < 500 else 500, error.summary)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
        _log.error("a request to the endpoint of the sessions failed: %s", reason)
        return _error(500, reason)


def _error(
    status: int, message: str, *, field: str | None = None, code: str | None = None, may_pass: bool = False
) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message, "type": kind, "param": field, "code": code or status}
    headers = {"x-should-retry": str(may_pass).lower()}
    if may_pass:
        headers["Retry-After"] = str(_RETRY_S)
    content = {"error": body}
    return JSONResponse(content, status_code=status, headers=headers)
