"""``python -m launch.agent JOB.json``: runs the roles of one node, and ends together with the agents of other nodes.

In: the job's file (``spec.py``) and this node's place from the environment. Out: an exit status, the same on all
nodes: 0 done, 85 saved and to be restarted, 130 cancelled, otherwise failed. Uses only the standard library.

    claim     node 0 holds the run's folder, so that no other job uses it
    join      write this node's address, and wait for all nodes
    start     torchrun for the trainer, with ranks in node order; replicas; other commands
    check     restart replicas; forward save requests to the trainer; read what other nodes wrote; if the agent of
              another node has died, save, or fail if the trainer was on that node
    end       when an essential role has ended on all of its nodes, a role has failed, or the checkpoint is saved
    conclude  stop the remaining roles, wait for the other nodes, print the first error of all nodes
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from launch import in_use, outcome
from launch.outcome import Outcome, Result
from launch.peers import CANCEL, CLAIMED, FAILED, STOP, STOPPED, Board, PeersMissingError, Place, free_port
from launch.roles import Failure, RoleProcess, format_exit_status, kill_leftovers
from launch.spec import SAVED, JobSpec, endpoint_file, read_jobs, record_job
from megatron_fp8rl.data.folder_lock import InUseError

JOIN_DEADLINE_S = float(os.environ.get("LAUNCH_JOIN_DEADLINE_S", "600"))  # other nodes may still download images
GRACE_S = float(os.environ.get("LAUNCH_GRACE_S", "15"))  # from a request to exit until SIGKILL
RESTART_PAUSE_S = float(os.environ.get("LAUNCH_RESTART_PAUSE_S", "0.5"))  # doubles with every death in a row, to 30 s
FILES_DEADLINE_S = float(os.environ.get("LAUNCH_FILES_DEADLINE_S", "60"))  # retries while the file system fails
MAX_RESTARTS = 5  # in a row, of a role that runs for less than _SETTLED_S each time
_SETTLED_S = 600.0
SILENT_S = float(os.environ.get("LAUNCH_SILENT_S", "30"))  # without a heartbeat, until an agent counts as dead
_HEARTBEAT_S = SILENT_S / 6
_ENDING_S = 60.0  # between the error of a process and its end
_LATE_TERM_S = 20.0  # by default, Slurm kills 30 s after its SIGTERM


class Agent:
    """Runs the roles of one node in one attempt."""

    def __init__(self, spec: JobSpec, place: Place, file: str = "") -> None:
        if place.num_nodes != spec.nodes:
            raise ValueError(f"the job has {place.num_nodes} nodes, and its plan is for {spec.nodes}; submit it again")
        self.spec = spec
        self.file = file  # path of the job's file
        self.place = place
        self.board = Board(spec.run_dir, place)
        self.processes: list[RoleProcess] = []
        # Monotonic times.
        self._ends_at: dict[str, float] = {}  # by role: when a part that was asked to exit is killed
        self._signals: list[int] = []
        self._deadline: float | None = None  # for the trainer to save
        self._rank_failed_at: float | None = None
        self._next_heartbeat = 0.0
        self._lost: dict[int, str] = {}  # by node: how its agent has died
        self._trouble_since: float | None = None  # since when the board's files cannot be read or written

    def run(self) -> int:
        # Blocked here and received in `_listen`. Children inherit the block, so the signal does not kill them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, lambda number, _: self._signals.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # see launch/local.py
        if (refused := outcome.refusal(self.spec, self.place)) is not None:
            self.say(refused.reason)
            self._show_error(refused)
            return refused.status if refused.status not in (0, SAVED) else outcome.FAILED
        try:
            with contextlib.ExitStack() as claim:
                result, reason = self._work(claim)
                self._end_all(has_failed=result == "failed")
                return self._conclude(result, reason)
        finally:
            for process in self.processes:  # no process outlives its agent, even if the board cannot be written
                if process.is_running:
                    process.kill()

    def say(self, text: str) -> None:
        # One write per line, because nodes share the file and an unbuffered print writes the line break separately.
        print(f"[node {self.place.node}, attempt {self.place.attempt}] {text}\n", end="", flush=True)

    def _work(self, claim: contextlib.ExitStack) -> tuple[Result, str]:
        """(result, reason) of the attempt; processes may still run. ``claim`` holds the run's folder."""
        roles = self.spec.on_node(self.place.node)
        kill_leftovers(self.spec.run_dir, self.place.job, but=self.place.attempt)
        try:
            self._claim_folder(claim)
            for role in roles:  # before other nodes see this one
                if role.kind == "replica":
                    endpoint_file(self.spec.run_dir, role.name).unlink(missing_ok=True)
            self._record_job()
            peers = self.board.join(JOIN_DEADLINE_S, lambda: bool(self._signals))
            self.say(f"all {self.place.num_nodes} nodes are here; roles: {', '.join(role.name for role in roles)}")
            for role in roles:
                process = RoleProcess(role, self.spec, self.board, peers)
                self.processes.append(process)
                process.start()
            while (end := self._turn()) is None:
                pass
            return end
        except InUseError as error:
            outcome.conclude(self.spec, self.board, "refused", str(error))  # before other nodes can decide
            self.board.put(FAILED, {"role": "agent", "node": self.place.node, "reason": str(error)}, once=True)
            return "refused", str(error)
        except (PeersMissingError, OSError) as error:
            names = self.board.names()
            if isinstance(error, PeersMissingError) and FAILED not in names and (self._signals or CANCEL in names):
                is_cancelled = signal.SIGINT in self._signals or CANCEL in names
                return ("cancelled" if is_cancelled else "saved"), "asked to end before all nodes were there"
            self._fail("agent", Failure(time.time(), f"{type(error).__name__}: {error}", None), log="the job's log")
            return "failed", str(error)

    def _claim_folder(self, claim: contextlib.ExitStack) -> None:
        """Hold the run's folder on node 0; on other nodes, wait for node 0.

        Raises:
            InUseError: another job or run uses the folder.
            PeersMissingError: node 0 does not hold it.
        """
        if self.place.node == 0:
            claim.enter_context(in_use.claimed(self.spec, on_loss=self._lose_folder))
            self.board.put(CLAIMED, {}, once=True)
            return
        deadline = time.monotonic() + JOIN_DEADLINE_S
        while CLAIMED not in (names := self.board.names()):
            if names & {FAILED, CANCEL} or self._signals or time.monotonic() > deadline:
                raise PeersMissingError("node 0 does not hold the run's folder; read its output in the job's log")
            time.sleep(self.board.poll_s)

    def _lose_folder(self) -> None:
        """End at once, with all processes: another job has taken over the folder while this one was suspended."""
        for process in self.processes:
            process.kill()
        os._exit(outcome.FAILED)

    def _record_job(self) -> None:
        """Add a job that another program submitted, such as nemo-run, to the run's ``jobs.jsonl``."""
        job = self.place.job
        is_known = any(known["job_id"] == job for known in read_jobs(self.spec.run_dir))
        if self.place.node == 0 and self.place.is_slurm and not is_known:
            cluster, folder = os.environ.get("SLURM_CLUSTER_NAME", ""), str(Path(self.file).parent)
            record_job(self.spec, job_id=job, cluster=cluster, kind="slurm", folder=folder, file=self.file)

    # ---- while the job runs

    def _turn(self) -> tuple[Result, str] | None:
        """(result, reason) if the attempt ends, otherwise None. The next turn repeats what failed, because a full disk
        may be temporary. Raises OSError after ``FILES_DEADLINE_S`` of errors."""
        try:
            if (end := self._check()) is not None:
                return end
            self._listen()
            self._trouble_since = None
        except OSError as error:
            now = time.monotonic()
            if self._trouble_since is None:
                self._trouble_since = now
                self.say(f"{type(error).__name__}: {error}; trying again for {FILES_DEADLINE_S:g} s")
            elif now > self._trouble_since + FILES_DEADLINE_S:
                raise
            time.sleep(self.board.poll_s)
        return None

    def _listen(self) -> None:
        """Wait for a signal until the next turn; request a checkpoint if one arrives."""
        info = signal.sigtimedwait({signal.SIGUSR1}, self.board.poll_s)
        # If another signal arrives at the timeout, as after `scontrol suspend`, CPython returns an invalid result.
        if info is not None and info.si_signo == signal.SIGUSR1:
            self._signals.append(info.si_signo)
        while self._signals:
            number = self._signals[0]
            self._ask_to_save(signal.Signals(number).name, is_cancelled=number == signal.SIGINT)
            if self._deadline is not None and number != signal.SIGUSR1:
                self._deadline = min(self._deadline, time.monotonic() + _LATE_TERM_S)
            del self._signals[0]
        self._watch_agents()

    def _watch_agents(self) -> None:
        """At each heartbeat: send it, and record agents of other nodes that have sent none for ``SILENT_S``."""
        if time.monotonic() < self._next_heartbeat:
            return
        self._next_heartbeat = time.monotonic() + _HEARTBEAT_S
        self.board.heartbeat()
        for node, (when, silence_s) in self.board.silent_nodes(SILENT_S).items():
            if node not in self._lost:
                text = f"sent no heartbeat for {silence_s:.0f} s: it was killed, or its node is lost"
                self._lost[node] = f"the agent of node {node} {text}"
                self.board.note_lost(node, when, self._lost[node])
                self.say(self._lost[node])

    def _check_lost(self) -> None:
        """If an agent has died, fail if an essential role was on its node, and otherwise ask the trainer to save."""
        for node, text in self._lost.items():
            if any(role.essential and node in role.nodes for role in self.spec.roles):
                failed = {"role": "agent", "node": node, "reason": text, "is_lost": True}
                self.board.put(FAILED, failed, once=True)
            elif STOP not in self.board.names():
                self._ask_to_save(text, is_cancelled=False)

    def _ask_to_save(self, reason: str, *, is_cancelled: bool) -> None:
        if is_cancelled:
            self.board.put(CANCEL, "", once=True)  # also after a request to save
        request = {"reason": reason, "node": self.place.node}
        if self.board.put(STOP, request, once=True):
            self.say(f"{reason}: asking the trainer to save")

    def _check(self) -> tuple[Result, str] | None:
        """Check this node's roles and the files of other nodes; (result, reason) if the attempt ends."""
        names = self.board.names()
        for process in self.processes:
            self._check_role(process, names)
        self._check_lost()
        names = self.board.names()  # read again: a role that exited after saving has just written STOPPED
        if FAILED in names and (failed := self.board.get(FAILED)):
            where = "" if failed.get("is_lost") else f"role {failed['role']} on node {failed['node']}: "
            return "failed", f"{where}{failed['reason']}"
        if CANCEL in names and STOP not in names:
            self._ask_to_save(CANCEL, is_cancelled=True)
        self._watch_ranks(names)
        complete, is_clean = self._complete_role(names)
        if STOPPED in names and (stopped := self.board.get(STOPPED)):
            if complete or time.monotonic() > self._saving_deadline():
                where = f"step {stopped.get('step')}, checkpoint {stopped.get('checkpoint') or 'none'}"
                why = "".join(f"; {text}" for text in self._lost.values())
                return ("cancelled" if self._is_cancelled() else "saved"), f"stopped on request at {where}{why}"
        elif complete and is_clean:
            return "done", f"{complete} has finished"
        elif complete and self._is_cancelled():
            return "cancelled", f"{complete} was cancelled"
        elif STOP in names:
            return self._check_save()
        return None

    def _check_save(self) -> tuple[Result, str] | None:
        """Wait for the trainer after a request to save; (result, reason) after the deadline."""
        if self._deadline is None:
            if (request := self.board.get(STOP)) is None:
                return None
            self.say(f"asked to stop ({request['reason']}): waiting for the trainer to save")
            self._saving_deadline()
            for process in self.processes:
                if process.role.kind == "command" and request["reason"] != signal.SIGUSR1.name:
                    process.request_exit()
        if time.monotonic() < self._deadline:
            return None
        if self._is_cancelled():
            return "cancelled", "cancelled before the trainer reached the end of a step"
        return "unsaved", (
            "the trainer did not reach the end of a step between the request to save and its deadline; ask earlier "
            f"(save_signal_s = {self.spec.save_signal_s}), or make steps shorter"
        )

    def _saving_deadline(self) -> float:
        if self._deadline is None:
            self._deadline = time.monotonic() + max(0.8 * self.spec.save_signal_s, self.spec.save_signal_s - GRACE_S)
        return self._deadline

    def _is_cancelled(self) -> bool:
        return CANCEL in self.board.names()

    def _check_role(self, process: RoleProcess, names: set[str]) -> None:
        role = process.role
        if role.restart and f"given-up-{role.name}.json" in names:
            self._give_up(process)
            return
        if role.restart and f"restart-{role.name}.{process.incarnation + 1}.json" in names:
            self._restart(process, names)
            return
        if process.state != "running" or (status := process.exit_status()) is None:
            return
        if role.restart:
            self._schedule_restart(process, status)
            return
        if status == SAVED:
            self.board.put(STOPPED, {"step": None, "checkpoint": None}, once=True)
        elif status != 0 and STOPPED not in self.board.names() and not self._is_cancelled():
            failure = process.failure()
            if role.essential:
                self._fail(role.name, failure, str(process.log), status)
            else:
                self._note(role.name, failure, str(process.log))
                self.say(f"the job continues without {role.name}; see {process.log}")
        process.report("ended", status)
        self.say(f"{role.name} ended with {format_exit_status(status)}")

    def _schedule_restart(self, process: RoleProcess, status: int) -> None:
        """Request a restart of a role on all of its nodes, or give it up after MAX_RESTARTS deaths in a row."""
        role = process.role
        self._count_death(process)
        self._withdraw(process)
        failure = process.failure()
        self._note(f"{role.name}.{process.incarnation}", failure, str(process.log), role=role.name)
        if process.num_deaths > MAX_RESTARTS:
            self.board.put(f"given-up-{role.name}.json", {"node": self.place.node}, once=True)
            self._fail_without_servers(process, failure, status)
            process.report("given up", status)
            self.say(f"{role.name} died {process.num_deaths} times in a row and is given up; see {process.log}")
            return
        self.board.put(f"restart-{role.name}.{process.incarnation + 1}.json", {"node": self.place.node}, once=True)
        process.report("dead", status)
        self.say(f"{role.name} died with {format_exit_status(status)}; restart {process.num_deaths} of {MAX_RESTARTS}")

    def _count_death(self, process: RoleProcess) -> None:
        """Count one death per incarnation, the same on all nodes of the role."""
        if process.last_counted < process.incarnation:
            process.last_counted = process.incarnation
            has_settled = time.monotonic() - process.started_s > _SETTLED_S
            process.num_deaths = 1 if has_settled else process.num_deaths + 1

    def _restart(self, process: RoleProcess, names: set[str]) -> None:
        """Start the next incarnation after the pause, once this part of the current one has ended. The role's first
        node starts first with a new port, so that no other node connects to an ending process."""
        if names & {FAILED, STOP}:
            return
        role = process.role
        if role.name not in self._ends_at:
            self._count_death(process)
            self._ends_at[role.name] = time.monotonic() + min(30.0, RESTART_PAUSE_S * 2**process.num_deaths)
            process.request_exit()
        if time.monotonic() < self._ends_at[role.name]:
            return
        if process.state == "running":
            process.report("dead", self._end(process))
        incarnation, port = process.incarnation + 1, free_port()
        if role.rank_of(self.place.node) > 0:
            first = self.board.get(f"role-{role.name}.node{role.nodes[0]}.json")
            if first is None or first["incarnation"] < incarnation or first["state"] != "running":
                return
            incarnation, port = first["incarnation"], first["port"]
        process.start(incarnation, port)
        del self._ends_at[role.name]

    def _give_up(self, process: RoleProcess) -> None:
        """End this part of a role that another node has given up."""
        if process.state == "given up":
            return
        if process.role.name not in self._ends_at:
            self._ends_at[process.role.name] = time.monotonic() + GRACE_S
            process.request_exit()
        if not process.is_running or time.monotonic() > self._ends_at[process.role.name]:
            process.report("given up", self._end(process))

    def _end(self, process: RoleProcess) -> int | None:
        process.kill()
        self._withdraw(process)
        return process.exit_status()

    def _withdraw(self, process: RoleProcess) -> None:
        if process.role.kind == "replica":
            endpoint_file(self.spec.run_dir, process.role.name).unlink(missing_ok=True)

    def _fail_without_servers(self, process: RoleProcess, failure: Failure, status: int) -> None:
        """Fail the attempt if a role that was given up is essential, or is the last replica."""
        kind, names = process.role.kind, self.board.names()
        replicas = {f"given-up-{role.name}.json" for role in self.spec.roles if role.kind == "replica"}
        if (replicas <= names) if kind == "replica" else process.role.essential:
            self._fail(process.role.name, failure, str(process.log), status)

    def _complete_role(self, names: set[str]) -> tuple[str, bool]:
        """(an essential role that has ended on all of its nodes, whether all parts succeeded), or ("", False)."""
        for role in self.spec.roles:
            parts = [f"ended-{role.name}.node{node}.json" for node in role.nodes]
            if role.essential and not role.restart and names.issuperset(parts):
                ends = [self.board.get(part) for part in parts]
                if None not in ends:
                    return role.name, all(end["status"] in (0, SAVED) for end in ends)
        return "", False

    def _watch_ranks(self, names: set[str]) -> None:
        """Fail the attempt if other ranks still run GRACE_S after a rank failed; torchrun itself waits for 30 s."""
        ranks = sorted(name for name in names if name.startswith("error-rank"))
        if not ranks:
            return
        if self._rank_failed_at is None:
            self._rank_failed_at = time.monotonic()
        elif time.monotonic() > self._rank_failed_at + GRACE_S and (error := self.board.get(ranks[0])):
            reason = f"rank {error['rank']} failed, and the others did not end"
            self.board.put(FAILED, {"role": error["role"], "node": error["node"], "reason": reason}, once=True)

    # ---- failures and the end

    def _fail(self, role: str, failure: Failure, log: str, status: int | None = None) -> None:
        self._note(role, failure, log)
        reason = "could not start" if status is None else format_exit_status(status)
        self.board.put(FAILED, {"role": role, "node": self.place.node, "reason": reason}, once=True)

    def _note(self, name: str, failure: Failure, log: str, role: str | None = None) -> None:
        error = {
            "time": failure.time,
            "role": role or name,
            "node": self.place.node,
            "rank": failure.rank,
            "text": failure.text,
            "log": log,
            "is_restarted": role is not None,
        }
        self.board.put(f"error-{name}.node{self.place.node}.json", error)

    def _end_all(self, *, has_failed: bool) -> None:
        """Ask every process to exit, and kill those that still run after GRACE_S. If the attempt has failed, record the
        errors of processes that were ending already: their error may be the first."""
        asked_s = time.time()
        running = [process for process in self.processes if process.is_running]
        for process in running:
            process.request_exit()
        deadline = time.monotonic() + GRACE_S
        while any(process.is_running for process in running) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._watch_agents()
            time.sleep(0.05)
        for process in running:
            if process.is_running:
                self.say(f"{process.role.name} did not end within {GRACE_S:g} s of being asked and is killed")
            process.kill()
            process.report("stopped", process.exit_status())
            self._withdraw(process)
            if has_failed and asked_s - _ENDING_S < (failure := process.failure()).time < asked_s:
                self._note(process.role.name, failure, str(process.log))
        self.board.put(f"gone-{self.place.node}.json", {})

    def _conclude(self, result: Result, reason: str) -> int:
        """Wait until all nodes have ended their roles, decide the outcome, and return its exit status."""
        deadline = time.monotonic() + GRACE_S + SILENT_S
        while self._missing() and time.monotonic() < deadline:
            self._watch_agents()
            time.sleep(self.board.poll_s)
        end = outcome.conclude(self.spec, self.board, result, reason)
        self.say(f"{end.result}: {end.reason}")
        self._show_error(end)
        return end.status

    def _missing(self) -> bool:
        """Whether an agent of this attempt lives and has not ended its roles."""
        names = self.board.names()
        nodes = [node for node in range(self.place.num_nodes) if f"node-{node}.json" in names]
        return any(f"gone-{node}.json" not in names and node not in self._lost for node in nodes)

    def _show_error(self, end: Outcome) -> None:
        if end.error:
            self.say(f"first error: {end.error}")


def main() -> int:
    args = sys.argv[1:]
    if len(args) != 1:
        print("usage: python -m launch.agent JOB.json", file=sys.stderr)
        return 2
    try:
        agent = Agent(JobSpec.load(args[0]), Place.from_environment(), args[0])
    except ValueError as error:
        print(f"launch.agent: {error}", file=sys.stderr)
        return 2
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
