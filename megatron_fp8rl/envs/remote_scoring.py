"""Has completions scored by score servers on other nodes. Prompts and texts in, rewards out; runs on rank 0.

The servers (envs/score_server.py) are started, and started again, by the agents of a launched job. A server that ends,
falls silent or does not answer costs its completions the time until others have scored them, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from megatron_fp8rl.envs.scoring import START_DEADLINE_S, CompletionScorer, Score, ScorePool, ScorePoolError
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.endpoint import Endpoint, scorer_path
from megatron_fp8rl.types import Prompt

_log = logging.getLogger(__name__)

_CONNECT_DEADLINE_S = 10.0
_ANSWER_MARGIN_S = 10.0  # on top of the deadlines that the server itself keeps
_RETRY_S = 0.5  # between looks whether a server that did not answer has come back
_MAX_LOST = 3  # servers that one completion may take with it
# A host that lost power is noticed after 20 s: keep-alive probes go unanswered, or what was sent is not acknowledged.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),  # milliseconds
)


def build_scorer(cfg: RunConfig) -> CompletionScorer:
    """What scores the completions of a run: processes of this host, or the job's score servers."""
    if not cfg.data.score_servers:
        return ScorePool.build(cfg.data)
    return RemoteScorePool(
        [scorer_path(cfg.run_dir, index) for index in range(cfg.data.score_servers)],
        num_workers=cfg.data.num_score_workers,
        deadline_s=cfg.data.score_deadline_s,
        wait_s=cfg.rollout.start_deadline_s,
    )


class RemoteScorePool(CompletionScorer):
    """Score servers that are found by their endpoint files, each with ``num_workers`` processes.

    A completion goes to the server with the fewest under way. Servers that do not answer are looked for again, in their
    files too, until none has answered for ``wait_s``. ``deadline_s`` is that of the servers, for one score.
    """

    def __init__(self, paths: Sequence[Path], *, num_workers: int, deadline_s: float, wait_s: float) -> None:
        self._servers = [_Server(path) for path in paths]
        self._num_workers = num_workers
        self._answer_s = START_DEADLINE_S + deadline_s + _ANSWER_MARGIN_S
        self._wait_s = wait_s
        self._heard_s = 0.0  # monotonic: when any server answered last
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
        """Ask the servers nothing more; what they are scoring counts as failed. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()
        self._threads.shutdown(wait=True)

    def _score(self, prompt: Prompt, text: str) -> Score:
        body = json.dumps({"prompt": dataclasses.asdict(prompt), "text": text}).encode()
        lost: list[str] = []
        since_s = time.monotonic()
        while len(lost) < _MAX_LOST:
            server = self._take(since_s)
            if server is None:
                return 0.0, "score_failed", "the score pool was closed before it was scored"
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
                reward, verdict, detail = answer["score"]
                return reward, verdict, detail
        return 0.0, "score_failed", f"{len(lost)} score servers ended, or did not answer, over it: {', '.join(lost)}"

    def _take(self, since_s: float) -> _Server | None:
        """A server that has room, with one more under way; None when the pool is closed.

        Raises ScorePoolError when none has answered for ``wait_s``, from ``since_s`` (monotonic) on at the earliest.
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
        """In a thread of its own: look for a server whenever it does not answer, until the pool is closed."""
        while not self._is_closed:
            if server.problem:
                problem = server.find()
                with self._changed:
                    self._note(server, problem)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_S)

    def _note(self, server: _Server, problem: str) -> None:
        """What has become of asking a server. Call with the lock."""
        if bool(problem) != bool(server.problem) and not self._is_closed:
            _log.warning("%s %s", server.place, problem or "answers")
        server.problem = problem
        if not problem:
            self._heard_s = time.monotonic()
        self._changed.notify_all()

    def _none_answers(self, silent_s: float) -> str:
        servers = "; ".join(f"{server.place} {server.problem}" for server in self._servers)
        return (
            f"no score server has answered for {silent_s:.0f} s: {servers}. Look into "
            f"{self._servers[0].path.parents[1] / 'logs' / 'score-*.log'}, or raise rollout.start_deadline_s"
        )


class _NotSentError(Exception):
    """A request did not reach the server, so that nobody has begun to work on it."""


class _Server:
    """One score server, over all its incarnations. Fields are guarded by the pool's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_running = 0  # completions under way
        self.problem = "has not answered yet"  # of the last attempt; empty while it answers
        self._endpoint: Endpoint | None = None
        self._open: set[http.client.HTTPConnection] = set()
        self._is_closed = False

    @property
    def place(self) -> str:
        """Its name, and its host as far as that is known."""
        return self.path.stem if self._endpoint is None else f"{self._endpoint.name} on {self._endpoint.host}"

    def find(self) -> str:
        """Read the endpoint file again and ask whoever answers there for its health; what is wrong, if something is."""
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
        """(status, answer) of one request, over a connection of its own.

        Raises _NotSentError, or what ``http.client`` raises once the request is on its way.
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
                raise _NotSentError("is asked nothing more")
            connection.sock.settimeout(deadline_s)
            connection.request(method, path, body, auth.headers(endpoint.token))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """End what is under way."""
        self._is_closed = True
        for connection in tuple(self._open):
            with contextlib.suppress(OSError, AttributeError):  # it ends by itself meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)


def _refusal(status: int, answer: dict) -> str:
    """Why an answer is not one of the server that the file names; empty when it is."""
    if status in (HTTPStatus.OK, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_REQUEST):
        return ""
    return f"refuses with status {status} {answer.get('error', '')}".rstrip()


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
