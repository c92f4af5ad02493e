"""A token store: a process that passes sampling requests on to engines and keeps the numbers of their answers.

    python -m megatron_fp8rl.rollout.token_store.store_server --listen-fd FD --parent-pid PID

In: sampling requests of trainer rank 0. Out: the answers without their numbers, to rank 0; and numbers, to whoever trains
them. Every request needs the token of the store, which stands in the environment:

    POST /fp8rl/keep  {"engine": url, "token": the engine's, "body": request, "before": [[key, first byte, bytes], ...],
                       "released": [key, ...]}  ->  the answer without its numbers; 424 if the engine fails
    POST /fp8rl/rows  [[key, first byte, bytes], ...]  ->  those bytes; 410 if one is not here

``before`` are ids that the store appends to the request's: what a completion has that goes on after a publication. The
numbers of ``released`` answers are dropped. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from megatron_fp8rl.net import auth, open_files
from megatron_fp8rl.net.parent import end_with
from megatron_fp8rl.rollout.completions import GENERATE_PATH, without_numbers
from megatron_fp8rl.stored_numbers import ROWS_PATH

KEEP_PATH = "/fp8rl/keep"
ENGINE_FAILED = 424  # the engine's failure: no other server that may have got a dead store's port answers so
_MAX_REQUEST_BYTES = 1 << 30


class _Keeper:
    """The numbers of answers, by key."""

    def __init__(self) -> None:
        self._numbers: dict[int, np.ndarray] = {}
        self._num_answers = 0
        self._session: aiohttp.ClientSession | None = None

    async def keep(self, request: web.Request) -> web.StreamResponse:
        """Ask an engine, keep the numbers of its answer, and return the rest."""
        wish = await request.json()
        for key in wish["released"]:
            self._numbers.pop(key, None)
        body = wish["body"]
        for before in wish["before"]:
            body["token_ids"] += self._bytes(before).view("<i4").tolist()
        if self._session is None:
            connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            url, headers = wish["engine"] + GENERATE_PATH, auth.headers(wish["token"])
            async with self._session.post(url, json=body, headers=headers) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            return web.Response(status=ENGINE_FAILED, text=f"{type(error).__name__}: {error}")
        if answer.status != 200:
            return web.Response(
                status=ENGINE_FAILED, text=f"status {answer.status}: {content.decode(errors='replace')[:1000]}"
            )
        self._num_answers, key = self._num_answers + 1, self._num_answers
        try:
            content, self._numbers[key] = without_numbers(content, key)
        except ValueError as error:
            return web.Response(status=ENGINE_FAILED, text=str(error))
        response = web.StreamResponse(headers={"Content-Length": str(len(content))})
        try:
            await response.prepare(request)
            await response.write(content)
            await response.write_eof()
        except BaseException:  # nobody will ask for them
            del self._numbers[key]
            raise
        return response

    async def rows(self, request: web.Request) -> web.Response:
        """The bytes that are asked for."""
        try:
            parts = [self._bytes(wanted) for wanted in await request.json()]
        except KeyError as error:
            return web.Response(status=410, text=f"answer {error} is not here, or no longer")
        return web.Response(body=b"".join(parts))

    def _bytes(self, wanted: Sequence[int]) -> np.ndarray:
        key, first, size = wanted
        return self._numbers[key][first : first + size]


@web.middleware
async def _authorized(request: web.Request, handler: Any) -> web.StreamResponse:
    if not auth.may_pass(request.headers.get("Authorization", "").encode(), os.environ.get(auth.TOKEN_VARIABLE)):
        return web.Response(status=401, text="the token of this store is missing or wrong")
    return await handler(request)


async def _serve(sock: socket.socket) -> None:
    keeper, app = _Keeper(), web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[_authorized])
    app.add_routes([web.post(KEEP_PATH, keeper.keep), web.post(ROWS_PATH, keeper.rows)])
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True
    )  # a request that is withdrawn is so at the engine
    await runner.setup()
    await web.SockSite(runner, sock).start()
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(argv)
    end_with(options.parent_pid)
    open_files.raise_limit()
    asyncio.run(_serve(socket.socket(fileno=options.listen_fd)))


if __name__ == "__main__":
    main(sys.argv[1:])
