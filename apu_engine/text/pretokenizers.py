"""How each vocabulary cuts text into words before its merges apply: the kinds that `tokenizer.ggml.pre` names.

A kind is a list of stages; each cuts the pieces of the one before. The patterns are the ones that the models' published
tokenizers state (tokenizer.json, tekken.json, tiktoken pattern); the names and which pattern each means follow the
converters that write them. They run on Oniguruma, as in the published tokenizers. A name that is not listed is refused:
a wrong pattern gives plausible but wrong ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apu_engine.errors import ModelError

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

# GPT-2's own pattern; ByteLevel's built-in one is the same, so both are written as the marker None.
_GPT2: tuple[str | None, ...] = (None,)
_LLAMA3 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}{_TAIL}",)
_QWEN2 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}{_TAIL}",)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}",
)
_TEKKEN = (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}",)
_GPT4O = (
    rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}",
)
_HAN_FREE = rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE[0]}*{_HAN_FREE[1]}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE[0]}+{_HAN_FREE[1]}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PUNCTUATION}{_TAIL}",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_TAIL}",)
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*{_TAIL}",
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, as DeepSeek's first tokenizer lists them: code points and ranges, written in hexadecimal because
# many of them change under Unicode normalisation.
_CASED_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
_CASED_CLASS = "".join("-".join(chr(int(end, 16)) for end in letters.split("-")) for letters in _CASED_LETTERS.split())
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_CLASS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DIGITS = (r"\p{N}", None)


@dataclass(frozen=True)
class Kind:
    """One pre-tokenizer: patterns in order (None stands for GPT-2's), and what else the name implies."""

    stages: tuple[str | None, ...]
    ignore_merges: bool = False  # a whole word that is in the vocabulary is taken without merging
    add_bos: bool = False  # where the file does not say
    nfc: bool = False  # the published tokenizer composes characters first


KINDS: dict[str, Kind] = {}


def _define(names: str, kind: Kind) -> None:
    KINDS.update(dict.fromkeys(names.split(), kind))


_define("default gpt-2 phi-2 mpt olmo jais gigachat mellum trillion granite-docling exaone4 a.x-4.0", Kind(_GPT2))
_define("smollm starcoder refact command-r codeshell exaone minerva-7b", Kind(_DIGITS))
_define(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Kind(_LLAMA3, ignore_merges=True, add_bos=True),
)
_define("dbrx smaug-bpe glm4 chatglm-bpe", Kind(_LLAMA3))
_define("qwen2", Kind(_QWEN2, nfc=True))
_define("deepseek-r1-qwen stablelm2 hunyuan solar-open grok-2 megrez kormo", Kind(_QWEN2))
_define("qwen35", Kind(_QWEN35, nfc=True))
_define("tekken", Kind(_TEKKEN, ignore_merges=True, add_bos=True))
_define("gpt-4o llama4 kanana2 minimax-m2", Kind(_GPT4O))
_define("kimi-k2", Kind(_KIMI))
_define("deepseek-llm", Kind(_DEEPSEEK_LLM))
_define("deepseek-coder", Kind(_DEEPSEEK_CODER))
_define("deepseek-v3 joyai-llm hunyuan-dense", Kind(_DEEPSEEK_V3))
_define("bailingmoe bailingmoe2 llada-moe", Kind(_BAILING))
_define("seed-coder", Kind(_SEED))


def find_kind(pre: str, source: str) -> Kind:
    """The kind that `tokenizer.ggml.pre` names; a file without the key gets GPT-2's. Raises ModelError when unknown."""
    kind = KINDS.get(pre or "default")
    if kind is None:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre = {pre!r} is not a known pre-tokenizer, and a guess would give wrong ids; "
            f"known are {', '.join(sorted(KINDS))}",
            (pre,),
        )
    return kind


def build_pipeline(text: str, source: str) -> tuple[PreTokenizer | None, Normalizer | None]:
    """What a tokenizer.json has itself: JSON of its "pre_tokenizer" and "normalizer", either of them null.

    Raises ModelError for components that the tokenizers library does not know.
    """
    from tokenizers import Tokenizer

    parts = json.loads(text) | {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    try:
        built = Tokenizer.from_str(json.dumps(parts))
    except BaseException as error:  # the library panics too, which is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{source}: tokenizer.json: pre_tokenizer or normalizer: {error}", ("pre_tokenizer",)
        ) from None
    return built.pre_tokenizer, built.normalizer


def build(kind: Kind) -> tuple[PreTokenizer, Normalizer | None]:
    """The pre-tokenizer of a kind, ending in GPT-2's byte alphabet, and its normaliser."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    stages: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.stages if pattern is not None
    ]
    builtin = None in kind.stages
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=builtin))
    sequence = stages[0] if len(stages) == 1 else pre_tokenizers.Sequence(stages)
    return sequence, normalizers.NFC() if kind.nfc else None
