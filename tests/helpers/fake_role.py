"""Small programs that act as a trainer and a rollout replica for an agent. Standard library only.

    train STEPS [--save-every STEPS] [--crash-at STEP --on RANK --times N] [--deaf] [--hold-at STEP --for FILE]
    serve [--die-after SECONDS --on RANK --times N] [--port PORT --parts N]

A trainer holds at a step until a file of the run is there, or until it is asked to save: what a test does meanwhile may
take its time. A part of a server dies once all ``--parts`` parts of it have begun.
"""

import argparse
import contextlib
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
    """Number of calls in this run."""
    marks = len(list(RUN.glob(f"{name}.*")))
    (RUN / f"{name}.{marks}").touch()
    return marks


def say(*args: object) -> None:
    """Print a line, even when no process reads it."""
    with contextlib.suppress(OSError):
        print(*args, flush=True)


def _has_crashed_elsewhere() -> bool:
    """Whether another rank's agent has recorded that rank's error in this attempt, and when."""
    logs = [path.read_text() for path in Path(os.environ["LAUNCH_LOG"]).parent.glob("trainer.node*.log")]
    return any("is not finite" in log.rpartition(f"attempt {os.environ['LAUNCH_ATTEMPT']},")[2] for log in logs)


def _num_begun(port: int) -> int:
    """Number of parts of this role that started with this port."""
    own = Path(os.environ["LAUNCH_LOG"])
    logs = [path.read_text() for path in own.parent.glob(f"{own.name.partition('.node')[0]}.node*.log")]
    return sum(f"port {port} " in log for log in logs)


def _save(step: int) -> str:
    folder = CHECKPOINTS / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def train(arguments: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it asks for the same as the file
    actual = sorted(CHECKPOINTS.glob("step_*"))
    step = int(actual[-1].name[5:]) if actual else 0
    say(f"begins after step {step}")
    while step < arguments.steps:
        if (BOARD / "stop.json").exists() and not arguments.deaf:
            if RANK == 0:
                told = json.dumps({"step": step, "checkpoint": _save(step)})
                (BOARD / ".told").write_text(told)
                (BOARD / ".told").rename(BOARD / "stopped.json")
            say(f"saved step {step}")
            return
        time.sleep(0.1)
        if step == arguments.hold_at and not (RUN / arguments.file).exists():
            continue
        step += 1
        if RANK == 0:
            with (RUN / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "reward/score/mean": step / 10, "time/step/s": 0.1}) + "\n")
        if RANK == 0 and arguments.save_every and step % arguments.save_every == 0:
            _save(step)
        if step == arguments.crash_at and arguments.on == RANK and _count("crash") < arguments.times:
            raise RuntimeError(f"tensor layer.{step} is not finite")
        say(f"step {step}")
        if arguments.crash_at and arguments.on != RANK and step > arguments.crash_at:
            while not _has_crashed_elsewhere():
                time.sleep(0.1)
            raise ConnectionError("the other rank is gone")
    say("has finished")


def serve(arguments: argparse.Namespace) -> None:
    name = os.environ["LAUNCH_ROLE"]
    say("port", arguments.port, "network", os.environ.get("GLOO_SOCKET_IFNAME"))
    dies = arguments.die_after is not None and arguments.on in (None, RANK)
    if dies and _count(f"death-{name}") < arguments.times:
        while arguments.port and _num_begun(arguments.port) < arguments.parts:
            time.sleep(0.05)
        time.sleep(arguments.die_after)
        raise MemoryError("no memory for the KV cache")
    endpoint = RUN / "replicas" / f"{name}.json"
    endpoint.parent.mkdir(exist_ok=True)
    say("listens")
    half = endpoint.with_suffix(".half")
    half.write_text(json.dumps({"name": name, "incarnation": os.environ["LAUNCH_INCARNATION"]}))
    half.rename(endpoint)
    time.sleep(600)


parser = argparse.ArgumentParser()
commands = parser.add_subparsers()
trainer = commands.add_parser("train")
trainer.set_defaults(run=train)
trainer.add_argument("steps", type=int)
trainer.add_argument("--crash-at", type=int, default=0)
trainer.add_argument("--save-every", type=int, default=0)
trainer.add_argument("--on", type=int, default=0)
trainer.add_argument("--times", type=int, default=1000)
trainer.add_argument("--deaf", action="store_true")
trainer.add_argument("--hold-at", type=int)
trainer.add_argument("--for", dest="file")
server = commands.add_parser("serve")
server.set_defaults(run=serve)
server.add_argument("--die-after", type=float)
server.add_argument("--on", type=int)
server.add_argument("--port", type=int)
server.add_argument("--parts", type=int, default=1)
server.add_argument("--times", type=int, default=1000)
chosen = parser.parse_args()
chosen.run(chosen)
