"""Sessions: conversations with the policy, in which all sampled tokens are trained.

In: lists of messages, or prompts, from agents. Out: completions, and at the end the trajectories of the session. Runs
on trainer rank 0, on the fleet's event loop.

A request continues the branch whose messages it starts with: the prompt is the branch's ids and the ids of the new
messages. It starts a branch if there is none, or if the chat template rewrites the history. Requests to the same branch
run one after another. All requests of a session go to one replica, which has cached the prefix. If it dies, another
continues from the ids.

Turns are numbered by the time of their answers, over all branches. :meth:`Session.withdraw` removes an answer that the
agent did not get; such answers are not trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megatron_fp8rl.config import SessionConfig
from megatron_fp8rl.data.conversation import ChatFormat, ConversationError, Message, Rendered, plain
from megatron_fp8rl.data.tokenizer import decode
from megatron_fp8rl.envs.agent_session import AT_LIMIT, CHARACTERS_PER_TOKEN
from megatron_fp8rl.types import Completion, Context, Trajectory

_TURN_STRIDE = 1 << 20  # difference of the seeds of two turns; more than completions per prompt
_MAX_OPEN = 64  # requests of one session that wait for an answer
Sample = Callable[..., Awaitable[Completion]]  # (token_ids, seed, affinity, **sampling) -> completion


MAX_ASIDES = 64


class SessionError(RuntimeError):
    """A session rejects a request; the message has the reason and the remedy."""


class SessionEndedError(SessionError):
    """A request to a session that has ended."""


class SessionLimitError(SessionError):
    """A session has used up its turns, tokens or time."""


@dataclass(eq=False)
class _Branch:
    """A growing trajectory."""

    segments: list[Context | Completion]
    messages: list[Message]  # the messages of the ids, including the last answer
    rendered: str  # the last prompt as text
    chat: ChatFormat
    tools: tuple[Any, ...] = ()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]


@dataclass(eq=False)
class _Turn:
    """An answer of the policy, and what its branch was before."""

    branch: _Branch
    before: tuple[list[Context | Completion], list[Message], str]  # segments, messages and rendered text
    num_segments: int  # of the branch after the answer
    reward: float | None = None
    is_withdrawn: bool = False


class Session:
    """A conversation with one or more branches. ``sample`` calls the engines."""

    def __init__(
        self,
        name: str,
        limits: SessionConfig,
        chat: ChatFormat,
        sample: Sample,
        seed: int,
        *,
        token_budget: int,
        max_completion_tokens: int,
        is_trained: bool = True,
    ) -> None:
        self.name = name
        self.seed = seed
        self.is_trained = is_trained
        self.limit: str = ""  # the limit that rejected a request, if any
        self.lost = ""  # why the session fails, whatever its agent returns
        self.model_s = 0.0  # time in requests
        self.token_budget = token_budget
        self._limits, self._max_new = limits, max_completion_tokens
        self._chat, self._sample = chat, sample
        self._asides: dict[int, Session] = {}
        self._branches: list[_Branch] = []
        self._turns: list[_Turn] = []  # by time
        self._num_seeds = 0  # used so far
        self._running: set[asyncio.Task[Any]] = set()
        self._num_open = 0
        self._ended = ""
        self._started_s = time.monotonic()

    @property
    def any_limit(self) -> str:
        """The limit that rejected a request, of this session or of a side conversation; empty if there is none."""
        return next((session.limit for session in (self, *self._asides.values()) if session.limit), "")

    @property
    def num_turns(self) -> int:
        """Answers that the agent got or waits for."""
        return sum(not turn.is_withdrawn for turn in self._turns) + len(self._running)

    def aside(self, number: int) -> Session:
        """Return side conversation ``number``, which is not trained on and ends with this session; 0: this session."""
        if number == 0:
            return self
        if number > MAX_ASIDES:
            raise SessionLimitError(f"a session has at most {MAX_ASIDES} conversations beside itself")
        if number not in self._asides:
            name, seed = f"{self.name} aside {number}", self.seed + (number << 33)
            self._asides[number] = Session(
                name,
                self._limits,
                self._chat,
                self._sample,
                seed,
                token_budget=self.token_budget,
                max_completion_tokens=self._max_new,
                is_trained=False,
            )
            self._asides[number]._ended = self._ended
        return self._asides[number]

    # ---- requests

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
        **sampling: Any,
    ) -> tuple[Completion, int]:
        """Return the policy's answer to a conversation, and its turn number. ``arguments`` are those of the chat
        template. ``sampling``: max_tokens, stop, seed. Raises SessionError, ConversationError, or EngineError."""
        chat = self._chat.for_request(tools, arguments)
        self._check_length(sum(len(plain(message)["content"]) for message in messages), "messages have")
        self._check_length(sum(len(json.dumps(tool)) for tool in tools), "tools have")
        with self._counted():
            while True:
                branch = self._branch_of(messages, tools, chat)
                if branch is None:
                    return await self._begin(chat, chat.begin(messages, tools), messages, tools, sampling)
                async with branch.lock:
                    if self._branch_of(messages, tools, chat) is branch:  # no other request has continued it meanwhile
                        return await self._extend(branch, messages, sampling)

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> tuple[Completion, int]:
        """Continue a text or token ids; continue a branch if the ids start with its ids. Raises like :meth:`chat`."""
        num_known = len(self._chat.tokenizer)
        if not isinstance(prompt, str) and (unknown := [token for token in prompt if not 0 <= token < num_known]):
            raise ConversationError(f"prompt has the token id {unknown[0]}; the vocabulary ends at {num_known - 1}")
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt has")
        with self._counted():
            for branch in reversed(self._branches):
                async with branch.lock:
                    context = self._rest_of(branch, prompt) if branch.segments else None
                    if context is not None:
                        return await self._continue(branch, context, "", [], sampling)
            if isinstance(prompt, str):
                rendered = replace(self._chat, uses_chat=False).begin([{"content": prompt}])
            else:
                rendered = Rendered(text="", new_text="", new_ids=tuple(prompt))
            return await self._begin(self._chat, rendered, [], (), sampling)

    def reward_turn(self, value: float, turn: int | None = None) -> None:
        """Add a reward to a turn; None stands for the last one. Raises SessionError if there is no such turn."""
        turns = self._turns if turn is None else self._turns[turn : turn + 1]
        rewarded = next((turn for turn in reversed(turns) if not turn.is_withdrawn), None)
        if rewarded is None:
            raise SessionError("no turn has been taken that a reward could be for")
        rewarded.reward = (rewarded.reward or 0.0) + float(value)

    def withdraw(self, turn: int) -> None:
        """Remove an answer that the agent did not get, as if it had not asked. Later turns keep their numbers."""
        withdrawn = self._turns[turn]
        branch = withdrawn.branch
        if withdrawn.is_withdrawn or len(branch.segments) != withdrawn.num_segments:
            return  # a request has continued the answer, so the agent has got it
        withdrawn.is_withdrawn = True
        branch.segments, branch.messages, branch.rendered = withdrawn.before
        if not branch.segments:
            self._branches.remove(branch)

    def end(self, reason: str = "it is over") -> None:
        """Reject further requests, and cancel running ones."""
        self._ended = self._ended or reason
        for task in self._running:
            task.cancel()
        for aside in self._asides.values():
            aside.end(reason)

    # ---- the outcome

    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(Trajectory(segments=tuple(branch.segments)) for branch in self._branches if branch.segments)

    def rewards_of_turns(self) -> tuple[float, ...]:
        """The rewards of turns in the order of the completions of :meth:`trajectories`; empty if none was given."""
        turns = [turn for _, turn in self._turns_by_branch()]
        return tuple(turn.reward or 0.0 for turn in turns) if any(turn.reward is not None for turn in turns) else ()

    def order_of_turns(self) -> tuple[int, ...]:
        """The position in time of each completion of :meth:`trajectories`; empty if they are in order of time."""
        order = tuple(position for position, _ in self._turns_by_branch())
        return () if order == tuple(range(len(order))) else order

    def _turns_by_branch(self) -> list[tuple[int, _Turn]]:
        """(position in time, turn) in the order of the completions of :meth:`trajectories`."""
        by_time = list(enumerate(turn for turn in self._turns if not turn.is_withdrawn))
        return [item for branch in self._branches for item in by_time if item[1].branch is branch]

    # ---- parts of a request

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Reject a request while too many others of this session are unanswered."""
        if self._num_open >= _MAX_OPEN:
            raise SessionError(f"session {self.name} has {self._num_open} requests open; wait for an answer")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def _branch_of(self, messages: Sequence[Message], tools: Sequence[Any], chat: ChatFormat) -> _Branch | None:
        """Return the longest branch that ``messages`` start with."""
        wanted = [plain(message) for message in messages]
        fits = [
            branch
            for branch in self._branches
            if branch.messages
            and len(branch.messages) < len(wanted)
            and branch.tools == tuple(tools)
            and branch.chat.arguments == chat.arguments
            and [plain(message) for message in branch.messages] == wanted[: len(branch.messages)]
        ]
        return max(fits, key=lambda branch: len(branch.messages), default=None)

    def _rest_of(self, branch: _Branch, prompt: str | Sequence[int]) -> Context | None:
        ids = branch.token_ids
        if not isinstance(prompt, str):
            rest = tuple(prompt[len(ids) :])
            return Context(token_ids=rest, role="user") if list(prompt[: len(ids)]) == ids else None
        text = "".join(map(self._text_of, branch.segments))
        if branch.messages or not text or not prompt.startswith(text):
            return None
        rest = prompt[len(text) :]
        new_ids = self._chat.tokenizer.encode(rest, add_special_tokens=False)
        if new_ids and new_ids[0] == ids[-1] and ids[-1] in self._chat.stop_ids:
            new_ids = new_ids[1:]  # the end token was already sampled
        return Context(token_ids=tuple(new_ids), role="user", text=rest)

    def _text_of(self, segment: Context | Completion) -> str:
        """The text of a segment as a client of texts knows it; a prompt of token ids is decoded without BOS token."""
        if segment.text or not segment.token_ids:
            return segment.text
        tokenizer = self._chat.tokenizer
        return decode(tokenizer, segment.token_ids[segment.token_ids[0] == tokenizer.bos_token_id :])

    async def _extend(
        self, branch: _Branch, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> tuple[Completion, int]:
        new = messages[len(branch.messages) :]
        chat, tools = branch.chat, branch.tools
        rendered = chat.extend(branch.rendered, branch.messages, branch.segments[-1].token_ids, new, tools)
        if rendered is None:
            return await self._begin(chat, chat.begin(messages, tools), messages, tools, sampling)
        context = Context(token_ids=rendered.new_ids, role=str(new[-1].get("role", "user")), text=rendered.new_text)
        # Keep the rendered history, because an agent may return calls with their keys in another order.
        return await self._continue(branch, context, rendered.text, [*branch.messages, *new], sampling)

    async def _begin(
        self,
        chat: ChatFormat,
        rendered: Rendered,
        messages: Sequence[Message],
        tools: Sequence[Any],
        sampling: Mapping[str, Any],
    ) -> tuple[Completion, int]:
        if len(self._branches) >= self._limits.max_turns:
            raise self._limit(f"it has {len(self._branches)} branches (--session.max_turns)")
        branch = _Branch(segments=[], messages=[], rendered="", chat=chat, tools=tuple(tools))
        context = Context(token_ids=rendered.new_ids, role="prompt", text=rendered.new_text)
        self._check(branch, context)
        self._branches.append(branch)
        try:
            async with branch.lock:
                return await self._continue(branch, context, rendered.text, messages, sampling)
        except BaseException:
            self._branches.remove(branch)
            raise

    async def _continue(
        self, branch: _Branch, context: Context, rendered: str, messages: Sequence[Message], sampling: Mapping[str, Any]
    ) -> tuple[Completion, int]:
        """Sample an answer; the branch changes only after that."""
        num_left = self._check(branch, context)
        limit = min(self._max_new, num_left)
        wanted = sampling.get("max_tokens") or limit
        prompt = [*branch.token_ids, *context.token_ids]
        if (wanted_seed := sampling.get("seed")) is None:
            seed = self.seed + self._num_seeds * _TURN_STRIDE
            self._num_seeds += 1
        else:
            seed = _seed_of(self.seed, wanted_seed, prompt)
        started_s = time.monotonic()
        task = asyncio.ensure_future(
            self._sample(
                prompt, seed, self, max_tokens=max(1, min(wanted, limit)), stop=tuple(sampling.get("stop") or ())
            )
        )
        self._running.add(task)
        try:
            completion = await task
        except asyncio.CancelledError:
            if self._ended and not asyncio.current_task().cancelling():
                raise SessionEndedError(f"session {self.name} has ended: {self._ended}") from None
            raise
        finally:
            self._running.discard(task)
            task.cancel()
            self.model_s += time.monotonic() - started_s
        if self._ended:
            raise SessionEndedError(f"session {self.name} has ended: {self._ended}")
        before = (list(branch.segments), branch.messages, branch.rendered)
        num_before = len(branch.token_ids) - 1 if branch.segments else 0
        if completion.routed_experts is not None and num_before:
            completion = replace(completion, routed_experts=completion.routed_experts[num_before:])
        if context.token_ids or not branch.segments:
            branch.segments.append(context)
        # The agent wanted no more tokens, so the answer is complete for it; the agent itself is told "length".
        is_complete = completion.finish_reason == "length" and wanted < limit
        branch.segments.append(replace(completion, finish_reason="stop") if is_complete else completion)
        branch.rendered = rendered
        branch.messages = [*messages, {"role": "assistant", "content": completion.text}] if messages else []
        self._turns.append(_Turn(branch, before, len(branch.segments)))
        return completion, len(self._turns) - 1

    def record_answer(self, turn: int, message: Message) -> None:
        """Record a turn's answer, with tool calls, in the form that the agent will send back."""
        branch = self._turns[turn].branch
        if branch.messages:
            branch.messages[-1] = {"role": "assistant", **message}

    def _check(self, branch: _Branch, context: Context) -> int:
        """Return the number of tokens that may still be sampled. Raises SessionError if there are none."""
        if self._ended:
            raise SessionEndedError(f"session {self.name} has ended: {self._ended}")
        if self.num_turns >= self._limits.max_turns:
            raise self._limit(f"it has taken {self.num_turns} turns (--session.max_turns)")
        if time.monotonic() - self._started_s > self._limits.deadline_s:
            raise self._limit(f"it is older than {self._limits.deadline_s:g} s (--session.deadline_s)")
        num_tokens = len(branch.token_ids) + len(context.token_ids)
        if num_tokens >= self.token_budget:
            raise self._limit(f"its next prompt has {num_tokens} of {self.token_budget} tokens (--session.max_tokens)")
        return self.token_budget - num_tokens

    def _check_length(self, num_characters: int, what: str) -> None:
        """Raises SessionLimitError for a text that cannot fit, before it is tokenized."""
        if num_characters > CHARACTERS_PER_TOKEN * self.token_budget:
            raise self._limit(f"its {what} {num_characters} characters (--session.max_tokens)")

    def _limit(self, what: str) -> SessionLimitError:
        self.limit = self.limit or what
        return SessionLimitError(f"session {self.name} {AT_LIMIT}: {what}")


def _seed_of(session: int, wanted: int, prompt: Sequence[int]) -> int:
    """The seed of a request that has a seed. It repeats only for the same prompt and session: answers to other prompts,
    and those of the other sessions of a group, stay independent."""
    return int.from_bytes(
        hashlib.blake2b(repr((session, wanted, list(prompt))).encode(), digest_size=5).digest(), "big"
    )
