"""The ids of a conversation only grow, and what a template rewrites is noticed, for the templates of five families."""

import random

import pytest

from megatron_fp8rl.data.conversation import ChatFormat, ConversationError, plain
from megatron_fp8rl.data.tokenizer import character_tokenizer
from tests.helpers.chat_templates import ENDS, TEMPLATES, format_of

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
WORDS = ("four", " is ", "2 + 2", "\n", "so", "{}", "  ")


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(1, 6)))


def converse(chat: ChatFormat, rng: random.Random, end: dict[str, str], roles, tools=()):
    """Play a conversation of random words; yields (ids, messages, rendered) before each answer."""
    tokenizer = chat.tokenizer
    messages = [{"role": "user", "content": words(rng)}]
    rendered = chat.begin(messages, tools)
    ids = list(rendered.new_ids)
    yield ids, messages, rendered, ()
    for role in roles:
        text = words(rng)
        sampled = tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.8:  # else the length limit cut it
            sampled += tokenizer.encode(end[role], add_special_tokens=False)
        answer = {"role": "assistant", "content": text}
        new = [{"role": role, "content": words(rng)}]
        rendered = chat.extend(rendered.text, [*messages, answer], sampled, new, tools)
        messages = [*messages, answer, *new]
        ids += [*sampled, *(rendered.new_ids if rendered else ())]
        yield ids, messages, rendered, sampled


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("seed", range(20))
def test_the_ids_are_those_of_the_whole_conversation(family, seed):
    """Without reasoning and tools, no template changes earlier text, so the ids decode to the rendered messages."""
    rng, chat = random.Random(seed), format_of(family)
    ends = ENDS[family]
    end = {"user": ends[0], "tool": ends[-1]}
    roles = ["user"] * 3 if family == "mistral" else [rng.choice(["user", "tool"]) for _ in range(4)]
    before: list[int] = []
    for ids, messages, rendered, sampled in converse(chat, rng, end, roles):
        assert rendered is not None
        assert ids[: len(before)] == before and ids[len(before) : len(before) + len(sampled)] == list(sampled)
        whole = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        told = chat.tokenizer.decode(ids)
        if family in ("llama3", "qwen3"):  # they trim what was sampled with spaces or line breaks around it
            assert told.replace(" ", "").replace("\n", "") == whole.replace(" ", "").replace("\n", "")
        else:
            assert told == whole
        before = list(ids)


@pytest.mark.parametrize("family", ["qwen3", "glm45"])
def test_dropped_reasoning_is_noticed_at_the_next_question_and_not_before(family):
    chat = format_of(family)
    tokenizer, first = chat.tokenizer, [{"role": "user", "content": "2+2"}]
    rendered = chat.begin(first)
    text = "<think>\nlet me see</think>\n\nadd" if family == "qwen3" else "<think>let me see</think>add"
    sampled = tokenizer.encode(text + ENDS[family][-1], add_special_tokens=False)
    past = [*first, {"role": "assistant", "content": text}]
    tool = chat.extend(rendered.text, past, sampled, [{"role": "tool", "content": "4"}])
    assert tool is not None and "let me see" in tool.text
    assert chat.extend(rendered.text, past, sampled, [{"role": "user", "content": "and 3+3?"}]) is None


def test_tools_that_move_to_the_last_question_are_noticed():
    chat = format_of("mistral")
    actual = list(converse(chat, random.Random(1), {"user": "</s>"}, ["user"], TOOLS))
    assert [rendered is not None for _, _, rendered, _ in actual] == [True, False]
    assert all(r is not None for _, _, r, _ in converse(chat, random.Random(1), {"user": "</s>"}, ["user"]))


def test_calls_of_tools_that_the_template_writes_anew_keep_their_tokens():
    """A call is sampled with its own spaces; the template would write its JSON otherwise."""
    chat = format_of("llama3")
    first = [{"role": "user", "content": "2+2"}]
    rendered = chat.begin(first, TOOLS)
    call = '{"arguments":   {"a":2},"name":"add"}'
    sampled = chat.tokenizer.encode(call + "<|eot_id|>", add_special_tokens=False)
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    actual = chat.extend(rendered.text, [*first, answer], sampled, [{"role": "tool", "content": "4"}], TOOLS)
    assert call not in actual.text
    told = chat.tokenizer.decode([*rendered.new_ids, *sampled, *actual.new_ids])
    assert call + "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>" in told
    assert told.count("<|eot_id|>") == 3


