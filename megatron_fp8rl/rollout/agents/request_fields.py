"""The fields of requests to the policy, and checks of their values before anything is sampled. Pure.

In: the JSON object of a request to ``/v1/chat/completions`` or ``/v1/completions``, or of ``session.ask``. Out: the
fields that are set, or a :class:`RequestError` that names the field, its value and the remedy.

:data:`FIELDS` says what each field of OpenAI's and vLLM's requests does. Other fields are rejected.
``python -m megatron_fp8rl.rollout.agents.request_fields`` prints the tables of ``docs/agents.md``.
"""

import difflib
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_fp8rl.data.conversation import ConversationError

MAX_DEPTH = 100  # of lists and objects in a request
_MAX_STOPS = 64
Surface = Literal["chat", "completions"]


class RequestError(ConversationError):
    """A request is not valid, or asks for something that the endpoint does not do. ``field`` is the field's name."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, kw_only=True)
class RequestField:
    """A field of a request; null stands for an absent field.

    ``effect``: what the field does, or why it is rejected. ``type`` checks its value. ``neutral``: the accepted values
    of a field that is rejected otherwise; None for a field that accepts all values of its type.
    """

    effect: str
    type: Any = Any
    neutral: tuple[Any, ...] | None = None


# ---- types of values


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"] = "text"
    text: str
    cache_control: Any = None  # both control caches of other servers
    prompt_cache_breakpoint: Any = None


class _CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(BaseModel):
    """A chat template gets further fields too."""

    model_config = ConfigDict(strict=True)
    role: str = Field(min_length=1)
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class _Function(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


_Positive = Annotated[int, Field(ge=1)]
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Single = Field(min_length=1, max_length=1)
_Prompt = _Text | _TokenIds | Annotated[list[_Text], _Single] | Annotated[list[_TokenIds], _Single]
_Object = dict[str, Any]

# ---- the table

_REPLACED = "replaced by the value of the run"
_NO_EFFECT = "changes neither answers nor training"
_DISTRIBUTION = "would sample from another distribution than the one that is trained"
_UNSUPPORTED = "is not supported by this endpoint"


def _only(effect: str, **neutral: tuple[Any, ...]) -> dict[str, RequestField]:
    """Fields that are rejected unless they have one of these values."""
    return {name: RequestField(effect=effect, neutral=values) for name, values in neutral.items()}


_COMMON: dict[str, RequestField] = {
    "max_tokens": RequestField(effect="tokens of the answer, at most those that the run allows", type=_Positive),
    "stop": RequestField(
        effect="a text or a list; the text of the answer ends before it, and all sampled tokens are trained",
        type=_Text | Annotated[list[_Text], Field(max_length=_MAX_STOPS)],
    ),
    "include_stop_str_in_output": RequestField(effect="true: the text ends after the `stop` text", type=bool),
    "seed": RequestField(
        effect="repeats the answer to the same prompt within a session",
        type=Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)],
    ),
    "stream": RequestField(effect="true: the complete answer as a stream", type=bool),
    "stream_options": RequestField(effect="`include_usage`", type=_StreamOptions),
    "user": RequestField(effect="the API key of the session, if the header has none", type=str),
    "request_id": RequestField(effect="part of the answer's id", type=Annotated[str, Field(max_length=256)]),
    "model": RequestField(effect=_REPLACED, type=str),
    "temperature": RequestField(effect=_REPLACED, type=Annotated[float, Field(ge=0, allow_inf_nan=False)]),
    "top_p": RequestField(effect=_REPLACED, type=Annotated[float, Field(gt=0, le=1)]),
    "top_k": RequestField(effect=_REPLACED, type=Annotated[int, Field(ge=-1, lt=1 << 31)]),
    "min_p": RequestField(effect=_REPLACED, type=Annotated[float, Field(ge=0, le=1)]),
    "metadata": RequestField(effect=_NO_EFFECT, type=dict[str, Any]),
    **_only(
        _DISTRIBUTION,
        allowed_token_ids=(),
        bad_words=([],),
        frequency_penalty=(0,),
        guided_choice=(),
        guided_decoding_backend=(),
        guided_grammar=(),
        guided_json=(),
        guided_regex=(),
        guided_whitespace_pattern=(),
        ignore_eos=(False,),
        length_penalty=(1,),
        logit_bias=({},),
        min_tokens=(0,),
        n=(1,),
        presence_penalty=(0,),
        repetition_detection=(),
        repetition_penalty=(1,),
        response_format=({"type": "text"},),
        structured_outputs=(),
        thinking_token_budget=(),
        use_beam_search=(False,),
        vllm_xargs=({},),
    ),
    **_only(
        _UNSUPPORTED,
        cache_salt=(),
        ec_transfer_params=(),
        echo=(False,),
        kv_transfer_params=(),
        logprob_token_ids=([],),
        priority=(0,),
        prompt_logprobs=(),
        return_token_ids=(False,),
        return_token_offsets=(False,),
        return_tokens_as_token_ids=(True,),
        skip_special_tokens=(False,),
        spaces_between_special_tokens=(True,),
        stop_token_ids=([],),
        truncate_prompt_tokens=(),
        truncation_side=(),
    ),
}
FIELDS: dict[Surface, dict[str, RequestField]] = {
    "chat": {
        "messages": RequestField(
            effect="texts, tool calls and their results; other parts are rejected",
            type=Annotated[list[_Message], Field(min_length=1)],
        ),
        "tools": RequestField(
            effect="the chat template writes them; `strict` constrains no sampling", type=list[_Tool]
        ),
        "tool_choice": RequestField(
            effect="`auto` or `none`; others would sample from another distribution", type=Literal["auto", "none"]
        ),
        "parallel_tool_calls": RequestField(
            effect="false: the answer has the first call only, and all sampled tokens are trained", type=bool
        ),
        "chat_template_kwargs": RequestField(
            effect="arguments of the chat template, such as `enable_thinking`", type=dict[str, Any]
        ),
        "reasoning_effort": RequestField(effect="the argument of the chat template with this name", type=_Text),
        "max_completion_tokens": RequestField(effect="like `max_tokens`, which it replaces", type=_Positive),
        "logprobs": RequestField(
            effect="true: the log-probabilities of the sampled tokens, which are named `token_id:N`", type=bool
        ),
        **_COMMON,
        **{
            name: RequestField(effect=_NO_EFFECT, type=type)
            for name, type in {
                "prompt_cache_key": str,
                "prompt_cache_options": dict[str, Any],
                "prompt_cache_retention": str,
                "safety_identifier": str,
                "service_tier": str,
            }.items()
        },
        **_only(
            _UNSUPPORTED,
            add_generation_prompt=(True,),
            add_special_tokens=(False,),
            audio=(),
            chat_template=(),
            continue_final_message=(False,),
            documents=(),
            function_call=("none",),
            functions=([],),
            include_reasoning=(True,),
            media_io_kwargs=(),
            mm_processor_kwargs=(),
            modalities=(["text"],),
            moderation=(),
            prediction=(),
            return_assistant_tokens_mask=(False,),
            return_prompt_text=(False,),
            store=(False,),
            top_logprobs=(0,),
            verbosity=("medium",),
            web_search_options=(),
        ),
    },
    "completions": {
        "prompt": RequestField(effect="one text, or the token ids of one prompt", type=_Prompt),
        "logprobs": RequestField(
            effect="0: the log-probabilities of the sampled tokens, which are named `token_id:N`", type=Literal[0]
        ),
        **_COMMON,
        **_only(_DISTRIBUTION, best_of=(1,)),
        **_only(_UNSUPPORTED, add_special_tokens=(True,), prompt_embeds=(), suffix=("",)),
    },
}
_REQUIRED: dict[Surface, str] = {"chat": "messages", "completions": "prompt"}


def check_request(body: Any, surface: Surface) -> dict[str, Any]:
    """Return the fields of a request that are not null. Raises RequestError for the first field that is not valid."""
    if not isinstance(body, dict):
        raise RequestError("the request is not a JSON object")
    for name, value in body.items():
        _check_content(name, "the name of a field", 1)
        _check_content(value, name, MAX_DEPTH)
    fields = FIELDS[surface]
    for name, value in body.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise RequestError(f"{name} = {_shown(value)}: the endpoint has no such field; {hint}", name)
        field = fields[name]
        if value is None:
            continue
        if field.neutral is not None:
            if value not in field.neutral:
                raise RequestError(f"{name} = {_shown(value)} {field.effect}; leave it out", name)
        else:
            _check_type(name, value, surface)
    body = {name: value for name, value in body.items() if value is not None}
    if (required := _REQUIRED[surface]) not in body:
        raise RequestError(f"the request has no {required}", required)
    if "stream_options" in body and not body.get("stream"):
        raise RequestError("stream_options need stream = true; leave them out", "stream_options")
    return body


def _check_type(name: str, value: Any, surface: Surface) -> None:
    try:
        _adapter(surface, name).validate_python(value, strict=True)
    except ValidationError as error:
        # Of a union, the longest path belongs to the alternative that fits best.
        problem = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
        path, inner = _place(name, value, problem["loc"])
        reason = problem["msg"].replace("Input", "it", 1).partition(" or instance of")[0]
        wrong = f"{path} = {_shown(inner)}: {reason}"
        if problem["type"] == "missing":
            wrong = f"{path} has no {problem['loc'][-1]}"
        if name == "messages":
            kind = f"messages[{problem['loc'][0]}] is not a message" if problem["loc"] else "not a list of messages"
            wrong = f"{kind}: {wrong}"
        if name == "prompt":
            wrong += "; send one text, or the token ids of one prompt"
        raise RequestError(wrong, name) from None


def _place(name: str, value: Any, loc: Sequence[int | str]) -> tuple[str, Any]:
    """Return the path and the value at ``loc``, without the names of types that pydantic adds to it."""
    path = name
    for step in loc:
        try:
            value = value[step]
        except (LookupError, TypeError):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path, value


def _check_content(value: Any, path: str, depth: int) -> None:
    """Raises RequestError for characters without an encoding, and for values nested deeper than ``depth``."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{path} has {value[error.start]!a} at {error.start}, half of a surrogate pair; remove it",
                    _top(path),
                ) from None
    elif isinstance(value, dict | list | tuple):
        if not depth:
            raise RequestError(f"{_top(path)} is nested deeper than {MAX_DEPTH} levels; make it flatter", _top(path))
        if isinstance(value, dict):
            for key, item in value.items():
                _check_content(key, f"a key of {path}", 1)
                _check_content(item, f"{path}.{key}", depth - 1)
        else:
            for index, item in enumerate(value):
                if not isinstance(item, int):
                    _check_content(item, f"{path}[{index}]", depth - 1)


