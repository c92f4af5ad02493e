"""``python -m tests.campaign --minutes 30``: random faults in runs, which must match an undisturbed run."""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fp8rl.observe.recording import read_steps
from tests.campaign import faults
from tests.campaign.faults import ENDING, MARK, RESTING, RUNNING, SAYS, Target
from tests.campaign.run_config import DATA, FAILS, write_data
from tests.helpers.fields import options

ROOT = Path(__file__).resolve().parents[2]
_COMPARED = tuple("reward/ loss/ train/ mismatch/ eval/ rollout/length rollout/surprisal publish/version".split())
_TIMES = ("/s", "_per_s/mean", "time_share")
_DISK_BYTES = 400 << 20
_END_S = 30.0  # for processes of a run that has ended
_EARLY_SHARE = 0.25  # of starts in which any fault comes before the first step; in others only those that end no run
_EARLY_FAULTS = 4  # of a start at most: a slow machine starts slowly, and a run has to get somewhere
_START_S, _STEP_S = (5.0, 20.0), (1.0, 5.0)  # between two faults, while a run starts and while it steps
_STEPS = options(
    "--num_steps 40 --checkpoint.every_steps 3 --checkpoint.keep 3 --checkpoint.export_hf False "
    "--parallel.world_size 2 --engine.num_replicas 2 --sampling.prompts_per_step 16 --engine.deadline_scale 0.25 "
    "--engine.max_replica_restarts 100 --observe.display plain --observe.eval_prompts 8 --scoring.num_workers 2 "
    "--scoring.deadline_s 10 --scoring.memory_gib 2"
)


@dataclass
class Struck:
    """A fault and its cost."""

    name: str
    details: str
    at: float
    step: int  # the last one on record
    lost_s: float | None = None  # until the next step was on record


@dataclass
class Trial:
    number: int
    struck: list[Struck] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    losses: list[str] = field(default_factory=list)  # what differs, or is left behind; empty: survived


