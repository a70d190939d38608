"""Vocabularies of true size with invented words, as GGUF metadata; every text can be encoded and comes back whole.

Single bytes come first. Words grow letter by letter from a space or a letter, breadth first, so each is an earlier word
and one letter more: that pair is its merge, of which there is one per word as in a trained vocabulary. Special tokens
have the ids and the names of the real model; where V is reduced they follow the words directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"

_LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DEEPSEEK2_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "Assistant: {{ message['content'] }}{{ eos_token }}{% elif message['role'] == 'user' %}"
    "User: {{ message['content'] }}\n\n{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_DEEPSEEK3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<\uff5cAssistant\uff5c>{{ message['content'] }}{{ eos_token }}{% elif message['role'] == 'user' %}"
    "<\uff5cUser\uff5c>{{ message['content'] }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"
)
_HARMONY_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_GLM_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def _words(space: str) -> Iterator[tuple[str, str]]:
    """(earlier word, letter), without end."""
    stems = [space, *_LETTERS]
    for stem in stems:  # which grows meanwhile
        for letter in _LETTERS:
            yield stem, letter
            stems.append(stem + letter)


def _byte_alphabet() -> list[str]:
    """GPT-2's characters for bytes in the order of its ids: those that print, then the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*map(chr, printable), *(chr(0x100 + i) for i in range(256 - len(printable)))]


def _bpe(
    pre: str, V: int, words_end: int, specials: Sequence[str], user: Sequence[str] = (), first: Sequence[str] = ()
) -> dict[str, Any]:
    """`first`, bytes and words up to id `words_end` (fewer where V has no room), specials, padding up to V."""
    words_end = min(words_end, V - len(specials))
    merges = list(islice(_words("Ġ"), words_end - 256 - len(first)))
    tokens = [*first, *_byte_alphabet(), *(stem + letter for stem, letter in merges), *specials]
    types = [_CONTROL] * len(first) + [_NORMAL] * (words_end - len(first))
    types += [_USER if token in user else _CONTROL for token in specials]
    for token_id in range(len(tokens), V):
        tokens.append(f"[PAD{token_id}]")
        types.append(_UNUSED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [f"{stem} {letter}" for stem, letter in merges],
    }


def llama3(V: int) -> dict[str, Any]:
    """Llama 3: 128,000 words, then 256 special tokens."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    specials = [named.get(i) or next(reserved) for i in range(256)]
    meta = _bpe("llama-bpe", V, 128_000, specials)
    first = min(128_000, V - 256)
    return meta | {
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 9,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": _LLAMA3_TEMPLATE,
    }


_QWEN_CONTROL = [f"<|{name}|>" for name in (
    "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start",
    "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad",
)]  # fmt: skip
_QWEN_USER = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip


def qwen2(V: int) -> dict[str, Any]:
    """Qwen 2.5: Qwen 3's without the last four of its special tokens."""
    return _qwen(V, _QWEN_USER[:-4])


def qwen3(V: int) -> dict[str, Any]:
    """Qwen 3: 151,643 words, 26 special tokens, padding up to 151,936."""
    return _qwen(V, _QWEN_USER)


def _qwen(V: int, user: Sequence[str]) -> dict[str, Any]:
    meta = _bpe("qwen2", V, 151_643, [*_QWEN_CONTROL, *user], user)
    first = min(151_643, V - len(_QWEN_CONTROL) - len(user))
    return meta | {
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHATML_TEMPLATE,
    }


_DEEPSEEK_LAST = [
    "<think>", "</think>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁end\uff5c>",
    "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
]  # fmt: skip


def deepseek(V: int) -> dict[str, Any]:
    """DeepSeek V3: three special tokens, words up to 128,000, placeholders and other special tokens from 128,798.

    Below that size V2, whose special tokens follow 100,000 words.
    """
    ends = ["<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"]
    if V < 128_805:
        first = min(100_000, V - 2)
        meta = _bpe("deepseek-llm", V, 100_000, ends) | {"tokenizer.chat_template": _DEEPSEEK2_TEMPLATE}
    else:
        first = 0
        holders = [f"<\uff5cplace▁holder▁no▁{i}\uff5c>" for i in range(798)]
        meta = _bpe(
            "deepseek-v3", V, 128_000, [*holders, *_DEEPSEEK_LAST], _DEEPSEEK_LAST[:2], [*ends, "<\uff5c▁pad▁\uff5c>"]
        )
        meta |= {"tokenizer.ggml.padding_token_id": 1, "tokenizer.chat_template": _DEEPSEEK3_TEMPLATE}
    return meta | {
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def deepseek4(V: int) -> dict[str, Any]:
    """DeepSeek V4: V3's, whose pre-tokenizer has another name in its files, and which adds no token by itself."""
    return deepseek(V) | {
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }


def gpt_oss(V: int) -> dict[str, Any]:
    """gpt-oss (o200k_harmony): 199,998 words, 21 special tokens, padding up to 201,088."""
    names = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end"}
    names |= {10: "message", 14: "call", 20: "endofprompt"}
    meta = _bpe("gpt-4o", V, 199_998, [f"<|{names.get(i, f'reserved_{199_998 + i}')}|>" for i in range(21)])
    first = min(199_998, V - 21)
    return meta | {
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 4,
        "tokenizer.ggml.padding_token_id": first + 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _HARMONY_TEMPLATE,
    }


_GLM_CONTROL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
]  # fmt: skip
_GLM_USER = ["/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>"]


def glm4(V: int) -> dict[str, Any]:
    """GLM 4.5: 151,329 words, special tokens, padding up to 151,552."""
    meta = _bpe("glm4", V, 151_329, [*_GLM_CONTROL, *_GLM_USER], _GLM_USER)
    first = min(151_329, V - len(_GLM_CONTROL) - len(_GLM_USER))
    return meta | {
        "tokenizer.ggml.bos_token_id": first + 2,
        "tokenizer.ggml.eos_token_id": first,
        "tokenizer.ggml.eot_token_id": first + 7,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _GLM_TEMPLATE,
    }


def gemma3(V: int) -> dict[str, Any]:
    """Gemma 3, SentencePiece: control tokens, runs of newlines and spaces, bytes from 238, words, characters."""
    rows: list[tuple[str, int]] = [("<pad>", _CONTROL), ("<eos>", _CONTROL), ("<bos>", _CONTROL), ("<unk>", _UNKNOWN)]
    rows += [("<mask>", _CONTROL), ("[multimodal]", _CONTROL)]
    rows += [(f"<unused{i}>", _CONTROL) for i in range(99)]
    rows += [("<start_of_turn>", _CONTROL), ("<end_of_turn>", _CONTROL)]
    rows += [("\n" * count, _USER) for count in range(1, 32)]
    rows += [(" " * count, _USER) for count in range(2, 32)]
    rows += [(f"<unused{i}>", _CONTROL) for i in range(99, 99 + 238 - len(rows))]
    rows += [(f"<0x{byte:02X}>", _BYTE) for byte in range(256)]
    first = len(rows)
    characters = ["▁", *_LETTERS, *(chr(c) for c in range(0x21, 0x7F) if chr(c) not in _LETTERS)]
    words = islice(_words("▁"), V - first - len(characters))
    rows += [(stem + letter, _NORMAL) for stem, letter in words]
    rows += [(character, _NORMAL) for character in characters]
    scores = np.full(V, -1000.0, np.float32)
    scores[first - 256 : first] = 0.0
    scores[first:] = -np.arange(V - first, dtype=np.float32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in rows],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array([kind for _, kind in rows], np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 106,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": _GEMMA_TEMPLATE,
    }
