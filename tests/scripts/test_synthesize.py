"""Synthesised models: valid blocks of every type, the same bytes every time, files that the engine opens and runs."""

from __future__ import annotations

import errno
import hashlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import awkward
import gguf
import numpy as np
import pytest
import synthesize
from numpy.typing import NDArray
from synthesis import vocabularies
from synthesis.architectures import ARCHITECTURES, MIXES, layer_count, tensors
from synthesis.blocks import CHUNK_BYTES, LAYOUTS, BlockStream, block_elements

from apu_engine import LLM, arch
from apu_engine.arch.blocks import MATRIX_TYPES
from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.ggml_types import GGML_TYPES
from apu_engine.weights.opening import open_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "synthesize.py"
KNOWN = list(arch.ARCHITECTURES)  # what the engine builds, the script writes
# Types whose every matrix, embedding and output included, the engine multiplies with.
RUNNABLE = {GGML_TYPES[number].name for number in MATRIX_TYPES & GGML_TYPES.keys()}  # GGUF's
RUNNABLE_MIXES = [name for name, mix in MIXES.items() if {mix.layers, mix.embedding, mix.output} <= RUNNABLE]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def values(dtype: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n,) as the gguf package dequantises them."""
    if dtype in ("F32", "F16"):
        return blocks.view(dtype.lower().replace("f32", "<f4").replace("f16", "<f2")).astype(np.float32).ravel()
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[dtype]).ravel()


def taken(dtype: str, count: int, deviation: float, seed: int = 0) -> NDArray[np.uint8]:
    """(blocks, bytes) with `count` values."""
    chunks = BlockStream(dtype, seed).take(count // block_elements(dtype), deviation)
    return np.concatenate([chunk.copy() for chunk in chunks])


# ---------------------------------------------------------------- blocks


def test_every_type_has_a_layout_and_a_mix() -> None:
    assert set(LAYOUTS) == {mix.layers for mix in MIXES.values()}
    used = {dtype for mix in MIXES.values() for dtype in (mix.layers, mix.embedding, mix.output, mix.more) if dtype}
    assert used <= set(LAYOUTS)
    names = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"}
    for name, mix in MIXES.items():
        wanted = "ALL_F32" if name == "F32" else f"MOSTLY_{names.get(name, name)}"
        assert gguf.LlamaFileType[wanted] == mix.file_type or (name, mix.file_type) == ("Q3_K", 11)


@pytest.mark.parametrize("dtype", LAYOUTS)
@pytest.mark.parametrize("row", [256, 2048, 14_336])
def test_values_are_finite_with_the_deviation_of_an_initialisation(dtype: str, row: int) -> None:
    found = values(dtype, taken(dtype, 1 << 20, row**-0.5)).astype(np.float64) * row**0.5
    assert np.isfinite(found).all()
    assert abs(found.mean()) < 0.01
    assert found.std() == pytest.approx(1.0, abs=0.06 if dtype in ("F32", "F16", "BF16") else 0.02)
    assert np.abs(found).max() < 6


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_a_stream_does_not_repeat_itself(dtype: str) -> None:
    """Over several passes through the pools, block runs as long as a short row differ."""
    blocks = taken(dtype, 6 * CHUNK_BYTES * block_elements(dtype) // BlockStream(dtype, 0).nbytes, 0.02)
    run_length = -(-512 // blocks.shape[1])
    rows = blocks[: len(blocks) // run_length * run_length].reshape(-1, run_length * blocks.shape[1])
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_ternary_types_hold_only_what_their_quantiser_writes() -> None:
    for dtype in ("TQ1_0", "TQ2_0"):
        blocks = taken(dtype, 1 << 16, 0.02)
        again = gguf.quants.quantize(values(dtype, blocks).reshape(-1, 256), gguf.GGMLQuantizationType[dtype])
        quants = slice(0, -2)
        positive = blocks[:, -1] < 0x80  # the quantiser never writes negative scales
        assert positive.any() and not positive.all()
        assert np.array_equal(again[positive, quants], blocks[positive, quants])


def test_the_stream_is_the_same_on_every_machine_and_numpy() -> None:
    """A digest recorded once: files of the same seed can be compared between machines."""
    digest = hashlib.sha256()
    for dtype in LAYOUTS:
        digest.update(taken(dtype, 1 << 14, 0.02, seed=7).tobytes())
    assert digest.hexdigest() == "2fe076dbc8951704691f27a0374cd1d26d9e5f6086926b2db41d4dbf38d570e6"
    assert not np.array_equal(taken("Q4_0", 1 << 12, 0.02, seed=7), taken("Q4_0", 1 << 12, 0.02, seed=8))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_runs_write_the_same_bytes_that_gguf_reads(name: str, tmp_path: Path) -> None:
    for file in ("a", "b"):
        done = run("--arch", name, "--type", "q4_k_m", "--seed", 3, "--out", tmp_path / file)
        assert done.returncode == 0, done.stderr
        assert re.search(r"layers, .* parameters, .* GB/s\), \d+ MiB", done.stdout)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    reader = gguf.GGUFReader(tmp_path / "a")
    chosen = ARCHITECTURES[name].presets["tiny"]
    wanted = tensors(ARCHITECTURES[name], chosen, MIXES["Q4_K_M"], chosen.letters["L"])
    assert [(t.name, tuple(t.shape.tolist()[::-1]), t.tensor_type.name) for t in reader.tensors] == [
        (t.name, t.shape, t.dtype) for t in wanted
    ]
    assert {t.dtype for t in wanted} == {"F32", "Q4_K", "Q6_K", *ARCHITECTURES[name].types.values()}
    assert reader.get_field("general.file_type").contents() == 15
    assert len(reader.get_field("tokenizer.ggml.tokens").data) == chosen.letters["V"]
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 and tensor.name != "rope_freqs.weight":
            assert 0.9 <= tensor.data.min() <= tensor.data.max() <= 1.1
            assert tensor.data.size == 1 or tensor.data.min() < tensor.data.max()


def test_rotary_factors_are_llama_3s(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    synthesize.synthesize(tmp_path / "m", "llama", "tiny", "F16")
    reader = gguf.GGUFReader(tmp_path / "m")
    (found,) = (t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    rope = {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(np.arange(32) / 32)
    np.testing.assert_allclose(found, plain / scaled.numpy(), rtol=1e-4)


def test_memory_is_bounded_and_no_page_is_there_twice(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    done = run("--preset", "1b", "--layers", 1, "--type", "Q8_0", "--out", out)
    assert done.returncode == 0, done.stderr
    size = out.stat().st_size
    peak = int(re.findall(r"(\d+) MiB of memory", done.stdout)[0]) << 20
    assert size > 330 << 20 and peak < 160 << 20
    start = open_model(out).tensors["token_embd.weight"].offset // 4096 + 1
    pages = np.memmap(out, np.uint8, "r")[start * 4096 : size // 4096 * 4096].reshape(-1, 512, 8)
    heads = pages[:, :3].copy().view("<u8").reshape(len(pages), 3)  # 24 bytes tell pages apart well enough
    out.unlink()
    assert len(np.unique(heads, axis=0)) == len(pages)


@pytest.mark.parametrize(
    ("name", "preset", "billions"),
    [
        ("qwen2", "7b", 7.62),  # of the models' cards
        ("qwen3", "8b", 8.19),
        ("qwen3moe", "30b", 30.53),
        ("gpt-oss", "20b", 20.91),
        ("gpt-oss", "120b", 116.83),
        ("glm4moe", "4.5-air", 106.85),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(name: str, preset: str, billions: float) -> None:
    chosen = ARCHITECTURES[name].presets[preset]
    table = tensors(ARCHITECTURES[name], chosen, MIXES["BF16"], chosen.letters["L"])
    assert sum(np.prod(tensor.shape, dtype=float) for tensor in table) / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(("preset", "low", "high"), [("1b", 0.7e9, 0.8e9), ("8b", 4.4e9, 4.7e9)])
def test_sizes_of_the_llama_presets(preset: str, low: float, high: float) -> None:
    chosen = ARCHITECTURES["llama"]
    table = tensors(chosen, chosen.presets[preset], MIXES["Q4_0"], chosen.presets[preset].letters["L"])
    assert low < sum(tensor.nbytes for tensor in table) < high


@pytest.mark.parametrize("dtype", ["Q4_0", "Q2_K", "IQ2_XXS"])
def test_the_moe_preset_has_layers_up_to_its_size(dtype: str) -> None:
    chosen = ARCHITECTURES["qwen3moe"]
    preset = chosen.presets["2.9gb"]
    layers = layer_count(chosen, preset, MIXES[dtype])
    size = sum(tensor.nbytes for tensor in tensors(chosen, preset, MIXES[dtype], layers))
    assert 2.75e9 < size < 3.05e9
    assert {"Q4_0": 8, "Q2_K": 14, "IQ2_XXS": 18}[dtype] == layers


def test_rows_that_blocks_do_not_divide_get_another_type() -> None:
    chosen = ARCHITECTURES["gemma3"]
    types = {t.name: t.dtype for t in tensors(chosen, chosen.presets["270m"], MIXES["Q4_K_M"], 18)}
    # The published file's types.
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["blk.0.attn_output.weight"] == "Q4_K"
    assert (types["blk.0.attn_v.weight"], types["blk.0.ffn_down.weight"]) == ("Q8_0", "Q6_K")


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "Q4_0") for name in KNOWN] + [("llama", dtype) for dtype in RUNNABLE_MIXES if dtype != "Q4_0"],
)
def test_the_engine_runs_it(name: str, dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    synthesize.synthesize(out, name, "tiny", dtype, layers=12)
    with LLM(out, ctx=256, threads=1) as llm:
        ids = llm.tokenize("the page cache holds the weights " * 8)
        assert len(ids) > 64  # beyond gemma's window
        logits = llm.logits(ids)
        assert np.isfinite(logits).all()
        assert 0.3 < logits.std() < 3
        done = llm.generate("Hello", max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)
        assert len(done.tokens) == 8 and llm.detokenize(done.tokens, skip_special=True) == done.text
        answer = llm.chat([{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0)
        assert answer.finish_reason in ("length", "stop")


TRUE_SIZES: list[tuple[Any, int, dict[int, str]]] = [
    (vocabularies.llama3, 128_256, {0: "!", 128_000: "<|begin_of_text|>", 128_009: "<|eot_id|>"}),
    (vocabularies.qwen3, 151_936, {151_643: "<|endoftext|>", 151_645: "<|im_end|>", 151_668: "</think>"}),
    (vocabularies.gpt_oss, 201_088, {199_998: "<|startoftext|>", 200_002: "<|return|>", 200_008: "<|message|>"}),
    (vocabularies.glm4, 151_552, {151_329: "<|endoftext|>", 151_331: "[gMASK]", 151_336: "<|user|>"}),
    (
        vocabularies.deepseek,
        129_280,
        {0: "<\uff5cbegin▁of▁sentence\uff5c>", 128_799: "</think>", 128_803: "<\uff5cUser\uff5c>"},
    ),
    (
        vocabularies.deepseek,
        102_400,
        {0: "!", 100_000: "<\uff5cbegin▁of▁sentence\uff5c>", 100_001: "<\uff5cend▁of▁sentence\uff5c>"},
    ),
    (vocabularies.gemma3, 262_144, {2: "<bos>", 106: "<end_of_turn>", 238: "<0x00>", 493: "<0xFF>"}),
]


@pytest.mark.parametrize(("build", "V", "named"), TRUE_SIZES)
def test_vocabularies_have_the_real_size_and_lose_no_text(build: Any, V: int, named: dict[int, str]) -> None:
    meta = build(V)
    tokenizer = Tokenizer.from_metadata(meta, build.__name__)
    assert tokenizer.vocab_size == V == len(set(meta["tokenizer.ggml.tokens"]))
    for token_id, spelling in named.items():
        assert tokenizer.token(token_id) == spelling
    assert len(tokenizer.encode("the weights are the pages", add_special=False)) < 20  # words do merge
    for text in awkward.PLAIN:
        if build is vocabularies.qwen3:
            text = tokenizer.decode(tokenizer.encode(text, add_special=False))  # composes characters, as Qwen's does
        if build is not vocabularies.gemma3 or "\u2581" not in text:  # which stands for a space there
            assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "gpt2"], "invalid choice: 'gpt2'"),
        (["--preset", "8"], "llama has tiny, 1b, 3b, 8b, 70b, found '8'"),
        (["--type", "Q4"], "--type: expected one of F32, F16, "),
        (["--layers", "0"], "--layers: expected 1 to 1024, found 0"),
        (["--layers", "2000000000"], "--layers: expected 1 to 1024"),
        (["--seed", "-1"], "--seed: expected 0 to 2^64 - 1, found -1"),
    ],
)
def test_odd_arguments_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(*arguments, "--out", tmp_path / "m")
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_existing_files_are_kept_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "m"
    out.write_text("precious")
    done = run("--out", out)
    assert done.returncode == 1 and "exists; --force replaces it" in done.stderr
    assert out.read_text() == "precious"
    assert run("--out", out, "--force").returncode == 0
    assert open_model(out).architecture == "llama"
    assert "is no regular file" in run("--out", tmp_path, "--force").stderr
    assert "does not exist" in run("--out", tmp_path / "no" / "m").stderr


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    assert run("--layers", 1, "--out", tmp_path / ("m" * 255)).returncode == 0
    done = run("--layers", 1, "--out", tmp_path / ("m" * 256))
    assert done.returncode == 1 and "File name too long" in done.stderr and "Traceback" not in done.stderr
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    """In the middle of a file that would have gigabytes; a fifo in place of the partial file holds it there."""
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); import synthesize\n"
        "def write(file, *_):\n    file.write(b'half')\n    file.flush()\n    os.kill(os.getpid(), int(sys.argv[3]))\n"
        "    signal.pause()\n"
        "synthesize.write = write\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(synthesize.main(['--out', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(tmp_path / "m"), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status, done.stderr
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_told_before_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m"
    usage = synthesize.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(synthesize.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(synthesize.SynthesisError, match=r"needs [\d,]+ bytes, but .* has 1,000 free"):
            synthesize.synthesize(out, "llama", "tiny", "Q4_0")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synthesize, "write", full)
    with pytest.raises(synthesize.SynthesisError, match="No space left"):
        synthesize.synthesize(out, "llama", "tiny", "Q4_0")
    assert not any(tmp_path.iterdir())


def test_list_names_all_presets_and_types() -> None:
    listing = run("--list").stdout
    for name, chosen in ARCHITECTURES.items():
        for preset in chosen.presets:
            assert re.search(rf"^{name} +{re.escape(preset)} ", listing, re.M)
    for dtype in MIXES:
        assert re.search(rf"^{dtype} ", listing, re.M)
