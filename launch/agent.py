"""``python -m launch.agent SPEC``: one per node; starts this node's roles, and ends together with the other nodes.

In: the job as one word (``spec.py``) and a place in it from the environment. Out: exit status 0 when the job is done, 85
when it should be started again, 130 when it was cancelled, anything else for a failure; all nodes end with the same.
The standard library alone.

    come      write this node's address, wait for all nodes
    start     torchrun for the trainer, with ranks in the order of nodes; replicas; other commands
    tend      restart what may be restarted; pass a request to save on to the trainer; see what other nodes say
    end       when a role that the job is for has ended everywhere, when any of them failed, or when all is saved
    conclude  stop what is left, wait for the other nodes to do so, show the first error of all
"""

from __future__ import annotations

import os
import signal
import sys
import time

from launch import outcome
from launch.outcome import Outcome, Result
from launch.peers import CANCEL, FAILED, STOP, STOPPED, Board, PeersMissingError, Place
from launch.roles import Failure, RoleProcess, status_in_words
from launch.spec import SAVED, JobSpec, endpoint_file

JOIN_DEADLINE_S = float(os.environ.get("LAUNCH_JOIN_DEADLINE_S", "600"))  # images may still be fetched on other nodes
GRACE_S = float(os.environ.get("LAUNCH_GRACE_S", "15"))  # for a role that was asked to end
RESTART_PAUSE_S = float(os.environ.get("LAUNCH_RESTART_PAUSE_S", "0.5"))  # doubled with every death in a row, up to 30 s
MAX_RESTARTS = 5  # of a role in a row, each having lived for less than:
_SETTLED_S = 600.0
_POLL_S = 0.2
_LIFE_S = 5.0
_LATE_TERM_S = 20.0  # Slurm kills 30 s after its SIGTERM, by default


