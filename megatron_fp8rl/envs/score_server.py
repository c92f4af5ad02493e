"""HTTP server that scores completions for a trainer on another node; started by an agent.

    python -m megatron_fp8rl score_server CONFIG [--field value ...] --server INDEX --endpoint FILE

In: the run's configuration, as for ``python -m megatron_fp8rl``, and the index of this score server. Out: a pool of
``data.num_score_workers`` processes behind HTTP at an address that other nodes can reach, and an endpoint file with
that address. Logs go to this process's own output. Requests of the client, envs/remote_scoring.py:

    GET  /health                                  ->  200
    POST /score   {"prompt": Prompt, "text": str} ->  200 {"score": [reward, status, detail, parts]}
                                                      401 without the token of the endpoint file
                                                      400 {"error": text} for a malformed request
                                                      500 {"error": text} if the pool cannot score at all

Exits with 0 after SIGTERM or SIGINT, and with 1 when its parent process is gone, for whatever reason. Ignores SIGUSR1,
which Slurm sends to every process before a time limit: the agent handles it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import FrameType
from typing import Any

from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.envs.rewards.scalar import SERVERS, servers_of
from megatron_fp8rl.envs.scoring import CompletionScorer, ScorePool, ScorePoolError
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.address import own_address
from megatron_fp8rl.net.endpoint import Endpoint, scorer_name
from megatron_fp8rl.types import Prompt

_POLL_S = 0.2
_READ_DEADLINE_S = 60.0  # for receiving a request
_REFUSED_BYTES = 1 << 16  # bytes read of a request without the token, so that the sender gets the answer


def main(cfg: RunConfig, *, server: int, endpoint: Path) -> int:
    """Run score server ``server`` until the parent exits or a signal arrives; return the exit status.

    The file ``endpoint`` is written once the server is ready. Raises ConfigError if the run has no such server.
    """
    parent = os.getppid()
    if not 0 <= server < cfg.data.score_servers:
        problem = f"data.score_servers is {cfg.data.score_servers}"
        raise ConfigError([Violation("--server", server, problem, "Choose one of 0 ... data.score_servers - 1")])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited by the workers
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, _leave)
    name, token = scorer_name(server), auth.new_token()
    os.environ[SERVERS] = servers_of(cfg.run_dir)  # score workers inherit it
    with ScorePool.build(cfg.data) as pool, serving(pool, own_address(), token) as url:
        announced = Endpoint.announce(endpoint, name=name, url=url, pid=os.getpid(), token=token)
        try:
            while os.getppid() == parent:
                time.sleep(_POLL_S)
        finally:
            announced.withdraw(endpoint)
    print(f"{name}: the process that started it is gone", file=sys.stderr)
    return 1


@contextlib.contextmanager
def serving(scorer: CompletionScorer, host: str, token: str) -> Iterator[str]:
    """Serve requests in threads on a free port of ``host`` for the block. Yields the URL."""
    with _Server((host, 0), _Handler) as server:
        server.scorer, server.token = scorer, token
        threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="score server", daemon=True).start()
        try:
            yield f"http://{host}:{server.server_address[1]}"
        finally:
            server.is_ending.set()
            server.shutdown()


class _Server(ThreadingTCPServer):
    scorer: CompletionScorer
    token: str
    daemon_threads = True
    block_on_close = False  # requests in flight end with the pool
    request_queue_size = 1024  # pending connections

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_ending = threading.Event()

    def handle_error(self, *request: Any) -> None:
        """Ignore errors caused by a disconnected client."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*request)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _READ_DEADLINE_S
    wbufsize = -1  # buffered, so that an answer is one packet

    def do_GET(self) -> None:
        if self._may_pass():
            is_health = self.path == "/health"
            self._answer(HTTPStatus.OK if is_health else HTTPStatus.NOT_FOUND, {})

    def do_POST(self) -> None:
        if not self._may_pass():
            return
        if self.path != "/score":
            self._answer(HTTPStatus.NOT_FOUND, {})
            return
        try:
            request = json.loads(self.rfile.read(self._length()))
            fields = request["prompt"]
            prompt, text = Prompt(**{**fields, "token_ids": tuple(fields["token_ids"])}), request["text"]
        except (ValueError, KeyError, TypeError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": f"{type(error).__name__}: {error}"})
            return
        try:
            score = self.server.scorer.submit(prompt, text).result()  # terminates: every score has a deadline
            answer = HTTPStatus.OK, {"score": score}
        except (ScorePoolError, CancelledError) as error:
            answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
        # A failure due to workers killed at shutdown is no score: without an answer, the client asks another server.
        if not self.server.is_ending.is_set():
            self._answer(*answer)

    def log_message(self, *_: object) -> None:
        """Log nothing: a step has thousands of requests."""

    def _may_pass(self) -> bool:
        if auth.may_pass(self.headers.get("Authorization", "").encode(), self.server.token):
            return True
        self.rfile.read(min(self._length(), _REFUSED_BYTES))
        self._answer(HTTPStatus.UNAUTHORIZED, {"error": "the token of this score server is missing or wrong"})
        return False

    def _length(self) -> int:
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isdigit() else 0

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _leave(sign: int, _frame: FrameType | None) -> None:
    """Signal handler: exit; leaving the pool's context kills the workers."""
    for further in (signal.SIGTERM, signal.SIGINT):
        signal.signal(further, signal.SIG_IGN)
    raise SystemExit(0)
