"""Folders and split sets: any shard or the folder loads the whole set, or the error names what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from apu_engine.errors import FormatError
from apu_engine.weights.opening import open_model

TENSORS = {f"blk.{i}.w": np.full((i + 1, 32), i, np.float32) for i in range(6)}


def single(path: Path, arch: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tensor("w", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shard(path: Path, number: int, tensors: dict[str, Any], count: int = 3, total: int = 6, **keys: str) -> None:
    """One shard as the usual splitting tool makes it: only the first has the model's keys."""
    writer = gguf.GGUFWriter(path, keys.pop("arch", "llama"))
    if number:
        del writer.kv_data[0]["general.architecture"]
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    for key, value in keys.items():
        writer.add_string(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def names(count: int = 3, stem: str = "model") -> list[str]:
    return [f"{stem}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    items = list(TENSORS.items())
    for number, name in enumerate(names()):
        shard(tmp_path / name, number, dict(items[2 * number : 2 * number + 2]))
    return tmp_path


@pytest.mark.parametrize("given", [*names(), ""])
def test_any_shard_or_the_folder(split: Path, given: str) -> None:
    model = open_model(split / given)
    assert model.path.name == names()[0] and [path.name for path in model.files] == names()
    assert model.file_sizes == tuple(path.stat().st_size for path in model.files)
    assert model.architecture == "llama"
    assert list(model.tensors) == list(TENSORS)
    for name, tensor in model.tensors.items():
        raw = model.files[tensor.shard].read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert raw == TENSORS[name].tobytes()


def test_a_set_of_links_as_in_a_download_cache(split: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")
    for i, name in enumerate(names()):
        blob = (split / name).rename(split / f"{i}0f4c")
        (snapshot / name).symlink_to(blob)
    assert open_model(snapshot / names()[1]).files == tuple(snapshot / name for name in names())


def test_a_first_shard_without_tensors(tmp_path: Path) -> None:
    shard(tmp_path / names(2)[0], 0, {}, count=2, total=1)
    shard(tmp_path / names(2)[1], 1, {"w": np.ones(4, np.float32)}, count=2, total=1)
    assert open_model(tmp_path).tensors["w"].shard == 1


@pytest.mark.parametrize("given", [names()[0], names()[2], ""])
def test_a_missing_shard_is_named(split: Path, given: str) -> None:
    (split / names()[1]).unlink()
    with pytest.raises(FormatError, match=r"1 of 3 shards missing \(number 2\): no .*model-00002-of-00003.gguf"):
        open_model(split / given)


def test_shards_of_different_models(split: Path) -> None:
    shard(split / names()[1], 1, {"w": np.ones(4, np.float32)}, total=7)
    with pytest.raises(FormatError, match=r"00002-of-00003.gguf: split.tensors.count: differs from .*00001"):
        open_model(split)


def test_a_shard_with_another_architecture(split: Path) -> None:
    writer = gguf.GGUFWriter(split / names()[2], "gemma3")
    writer.add_uint16("split.no", 2)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"00003-of-00003.gguf: general.architecture: differs"):
        open_model(split)


def test_a_single_model_in_place_of_a_shard(split: Path) -> None:
    single(split / names()[1])
    with pytest.raises(FormatError, match=r"00002-of-00003.gguf: split.no: expected"):
        open_model(split)


def test_shards_in_each_others_place(split: Path) -> None:
    first, second, third = (split / name for name in names())
    second.rename(split / "x")
    third.rename(second)
    (split / "x").rename(third)
    with pytest.raises(FormatError, match=r"split.no: expected 1 for shard 2, found 2"):
        open_model(first)


def test_a_renamed_shard(split: Path) -> None:
    (split / names()[0]).rename(split / "mine.gguf")
    with pytest.raises(FormatError, match=r"one of 3 shards, .*NAME-00001-of-00003.gguf; rename it back"):
        open_model(split / "mine.gguf")


def test_a_tensor_in_two_shards(split: Path) -> None:
    shard(split / names()[1], 1, {"blk.0.w": TENSORS["blk.0.w"], "y": np.ones(4, np.float32)})
    with pytest.raises(FormatError, match=r'00002-of-00003.gguf: tensor "blk.0.w": is also in .*00001-of'):
        open_model(split)


def test_too_few_tensors(split: Path) -> None:
    shard(split / names()[1], 1, {"y": np.ones(4, np.float32)})
    with pytest.raises(FormatError, match=r"split.tensors.count: expected 6 tensors, found 5"):
        open_model(split)


def test_a_truncated_shard(split: Path) -> None:
    path = split / names()[2]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FormatError, match=r'00003-of-00003.gguf: tensor "blk.5.w": .*truncated'):
        open_model(split / names()[0])


def test_a_set_of_one(tmp_path: Path) -> None:
    shard(tmp_path / names(1)[0], 0, {"w": np.ones(4, np.float32)}, count=1, total=1)
    assert len(open_model(tmp_path).files) == 1


def test_folder_with_a_projector_and_hidden_files(tmp_path: Path) -> None:
    single(tmp_path / "model-Q4_K.gguf")
    single(tmp_path / "mmproj-F16.gguf", "clip")
    single(tmp_path / "._model.gguf")
    assert open_model(tmp_path).path.name == "model-Q4_K.gguf"


def test_folder_with_several_models(split: Path) -> None:
    single(split / "other.gguf")
    with pytest.raises(FormatError, match=r"holds 2 models; name one of: model-00001-of-00003.gguf, other.gguf"):
        open_model(split)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"holds no .gguf file, pass a .gguf file"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match=r"only safetensors"):
        open_model(tmp_path)
    (tmp_path / "Q4_K").mkdir()
    single(tmp_path / "Q4_K" / "model.gguf")
    with pytest.raises(FormatError, match=r"its folders do: Q4_K; name one"):
        open_model(tmp_path)


def test_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", denied)
    with pytest.raises(FormatError, match=r"cannot be listed: Permission denied"):
        open_model(tmp_path)
