"""``python -m tests.campaign --minutes 30``: random faults at random moments, and runs that must be as if there were none.

A run of two trainer ranks and two engines is done once undisturbed. Then it is done again and again, with a fault every
few seconds; one that ends is started again by the same command. It survives if it comes to its end with the same
metrics and the same rollouts, and leaves nothing behind: processes, shared memory, sockets. Prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fp8rl.observe.recording import read_steps
from tests.campaign import faults
from tests.campaign.faults import MARK, RESTING, RUNNING, Target

ROOT = Path(__file__).resolve().parents[2]
_COMPARED = ("reward/", "loss/", "train/", "mismatch/", "eval/", "rollout/length", "rollout/surprisal", "publish/version")
_TIMES = ("/s", "_per_s/mean", "time_share")
_DISK_BYTES = 400 << 20
_END_S = 30.0  # for processes of a run that has ended
_EARLY_S, _LATER_S = (5.0, 30.0), (45.0, 60.0)  # the first fault comes while a run starts, or when it steps
_STEPS = {
    "--num_steps": "24", "--checkpoint.every_steps": "3", "--checkpoint.keep": "3", "--checkpoint.export_hf": "False",
    "--parallel.world_size": "2", "--rollout.num_replicas": "2", "--rollout.prompts_per_step": "16",
    "--rollout.hang_deadline_s": "8", "--rollout.max_replica_restarts": "100", "--rollout.update_deadline_s": "120",
    "--observe.display": "plain", "--observe.eval_prompts": "8", "--observe.tensorboard": "False",
    "--data.num_score_workers": "2", "--data.score_deadline_s": "10",
}  # fmt: skip


@dataclass
class Trial:
    """What happened to one run."""

    number: int
    struck: list[tuple[str, str]] = field(default_factory=list)  # (fault, details)
    num_starts: int = 0
    seconds: float = 0.0
    losses: list[str] = field(default_factory=list)  # what differs, or is left behind; empty: survived


class Campaign:
    """The undisturbed run, and the disturbed ones."""

    def __init__(self, work: Path, seed: int, limit_s: float):
        self.work, self.limit_s = work, limit_s
        self.rng = random.Random(seed)
        self.model = work / "model" / "hf"

    def prepare(self) -> None:
        """Weights to start from, and the undisturbed run. Raises RuntimeError if that does not end well."""
        sft = ["sft", "tiny_qwen3", "--output_dir", str(self.work / "sft"), "--data.sft_steps", "40", "--observe.display", "plain"]
        self._done("sft", sft)
        self.model = self.work / "sft" / "warm_start" / "hf"
        self._done("undisturbed", self._words(self.work / "undisturbed"))
        self.expected = contents(self.work / "undisturbed")

    def trial(self, number: int) -> Trial:
        """One disturbed run, from its start to its end."""
        found, began = Trial(number), time.monotonic()
        disk = self.work / f"disk-{number}"
        with small_disk(disk) as folder:
            clock = self.work / f"clock-{number}"
            clock.write_bytes(bytes(8))
            target = Target(f"{os.getpid()}-{number}", folder / "run", clock, self.rng)
            before = left_behind()
            try:
                self._until_the_end(target, found, began)
                if not found.losses:
                    found.losses += differences(self.expected, contents(target.folder))
                    found.losses += self._left(target, before)
            finally:
                if found.losses:
                    keep(target.folder, self.work / f"lost-{number}")
                faults.end_all(target)
        found.seconds = time.monotonic() - began
        return found

    def _until_the_end(self, target: Target, found: Trial, began: float) -> None:
        while True:
            found.num_starts += 1
            status = self._disturbed(target, found, began)
            if status == 0:
                return
            if status is None or found.num_starts > 30:
                why = f"not at its end after {self.limit_s:g} s" if status is None else "30 starts were not enough"
                found.losses.append(why)
                return
            self._wait_for_silence(target)
            if self.rng.random() < 0.6:
                self._strike(found, target, *self.rng.choice(list(RESTING.items())))

    def _disturbed(self, target: Target, found: Trial, began: float) -> int | None:
        """Start the run and disturb it; its exit status, None if it takes too long."""
        environ = self._environ(target.mark) | {"FP8RL_CLOCK": str(target.clock)}
        environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests" / "campaign" / "clock"), str(ROOT)))
        log = self.work / f"trial-{found.number}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self._command(self._words(target.folder)), cwd=self.work, env=environ, stdout=output, stderr=output
            )
        next_s = time.monotonic() + self.rng.uniform(*(_EARLY_S if self.rng.random() < 0.2 else _LATER_S))
        while process.poll() is None:
            if time.monotonic() - began > self.limit_s:
                process.kill()
                process.wait()
                return None
            if time.monotonic() > next_s:
                names = list(RUNNING)
                (name,) = self.rng.choices(names, weights=[RUNNING[name][0] for name in names])
                self._strike(found, target, name, RUNNING[name][1])
                next_s = time.monotonic() + self.rng.uniform(2, 15)
            time.sleep(0.1)
        return process.returncode

    def _strike(self, found: Trial, target: Target, name: str, fault) -> None:
        if details := fault(target):
            found.struck.append((name, details))

    def _wait_for_silence(self, target: Target) -> list[str]:
        """The processes that do not end by themselves."""
        end = time.monotonic() + _END_S
        while (alive := target.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return [f"process {process.pid}: {' '.join(process.cmdline())[:100]}" for process in alive]

    def _left(self, target: Target, before: set[str]) -> list[str]:
        return [f"left behind: {name}" for name in [*self._wait_for_silence(target), *(left_behind() - before)]]

    def _done(self, name: str, words: list[str]) -> None:
        done = subprocess.run(
            self._command(words), cwd=self.work, env=self._environ(name), capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")

    def _words(self, folder: Path) -> list[str]:
        options = _STEPS | {"--model.hf_path": str(self.model), "--output_dir": str(folder)}
        return ["rl", "tiny_qwen3", *(word for pair in options.items() for word in pair)]

    def _command(self, words: list[str]) -> list[str]:
        return [sys.executable, "-m", "megatron_fp8rl", *words]

    def _environ(self, mark: str) -> dict[str, str]:
        return {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def contents(folder: Path) -> dict[str, object]:
    """What a run must have in common with the undisturbed one, by name."""
    found: dict[str, object] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if key.startswith(_COMPARED) and not key.endswith(_TIMES):
                found[f"step {record['step']}: {key}"] = value
    for step, groups in read_steps(folder / "rollouts"):
        found[f"step {step}: rollouts"] = [
            (r.name, r.completion.token_ids, r.completion.rollout_logprobs, r.reward, r.status)
            for group in groups
            for r in group.rollouts
        ]
    return found


def differences(expected: dict[str, object], found: dict[str, object]) -> list[str]:
    names = [name for name in {**expected, **found} if expected.get(name, "nothing") != found.get(name, "nothing")]
    shown = [f"{name}: {str(found.get(name))[:60]} instead of {str(expected.get(name))[:60]}" for name in names[:4]]
    return shown + ([f"and {len(names) - 4} more values"] if len(names) > 4 else [])


def left_behind() -> set[str]:
    """Shared memory and sockets that runs could leave."""
    temporary = Path(tempfile.gettempdir())
    return {str(path) for path in [*Path("/dev/shm").iterdir(), *temporary.glob("fp8rl-sockets-*")]}


def keep(folder: Path, aside: Path) -> None:
    """Copy what tells why a run was lost."""
    aside.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "failure.json"):
        with contextlib.suppress(OSError):
            (aside / name).write_bytes((folder / name).read_bytes())


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 400 MB, where this user may mount one; else a plain folder, which never is full."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def table(trials: list[Trial]) -> str:
    """Rows: a fault, how often it struck, and how many runs with it survived."""
    struck = Counter(name for trial in trials for name, _ in trial.struck)
    survived = Counter(name for trial in trials if not trial.losses for name in {name for name, _ in trial.struck})
    runs = Counter(name for trial in trials for name in {name for name, _ in trial.struck})
    rows = [f"| {name} | {count} | {survived[name]} of {runs[name]} |" for name, count in sorted(struck.items())]
    num_survived = sum(not trial.losses for trial in trials)
    rows.append(f"| all | {sum(struck.values())} | {num_survived} of {len(trials)} |")
    return "\n".join(["| fault | times | runs with it that ended as undisturbed |", "|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="no run is begun after them")
    parser.add_argument("--faults", type=int, default=10**9, help="nor after so many faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="of one run, with all its starts")
    parser.add_argument("--work", type=Path, help="folder for logs; a temporary one by default")
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="fp8rl-campaign-"))
    work.mkdir(parents=True, exist_ok=True)
    print(f"logs: {work}", flush=True)
    campaign, trials = Campaign(work, given.seed, given.limit_s), []
    end = time.monotonic() + 60 * given.minutes
    campaign.prepare()
    while time.monotonic() < end and sum(len(trial.struck) for trial in trials) < given.faults:
        trials.append(trial := campaign.trial(len(trials) + 1))
        outcome = "; ".join(trial.losses) or "as undisturbed"
        faults_told = ", ".join(name for name, _ in trial.struck)
        print(f"run {trial.number}: {trial.num_starts} starts, {trial.seconds:.0f} s: {faults_told}: {outcome}", flush=True)
    print(table(trials), flush=True)
    return 0 if not any(trial.losses for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
