"""Small programs that behave like a trainer and a rollout replica towards an agent. Run by path; standard library alone.

    train STEPS [--crash-at STEP --on RANK --times N] [--deaf]
    serve [--die-after SECONDS --on RANK --times N] [--port PORT]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

RUN = Path(os.environ["FAKE_RUN"])
BOARD = Path(os.environ["LAUNCH_DIR"])
RANK = int(os.environ.get("LAUNCH_ROLE_RANK", "0"))
CHECKPOINTS = RUN / "checkpoints"


def _count(name: str) -> int:
    """How often this was called in the run before."""
    marks = len(list(RUN.glob(f"{name}.*")))
    (RUN / f"{name}.{marks}").touch()
    return marks


def _save(step: int) -> str:
    folder = CHECKPOINTS / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def train(arguments: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it asks for the same as the file
    found = sorted(CHECKPOINTS.glob("step_*"))
    step = int(found[-1].name[5:]) if found else 0
    print(f"begins after step {step}", flush=True)
    while step < arguments.steps:
        if (BOARD / "stop.json").exists() and not arguments.deaf:
            if RANK == 0:
                told = json.dumps({"step": step, "checkpoint": _save(step)})
                (BOARD / ".told").write_text(told)
                (BOARD / ".told").rename(BOARD / "stopped.json")
            print(f"saved step {step}", flush=True)
            return
        time.sleep(0.1)
        step += 1
        if RANK == 0:
            with (RUN / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "reward/score/mean": step / 10, "time/step/s": 0.1}) + "\n")
        if step == arguments.crash_at and arguments.on == RANK and _count("crash") < arguments.times:
            raise RuntimeError(f"tensor layer.{step} is not finite")
        print(f"step {step}", flush=True)
        if arguments.crash_at and arguments.on != RANK and step > arguments.crash_at:
            while not list(RUN.glob("crash.*")):  # the other rank's own
                time.sleep(0.1)
            time.sleep(0.5)
            raise ConnectionError("the other rank is gone")
    print("has finished", flush=True)


def serve(arguments: argparse.Namespace) -> None:
    name = os.environ["LAUNCH_ROLE"]
    print("port", arguments.port, "network", os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
    dies = arguments.die_after is not None and arguments.on in (None, RANK)
    if dies and _count(f"death-{name}") < arguments.times:
        time.sleep(arguments.die_after)
        raise MemoryError("no memory for the KV cache")
    endpoint = RUN / ("scorers" if name.startswith("score-") else "replicas") / f"{name}.json"
    endpoint.parent.mkdir(exist_ok=True)
    endpoint.write_text(json.dumps({"name": name, "incarnation": os.environ["LAUNCH_INCARNATION"]}))
    print("listens", flush=True)
    time.sleep(600)


parser = argparse.ArgumentParser()
commands = parser.add_subparsers()
trainer = commands.add_parser("train")
trainer.set_defaults(run=train)
trainer.add_argument("steps", type=int)
trainer.add_argument("--crash-at", type=int, default=0)
trainer.add_argument("--on", type=int, default=0)
trainer.add_argument("--times", type=int, default=1000)
trainer.add_argument("--deaf", action="store_true")
server = commands.add_parser("serve")
server.set_defaults(run=serve)
server.add_argument("--die-after", type=float)
server.add_argument("--on", type=int)
server.add_argument("--port", type=int)
server.add_argument("--times", type=int, default=1000)
chosen = parser.parse_args()
chosen.run(chosen)
