"""Writes data/spm.json: small SentencePiece models and the ids that SentencePiece itself gives. Needs `sentencepiece`.

Run by hand when the list of strings changes: python tests/text/make_spm_fixture.py
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
from awkward import PLAIN, SPECIAL

HERE = Path(__file__).parent
CORPUS = HERE.parent / "data" / "prose.txt"
COMMON = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "minloglevel": 2,
}
MODELS = {
    "llama": {"vocab_size": 700, "byte_fallback": True},
    "gemma": {
        "vocab_size": 700,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n", "<b>", "</b>"],
    },
    "no bytes": {"vocab_size": 400},
}


def main() -> None:
    out = {}
    for name, options in MODELS.items():
        stored = io.BytesIO()
        sentences = iter(CORPUS.read_text().splitlines())
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=stored, **COMMON, **options)
        model = sentencepiece.SentencePieceProcessor(model_proto=stored.getvalue())
        pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        defined = set(options.get("user_defined_symbols", ()))

        def kind(i: int, model=model, pieces=pieces, defined=defined) -> int:
            if model.is_unknown(i):
                return 2
            if model.is_control(i):
                return 3
            if pieces[i] in defined:
                return 4
            return 6 if model.is_byte(i) else 5 if model.is_unused(i) else 1

        out[name] = {
            "pieces": pieces,
            "scores": [model.get_score(i) for i in range(len(pieces))],
            "types": [kind(i) for i in range(len(pieces))],
            "dummy_prefix": options.get("add_dummy_prefix", True),
            "ids": [model.encode(text) for text in PLAIN + SPECIAL],
        }
    (HERE / "data" / "spm.json").write_text(json.dumps(out, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
