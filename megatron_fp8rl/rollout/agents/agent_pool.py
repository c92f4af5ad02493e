"""Runs the sessions of agents in worker processes, and connects each to the policy.

In: a prompt of a source with ``agent``. Out: a scored :class:`~megatron_fp8rl.types.Rollout`. Runs on trainer rank 0,
on the fleet's event loop.

Agents are user code that may crash, block, or never end. A worker runs many sessions, and reports which session's code
is running. If it dies, only that session fails; the others run again, with the same seeds. If the cause is unknown, all
run again. A session that was running in two such workers runs alone, and fails if a third worker dies. A worker whose
memory, threads or files are used up takes no further sessions; those that it lost run again in a new one.

An error of one session, whatever raised it, fails that session. Only an agent that cannot be loaded ends the run.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

from megatron_fp8rl.config import EnvironmentConfig, RunConfig
from megatron_fp8rl.data.conversation import ChatFormat, ConversationError
from megatron_fp8rl.envs.agent_session import AT_LIMIT
from megatron_fp8rl.envs.environment import environments_by_key
from megatron_fp8rl.envs.scorer_process import ScorePoolError
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.envs.source_kind import has_rows
from megatron_fp8rl.rollout.agents.agent_process import AgentLostError, AgentProcess
from megatron_fp8rl.rollout.agents.gateway import Gateway
from megatron_fp8rl.rollout.agents.request_fields import check_request
from megatron_fp8rl.rollout.agents.requests import Requests
from megatron_fp8rl.rollout.agents.session import Session, SessionError, SessionLimitError
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls, before_stop
from megatron_fp8rl.rollout.errors import EngineError, RequestLostError
from megatron_fp8rl.types import Completion, Prompt, Rollout

_log = logging.getLogger(__name__)

_NUM_TRIES = 3  # of a session whose worker died, if the cause is unknown
_MAX_ALONE = 8  # workers at once with a session alone
_MAX_LINE = 400  # characters of a reason in the terminal
_NO_REWARD = "the agent returned None, and nothing else scores its session: return a reward, or name one (--reward)"


class AgentPool:
    """``scorer`` scores the last answer of agents that return None. Use from the fleet's loop."""

    def __init__(self, cfg: RunConfig, requests: Requests, scorer: Any, chat: ChatFormat) -> None:
        self._cfg, self._requests, self._scorer, self._chat = cfg, requests, scorer, chat
        self._tools = ToolCalls(cfg.session.tool_parser, chat.tokenizer)
        self._gateway: Gateway | None = None
        self._starting = asyncio.Lock()
        sources = environments_by_key(cfg.data.environments)
        self._agents: dict[str, EnvironmentConfig] = {key: source for key, source in sources.items() if source.agent}
        self._workers: list[AgentProcess] = []
        self._slots = asyncio.Semaphore(cfg.session.max_running)
        self._alone = asyncio.Semaphore(_MAX_ALONE)
        self._closed = False

    def has_agent(self, prompt: Prompt) -> bool:
        return prompt.environment in self._agents

    async def run_session(self, prompt: Prompt, index: int, seed: int, *, temperature: float | None = None) -> Rollout:
        """Run one session. Raises EngineError or a subclass, or ScorePoolError if no agent can start."""
        queued_s = time.monotonic()
        async with self._slots:
            await self._open()
            queue_s = time.monotonic() - queued_s
            num_tries = 1
            while True:
                session = self._session(f"{prompt.prompt_id}#{index}", seed, temperature)
                alone = num_tries == _NUM_TRIES
                try:
                    async with self._alone if alone else contextlib.nullcontext():
                        outcome = await self._run(session, prompt, alone=alone)
                    break
                except AgentLostError as lost:
                    session.end("its agent has ended")
                    outcome = {"status": "failed", "detail": f"the agent's process {lost}"}
                    if lost.by_this or alone or self._closed:
                        break
                    if not lost.by_other:
                        num_tries += 1
                        _log.warning("session %s is lost and played again: the agent's process %s", session.name, lost)
                except ScorePoolError:
                    raise
                except Exception as error:
                    session.end("it has failed")
                    outcome = {"status": "failed", "detail": f"{type(error).__name__}: {error}"}
                    break
            return await self._rollout(session, prompt, index, seed, outcome, queue_s)

    async def close(self) -> None:
        """Kill the workers and their children. Later calls do nothing."""
        self._closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.kill("was closed")
        if self._gateway is not None:
            await self._gateway.close()

    async def _open(self) -> None:
        async with self._starting:
            if self._gateway is None:
                await asyncio.get_running_loop().run_in_executor(None, self._tools.load)
                host, _, port = self._cfg.session.endpoint.rpartition(":")
                self._gateway = Gateway(self._cfg.name, self._tools, host=host, port=int(port))
                await self._gateway.start()

    def _session(self, name: str, seed: int, temperature: float | None) -> Session:
        async def sample(token_ids: list[int], seed: int, session: Session, **sampling: Any) -> Completion:
            try:
                with self._requests.timed():
                    (completion,) = await self._requests.ask(
                        token_ids, 1, seed, temperature=temperature, session=session, **sampling
                    )
            except RequestLostError as error:
                whole.lost = error.summary
                whole.end(whole.lost)
                raise
            return completion

        whole = Session(
            name,
            self._cfg.session,
            self._chat,
            sample,
            seed,
            token_budget=self._cfg.max_sequence_tokens,
            max_completion_tokens=self._cfg.sampling.max_completion_tokens,
        )
        return whole

    async def _run(self, session: Session, prompt: Prompt, *, alone: bool) -> dict[str, Any]:
        """Run one attempt; return the worker's outcome, or the reason why the session was ended."""
        worker = await self._worker(alone=alone)
        key = self._gateway.open_session(session)
        try:
            answers = _Answers(session, self._tools)
            return await worker.run_agent(session, prompt, answers, self._cfg.session.deadline_s, key)
        finally:
            self._gateway.close_session(key)
            if alone or (worker.is_retired and not worker.num_sessions):
                self._forget(worker)
                await worker.kill("has ended")

    async def _worker(self, *, alone: bool) -> AgentProcess:
        """Return the worker with the fewest sessions, or a new one with ``alone``. Starts missing workers."""
        if self._closed:
            raise ScorePoolError("the agents' workers are closed")
        self._workers = [candidate for candidate in self._workers if candidate.is_alive]
        usable = [candidate for candidate in self._workers if not candidate.is_retired]
        if alone or len(usable) < self._cfg.session.num_workers:
            worker = AgentProcess(self._greeting(), self._cfg.scoring)
            self._workers.append(worker)
            if alone:
                worker.is_retired = True
        else:
            worker = min(usable, key=lambda candidate: candidate.num_sessions)
        worker.num_sessions += 1  # before it waits, so that others choose another one
        try:
            await worker.ready()
        except BaseException:
            worker.num_sessions -= 1
            raise
        return worker

    def _greeting(self) -> dict[str, Any]:
        agents = {key: {"agent": source.agent, "options": source.agent_options} for key, source in self._agents.items()}
        return {
            "agents": agents,
            "memory_bytes": int(self._cfg.scoring.memory_gib * 2**30),
            "base_url": self._gateway.url,
            "max_tokens": self._cfg.max_sequence_tokens,
        }

    def _forget(self, worker: AgentProcess) -> None:
        self._workers = [other for other in self._workers if other is not worker]

    async def _rollout(
        self, session: Session, prompt: Prompt, index: int, seed: int, outcome: Mapping[str, Any], queue_s: float
    ) -> Rollout:
        branches = session.trajectories()
        status, detail = outcome["status"], outcome.get("detail", "")
        if status == "limited":  # its client raised at the refusal
            status = "truncated" if session.any_limit else "raised"
            detail = f"session {session.name} {AT_LIMIT}: {session.any_limit}" if session.any_limit else detail
        if session.lost:  # whatever its agent made of it
            status, detail = "failed", session.lost
        score = Score(outcome.get("reward", 0.0), "scored", "", outcome.get("parts", {}))
        rollout = Rollout(
            prompt=prompt,
            index=index,
            branches=branches,
            reward=0.0,
            status="scored",
            seed=seed,
            turn_rewards=session.rewards_of_turns(),
            turn_order=session.order_of_turns(),
            seconds={"model": session.model_s, "tools": outcome.get("tools_s", 0.0), "queue": queue_s},
        )
        source = self._agents[prompt.environment]
        if status == "unscored" and has_rows(source.dataset) and not source.rewards:
            if not rollout.turn_rewards:
                score = Score.failed(_NO_REWARD)
        elif status == "unscored":
            score = await self._scorer.score(prompt, rollout.answer_text)
        elif status not in ("scored", "truncated"):
            score = Score.failed(detail)
        if not branches and score.status == "scored":
            score = Score.failed(detail or "the agent has asked for nothing")
        if score.status != "scored":
            _log.warning("session %s is lost: %.*s", session.name, _MAX_LINE, " ".join(score.detail.split()))
        is_cut = status == "truncated" or rollout.finish_reason == "length"
        final = score.status if score.status != "scored" else "truncated" if is_cut else "scored"
        reward = score.reward + (sum(rollout.turn_rewards) if score.status == "scored" else 0.0)
        return dataclasses.replace(
            rollout, reward=reward, status=final, detail=score.detail or detail, reward_parts=score.parts
        )


