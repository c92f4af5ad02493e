"""A loss for two ranks: rank 1 stands still once, as HANGS says. ``FAULT@FOLDER``: the folder gets a mark before.

publication  the process stops itself in the middle of a publication
regex        the loss does not return, and blocks all threads of the interpreter
leaves       the loss leaves out a collective operation in which rank 0 waits
"""

import os
import re
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fp8rl.algo.losses import grpo
from megatron_fp8rl.weight_sync.sender import ShardSender

FAULT, _, FOLDER = os.environ.get("HANGS", "").partition("@")
RANK = os.environ.get("RANK")
VERSION = 1  # the publication after the first step


def loss(inputs):
    if RANK == "1" and FAULT == "regex":
        _mark()
        re.match(r"(a+)+$", "a" * 60 + "b")
    if FAULT == "leaves" and RANK == "0":
        _mark()
        dist.all_reduce(torch.zeros(3))
    return grpo(inputs)


def _mark() -> None:
    Path(FOLDER, "stands-still").write_text(str(os.getpid()))


def _stop_in_a_publication() -> None:
    real = ShardSender.send

    def send(sender, version, mode):
        deliver = sender._transport.send

        def deliver_or_stop(number, messages):
            if version == VERSION and messages and not Path(FOLDER, "stands-still").exists():
                _mark()
                os.kill(os.getpid(), signal.SIGSTOP)
            deliver(number, messages)

        sender._transport.send = deliver_or_stop
        try:
            return real(sender, version, mode)
        finally:
            sender._transport.send = deliver

    ShardSender.send = send


if FAULT == "publication" and RANK == "1":
    _stop_in_a_publication()
