"""The prompt stream, its held-out side, and the supervised samples made from the same problems."""

import dataclasses
import random
from collections import Counter

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RunConfig, SamplingConfig, WarmStartConfig
from megatron_fp8rl.data.dropped import TooManyDroppedError
from megatron_fp8rl.data.prompts import PromptStream, TooFewProblemsError, apportion, is_held_out
from megatron_fp8rl.data.sft import SftSource
from megatron_fp8rl.data.tokenizer import character_tokenizer, decode, encode
from megatron_fp8rl.envs.environment import build_environment
from tests.helpers.models import small_model

TOKENIZER = character_tokenizer()
SUMS = EnvironmentConfig(options={"min_terms": 2, "max_terms": 3, "max_digits": 2}, template="{expression}=", weight=3)
PRODUCTS = EnvironmentConfig(dataset="products", options={"max_terms": 2, "max_digits": 2}, template="{expression}=")
MODEL = small_model((1, 8, 1, 1, 8, 128))


def config(*environments: EnvironmentConfig, seed: int = 1, **data) -> RunConfig:
    return RunConfig(
        name="x",
        model=MODEL,
        seed=seed,
        data=DataConfig(environments=environments or (SUMS, PRODUCTS), **data),
        warm_start=WarmStartConfig(batch_size=16),
        sampling=SamplingConfig(max_prompt_tokens=20, max_completion_tokens=8),
    )


def test_stream_is_resumable_and_does_not_depend_on_the_cut():
    whole = PromptStream(config(), TOKENIZER).next_prompts(40)
    stream = PromptStream(config(), TOKENIZER)
    cut = [p for count in (1, 7, 0, 20) for p in stream.next_prompts(count)]
    assert stream.position == 28
    resumed = PromptStream(config(), TOKENIZER, position=28).next_prompts(12)
    assert cut + resumed == whole
    assert PromptStream(config(seed=2), TOKENIZER).next_prompts(40) != whole


def test_prompts_carry_their_own_text_tokens_and_answer():
    prompts = PromptStream(config(), TOKENIZER).next_prompts(400)
    for position, prompt in enumerate(prompts):
        assert prompt.prompt_id == f"{prompt.environment}/{position}"
        assert prompt.token_ids == encode(TOKENIZER, prompt.text)
        expression = prompt.text.removesuffix("=")
        assert int(prompt.answer) == eval(expression)  # an independent check of generator and template
        assert prompt.metadata["expression"] == expression
    # 3 : 1 by weight; four standard deviations of a binomial with n = 400, p = 3/4 are 35.
    assert abs(Counter(p.environment for p in prompts)["chain_sum"] - 300) < 35


def test_training_and_evaluation_never_share_a_question():
    train = {
        p.metadata["question"] for seed in (1, 2) for p in PromptStream(config(seed=seed), TOKENIZER).next_prompts(800)
    }
    evaluation = PromptStream(config(seed=3), TOKENIZER).eval_prompts(64)
    questions = {p.metadata["question"] for p in evaluation}
    assert len(questions) == len(evaluation) == 64
    assert not questions & train
    assert Counter(p.environment for p in evaluation) == {"chain_sum": 48, "products": 16}
    assert PromptStream(config(seed=9), TOKENIZER).eval_prompts(64) == evaluation
    fraction = sum(is_held_out(str(random.Random(i).random())) for i in range(4000)) / 4000
    assert abs(fraction - 1 / 8) < 0.021  # four standard deviations of a binomial with n = 4000, p = 1/8


def test_two_environments_of_one_generator_have_keys_of_their_own():
    prompts = PromptStream(
        config(SUMS, dataclasses.replace(SUMS, template="{expression} is ")), TOKENIZER
    ).next_prompts(60)
    endings = {p.environment: p.text[-1] for p in prompts}
    assert endings == {"chain_sum": "=", "chain_sum-2": " "}


def test_small_question_space_gives_what_it_has():
    tiny = EnvironmentConfig(options={"min_terms": 2, "max_terms": 2, "max_digits": 1}, template="{expression}=")
    prompts = PromptStream(config(tiny), TOKENIZER).eval_prompts(128)  # 200 questions exist
    assert 10 < len(prompts) < 50
    assert len({p.text for p in prompts}) == len(prompts)