class Agent:
    """All that happens on one node in one attempt."""

    def __init__(self, spec: JobSpec, place: Place) -> None:
        if place.num_nodes != spec.nodes:
            raise ValueError(f"the job has {place.num_nodes} nodes, and its plan is for {spec.nodes}; submit it again")
        self.spec = spec
        self.place = place
        self.board = Board(spec.run_dir, place)
        self.processes: list[RoleProcess] = []
        self._restart_at: dict[str, float] = {}  # role -> monotonic time of its next start
        self._signals: list[int] = []
        self._deadline: float | None = None  # monotonic: for the trainer to save
        self._rank_failed_at: float | None = None  # monotonic
        self._next_sign_of_life = 0.0

    def run(self) -> int:
        """Everything; the exit status."""
        # Blocked for good and asked for in `_listen`: what is started inherits the block, and so survives the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, lambda number, _: self._signals.append(number))
        if (refused := outcome.refusal(self.spec, self.place)) is not None:
            self.say(refused.reason)
            self._show(refused)
            return refused.status if refused.status not in (0, SAVED) else outcome.FAILED
        result, reason = self._work()
        self._end_all()
        return self._conclude(result, reason)

    def say(self, text: str) -> None:
        # In one write: nodes share the file, and an unbuffered print writes the end of the line by itself.
        print(f"[node {self.place.node}, attempt {self.place.attempt}] {text}\n", end="", flush=True)

    def _work(self) -> tuple[Result, str]:
        """(what came of it, why), with processes that may still run."""
        plan = self.spec.on_node(self.place.node)
        try:
            for role in plan.roles:  # before anybody is told that this node is here
                if role.kind == "replica":
                    endpoint_file(self.spec.run_dir, role.name).unlink(missing_ok=True)
            peers = self.board.meet(JOIN_DEADLINE_S, lambda: bool(self._signals))
            self.say(f"all {self.place.num_nodes} nodes are here; roles: {', '.join(role.name for role in plan.roles)}")
            for role in plan.roles:
                process = RoleProcess(role, self.spec, self.board, peers)
                self.processes.append(process)
                process.start()
        except (PeersMissingError, OSError) as error:
            self._fail("agent", Failure(time.time(), f"{type(error).__name__}: {error}", None), log="the job's log")
            return "failed", str(error)
        while (end := self._tend()) is None:
            self._listen()
        return end

    # ---- while the job runs

    def _listen(self) -> None:
        """Sleep for a moment, or until a signal; ask for a checkpoint when there is one."""
        info = signal.sigtimedwait({signal.SIGUSR1}, _POLL_S)
        signals = [*self._signals, *([] if info is None else [info.si_signo])]
        self._signals.clear()
        for number in signals:
            self._ask_to_save(signal.Signals(number).name, is_cancelled=number == signal.SIGINT)
            if self._deadline is not None and number != signal.SIGUSR1:
                self._deadline = min(self._deadline, time.monotonic() + _LATE_TERM_S)
        if time.monotonic() > self._next_sign_of_life:
            self._next_sign_of_life = time.monotonic() + _LIFE_S
            self.board.sign_of_life()

    def _ask_to_save(self, reason: str, *, is_cancelled: bool) -> None:
        request = {"reason": reason, "node": self.place.node, "is_cancelled": is_cancelled}
        if self.board.put(STOP, request, once=True):
            self.say(f"{reason}: asking the trainer to save")

    def _tend(self) -> tuple[Result, str] | None:
        """Look after the processes and at what other nodes say; what ends the attempt, when something does."""
        names = self.board.names()
        for process in self.processes:
            self._tend_role(process, names)
        names = self.board.names()  # with what the roles have just said: ended to save is not ended for good
        if FAILED in names:
            failed = self.board.get(FAILED)
            return "failed", f"role {failed['role']} on node {failed['node']}: {failed['reason']}"
        if CANCEL in names and STOP not in names:
            self._ask_to_save(CANCEL, is_cancelled=True)
        self._watch_ranks(names)
        complete, is_clean = self._complete_role()
        if STOPPED in names:
            stopped = self.board.get(STOPPED)
            if complete or time.monotonic() > self._saving_deadline():
                where = f"step {stopped.get('step')}, checkpoint {stopped.get('checkpoint') or 'none'}"
                return ("cancelled" if self._is_cancelled() else "saved"), f"stopped on request at {where}"
        elif complete and is_clean:
            return "done", f"{complete} has finished"
        elif complete and self._is_cancelled():
            return "cancelled", f"{complete} was cancelled"
        elif STOP in names:
            return self._tend_stop()
        return None

    def _tend_stop(self) -> tuple[Result, str] | None:
        """Somebody asked to save, and the trainer has not yet."""
        if self._deadline is None:
            request = self.board.get(STOP)
            self.say(f"asked to stop ({request['reason']}): waiting for the trainer to save")
            self._saving_deadline()
            for process in self.processes:
                if process.role.kind == "command" and request["reason"] != signal.SIGUSR1.name:
                    process.ask()
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
        return bool((self.board.get(STOP) or {}).get("is_cancelled")) or CANCEL in self.board.names()

    def _tend_role(self, process: RoleProcess, names: set[str]) -> None:
        role = process.role
        if role.restart and f"restart-{role.name}.{process.incarnation + 1}.json" in names:
            self._restart(process, names)
            return
        if process.state != "running" or (status := process.ended()) is None:
            return
        if role.restart:
            self._schedule_restart(process, status)
            return
        process.tell("ended", status)
        self.say(f"{role.name} ended with {status_in_words(status)}")
        if status == SAVED:
            self.board.put(STOPPED, {"step": None, "checkpoint": None}, once=True)
        elif status != 0 and STOPPED not in self.board.names() and not self._is_cancelled():
            failure = process.failure()
            if role.essential:
                self._fail(role.name, failure, str(process.log), status)
            else:
                self._note(role.name, failure, str(process.log))
                self.say(f"the job goes on without {role.name}; see {process.log}")

    def _schedule_restart(self, process: RoleProcess, status: int) -> None:
        """A role that may be restarted has ended: all of its nodes begin anew, a little later each time in a row."""
        role = process.role
        has_settled = time.monotonic() - process.started_s > _SETTLED_S
        process.num_deaths = 1 if has_settled else process.num_deaths + 1
        self._withdraw(process)
        failure = process.failure()
        self._note(f"{role.name}.{process.incarnation}", failure, str(process.log), role=role.name)
        if process.num_deaths > MAX_RESTARTS:
            process.tell("given up", status)
            self.say(f"{role.name} died {process.num_deaths} times in a row and is given up; see {process.log}")
            self._fail_without_replicas(process, failure, status)
            return
        process.tell("dead", status)
        self.say(f"{role.name} died with {status_in_words(status)}; restart {process.num_deaths} of {MAX_RESTARTS}")
        self.board.put(f"restart-{role.name}.{process.incarnation + 1}.json", {"node": self.place.node}, once=True)

    def _restart(self, process: RoleProcess, names: set[str]) -> None:
        """Begin the next incarnation, once this one has ended here and the pause is over."""
        if names & {FAILED, STOP}:
            return
        name = process.role.name
        if name not in self._restart_at:
            pause_s = min(30.0, RESTART_PAUSE_S * 2**process.num_deaths)
            self._restart_at[name] = time.monotonic() + pause_s
            process.ask()
        if time.monotonic() >= self._restart_at[name]:
            process.kill()
            process.ended()
            del self._restart_at[name]
            self._withdraw(process)
            process.start(process.incarnation + 1)

    def _withdraw(self, process: RoleProcess) -> None:
        """Nobody is to ask a server that is gone."""
        if process.role.kind == "replica":
            endpoint_file(self.spec.run_dir, process.role.name).unlink(missing_ok=True)

    def _fail_without_replicas(self, process: RoleProcess, failure: Failure, status: int) -> None:
        """A replica is given up: a failure when it was essential, or the last of the replicas."""
        replicas = {role.name for role in self.spec.roles if role.kind == "replica"}
        states = self.board.all("role-")
        gone = {name for name in replicas for key, one in states.items()
                if key.startswith(f"role-{name}.node") and one["state"] == "given up"}  # fmt: skip
        if gone == replicas or (process.role.kind != "replica" and process.role.essential):
            self._fail(process.role.name, failure, str(process.log), status)

    def _complete_role(self) -> tuple[str, bool]:
        """(an essential role that has ended on all of its nodes, whether without a failure); ("", False) without one."""
        states = self.board.all("role-")
        for role in self.spec.roles:
            parts = [states.get(f"role-{role.name}.node{node}.json") for node in role.nodes]
            if role.essential and not role.restart and all(part and part["state"] == "ended" for part in parts):
                return role.name, all(part["status"] in (0, SAVED) for part in parts)
        return "", False

    def _watch_ranks(self, names: set[str]) -> None:
        """A rank says at once that it failed; torchrun gives the others of its node half a minute."""
        ranks = sorted(name for name in names if name.startswith("error-rank"))
        if not ranks:
            return
        if self._rank_failed_at is None:
            self._rank_failed_at = time.monotonic()
        elif time.monotonic() > self._rank_failed_at + GRACE_S:
            error = self.board.get(ranks[0])
            reason = f"rank {error['rank']} failed, and the others did not end"
            self.board.put(FAILED, {"role": error["role"], "node": error["node"], "reason": reason}, once=True)

    # ---- failures and the end

    def _fail(self, role: str, failure: Failure, log: str, status: int | None = None) -> None:
        self._note(role, failure, log)
        reason = "could not start" if status is None else status_in_words(status)
        self.board.put(FAILED, {"role": role, "node": self.place.node, "reason": reason}, once=True)

    def _note(self, name: str, failure: Failure, log: str, role: str | None = None) -> None:
        error = {"time": failure.time, "role": role or name, "node": self.place.node, "rank": failure.rank,
                 "text": failure.text, "log": log, "is_restarted": role is not None}  # fmt: skip
        self.board.put(f"error-{name}.node{self.place.node}.json", error)

    def _end_all(self) -> None:
        """Ask every process to end, and make it after the grace."""
        running = [process for process in self.processes if process.is_running]
        for process in running:
            process.ask()
        deadline = time.monotonic() + GRACE_S
        while any(process.is_running for process in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in running:
            if process.is_running:
                self.say(f"{process.role.name} did not end within {GRACE_S:g} s of being asked and is killed")
            process.kill()
            process.tell("stopped", process.ended())
            self._withdraw(process)
        self.board.put(f"gone-{self.place.node}.json", {})

    def _conclude(self, result: Result, reason: str) -> int:
        """Wait until all nodes have ended their roles, judge, and show the verdict."""
        came = [node for node in range(self.place.num_nodes) if f"node-{node}.json" in self.board.names()]
        expected = {f"gone-{node}.json" for node in came}
        deadline = time.monotonic() + GRACE_S + 15.0
        while not expected <= self.board.names() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        judged = outcome.conclude(self.spec, self.board, result, reason)
        self.say(f"{judged.result}: {judged.reason}")
        self._show(judged)
        return judged.status

    def _show(self, judged: Outcome) -> None:
        if judged.error:
            self.say(f"first error: {judged.error}")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m launch.agent SPEC", file=sys.stderr)
        return 2
    try:
        agent = Agent(JobSpec.decode(arguments[0]), Place.from_environment())
    except ValueError as error:
        print(f"launch.agent: {error}", file=sys.stderr)
        return 2
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