def _top(path: str) -> str:
    """The field of a path."""
    return path.partition(".")[0].partition("[")[0]


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:200]
    except (TypeError, ValueError):
        return f"{value!r:.200}"


@cache
def _adapter(surface: Surface, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(FIELDS[surface][name].type)


# ---- the page


def markdown() -> str:
    """The tables of ``docs/agents.md``: what each field does, and which are rejected."""
    used: dict[tuple[str, str], list[str]] = {}
    rejected: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for fields in FIELDS.values() for name in fields):
        found = {surface: fields[name] for surface, fields in FIELDS.items() if name in fields}
        for surface, field in found.items():
            where = "both" if len(set(map(id, found.values()))) < len(found) else surface
            if field.neutral is None:
                names = used.setdefault((where, field.effect), [])
            else:
                names = rejected.setdefault(field.effect, [])
            text = f"`{name}`"
            if field.neutral is not None:
                text += "".join(f" ({_shown(value)})" for value in field.neutral)
                text += "" if where == "both" or len(found) == 1 else f" in {surface}"
            if text not in names:
                names.append(text)
    lines = ["| field | requests | effect |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {where} | {effect} |" for (where, effect), names in used.items()]
    for effect, names in rejected.items():
        listed = textwrap.fill(f"{', '.join(sorted(names))}.", 120, break_long_words=False, break_on_hyphens=False)
        lines += ["", f"Accepted only with the value in brackets. Another value {effect}:", "", listed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