class Campaign:
    def __init__(self, work: Path, seed: int, limit_s: float, num_faults: int, only: set[str]):
        self.work, self.limit_s, self.faults_left = work, limit_s, num_faults
        self.running = {name: fault for name, fault in RUNNING.items() if not only or name in only}
        self.resting = {name: fault for name, fault in RESTING.items() if not only or name in only}
        self.data = work / "data"
        self.rng = random.Random(seed)
        self.model = work / "model" / "hf"
        # Of these runs alone: engines of other programs may be killed on this machine, too. Paths of sockets are short.
        self._tmp = tempfile.TemporaryDirectory(prefix="fc-")

    def prepare(self) -> None:
        """Weights to start from, and the undisturbed run. Raises RuntimeError if that does not end well."""
        write_data(self.data)
        sft = [
            *"sft tiny_qwen3 --output_dir".split(),
            str(self.work / "sft"),
            *"--warm_start.steps 40 --observe.display plain".split(),
        ]
        self._done("sft", sft)
        self.model = self.work / "sft" / "warm_start" / "hf"
        began = time.monotonic()
        self._done("undisturbed", self._words(self.work / "undisturbed"))
        self.undisturbed_s = time.monotonic() - began
        self.expected = contents(self.work / "undisturbed")
        self.last_step = last_step(self.work / "undisturbed")
        lines = (self.work / "undisturbed" / "metrics.jsonl").read_text().splitlines()
        self.step_s = statistics.median(json.loads(line).get("time/step/s", 0.0) for line in lines)

    def trial(self, number: int) -> Trial:
        """One disturbed run."""
        result, began = Trial(number), time.monotonic()
        disk = self.work / f"disk-{number}"
        with small_disk(disk) as folder:
            clock = self.work / f"clock-{number}"
            clock.write_bytes(bytes(8))
            target = Target(f"{os.getpid()}-{number}", folder / "run", clock, self.data, self.rng)
            before = left_behind(self._tmp.name)
            try:
                self._until_the_end(target, result, began)
                if not result.losses:
                    result.losses += differences(self.expected, contents(target.folder))
                    result.losses += self._left(target, before)
            finally:
                if result.losses:
                    keep(target.folder, self.work / f"lost-{number}")
                faults.end_all(target)
        result.seconds = time.monotonic() - began
        return result

    def _until_the_end(self, target: Target, trial: Trial, began: float) -> None:
        while True:
            trial.num_starts += 1
            status = self._disturbed(target, trial, began)
            if status == 0:
                return
            if status is None or trial.num_starts > 60:
                why = f"not at its end after {self.limit_s:g} s" if status is None else "60 starts were not enough"
                trial.losses.append(why)
                return
            if self.rng.random() < 0.5:  # else the next start finds what the one before has left
                self._wait_for_silence(target)
            for name in self.rng.sample(list(self.resting), min(len(self.resting), self.rng.randint(0, 2))):
                if name != "reward fails always" or last_step(target.folder) < self.last_step:
                    self._strike(trial, target, name, self.resting[name])

    def _disturbed(self, target: Target, trial: Trial, began: float) -> int | None:
        """Start and disturb a run; its exit status, or None after the time limit."""
        environ = self._environ(target.mark) | {"FP8RL_CLOCK": str(target.clock)}
        environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests" / "campaign" / "clock"), str(ROOT)))
        log = self.work / f"trial-{trial.number}.log"
        # Such a start ends in its first step. Another fault could save completions whose scores have failed.
        has_reward = not (self.data / FAILS).exists()
        ended_by = [] if has_reward else ["reward fails always"]
        with log.open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(
                self._command(self._words(target.folder)), cwd=self.work, env=environ, stdout=output, stderr=output
            )
        is_early, first = self.rng.random() < _EARLY_SHARE, last_step(target.folder)
        next_s = time.monotonic() + self.rng.uniform(*_START_S)
        target.is_stepping, num_early = False, 0
        while process.poll() is None:
            if time.monotonic() - began > self.limit_s:
                process.kill()
                process.wait()
                return None
            target.do_what_is_due()
            step = last_step(target.folder)
            self._count(trial, step)
            if not target.is_stepping and step > first:
                target.is_stepping, next_s = True, time.monotonic() + self.rng.uniform(*_STEP_S)
            first = min(first, step)  # what came after the checkpoint is cut
            is_due = time.monotonic() > next_s and (target.is_stepping or num_early < _EARLY_FAULTS)
            names = [name for name in self.running if target.is_stepping or is_early or name not in ENDING]
            if is_due and has_reward and names:
                num_early += not target.is_stepping
                (name,) = self.rng.choices(names, weights=[self.running[name][0] for name in names])
                if self._strike(trial, target, name, self.running[name][1]) and name in ENDING:
                    ended_by.append(name)
                next_s = time.monotonic() + self.rng.uniform(*(_STEP_S if target.is_stepping else _START_S))
            time.sleep(0.1)
        target.do_what_is_due(all_of_it=True)
        if process.returncode == 0:
            self._count(trial, None)
        elif len(ended_by) == 1 and (text := SAYS.get(ended_by[0], "")):
            said = log.read_bytes()[begin:].decode(errors="replace")
            if text not in said:
                trial.losses.append(f"after {ended_by[0]}: the run has ended without {text!r}")
        return process.returncode

    def _strike(self, trial: Trial, target: Target, name: str, fault) -> bool:
        """Whether the fault could take place."""
        at, step = time.monotonic(), last_step(target.folder)
        if self.faults_left <= 0:
            return False
        if details := fault(target):
            self.faults_left -= 1
            trial.struck.append(Struck(name, details, at, step))
            with (self.work / "faults.log").open("a") as log:
                log.write(f"{time.strftime('%H:%M:%S')} run {trial.number} after step {step}: {name}, {details}\n")
        return bool(details)

    def _count(self, trial: Trial, step: int | None) -> None:
        """Note the seconds of faults after which a run is further than before; ``step`` None: it is at its end."""
        for struck in trial.struck:
            if struck.lost_s is None and (step is None or step > struck.step):
                struck.lost_s = max(0.0, time.monotonic() - struck.at - self.step_s)

    def _wait_for_silence(self, target: Target) -> list[str]:
        """Processes that do not end by themselves."""
        end = time.monotonic() + _END_S
        while (alive := target.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return [f"process {process.pid}: {' '.join(process.cmdline())[:100]}" for process in alive]

    def _left(self, target: Target, before: set[str]) -> list[str]:
        return [
            f"left behind: {name}"
            for name in [*self._wait_for_silence(target), *(left_behind(self._tmp.name) - before)]
        ]

    def _done(self, name: str, args: list[str]) -> None:
        done = subprocess.run(
            self._command(args), cwd=self.work, env=self._environ(name), capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")

    def _words(self, folder: Path) -> list[str]:
        options = _STEPS | {"--model.hf_path": str(self.model), "--output_dir": str(folder)}
        return ["rl", "tests.campaign.run_config:config", *(word for pair in options.items() for word in pair)]

    def _command(self, args: list[str]) -> list[str]:
        return [sys.executable, "-m", "megatron_fp8rl", *args]

    def _environ(self, mark: str) -> dict[str, str]:
        own = {MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": self._tmp.name}
        return os.environ | own | {DATA: str(self.data)}


def last_step(folder: Path) -> int:
    """The last step in ``metrics.jsonl``; -1 if there is none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = [line for line in file.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
            return json.loads(lines[-1])["step"] if lines else -1
    except (OSError, ValueError):
        return -1


def contents(folder: Path) -> dict[str, object]:
    """The results that a run must share with the undisturbed run, by name."""
    result: dict[str, object] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if key.startswith(_COMPARED) and not key.endswith(_TIMES):
                result[f"step {record['step']}: {key}"] = value
    for step, groups in read_steps(folder / "rollouts"):
        result[f"step {step}: rollouts"] = [
            (r.name, r.completions[0].token_ids, r.completions[0].rollout_logprobs, r.reward, r.status)
            for group in groups
            for r in group.rollouts
        ]
    return result | scalars(folder / "tensorboard", {key for key in result if "rollouts" not in key})


def scalars(folder: Path, names: set[str]) -> dict[str, object]:
    """The values that TensorBoard shows for ``names`` of :func:`contents`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    result: dict[str, object] = {}
    for key in shown.Tags()["scalars"]:
        for event in shown.Scalars(key):
            if (name := f"step {event.step}: {key}") in names:
                result[f"TensorBoard, {name}"] = event.value
    return result


def differences(expected: dict[str, object], actual: dict[str, object]) -> list[str]:
    names = [name for name in {**expected, **actual} if expected.get(name, "nothing") != actual.get(name, "nothing")]
    shown = [f"{name}: {str(actual.get(name))[:60]} instead of {str(expected.get(name))[:60]}" for name in names[:4]]
    return shown + ([f"and {len(names) - 4} more values"] if len(names) > 4 else [])


def left_behind(tmp: str) -> set[str]:
    """Shared memory and socket folders in ``tmp`` that no running process uses."""
    result = {str(path) for path in [*Path("/dev/shm").iterdir(), *Path(tmp).glob("fp8rl-sockets-*")]}
    used = [Path("/proc/net/unix").read_text()]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.append((process / "maps").read_text())
            used += [os.readlink(link) for link in (process / "fd").iterdir()]
    text = "\n".join(used)
    return {path for path in result if path not in text}


def keep(folder: Path, aside: Path) -> None:
    """Copy the files that explain a lost run."""
    aside.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "failure.json"):
        with contextlib.suppress(OSError):
            (aside / name).write_bytes((folder / name).read_bytes())


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 400 MB where this user may mount one; otherwise a folder without a limit."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def table(trials: list[Trial]) -> str:
    """Rows: a fault, its number, the surviving runs, and seconds until the run passed its last step. Faults may
    overlap."""
    rows = []
    for name in sorted({struck.name for trial in trials for struck in trial.struck}):
        struck = [struck for trial in trials for struck in trial.struck if struck.name == name]
        runs = [trial for trial in trials if any(struck.name == name for struck in trial.struck)]
        lost = [strike.lost_s for strike in struck if strike.lost_s is not None] or [float("nan")]
        survived = sum(not trial.losses for trial in runs)
        seconds = f"{statistics.median(lost):.0f} | {max(lost):.0f}"
        rows.append(f"| {name} | {len(struck)} | {survived} of {len(runs)} | {seconds} |")
    lost = [strike.lost_s for trial in trials for strike in trial.struck if strike.lost_s is not None] or [float("nan")]
    num_survived, num_struck = sum(not trial.losses for trial in trials), sum(len(trial.struck) for trial in trials)
    rows.append(
        f"| all | {num_struck} | {num_survived} of {len(trials)} | {statistics.median(lost):.0f} | {max(lost):.0f} |"
    )
    head = "| fault | times | runs with it that ended as undisturbed | seconds lost, median | at most |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="no run is begun after them")
    parser.add_argument("--faults", type=int, default=10**9, help="no more than so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=2400.0, help="of one run, with all its starts")
    parser.add_argument("--work", type=Path, help="folder for logs; a temporary one by default")
    parser.add_argument("--only", default="", help="names of faults, separated by commas; by default, all")
    given = parser.parse_args()
    only = {name.strip() for name in given.only.split(",") if name.strip()}
    if unknown := only - RUNNING.keys() - RESTING.keys():
        parser.error(f"--only: unknown faults {sorted(unknown)}; there are {sorted(RUNNING | RESTING)}")
    work = given.work or Path(tempfile.mkdtemp(prefix="fp8rl-campaign-"))
    work.mkdir(parents=True, exist_ok=True)
    print(f"logs: {work}", flush=True)
    campaign, trials = Campaign(work, given.seed, given.limit_s, given.faults, only), []
    end = time.monotonic() + 60 * given.minutes
    campaign.prepare()
    while time.monotonic() < end and campaign.faults_left > 0:
        trials.append(trial := campaign.trial(len(trials) + 1))
        outcome = "; ".join(trial.losses) or "as undisturbed"
        faults_told = ", ".join(strike.name for strike in trial.struck)
        what = f"{trial.num_starts} starts, {len(trial.struck)} faults, {trial.seconds:.0f} s"
        print(f"run {trial.number}: {what}: {faults_told}: {outcome}\n{table(trials)}", flush=True)
    seconds, num_struck = sum(trial.seconds for trial in trials), sum(len(trial.struck) for trial in trials)
    lost = (seconds - len(trials) * campaign.undisturbed_s) / max(1, num_struck)
    told = f"seed {given.seed}, {len(trials)} runs in {seconds / 60:.0f} min"
    told += f"; an undisturbed run takes {campaign.undisturbed_s:.0f} s"
    print(f"{told}: {lost:.1f} s lost per fault", flush=True)
    return 0 if not any(trial.losses for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
