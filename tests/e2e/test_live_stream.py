"""The rollout stream over a real engine: reproducible when synchronous, bounded and overlapping when not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_weights import DigitShare, OneRank, publish, random_weights

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.observe.recording import RolloutWriter
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.rollout.stream import Groups, RolloutStream, seed_of
from megatron_fp8rl.types import Prompt


def stream_of(fleet: Fleet, **rollout) -> tuple[RunConfig, RolloutStream]:
    base = replace(fleet.cfg.sampling, prompts_per_step=4, completions_per_prompt=3)
    cfg = replace(fleet.cfg, sampling=replace(base, **rollout))
    return cfg, RolloutStream(cfg, fleet, PromptStream(cfg, character_tokenizer()), DigitShare(), OneRank())


def contents(groups: Groups) -> list:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [(r.name, r.seed, r.reward, r.completions[0].token_ids, r.completions[0].rollout_logprobs) for r in rollouts]


@pytest.fixture
def published(fleet: Fleet) -> Iterator[Fleet]:
    """Policy 1, asked for short completions."""
    publish(fleet, random_weights(fleet.cfg, seed=1), 1)
    (client,) = fleet.clients
    usual, client.sampling = client.sampling, replace(client.sampling, max_tokens=24)
    yield fleet
    client.sampling = usual


def test_two_synchronous_runs_agree(published):
    runs = []
    for _ in range(2):
        cfg, stream = stream_of(published)
        stream.after_update(1)
        runs.append([contents(stream.next_groups()) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert stream.position == 8
    name, seed, *_ = runs[0][0][1]
    prompt_id = name.removesuffix("#1")
    prompt = Prompt(prompt_id=prompt_id, environment="", token_ids=(), text="", answer="")
    assert seed == seed_of(cfg.seed, prompt) + 1


def test_asynchronous_batches_span_an_update_and_stay_within_the_bound(published):
    _, stream = stream_of(published, max_staleness=1)
    weights = {version: random_weights(published.cfg, seed=version) for version in range(2, 12)}
    stream.after_update(1)
    completions = [(1, r.completions[0]) for group in stream.next_groups() for r in group.rollouts]
    published.clients[0].sampling = replace(published.clients[0].sampling, max_tokens=512, stop_token_ids=())
    for version in weights:  # until one was under way while weights changed, however fast the engine is
        stream.before_update()
        publish(published, weights[version], version)
        stream.after_update(version)  # starts the batch after the one that is asked for here
        completions += [(version, r.completions[0]) for group in stream.next_groups() for r in group.rollouts]
        if version >= 4 and any(c.max_version > c.min_version for _, c in completions):
            break
    assert {v - c.min_version for v, c in completions} <= {0, 1}
    assert any(c.max_version > c.min_version for _, c in completions)


def test_evaluation_is_repeatable(published):
    cfg, stream = stream_of(published)
    prompts = PromptStream(cfg, character_tokenizer()).eval_prompts(4)
    first, second = (contents(stream.sample(prompts, num_completions=2)) for _ in range(2))
    assert first == second
    greedy = stream.sample(prompts, num_completions=2, temperature=0.0)
    assert all(len({r.completions[0].token_ids for r in group.rollouts}) == 1 for group in greedy)


def test_replay_returns_what_was_recorded(published, tmp_path):
    cfg, stream = stream_of(published)
    stream.after_update(1)
    recorded = [stream.next_groups() for _ in range(2)]
    writer = RolloutWriter(tmp_path / "rollouts")
    for step, groups in enumerate(recorded, 1):
        writer.write(step, groups)
    writer.close()
    replay_cfg = replace(cfg, sampling=replace(cfg.sampling, replay=str(tmp_path / "rollouts")))
    replay = RolloutStream(replay_cfg, None, None, None, OneRank())
    replay.after_update(1)  # a run resumed after step 1 goes on with step 2
    assert contents(replay.next_groups()) == contents(recorded[1])
