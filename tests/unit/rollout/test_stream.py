"""Order, staleness, windows, refills and failures of the stream, with engines that are told when to answer.

The engines are in memory. The tests are about which group starts when, and no real engine can show that.
"""

import asyncio
import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest

from megatron_fp8rl.algo.samples import RoutedExpertsError
from megatron_fp8rl.envs.failed_scores import FailedScores, TooManyFailedError
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.observe.recording import RolloutWriter
from megatron_fp8rl.rollout import unfinished
from megatron_fp8rl.rollout.stream import RolloutError, RolloutStream
from megatron_fp8rl.rollout.window import position_before
from megatron_fp8rl.types import Completion, Rollout, RolloutGroup, single_turn
from tests.helpers.processes import until
from tests.helpers.samples import advantages_of, make_completion, mask_of
from tests.helpers.streams import Client, Fleet, Numbers, Ranks, Scorer, build, numbers, publish


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_groups_come_in_order_and_never_too_old(max_staleness):
    fleet = Fleet()
    stream = build(fleet, rollout={"max_staleness": max_staleness})
    publish(fleet, stream, 10)  # a resumed run
    oldest = 0
    for step in range(8):
        groups = stream.next_groups()
        assert numbers(groups) == [2 * step, 2 * step + 1]
        staleness = {stream.version - r.completions[0].min_version for g in groups for r in g.rollouts}
        assert max(staleness) <= max_staleness
        oldest = max(oldest, *staleness)
        asked = fleet.clients[0].prompts
        # The fleet's thread asks for what this version allows, and for no more.
        until(lambda: len(asked) >= 2 * (step + 1 + max_staleness), "what may be sampled ahead")
        fleet.turn()
        assert len(asked) == 2 * (step + 1 + max_staleness)
        assert stream.position == 2 * (step + 1)  # what was started ahead is sampled again after a resume
        publish(fleet, stream, 11 + step)
    assert oldest == max_staleness


def test_generation_goes_on_while_the_trainer_works():
    fleet = Fleet()
    stream = build(fleet, rollout={"max_staleness": 1})
    stream.next_groups()
    until(lambda: fleet.clients[0].prompts == [0, 1, 2, 3], "the batch behind the first")


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_nothing_is_sampled_behind_the_last_step(max_staleness):
    fleet = Fleet()
    stream = build(fleet, rollout={"max_staleness": max_staleness}, num_steps=13)
    publish(fleet, stream, 10)  # a resumed run, with three steps to go
    for version in (11, 12, 13):
        stream.next_groups()
        publish(fleet, stream, version)
    fleet.turn()
    assert fleet.clients[0].prompts == [0, 1, 2, 3, 4, 5]
    assert stream.position == 6


