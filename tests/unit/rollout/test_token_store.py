"""A token store between trainer rank 0 and an engine: what it keeps, gives away and drops, and what fails by name."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import ClientSession, web

from megatron_fp8rl.algo.named import load_advantage
from megatron_fp8rl.algo.samples import to_samples
from megatron_fp8rl.data.packing import build, divide, fetch_numbers
from megatron_fp8rl.observe.recording import RolloutWriter, read_step
from megatron_fp8rl.rollout import client as client_module
from megatron_fp8rl.rollout.client import EngineClient, EngineDeadError, EngineError
from megatron_fp8rl.rollout.completions import GENERATE_PATH, Answer, Sampling, Segment, write_answer
from megatron_fp8rl.rollout.replicas import Replica
from megatron_fp8rl.rollout.token_store.answer_store import AnswerStore, running
from megatron_fp8rl.rollout.token_store.store_server import KEEP_PATH
from megatron_fp8rl.stored_numbers import ROWS_PATH, Store, Stored, StoreError, fetch
from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup, single_turn
from model_configs.tiny import tiny_qwen3

ALONE = SimpleNamespace(
    rank=0, tp_rank=0, pp_rank=0, cp_rank=0, dp_rank=0, dp_size=1, gather_from_all=lambda value: [value]
)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=40, stop_token_ids=(), stop_strings=())
PROMPT = list(range(100, 112))
TOKEN = "of the engine"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Store]:
    cfg = tiny_qwen3()
    cfg = replace(cfg, rollout=replace(cfg.rollout, token_stores=1), output_dir=str(tmp_path_factory.mktemp("store")))
    with running(cfg, ALONE) as (one,):
        yield one


class Engine:
    """Answers with numbers drawn from the seed: 20 to 39 ids, log-probabilities, and the experts of all tokens."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[Answer] = []
        self.status = 200
        self.withdrawn = 0
        self.held: asyncio.Event | None = None  # answers wait for it, or end as they are at a pause
        self.cut_at: int | None = None  # tokens of an answer that a pause ends

    async def generate(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        body = await request.json()
        self.asked.append(body)
        if self.held is not None:
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.withdrawn += 1
                raise
        if self.status != 200:
            return web.Response(status=self.status, text="not today")
        numbers = np.random.default_rng(body["sampling_params"]["seed"] % 1000)
        segments = []
        for _ in range(body["sampling_params"]["n"]):
            count = int(numbers.integers(20, 40)) if self.cut_at is None else self.cut_at
            segments.append(
                Segment(
                    token_ids=numbers.integers(0, 1000, count).astype(np.int32),
                    rollout_logprobs=-numbers.random(count, np.float32),
                    finish_reason="stop" if self.cut_at is None else "abort",
                    routed_experts=numbers.integers(0, 8, (len(body["token_ids"]) + count - 1, 2, 3)).astype(np.uint8),
                    text=None if self.cut_at is not None else f"text of {count}",
                )
            )
        self.answers.append(Answer(segments=segments, num_cached_tokens=5))
        return web.Response(body=write_answer(self.answers[-1]))

    async def nothing(self, _request: web.Request) -> web.Response:
        return web.Response(body=b"")


@contextlib.asynccontextmanager
async def client_of(engine: Engine, tmp_path: Path) -> Any:
    app = web.Application()
    app.add_routes([web.post(GENERATE_PATH, engine.generate)])
    app.add_routes([web.post(path, engine.nothing) for path in ("/pause", "/resume")])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    replica = Replica(name="rollout-0", url=url, log_path=tmp_path / "log", process_group=0, exited=exited, token=TOKEN)
    client = EngineClient(
        replica,
        sampling=SAMPLING,
        decode=lambda ids: f"decoded {len(ids)}",
        request_deadline_s=60.0,
        update_deadline_s=60.0,
    )
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def play(tmp_path: Path, what: Callable[[Engine, EngineClient], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        engine = Engine()
        async with client_of(engine, tmp_path) as client:
            return await what(engine, client)

    return asyncio.run(main())


def sampled(tmp_path: Path, store: Store | None, num: int = 3, seed: int = 7) -> list[Completion]:
    async def ask(_engine: Engine, client: EngineClient) -> list[Completion]:
        if store is None:
            return await client.generate(PROMPT, num, seed)
        answers = AnswerStore(store)
        try:
            return await client.generate(PROMPT, num, seed, store=answers)
        finally:
            await answers.close()

    return play(tmp_path, ask)


def arrays_of(completions: list[Completion]) -> list[Stored]:
    return [a for c in completions for a in (c.token_ids.array, c.rollout_logprobs.array, c.routed_experts)]


def test_completions_are_those_without_a_store_and_their_numbers_are_not_here(store, tmp_path):
    direct, stored = sampled(tmp_path, None), sampled(tmp_path, store)
    arrays = arrays_of(stored)
    assert all(isinstance(one, Stored) and not one.is_here for one in arrays)
    for one, other in zip(direct, stored, strict=True):
        assert (one.text, one.finish_reason, one.version_spans) == (
            other.text,
            other.finish_reason,
            other.version_spans,
        )
        assert (one.num_prompt_tokens, one.num_cached_tokens) == (other.num_prompt_tokens, other.num_cached_tokens)
        assert len(one.token_ids) == len(other.token_ids) and one.routed_experts.shape == other.routed_experts.shape
        assert one.rollout_logprobs.sum() == other.rollout_logprobs.sum()
        assert one.rollout_logprobs[5:9] == other.rollout_logprobs[5:9] and one.token_ids[-3:] == other.token_ids[-3:]
    assert not any(one.is_here for one in arrays), "lengths, sums and parts need no transfer of all"
    fetch(arrays)
    assert all(one.is_here for one in arrays)
    for one, other in zip(direct, stored, strict=True):
        assert one.token_ids == other.token_ids and one.rollout_logprobs == other.rollout_logprobs
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        assert np.asarray(other.routed_experts).dtype == np.uint8


def test_one_that_goes_on_after_a_publication_is_what_the_engine_returned(store, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_SETTLE_S", 60.0)  # an answer that a pause ends may come late

    async def publish_twice(engine: Engine, client: EngineClient) -> tuple[Engine, Completion]:
        answers = AnswerStore(store)
        engine.held, engine.cut_at = asyncio.Event(), 4
        asking = asyncio.ensure_future(client.generate(PROMPT, 1, 3, store=answers))
        for version in (1, 2):
            while len(engine.asked) < version:
                await asyncio.sleep(0.01)
            pausing = asyncio.ensure_future(client.pause("keep"))
            await asyncio.sleep(0.05)
            engine.held.set()
            await pausing
            engine.held, engine.cut_at = (asyncio.Event(), 4) if version == 1 else (None, None)
            client.set_version(version)
            await client.resume()
        (completion,) = await asking
        await answers.close()
        return engine, completion

    engine, completion = play(tmp_path, publish_twice)
    parts = [answer.segments[0] for answer in engine.answers]
    assert len(parts) == 3
    ids = [int(i) for part in parts for i in part.token_ids]
    assert [body["token_ids"] for body in engine.asked] == [PROMPT, PROMPT + ids[:4], PROMPT + ids[:8]]
    assert completion.version_spans == ((0, 0), (4, 1), (8, 2)) and completion.num_prompt_tokens == 3 * 12 + 4 + 8
    assert not completion.token_ids.array.is_here
    assert list(completion.token_ids) == ids
    assert list(completion.rollout_logprobs) == [float(p) for part in parts for p in part.rollout_logprobs]
    own = [parts[0].routed_experts, parts[1].routed_experts[15:], parts[2].routed_experts[19:]]
    np.testing.assert_array_equal(completion.routed_experts, np.concatenate(own))


def test_what_nobody_refers_to_is_dropped_with_the_next_request(store, tmp_path):
    async def ask(_engine: Engine, client: EngineClient) -> tuple[Stored, Stored]:
        answers = AnswerStore(store)
        (first,) = await client.generate(PROMPT, 1, 1, store=answers)
        row = first.token_ids[2:5]
        address = pickle.dumps(row.array)
        await client.generate(PROMPT, 1, 2, store=answers)
        kept = np.asarray(pickle.loads(address))  # a part of it is still referred to
        del first, row
        gc.collect()
        await client.generate(PROMPT, 1, 3, store=answers)
        await answers.close()
        return kept, pickle.loads(address)

    kept, dropped = play(tmp_path, ask)
    assert kept.shape == (3,)
    with pytest.raises(StoreError, match=rf"{store.url} failed: status 410: answer \d+ is not here.*token-store-0.log"):
        np.asarray(dropped)


def test_what_an_engine_refuses_and_its_end_are_told_as_without_a_store(store, tmp_path):
    async def refuse(engine: Engine, client: EngineClient) -> None:
        answers = AnswerStore(store)
        engine.status = 400
        with pytest.raises(EngineError, match="rollout-0 failed .*status 400: not today"):
            await client.generate(PROMPT, 1, 1, store=answers)
        engine.status, engine.held = 200, asyncio.Event()
        asking = asyncio.ensure_future(client.generate(PROMPT, 1, 1, store=answers))
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not engine.withdrawn:  # what is withdrawn here is withdrawn there
            await asyncio.sleep(0.01)
        client.replica.exited.set_result("was killed")
        with pytest.raises(EngineDeadError, match="rollout-0 was killed"):
            await client.generate(PROMPT, 1, 1, store=answers)
        await answers.close()

    play(tmp_path, lambda engine, client: asyncio.wait_for(refuse(engine, client), 60.0))


def test_nothing_is_told_without_the_token(store):
    async def ask() -> list[int]:
        async with ClientSession() as session:
            return [(await session.post(store.url + path, data="[]")).status for path in (KEEP_PATH, ROWS_PATH)]

    assert asyncio.run(ask()) == [401, 401]
    assert store.token not in " ".join(
        word for p in psutil.process_iter(["cmdline"]) for word in p.info["cmdline"] or ()
    )


def groups_of(completions: list[Completion]) -> list[RolloutGroup]:
    groups = []
    for number in range(0, len(completions), 4):
        prompt = Prompt(
            prompt_id=f"digits/{number}", environment="digits", token_ids=tuple(PROMPT), text="?", answer="!"
        )
        rollouts = tuple(
            Rollout(prompt=prompt, index=i, branches=single_turn(prompt, c), reward=float(i % 2), status="scored")
            for i, c in enumerate(completions[number : number + 4])
        )
        groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return groups


def test_ranks_train_the_same_tensors(store, tmp_path):
    """A share that another rank gets holds no number of a completion until it has fetched them."""
    cfg = tiny_qwen3()
    found = []
    for own in (None, store):
        completions = [c for seed in (10, 20, 30) for c in sampled(tmp_path, own, num=4, seed=seed)]
        samples = to_samples(groups_of(completions), load_advantage(cfg.algo), cfg, 0)
        shares = divide(samples, data_size=2, max_tokens=128, alignment=16)
        messages = [pickle.dumps(share, protocol=5) for share in shares]
        received = [pickle.loads(message) for message in messages]
        for share in received:
            fetch_numbers(share)
        again = [pickle.loads(pickle.dumps(share, protocol=5)) for share in received]  # to the others of a replica
        found.append((sum(map(len, messages)), [build(share, 16) for share in (*received, *again)]))
    (size, direct), (size_stored, stored) = found
    num_tokens = sum(int(mb.loss_mask_T.sum()) for batch in direct[:2] for one in batch for mb in one.microbatches)
    assert size - size_stored > 8 * num_tokens, "ids, log-probabilities and experts did not travel"
    for one, other in zip([b for bs in direct for b in bs], [b for bs in stored for b in bs], strict=True):
        for mb, twin in zip(one.microbatches, other.microbatches, strict=True):
            assert mb.names == twin.names
            for field in ("tokens_T", "rollout_logprobs_T", "advantages_T", "loss_mask_T", "routed_experts_T"):
                assert (getattr(mb, field) == getattr(twin, field)).all(), field


def test_records_are_the_same_and_hold_nothing_afterwards(store, tmp_path):
    files = []
    for number, own in enumerate((None, store)):
        groups = groups_of(sampled(tmp_path, own, num=8))
        writer = RolloutWriter(tmp_path / str(number))
        writer.write(1, groups)
        writer.close()
        (path,) = (tmp_path / str(number)).glob("*.parquet")
        files.append(path)
        arrays = arrays_of([c for group in groups for rollout in group.rollouts for c in rollout.completions])
        assert own is None or not any(one.is_here for one in arrays)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(read_step(files[1])) == 2


@contextlib.contextmanager
def another_server_at(url: str) -> Iterator[None]:
    """A server that knows none of a store's requests, at its port."""
    host, port = url.removeprefix("http://").split(":")
    with ThreadingHTTPServer((host, int(port)), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(60)


def test_a_store_that_has_ended_is_named(tmp_path):
    cfg = tiny_qwen3()
    cfg = replace(cfg, rollout=replace(cfg.rollout, token_stores=1), output_dir=str(tmp_path))
    others = psutil.Process().children()
    with running(cfg, ALONE) as (store,):
        rows = sampled(tmp_path, store, num=1)[0].token_ids
        (process,) = set(psutil.Process().children()) - set(others)
        process.kill()
        process.wait(60)
        for call in (lambda: list(rows), lambda: sampled(tmp_path, store)):
            with pytest.raises(
                StoreError, match=rf"the token store at {store.url} failed: .*look into .*token-store-0.log"
            ):
                call()
        with another_server_at(store.url):
            for call in (lambda: list(rows), lambda: sampled(tmp_path, store)):
                with pytest.raises(
                    StoreError, match=rf"(?s){store.url} failed: status 501: .*look into .*token-store-0.log"
                ):
                    call()
    assert set(psutil.Process().children()) <= set(others), "it leaves nothing behind"
