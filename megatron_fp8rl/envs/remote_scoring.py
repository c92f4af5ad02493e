"""Client for score servers on other nodes.

In: prompts and completion texts. Out: rewards. Runs on: rank 0.

The agents of a launched job start and restart the servers (envs/score_server.py). If a server exits, hangs or does not
answer, other servers score its completions: they are delayed, with no other consequence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.scorer_process import START_DEADLINE_S
from megatron_fp8rl.envs.scoring import CompletionScorer, Score, ScorePool, ScorePoolError
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.endpoint import Endpoint, scorer_path
from megatron_fp8rl.types import Prompt

_log = logging.getLogger(__name__)

_CONNECT_DEADLINE_S = 10.0
_ANSWER_MARGIN_S = 10.0  # added to the server's own deadlines
_RETRY_S = 0.5  # interval between checks whether an unresponsive server has come back
_MAX_LOST = 3  # servers that may be lost while scoring one completion
# Detect a host that lost power within 20 s: unanswered keep-alive probes or unacknowledged data.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),  # milliseconds
)


def build_scorer(cfg: RunConfig) -> CompletionScorer:
    """Create the scorer of a run: a process pool on this host, or a client of the job's score servers."""
    if not cfg.data.score_servers:
        return ScorePool.build(cfg.data)
    return RemoteScorePool(
        [scorer_path(cfg.run_dir, index) for index in range(cfg.data.score_servers)],
        num_workers=cfg.data.num_score_workers,
        deadline_s=cfg.data.score_deadline_s,
        wait_s=cfg.rollout.start_deadline_s,
    )