class Failing(Scorer):
    """Fails in the calls of ``steps``, which have four completions each."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.num_scores = steps, 0

    async def score(self, prompt, text):
        self.num_scores += 1
        is_failing = (self.num_scores - 1) // 32 in self.steps
        return Score.failed("the reward raised NameError: re") if is_failing else Score(1.0, "scored")


WIDE = {"prompts_per_step": 8, "completions_per_prompt": 4}


def test_a_run_ends_when_no_completion_gets_a_score():
    stream = build(Fleet(), scorer=Failing(range(9)), rollout=WIDE)
    publish_and_take(stream, 1)
    with pytest.raises(TooManyFailedError, match="the last 64 completions of n got no score.*NameError: re. Correct"):
        publish_and_take(stream, 1)


def test_an_outage_of_a_scorer_may_last_two_steps():
    stream = build(Fleet(), scorer=Failing((1, 2, 4, 5, 7, 8, 9)), rollout=WIDE)
    publish_and_take(stream, 9)
    with pytest.raises(TooManyFailedError, match="the last 96 completions"):
        publish_and_take(stream, 1)


def test_a_short_run_without_any_score_is_no_success():
    stream = build(Fleet(), scorer=Failing((0,)), rollout=WIDE)
    stream.require_scores()
    publish_and_take(stream, 1)
    with pytest.raises(TooManyFailedError, match="none of the 32 completions got a score.*NameError"):
        stream.require_scores()
    publish_and_take(stream, 1)
    stream.require_scores()


def test_an_evaluation_without_scores_ends_too():
    stream = build(Fleet(), scorer=Failing(range(9)), rollout=WIDE)
    with pytest.raises(TooManyFailedError, match="the last 64 completions"):
        stream.sample(Numbers().next_prompts(16), num_completions=4)


def publish_and_take(stream, num_steps: int) -> None:
    for _ in range(num_steps):
        stream.next_groups()
        publish(stream._fleet, stream, stream.version + 1)


def _scored_group(environment: str, status: str) -> RolloutGroup:
    prompt = replace(Numbers().next_prompts(1)[0], environment=environment)
    branches = single_turn(prompt, make_completion((1,)))
    fields = {"prompt": prompt, "branches": branches, "reward": 0.0, "status": status, "detail": "", "seed": 1}
    return RolloutGroup(prompt=prompt, rollouts=tuple(Rollout(index=i, **fields) for i in range(16)))


def test_one_source_without_scores_ends_the_run_of_two():
    scores = FailedScores()
    good, bad = _scored_group("a", "scored"), _scored_group("b", "score_failed")
    for _ in range(3):
        scores.add([good, bad])
    with pytest.raises(TooManyFailedError, match="the last 64 completions of b got no score"):
        scores.add([good, bad])


def test_prompts_are_spread_over_replicas():
    fleet = Fleet(num_clients=2)
    build(fleet, rollout={"prompts_per_step": 6}).next_groups()
    assert [len(client.prompts) for client in fleet.clients] == [3, 3]


def test_groups_without_variance_are_replaced():
    fleet = Fleet()
    stream = build(
        fleet, scorer=Scorer(uniform=True), rollout={"prompts_per_step": 4}, algo={"zero_variance": "refill"}
    )
    assert numbers(stream.next_groups()) == [1, 3, 5, 7]  # 0 2 go, 4 5 come; 4 goes, 6 comes; 6 goes, 7 comes
    assert stream.position == 8
    keep = build(Fleet(), scorer=Scorer(uniform=True), algo={"zero_variance": "drop"})
    assert numbers(keep.next_groups()) == [0, 1]


def test_at_most_three_times_the_groups_of_a_step_are_replaced():
    class Same(Scorer):
        async def score(self, prompt, text):
            return Score(1.0, "scored")

    fleet = Fleet()
    stream = build(fleet, scorer=Same(), algo={"zero_variance": "refill"})
    assert len(stream.next_groups()) == 2 and sorted(fleet.clients[0].prompts) == [*range(8)]
    publish(fleet, stream, 1)
    assert len(stream.next_groups()) == 2 and stream.position == 16


def test_an_update_during_synchronous_sampling_is_refused():
    fleet = Fleet()
    fleet.call(fleet.clients[0].gate.clear)
    stream = build(fleet)
    waiting = threading.Thread(target=stream.next_groups)
    waiting.start()
    until(lambda: len(fleet.clients[0].prompts) == 2, "both prompts")
    with pytest.raises(RolloutError, match="4 completions are running at the start of an update"):
        stream.before_update()
    fleet.call(fleet.clients[0].gate.set)
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_rollouts_that_are_too_old_are_refused():
    fleet = Fleet()
    stream = build(fleet)
    stream.after_update(3)  # the engines still hold version 0
    with pytest.raises(RolloutError, match=r"rollout n/0#0 was sampled 3 policy versions ago"):
        stream.next_groups()


def test_every_rank_learns_that_there_are_groups_and_of_failures():
    carried: list = []
    fleet = Fleet()
    first, second = build(fleet, ranks=Ranks(0, carried)), build(None, ranks=Ranks(1, carried))
    assert len(first.next_groups()) == 2 and second.next_groups() == ()

    async def fail(*_, **__):
        raise ValueError("engine on fire")

    fleet.clients[0].generate = fail
    with pytest.raises(ValueError, match="engine on fire"):
        first.next_groups()
    with pytest.raises(RolloutError, match="on trainer rank 0: ValueError: engine on fire"):
        second.next_groups()


def test_groups_stay_on_rank_0_and_a_missing_record_ends_all_ranks():
    carried: list = []
    fleet = Fleet()
    generate = fleet.clients[0].generate

    async def routed(*args, **kwargs):
        return [replace(c, routed_experts=np.ones((1, 2, 2), np.uint8)) for c in await generate(*args, **kwargs)]

    for client in fleet.clients:
        client.generate = routed
    first, second = build(fleet, ranks=Ranks(0, carried)), build(None, ranks=Ranks(1, carried))
    here, there = first.next_groups(), second.next_groups()
    assert all(r.completions[0].routed_experts is not None for g in here for r in g.rollouts) and there == ()

    replay = {"algo": {"router_replay": "rollout"}}
    first, second = build(Fleet(), ranks=Ranks(0, carried), **replay), build(None, ranks=Ranks(1, carried), **replay)
    with pytest.raises(RoutedExpertsError, match="has no routed experts"):
        first.next_groups()
    with pytest.raises(RolloutError, match="on trainer rank 0: RoutedExpertsError"):
        second.next_groups()


def test_a_replay_goes_on_in_the_prompts_where_the_recorded_run_was(tmp_path):
    """Its checkpoints need the position of the repeated run, because a live run may continue it."""
    fleet = Fleet()
    live = build(fleet, rollout={"prompts_per_step": 4})
    recording, positions = tmp_path / "rollouts", []
    with contextlib.closing(RolloutWriter(recording)) as writer:
        for step in (1, 2, 3):
            writer.write(step, live.next_groups())
            publish(fleet, live, step)
            positions.append(live.position)
    cfg = replace(live.cfg, sampling=replace(live.cfg.sampling, replay=str(recording)))
    replayed = RolloutStream(cfg, None, Numbers(), None, live._parallel)
    actual = []
    for step in (1, 2, 3):
        replayed.next_groups()
        actual.append(replayed.position)
        replayed.after_update(step)
    assert actual == positions == [4, 8, 12]


def test_a_run_that_ends_early_gives_up_what_it_has_begun():
    fleet = Fleet(2)
    stream = build(fleet)
    stream.next_groups()
    position = stream.position
    for client in fleet.clients:
        fleet.call(client.gate.clear)
    publish(fleet, stream, 1)
    fleet.turn()
    assert sum(client.num_running for client in fleet.clients) == 4  # the next step has begun
    stream.abandon()
    assert not any(client.num_running for client in fleet.clients) and stream.position == position
    stream.abandon()  # nothing is left to give up
    for client in fleet.clients:
        fleet.call(client.gate.set)
    assert numbers(stream.next_groups()) == [2, 3], "a run that goes on all the same leaves no prompt out"


def test_a_request_to_stop_ends_the_wait_and_finished_groups_are_used_by_the_run_that_goes_on(tmp_path):
    """One of two prompts is answered before the stop: only the other is asked again."""
    how = {"rollout": {"max_staleness": 0}}
    stream, fleet = stopped_in_a_batch(tmp_path, how)
    assert stream.abandon() == 1 and stream.position == 0 and fleet.clients[0].num_running == 0
    first = fleet.clients[0].prompts[0]

    then = Fleet()
    again = build(then, **how)
    again.cfg = replace(again.cfg, output_dir=str(tmp_path))
    again.cfg = replace(again.cfg, engine=replace(again.cfg.engine, deadline_scale=3.0))  # changes no completion
    assert again.resume_unfinished() == 1 and not (tmp_path / "unfinished").exists()
    groups = again.next_groups()
    assert [group.prompt.text for group in groups] == ["0", "1"] and then.clients[0].prompts == [1 - first]


@pytest.mark.parametrize("change", [{"seed": 5}, {"version": 1}])
def test_groups_of_another_policy_or_sampling_are_not_used(tmp_path, change):
    stream, _ = stopped_in_a_batch(tmp_path, {})
    assert stream.abandon() == 1
    cfg = replace(stream.cfg, seed=change.get("seed", stream.cfg.seed))
    assert unfinished.load(cfg, change.get("version", 0)) == {}
    assert not (tmp_path / "unfinished").exists()


def stopped_in_a_batch(folder, how):
    """(a stream that was asked to stop while one of two prompts was being answered, its fleet)."""

    class Half(Client):
        async def generate(self, prompt, n, seed, *, sampling=None):
            if self.prompts:  # the second is never answered
                self.num_running += n
                try:
                    await asyncio.Event().wait()
                finally:
                    self.num_running -= n
            return await super().generate(prompt, n, seed, sampling=sampling)

    fleet = Fleet()
    fleet.clients = [Half()]
    stream = build(fleet, **how)
    stream.cfg = replace(stream.cfg, output_dir=str(folder))
    assert stream.next_groups(lambda: sum(ahead.sampling.done() for ahead in stream._window._ahead) == 1) is None
    return stream, fleet


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
            make_completion((i,) * length, min_version=first, max_version=self.version, text=f"{prompt[0]} {i}")
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
    cfg, groups = stream.cfg, [replace(group, rollouts=rollouts)]
    actual = to_samples(groups, load_advantage(cfg.algo), cfg.algo, cfg.sampling, stream.version)
    for sample in actual:
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


def test_a_window_samples_nothing_behind_the_last_step():
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
