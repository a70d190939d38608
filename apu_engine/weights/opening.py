"""Which reader a path is for: a GGUF file or split set, or a folder of safetensors with its config.json."""

from __future__ import annotations

import os
from pathlib import Path

from apu_engine.collector import collector_paused
from apu_engine.errors import FormatError
from apu_engine.weights.gguf import open_gguf
from apu_engine.weights.model_file import ModelFile


def open_model(path: str | os.PathLike[str], *, whole: bool = True) -> ModelFile:
    """Read the headers of a model: a GGUF file, any shard of a split set, a folder that holds one of either, or a
    Hugging Face folder, also named by one of its .safetensors files. GGUF files in such a folder come first.

    A file that ends before its tensors do is refused, unless `whole` is off: then the header is enough.
    Raises FormatError, whose message names the file, the field, what was found and what to do; ModelError for what is
    not supported.
    """
    given = Path(path).expanduser()
    folder = given.parent if given.name.endswith((".safetensors", ".safetensors.index.json")) else given
    if folder.is_dir() and (folder != given or not any(folder.glob("*.gguf"))):
        from apu_engine.weights.folder import CONFIG, is_folder, open_folder

        if is_folder(folder):
            with collector_paused():
                return open_folder(folder, whole)
        if folder != given and given.exists():
            raise FormatError(given, "", f"is one file of a model; its folder has no {CONFIG}, download that too")
    return open_gguf(given, whole=whole)