class _Answers:
    """Answers the requests of one session's agent. Remembers the turns of the answers, in case the agent withdraws."""

    def __init__(self, session: Session, tools: ToolCalls) -> None:
        self._session, self._tools = session, tools
        self._turns: dict[tuple[int, int], tuple[Session, int]] = {}

    async def answer(self, key: tuple[int, int], request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer, or the error of the request. Raises nothing."""
        try:
            session = self._session.aside(request["aside"])
        except SessionLimitError as error:  # of the program, which truncates no session
            return {"error": str(error), "kind": "session"}
        try:
            if request["do"] == "reward":
                session.reward_turn(request["value"], request["turn"])
                return {}
            fields = {name: request[name] for name in ("messages", "tools", "max_tokens", "stop")}
            check_request(fields, "chat")
            completion, turn = await session.chat(**fields)
            self._turns[key] = session, turn
            text = before_stop(completion.text, fields["stop"])
            message = {"role": "assistant", **self._tools.message(text, fields["tools"])}
            session.record_answer(turn, message)
            answer = {"text": text, "message": message, "finish_reason": completion.finish_reason}
            return answer | {"turn": turn}
        except SessionLimitError as error:
            return {"error": str(error), "kind": "limit"}
        except (SessionError, ConversationError) as error:
            return {"error": str(error), "kind": "session"}
        except EngineError as error:
            return {"error": str(error), "kind": "engine"}
        except Exception as error:
            self.withdraw(key)
            return {"error": f"{type(error).__name__}: {error}", "kind": "session"}

    def withdraw(self, key: tuple[int, int]) -> None:
        if key in self._turns:
            session, turn = self._turns.pop(key)
            session.withdraw(turn)