class RemoteScorePool(CompletionScorer):
    """Score servers found through their endpoint files, each with ``num_workers`` processes.

    Each completion goes to the server with the fewest in flight. Unresponsive servers are retried, rereading their
    endpoint files, until none has answered for ``wait_s``. ``deadline_s`` is the servers' deadline for one score.
    """

    def __init__(self, paths: Sequence[Path], *, num_workers: int, deadline_s: float, wait_s: float) -> None:
        self._servers = [_Server(path) for path in paths]
        self._num_workers = num_workers
        self._answer_s = START_DEADLINE_S + deadline_s + _ANSWER_MARGIN_S
        self._wait_s = wait_s
        self._heard_s = 0.0  # monotonic time of the last answer from any server
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(len(paths) * num_workers, thread_name_prefix="remote score")
        self._is_closed = False
        for server in self._servers:
            threading.Thread(target=self._seek, args=(server,), name=f"seek {server.place}", daemon=True).start()

    def submit(self, prompt: Prompt, text: str) -> Future[Score]:
        if self._is_closed:
            raise ScorePoolError("the score pool is closed")
        return self._threads.submit(self._score, prompt, text)

    def close(self) -> None:
        """Stop sending requests; completions being scored count as failed. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()
        self._threads.shutdown(wait=True)

    def _score(self, prompt: Prompt, text: str) -> Score:
        body = json.dumps({"prompt": prompt.fields(), "text": text}).encode()
        lost: list[str] = []
        since_s = time.monotonic()
        while len(lost) < _MAX_LOST:
            server = self._take(since_s)
            if server is None:
                return Score.failed("the score pool was closed before it was scored")
            problem = ""
            try:
                status, answer = server.ask("POST", "/score", body, self._answer_s)
            except _NotSentError as error:
                problem = str(error)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"ended, or did not answer within {self._answer_s:g} s ({_in_words(error)})"
                lost.append(server.place)
            else:
                problem = _refusal(status, answer)
            finally:
                self._give_back(server, problem)
            if not problem:
                if status != HTTPStatus.OK:
                    raise ScorePoolError(f"{server.place}: prompt {prompt.prompt_id}: {answer.get('error', status)}")
                return Score(*answer["score"])
        return Score.failed(f"{len(lost)} score servers ended, or did not answer, over it: {', '.join(lost)}")

    def _take(self, since_s: float) -> _Server | None:
        """Reserve a slot on a server with free capacity; None if the pool is closed.

        Raises ScorePoolError if none has answered for ``wait_s``, counted from ``since_s`` (monotonic) at the earliest.
        """
        with self._changed:
            while not self._is_closed:
                present = [server for server in self._servers if not server.problem]
                free = [server for server in present if server.num_running < self._num_workers]
                if free:
                    server = min(free, key=lambda one: one.num_running)
                    server.num_running += 1
                    return server
                silent_s = time.monotonic() - max(since_s, self._heard_s)
                if not present and silent_s > self._wait_s:
                    raise ScorePoolError(self._none_answers(silent_s))
                self._changed.wait(_RETRY_S)
        return None

    def _give_back(self, server: _Server, problem: str) -> None:
        with self._changed:
            server.num_running -= 1
            self._note(server, problem)

    def _seek(self, server: _Server) -> None:
        """Thread: look for a server whenever it does not answer, until the pool is closed."""
        while not self._is_closed:
            if server.problem:
                problem = server.find()
                with self._changed:
                    self._note(server, problem)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_S)

    def _note(self, server: _Server, problem: str) -> None:
        """Record the outcome of a request to a server. Call with the lock held."""
        if bool(problem) != bool(server.problem) and not self._is_closed:
            _log.warning("%s %s", server.place, problem or "answers")
        server.problem = problem
        if not problem:
            self._heard_s = time.monotonic()
        self._changed.notify_all()

    def _none_answers(self, silent_s: float) -> str:
        servers = "; ".join(f"{server.place} {server.problem}" for server in self._servers)
        return (
            f"no score server has answered for {silent_s:.0f} s: {servers}. Check "
            f"{self._servers[0].path.parents[1] / 'logs' / 'score-*.log'}, or raise rollout.start_deadline_s"
        )


class _NotSentError(Exception):
    """A request did not reach the server, so no work on it has begun."""


class _Server:
    """One score server, across restarts. Fields are guarded by the pool's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_running = 0  # completions in flight
        self.problem = "has not answered yet"  # problem of the last attempt; empty while the server answers
        self._endpoint: Endpoint | None = None
        self._open: set[http.client.HTTPConnection] = set()
        self._is_closed = False

    @property
    def place(self) -> str:
        """The server's name, and its host if known."""
        return self.path.stem if self._endpoint is None else f"{self._endpoint.name} on {self._endpoint.host}"

    def find(self) -> str:
        """Reread the endpoint file and check the health of the server there; return the problem, or an empty string."""
        endpoint = Endpoint.read(self.path)
        if endpoint is None:
            return f"has no endpoint file {self.path}"
        self._endpoint = endpoint
        try:
            return _refusal(*self.ask("GET", "/health", b"", _CONNECT_DEADLINE_S))
        except _NotSentError as error:
            return str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"did not answer at {endpoint.url} ({_in_words(error)})"

    def ask(self, method: str, path: str, body: bytes, deadline_s: float) -> tuple[int, dict]:
        """(status, answer) of one request, over a new connection.

        Raises _NotSentError, or the errors of ``http.client`` once the request is being sent.
        """
        endpoint = self._endpoint
        assert endpoint is not None
        connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=_CONNECT_DEADLINE_S)
        try:
            try:
                connection.connect()
                for option in _SOCKET_OPTIONS:
                    connection.sock.setsockopt(*option)
            except OSError as error:
                raise _NotSentError(f"does not answer at {endpoint.url} ({_in_words(error)})") from error
            self._open.add(connection)
            if self._is_closed:
                raise _NotSentError("accepts no more requests")
            connection.sock.settimeout(deadline_s)
            connection.request(method, path, body, auth.headers(endpoint.token))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """Abort the requests in flight."""
        self._is_closed = True
        for connection in tuple(self._open):
            with contextlib.suppress(OSError, AttributeError):  # it may finish concurrently
                connection.sock.shutdown(socket.SHUT_RDWR)


def _refusal(status: int, answer: dict) -> str:
    """Why an answer is not from the server in the endpoint file; empty if it is."""
    if status in (HTTPStatus.OK, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_REQUEST):
        return ""
    return f"refuses with status {status} {answer.get('error', '')}".rstrip()


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
