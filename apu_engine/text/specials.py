"""Which vocabulary entries are control tokens, and how a text is cut at them.

A GGUF types each token, but "user defined" covers two kinds: ordinary text that the vocabulary wants whole (runs
of spaces or newlines, HTML tags in Gemma's) and markup that steers the model (`<think>`, `<start_of_image>`). The
first kind is matched in any text; the second, like CONTROL, only where the caller trusts the text. So a user who
types `<|im_end|>` sends ten characters, not the end of a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Token types of tokenizer.ggml.token_type (GGUF specification).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Tags that vocabularies hold whole because they occur in ordinary web text.
_HTML_NAMES = """
a b bbox blockquote body br caption code div em footer h1 h2 h3 h4 h5 h6 head header hr html i iframe img li ol
p pre s script section small span strike strong style sub sup table tbody td tfoot th thead title tr tt u ul
"""
_HTML = frozenset(_HTML_NAMES.split())
_HTML_TAG = re.compile(r"</?([a-z][a-z0-9]*)/?>")
_OPENERS = frozenset("<[{|｜【〈《«")  # noqa: RUF001

# Names that end a turn or a text, by family. Only a token that is a control token is meant: Gemma holds `</s>` as
# HTML.
_EOG_NAMES = """
<|eot_id|> <|eom_id|> <|end_of_text|> <|endoftext|> <|im_end|> <|end|> <|return|> <|call|> <|eot|> <|EOT|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_turn|> <end_of_turn> <turn|> <end_of_utterance> <｜end▁of▁sentence｜>
<|END_OF_TURN_TOKEN|> [e~[ </s> <eos> <|eos|> <|endofturn|> <|plamo:eos|>
"""  # noqa: RUF001
EOG_NAMES = frozenset(_EOG_NAMES.split())


def is_markup(token: str) -> bool:
    """Whether a user-defined token steers the model rather than standing for ordinary text."""
    if not token or token[0] not in _OPENERS or len(token) < 2:
        return False
    tag = _HTML_TAG.fullmatch(token)
    return tag is None or tag.group(1) not in _HTML


class Splitter:
    """Cuts a text at control tokens: leftmost first, the longest at each place.

    A dictionary probe per possible length is faster to build than a trie or a regular expression over the thousands of
    reserved tokens that vocabularies hold, and candidates are found by their first character.
    """

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._ids = dict(specials)
        lengths: dict[str, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(re.escape(first) for first in sorted(lengths))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """The text in order: non-empty strings, and the ids of the control tokens between them."""
        out: list[str | int] = []
        ids, lengths = self._ids, self._lengths
        done = at = 0
        while found := self._first.search(text, at):
            at = found.start()
            for length in lengths[text[at]]:
                token = ids.get(text[at : at + length])
                if token is not None:
                    if at > done:
                        out.append(text[done:at])
                    out.append(token)
                    done = at = at + length
                    break
            else:
                at += 1
        if done < len(text):
            out.append(text[done:])
        return out
