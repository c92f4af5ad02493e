"""Small chat templates that behave as those of five model families do, and a tokenizer with their special tokens."""

from transformers import PreTrainedTokenizerFast

from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.tokenizer import character_tokenizer

# Drops the reasoning of answers before the last question of a user; keeps it between a question and the results of
# tools.
QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
{%- set text = parts[-1].lstrip('\\n') -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and parts | length > 1 -%}{{- parts[0] + '</think>\\n\\n' -}}{%- endif -%}
{{- text -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Trims every content, and allows one call of a tool at a time.
LLAMA3 = """
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}
{{- raise_exception('This model only supports single tool-calls at once!') -}}{%- endif -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + (m.tool_calls[0].function | tojson) + '<|eot_id|>' -}}
{%- else -%}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
# Users and the assistant alternate without line breaks; the end token is the whole end of an answer.
DEEPSEEK_V3 = """
{{- '<|begin_of_sentence|>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<|User|>' + m.content + '<|Assistant|>' -}}
{%- elif m.role == 'tool' -%}{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' -}}
{%- else -%}{{- m.content + '<|end_of_sentence|>' -}}{%- endif -%}
{%- endfor -%}
"""
# No end token: an answer ends where the next role begins, and the policy samples the token of that role.
GLM45 = """
{{- '[gMASK]<sop>' -}}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
{{- '<|assistant|>' -}}
{%- if loop.index0 > ns.last and parts | length > 1 -%}{{- parts[0] + '</think>' -}}{%- endif -%}{{- parts[-1] -}}
{%- elif m.role == 'tool' -%}{{- '<|observation|>' + m.content -}}
{%- else -%}{{- '<|' + m.role + '|>' + m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
# Writes the tools before the last question of a user, wherever that is, and wants users and assistants to alternate.
MISTRAL = """
{%- set ns = namespace(last=-1, turn=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- '<s>' -}}
{%- for m in messages -%}
{%- if m.role in ('user', 'assistant') and not m.tool_calls
      and not (m.role == 'assistant' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool') -%}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- set ns.turn = ns.turn + 1 -%}
{%- endif -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}{{- '[TOOL_CALLS]' + (m.tool_calls | map(attribute='function') | list | tojson) + '</s>' -}}
{%- else -%}{{- m.content + '</s>' -}}{%- endif -%}
{%- endfor -%}
"""
TEMPLATES = {"qwen3": QWEN3, "llama3": LLAMA3, "deepseek_v3": DEEPSEEK_V3, "glm45": GLM45, "mistral": MISTRAL}
ENDS = {
    "qwen3": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",),
    "deepseek_v3": ("<|end_of_sentence|>",),
    "glm45": ("<|user|>", "<|observation|>"),
    "mistral": ("</s>",),
}
_SPECIAL = tuple(
    (
        "<|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
        "<|begin_of_sentence|> <|end_of_sentence|> <|User|> <|Assistant|> <|tool_output_begin|> "
        "<|tool_output_end|> [gMASK] <sop> <|user|> <|assistant|> <|system|> <|observation|> <s> </s> [INST] "
        "[/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] <think> "
        "</think> <tool_call> </tool_call> <tool_response> </tool_response>"
    ).split()
)


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A character tokenizer with the family's template."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer


def format_of(family: str) -> ChatFormat:
    tokenizer = tokenizer_of(family)
    return ChatFormat(tokenizer, True, {}, frozenset(tokenizer.convert_tokens_to_ids(list(ENDS[family]))))
