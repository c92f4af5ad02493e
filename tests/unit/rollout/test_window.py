"""``window_groups``: complete groups are trained first, long answers delay only their own group, the bias is measured."""

import asyncio
from dataclasses import replace

import pytest

from megatron_fp8rl.rollout.window import position_before
from megatron_fp8rl.types import Completion, single_turn
from tests.helpers.processes import until
from tests.helpers.samples import advantages_of, mask_of
from tests.helpers.streams import Client, Fleet, Numbers, Scorer, build, numbers, publish

WINDOW = {"max_staleness": 1, "window_groups": 4}


class Slow(Client):
    """Answers to some prompts have to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, asyncio.Event] = {}

    async def generate(self, prompt, n, seed, *, sampling=None) -> list[Completion]:
        self.prompts.append(prompt[0])
        first = self.version
        if prompt[0] in self.held:
            await self.held[prompt[0]].wait()
        length = 40 if prompt[0] in self.held else 10
        return [
            Completion(
                token_ids=(i,) * length,
                rollout_logprobs=(-1.0,) * length,
                finish_reason="stop",
                min_version=first,
                max_version=self.version,
                text=f"{prompt[0]} {i}",
            )
            for i in range(n)
        ]


def slow_fleet(*held: int) -> tuple[Fleet, Slow]:
    fleet, client = Fleet(), Slow()
    fleet.clients = [client]
    fleet.call(lambda: client.held.update({number: asyncio.Event() for number in held}))
    return fleet, client


def test_a_long_answer_delays_only_its_own_group():
    fleet, client = slow_fleet(0)
    stream = build(fleet, rollout=WINDOW)
    assert numbers(stream.next_groups()) == [1, 2], "prompt 0 is not waited for"
    assert stream.position == {"next": 3, "pending": [0]}, "1 and 2 are trained"
    publish(fleet, stream, 1)
    until(lambda: client.prompts == [0, 1, 2, 3, 4, 5], "the window is full again")
    fleet.call(client.held[0].set)
    fleet.turn()
    groups = stream.next_groups()
    assert numbers(groups)[0] == 0 and stream.version - groups[0].rollouts[0].completions[0].min_version == 1
    assert groups[0].rollouts[0].completions[0].max_version == 1, "carried over the publication"


def test_a_complete_group_in_a_full_window_is_trained_within_the_bound():
    stream = build(fleet := Fleet(), rollout={"max_staleness": 2, "window_groups": 6})
    seen = []
    for version in range(1, 9):
        groups = stream.next_groups()
        seen += numbers(groups)
        assert all(stream.version - r.completions[0].max_version <= 2 for group in groups for r in group.rollouts)
        until(lambda: stream._window.take_metrics()["rollout/window_complete/sum"] == 4, "all are complete")
        publish(fleet, stream, version)
    assert sorted(seen) == [*range(16)]


def test_tokens_beyond_the_bound_are_context_and_not_trained():
    from megatron_fp8rl.algo.load_function import load_advantage
    from megatron_fp8rl.algo.samples import to_samples, version_runs

    fleet, client = slow_fleet(0)
    stream = build(fleet, rollout=WINDOW)
    for version in range(1, 5):
        stream.next_groups()
        publish(fleet, stream, version)
    fleet.call(client.held[0].set)
    fleet.turn()
    group = next(group for group in stream.next_groups() if numbers([group]) == [0])
    whole = group.rollouts[0].completions[0]
    assert (whole.min_version, whole.max_version) == (0, 4)
    spans = ((0, 0), (10, 2), (25, 3), (30, 4))
    completion = replace(whole, version_spans=spans)
    assert version_runs(completion) == [(0, 10), (2, 15), (3, 5), (4, 10)]
    rollouts = tuple(
        replace(one, branches=single_turn(group.prompt, completion), reward=float(i))
        for i, one in enumerate(group.rollouts)
    )
    found = to_samples([replace(group, rollouts=rollouts)], load_advantage(stream.cfg.algo), stream.cfg, stream.version)
    for sample in found:
        assert mask_of(sample) == [False] * 26 + [True] * 15 and sample.num_prompt_tokens == 1
        assert sample.staleness == 1 and not any(advantages_of(sample)[:26]) and all(advantages_of(sample)[26:])


def test_the_bias_in_length_is_measured():
    fleet, client = slow_fleet(0, 1)
    stream = build(fleet, rollout={"max_staleness": 3, "window_groups": 8})
    stream.next_groups()
    fleet.call(lambda: [event.set() for event in client.held.values()])
    fleet.turn()
    # 8 complete groups, two of 40 tokens and the rest of 10; two of 10 are trained.
    until(lambda: stream._window.take_metrics()["rollout/window_complete/sum"] == 6, "all are complete")
    bias = stream._window.take_metrics()["rollout/window_length_bias/mean"]
    assert bias == pytest.approx(10 / ((6 * 10 + 2 * 40) / 8))


def test_groups_that_teach_nothing_are_replaced():
    stream = build(Fleet(), scorer=Scorer(uniform=True), rollout=WINDOW, algo={"zero_variance": "refill"})
    assert all(number % 2 for number in numbers(stream.next_groups()))


def test_a_resumed_run_samples_pending_prompts_first():
    from megatron_fp8rl.data.prompts import PromptStream
    from megatron_fp8rl.data.tokenizer import character_tokenizer
    from model_configs.tiny import tiny_qwen3_moe

    stream = PromptStream(tiny_qwen3_moe(), character_tokenizer())
    ids = [prompt.prompt_id for prompt in stream.next_prompts(8)]
    stream.position = {"next": 6, "pending": [0, 3, 4]}
    again = [prompt.prompt_id for prompt in stream.next_prompts(5)]
    assert again == [ids[0], ids[3], ids[4], ids[6], ids[7]] and stream.position == 8
    prompts = Numbers().next_prompts(4)
    assert position_before({"next": 9, "pending": [7]}, prompts[:2]) == {"next": 9, "pending": [0, 1, 7]}
    assert position_before({"next": 4, "pending": []}, prompts[2:]) == position_before(4, prompts[2:]) == 2


def test_nothing_is_sampled_behind_the_last_step():
    fleet = Fleet()
    stream = build(fleet, rollout=WINDOW, num_steps=2)
    stream.next_groups()
    publish(fleet, stream, 1)
    stream.next_groups()
    publish(fleet, stream, 2)
    fleet.turn()
    assert len(fleet.clients[0].prompts) == 4


def test_the_error_of_an_engine_ends_the_step():
    fleet = Fleet()

    async def fail(*_, **__):
        raise ValueError("engine on fire")

    fleet.clients[0].generate = fail
    with pytest.raises(ValueError, match="engine on fire"):
        build(fleet, rollout=WINDOW).next_groups()