def test_a_single_question_cannot_be_on_both_sides():
    one = EnvironmentConfig(options={"min_terms": 1, "max_terms": 1, "max_digits": 1}, template="{expression}=")
    environment = build_environment(one)
    questions = {environment.make_problem(i).question for i in range(100)}
    sides = {is_held_out(question) for question in questions}
    assert len(questions) == 10 and sides == {False}  # by the hash of these ten
    with pytest.raises(TooFewProblemsError, match=r"environment chain_sum: no problem to hold out; .*widen them"):
        PromptStream(config(one), TOKENIZER).eval_prompts(1)


def test_bad_prompts_are_named():
    wordy = EnvironmentConfig(template="{question}")
    with pytest.raises(
        TooManyDroppedError, match=r"of 500 prompts.*has \d+ tokens, more than sampling.max_prompt_tokens = 20"
    ):
        PromptStream(config(wordy), TOKENIZER).next_prompts(1)
    with pytest.raises(TooManyDroppedError, match=r"of 500 prompts.*does not know '→'"):
        PromptStream(config(dataclasses.replace(SUMS, template="{expression}→")), TOKENIZER).next_prompts(1)
    with pytest.raises(TooManyDroppedError, match="no field 'expresion'; did you mean expression"):
        PromptStream(config(dataclasses.replace(SUMS, template="{expresion}")), TOKENIZER).next_prompts(1)
    small = dataclasses.replace(config(), model=dataclasses.replace(MODEL, vocab_size=64))
    with pytest.raises(ValueError, match=r"has 128 tokens, model\.vocab_size is only 64"):
        PromptStream(small, TOKENIZER)
    gap = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"<eos>": 0, "1": 1, "2": 200}, [])), eos_token="<eos>"
    )
    assert len(gap) == 3 and encode(gap, "2") == (200,)
    with pytest.raises(ValueError, match=r"has 201 tokens, model\.vocab_size is only 128"):
        PromptStream(config(), gap)
    with pytest.raises(ValueError, match="no chat template"):
        PromptStream(config(chat_template=True), TOKENIZER)


def test_chat_template_is_applied_once():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}U{{ messages[0]['content'] }}{% if add_generation_prompt %}A{% endif %}"
    prompt = PromptStream(config(SUMS, chat_template=True), tokenizer).next_prompts(1)[0]
    assert prompt.text == f"<bos>U{prompt.metadata['expression']}=A"
    assert prompt.token_ids == encode(tokenizer, prompt.text, add_special_tokens=False)
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1


def test_apportion():
    assert apportion(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert apportion(7, {"a": 3, "b": 1}) == {"a": 5, "b": 2}
    assert apportion(1, {"a": 1, "b": 9}) == {"a": 0, "b": 1}


def test_sft_samples_are_prompt_answer_end():
    source = SftSource(config(), TOKENIZER)
    batch = source.samples(3)
    assert batch == SftSource(config(), TOKENIZER).samples(3) != source.samples(4)
    assert len(batch) == 16
    for i, sample in enumerate(batch):
        assert sample.name == f"{sample.environment}/sft-{48 + i}"
        prompt, answer = sample.token_ids[: sample.num_prompt_tokens], sample.token_ids[sample.num_prompt_tokens :]
        assert prompt[0] == TOKENIZER.bos_token_id and answer[-1] == TOKENIZER.eos_token_id
        assert eval(decode(TOKENIZER, prompt[1:]).removesuffix("=")) == int(decode(TOKENIZER, answer))
        assert [segment.is_trained for segment in sample.segments] == [False, True] and sample.num_loss_tokens == len(
            answer
        )


def test_sft_refuses_a_long_answer_by_name():
    short = dataclasses.replace(config(SUMS), sampling=SamplingConfig(max_prompt_tokens=20, max_completion_tokens=1))
    with pytest.raises(ValueError, match=r"answer of chain_sum/sft-\d+ has \d tokens .*max_completion_tokens = 1"):
        SftSource(short, TOKENIZER).samples(0)