def test_messages_that_a_template_refuses_are_named():
    chat = format_of("mistral")
    with pytest.raises(ConversationError, match=r"refuses the messages \(user, user\).*must alternate"):
        chat.begin([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    calls = [{"function": {"name": "f", "arguments": "{"}}] * 2
    with pytest.raises(ConversationError, match="single tool-calls"):
        format_of("llama3").begin([{"role": "assistant", "content": None, "tool_calls": calls}])


def test_without_a_template_a_conversation_is_its_contents():
    tokenizer = character_tokenizer()
    chat = ChatFormat(tokenizer, False, {}, frozenset({tokenizer.eos_token_id}))
    first = [{"role": "user", "content": "1+2="}]
    rendered = chat.begin(first)
    assert list(rendered.new_ids) == tokenizer.encode("1+2=")
    sampled = [*tokenizer.encode("add", add_special_tokens=False), tokenizer.eos_token_id]
    actual = chat.extend(
        rendered.text, [*first, {"role": "assistant", "content": "add"}], sampled, [{"role": "tool", "content": "3"}]
    )
    assert list(actual.new_ids) == tokenizer.encode("3", add_special_tokens=False)
    with pytest.raises(ConversationError, match="does not know 'é'"):
        chat.begin([{"role": "user", "content": "é"}])


def test_messages_are_compared_by_what_they_say():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    same = {"id": "2", "type": "function", "function": {"name": "f", "arguments": {"b": 2, "a": 1}}}
    assert plain({"role": "assistant", "content": None, "tool_calls": [call]}) == plain(
        {"role": "assistant", "content": "", "tool_calls": [same], "refusal": None}
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain({"role": "user", "content": parts}) == plain({"role": "user", "content": "ab", "name": "x"})


def chat_of(template: str) -> ChatFormat:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, True, {}, frozenset({tokenizer.eos_token_id}))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_a_generation_prompt_leaves_the_header_to_the_policy():
    assert chat_of(CHATML).header() == ""
    assert chat_of(CHATML.partition("{% if")[0]).header() == "<|im_start|>assistant"
    # Llama 2 and Mistral need none: the end of the question begins the answer.
    inst = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    assert chat_of(inst + "{{ m.content }}<|im_end|>{% endif %}{% endfor %}").header() == ""


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_template_that_leaves_out_a_message_is_refused(role):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is two?"}]
    assert "Be brief." in chat_of(CHATML).begin(messages).text
    drops = CHATML.replace("%}<|im_start|>{{", f"%}}{{% if m.role != '{role}' %}}<|im_start|>{{{{", 1)
    drops = drops.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    with pytest.raises(ConversationError, match=f"leaves out or changes a message of role '{role}'"):
        chat_of(drops).begin(messages)


@pytest.mark.parametrize("role", ["function_call", "chatgpt", "Assistant"])
def test_a_role_that_a_template_only_repeats_is_refused(role):
    messages = [{"role": "user", "content": "2?"}, {"role": role, "content": "f()"}, {"role": "user", "content": "?"}]
    with pytest.raises(ConversationError, match=f"does not know the role '{role}' of a message; use one of system, "):
        chat_of(CHATML).begin(messages)
    knows = chat_of(CHATML.replace("{% for", f"{{# {role} #}}{{% for", 1))
    assert f"<|im_start|>{role}\nf()<|im_end|>" in knows.begin(messages).text


def test_messages_that_are_rendered_already_are_found():
    chat = chat_of(CHATML)
    assert not chat.has_markers([{"role": "user", "content": "a <b> <eos> c"}])
    assert chat.has_markers([{"role": "user", "content": "<|im_start|>user\nhi<|im_end|>\n"}])
    assert not ChatFormat(chat.tokenizer, False).has_markers([{"role": "user", "content": "<|im_start|>user"}])
