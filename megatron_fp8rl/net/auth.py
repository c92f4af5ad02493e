"""Access control for engines: a request must carry the run's token.

vLLM's ``--api-key`` does not cover the endpoints of its development mode, which pause engines, load weights and call
methods of workers. This covers every path. Other users can read neither the environment variable of the token nor the
endpoint file for trainers on other hosts.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Any

TOKEN_VARIABLE = "MEGATRON_FP8RL_TOKEN"


def new_token() -> str:
    """An unguessable token."""
    return secrets.token_urlsafe(32)


def headers(token: str) -> dict[str, str]:
    """The headers that a request must carry."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def may_pass(authorization: bytes, token: str | None) -> bool:
    """Whether the Authorization value of a request matches the token. Without a token every request is refused."""
    return bool(token) and hmac.compare_digest(authorization, headers(token)["Authorization"].encode())


class RequireToken:
    """ASGI middleware, for vLLM's ``--middleware``. Without a token in the environment every request is refused."""

    def __init__(self, app: Any, environment: Mapping[str, str] = os.environ) -> None:
        self._app = app
        self._token = environment.get(TOKEN_VARIABLE)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        sent = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        if scope["type"] == "lifespan" or may_pass(sent, self._token):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            content = b'{"error": "the token of this rollout replica is missing or wrong"}'
            length = str(len(content)).encode()
            head = [(b"content-type", b"application/json"), (b"content-length", length)]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": content})
        else:
            await send({"type": "websocket.close", "code": 1008})
