"""Text on both sides of the engine: vocabularies and tokenizers, chat templates, streamed answers.

`tokenizer.Tokenizer` turns text into ids and back, `template.ChatTemplate` renders messages into a `prompt.Prompt`,
which `prompt.encode_prompt` turns into ids, and `stream.TextStream` turns generated ids into text that is safe to show.
"""
