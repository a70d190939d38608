"""Truncation under a live mapping, with the real library: an error that names the file, not a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

READER = """
import os, sys
import numpy as np
from apu_engine.errors import MappingError
from apu_engine.memory.mapping import Mapping

path, how = sys.argv[1:]
mapping = Mapping.open(path)
view = mapping.array()
first = int(view[0])
mapping.check()
os.truncate(path, 4096)
if how == "restored":  # the file has its old size again when the fault is noticed
    total = int(view.sum(dtype=np.uint64))
    os.truncate(path, mapping.nbytes)
else:
    total = int(view.sum(dtype=np.uint64))
assert total >= first
try:
    mapping.check()
except MappingError as error:
    print(error)
del view
mapping.close()
again = Mapping.open(path)  # a later mapping is not blamed for the earlier one's fault
again.check()
again.close()
"""


@pytest.mark.parametrize(("how", "words"), [("shorter", "was truncated from"), ("restored", "could not be read")])
def test_truncated_while_mapped(file: Path, how: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READER, str(file), how], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert str(file) in done.stdout and words in done.stdout
