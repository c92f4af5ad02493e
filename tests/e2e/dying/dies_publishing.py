"""A loss for two ranks: rank 1 dies once in a publication; rank 0 records its requests to engines."""

import os
import signal
import time
from pathlib import Path

from megatron_fp8rl.algo.losses import grpo
from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.weight_sync.sender import ShardSender

FOLDER = os.environ.get("DIES_PUBLISHING")  # where marks are left; unset: nobody dies
VERSION = 3
FIRST_LEFT_OUT = 2  # of the rounds of its messages


def loss(inputs):
    return grpo(inputs)


def _die_once(folder: Path) -> None:
    real = ShardSender.send

    def send(sender, version, mode):
        deliver, num_sent = sender._transport.send, 0

        def deliver_or_die(number, messages):
            nonlocal num_sent
            if version == VERSION and messages and num_sent == FIRST_LEFT_OUT and not (folder / "died").exists():
                (folder / "died").write_text(f"{time.time()} {mode} {number}")
                os.kill(os.getpid(), signal.SIGKILL)
            num_sent += bool(messages)
            deliver(number, messages)

        sender._transport.send = deliver_or_die
        try:
            return real(sender, version, mode)
        finally:
            sender._transport.send = deliver

    ShardSender.send = send


def _note_requests(folder: Path) -> None:
    real = EngineClient._request

    async def request(client, verb, path, body, read):
        with (folder / "asked").open("a") as file:
            file.write(f"{time.time()} {os.getpid()} {path}\n")
        return await real(client, verb, path, body, read)

    EngineClient._request = request


if FOLDER and os.environ.get("RANK") == "1":
    _die_once(Path(FOLDER))
elif FOLDER and os.environ.get("RANK") == "0":
    _note_requests(Path(FOLDER))
