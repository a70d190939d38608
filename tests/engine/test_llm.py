"""The Python API on tiny models, and what their engines do: greedy equality, company, cancelling, errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import eventually

from apu_engine import LLM, ApuError, BudgetError, ConfigError, MappingError, ModelError
from apu_engine.engine.job import ContextLengthError, Done, Job, SamplingParams
from apu_engine.engine.load import STAGES
from models import TinyModel, tiny_gemma3_gguf, tiny_llama_gguf

TEXT = "hello the world and other things of the sea "


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def llm(request: pytest.FixtureRequest, tiny_llama: TinyModel, tiny_gemma3: TinyModel) -> Iterator[LLM]:
    model = tiny_llama if request.param == "llama" else tiny_gemma3
    with LLM(model.path, threads=2, batch=64, parallel=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, threads=2, ctx=256, batch=32) as llm:
        yield llm


def greedy(llm: LLM, ids: list[int], count: int) -> list[int]:
    """Greedy decoding by whole forward passes: the oracle of the step-by-step one."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(llm.logits(tokens)[-1].argmax()))
    return tokens[len(ids) :]


# ---- logits and generation agree


def test_logits_have_a_row_per_token(llm: LLM) -> None:
    ids = list(range(3, 90))
    logits = llm.logits(ids)
    assert logits.shape == (87, llm.vocabulary) and logits.dtype == np.float32
    assert np.isfinite(logits).all() and logits.std() > 0.1
    np.testing.assert_array_equal(llm.logits(ids[:40]), logits[:40])
    np.testing.assert_array_equal(llm.logits(np.array(ids)), logits)


def test_greedy_generation_is_argmax_of_logits(llm: LLM) -> None:
    ids = [5, 17, 200, 31]
    result = llm.generate(ids, 12, temperature=0, ignore_eos=True)
    assert result.tokens == greedy(llm, ids, 12)
    assert result.finish_reason == "length"
    assert (result.timings.prompt_tokens, result.timings.generated_tokens) == (4, 12)


def test_long_prompts_cross_chunks_pages_and_windows(llm: LLM) -> None:
    ids = [3 + (i * 7) % 250 for i in range(300)]
    result = llm.generate(ids, 6, temperature=0, ignore_eos=True)
    assert result.tokens == greedy(llm, ids, 6)


def test_company_changes_nothing(llm: LLM) -> None:
    prompts = [[4 + i, 9, 30 + i] * (1 + 30 * i) for i in range(5)]
    alone = [llm.generate(p, 10, temperature=0.9, seed=7, ignore_eos=True).tokens for p in prompts]
    together = [llm.stream(p, 10, temperature=0.9, seed=7, ignore_eos=True) for p in prompts]
    assert [g.result.tokens for g in together] == alone


def test_a_seed_repeats_and_seeds_differ(llm: LLM) -> None:
    def run(seed: int | None) -> tuple[list[int], int]:
        result = llm.generate([5, 6], 16, temperature=1.5, top_k=0, top_p=1, min_p=0, seed=seed, ignore_eos=True)
        return result.tokens, result.seed

    assert run(1) == run(1)
    assert len({tuple(run(seed)[0]) for seed in range(4)}) == 4
    tokens, seed = run(None)
    assert run(seed)[0] == tokens


def test_sampling_parameters_reach_the_sampler(llama: LLM) -> None:
    top = llama.generate([5, 6], 5, temperature=5.0, top_k=1, ignore_eos=True, seed=3).tokens
    assert top == greedy(llama, [5, 6], 5)
    forced = llama.generate([5, 6], 5, temperature=0, logit_bias={77: 1e4}, ignore_eos=True).tokens
    assert forced == [77] * 5
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repeat_penalty": 1.3, "repeat_last_n": 6}
    tokens = [5, 6, 6]
    for _ in range(12):  # the same in numpy
        logits = llama.logits(tokens)[-1]
        recent, counts = np.unique(tokens[-6:], return_counts=True)
        penalised = np.where(logits > 0, logits / 1.3, logits * 1.3) - 0.5
        logits[recent] = penalised[recent] - 0.7 * counts
        logits[77] += 2.0
        tokens.append(int(logits.argmax()))
    result = llama.generate([5, 6, 6], 12, temperature=0, logit_bias={77: 2.0}, ignore_eos=True, **options)
    assert result.tokens == tokens[3:]


def test_log_probabilities(llama: LLM) -> None:
    result = llama.generate([5, 6], 4, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True)
    logits = llama.logits([5, 6, *result.tokens])[1:-1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert result.logprobs is not None
    for event, row in zip(result.logprobs, wanted, strict=True):
        assert event.logprob == pytest.approx(row[event.token], abs=1e-4)
        assert [token for token, _ in event.top] == np.argsort(-row)[:3].tolist()
        assert [p for _, p in event.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)


# ---- text


def test_text_in_and_out(llm: LLM) -> None:
    ids = llm.tokenize(TEXT)
    assert llm.detokenize(ids, skip_special=True) == TEXT
    result = llm.generate(TEXT, 8, temperature=0, ignore_eos=True)
    assert result.tokens == llm.generate(ids, 8, temperature=0, ignore_eos=True).tokens
    pieces = llm.stream(TEXT, 8, temperature=0, ignore_eos=True)
    assert "".join(pieces) == result.text == pieces.result.text


def test_chat(llm: LLM) -> None:
    ids = llm.chat_tokens([{"role": "user", "content": "hello"}])
    assert ids == llm.chat_tokens("hello")
    result = llm.chat("hello", 6, temperature=0)
    assert result.tokens == llm.generate(ids, 6, temperature=0).tokens[: len(result.tokens)]
    assert "".join(llm.stream_chat("hello", 6, temperature=0)) == result.text
    assert llm.has_chat_template == ("chat_template" in str(llm.runtime.model.metadata.keys()))


def test_stop_strings(llama: LLM) -> None:
    options = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    text = llama.generate(TEXT, 40, **options).text
    stop = text[10:13]
    cut = llama.generate(TEXT, 40, stop=stop, **options)
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert len(cut.tokens) < 40
    assert "".join(llama.stream(TEXT, 40, stop=[stop], **options)) == cut.text


def test_end_of_generation_tokens(llama: LLM) -> None:
    (eos,) = {llama.tokenizer.eos_id}
    assert eos in llama.stop_ids
    result = llama.generate([5], 10, temperature=0, logit_bias={eos: 1e4})
    assert (result.tokens, result.text, result.finish_reason) == ([], "", "stop")


def test_the_context_is_the_limit(llama: LLM) -> None:
    assert llama.context == 256
    result = llama.generate([5] * 250, temperature=0, ignore_eos=True)
    assert len(result.tokens) == 6 and result.finish_reason == "length"


# ---- bad input


def test_bad_prompts_name_both_numbers(llama: LLM) -> None:
    V = llama.vocabulary
    with pytest.raises(ConfigError, match=f"from 0 to {V - 1}, found {V}"):
        llama.generate([1, V])
    with pytest.raises(ConfigError, match="found -3"):
        llama.logits([1, -3])
    with pytest.raises(ConfigError, match="at least one token"):
        llama.generate([])
    with pytest.raises(ConfigError, match="at least one token"):
        llama.generate("")
    with pytest.raises(ContextLengthError, match=r"has 300 tokens.*holds 256"):
        llama.generate([1] * 300)
    llama.check_length(["x" * 256])
    with pytest.raises(ContextLengthError, match=r"at least \d+ tokens.*holds 256"):
        llama.check_length(["x"] * 100_000)
    with pytest.raises(ConfigError, match="flat list of token ids, found 1 dimensions of float64"):
        llama.generate([1.5, 2.0])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="max_tokens"):
        llama.generate([1], -1)
    with pytest.raises(ConfigError, match="temprature: is no sampling parameter"):
        llama.generate([1], temprature=1)
    assert llama.generate([1], 1, ignore_eos=True).finish_reason == "length"  # still well


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = tiny_llama_gguf(tmp_path / "m.gguf", tokenizer=False).path
    with LLM(path, ctx=128) as llm:
        assert llm.logits([1, 2]).shape == (2, llm.vocabulary)
        result = llm.generate([1, 2], 3, temperature=0)
        assert len(result.tokens) == 3 and result.text == ""
        for call in (lambda: llm.tokenize("x"), lambda: llm.generate("x"), lambda: llm.chat("x")):
            with pytest.raises(ModelError, match=r"m\.gguf: has no tokenizer"):
                call()
        with pytest.raises(ModelError, match="no tokenizer"):
            llm.generate([1], stop="x")


def test_loading_refuses_by_name(tmp_path: Path, tiny_llama: TinyModel) -> None:
    with pytest.raises(ApuError, match="does not exist"):
        LLM(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="no model was named"):
        LLM()
    with pytest.raises(ConfigError, match="memory: staged needs a GPU"):
        LLM(tiny_llama.path, memory="staged")
    with pytest.raises(ConfigError, match="memory_way: svm needs a GPU"):
        LLM(tiny_llama.path, memory_way="svm")
    with pytest.raises(ConfigError, match="ctx: expected an integer"):
        LLM(tiny_llama.path, ctx="long")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nonsense: is no option"):
        LLM(tiny_llama.path, nonsense=1)
    with pytest.raises(BudgetError, match="ctx 16777216 needs"):
        LLM(tiny_llama.path, ctx=1 << 24, parallel=256)
    with pytest.raises(ConfigError, match="chat_template"):
        LLM(tiny_llama.path, chat_template=str(tmp_path / "none.jinja"))


# ---- loading


def test_stages_come_in_order_and_nothing_is_mapped_at_pool(tmp_path: Path) -> None:
    path = tiny_llama_gguf(tmp_path / "m.gguf").path
    seen: list[tuple[str, bool]] = []

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    with LLM(path, ctx=128, on_stage=lambda name: seen.append((name, is_mapped()))) as llm:
        assert seen == list(zip(STAGES, [False, False, True, True, True], strict=True))
        assert [name for name, _ in llm.runtime.stages] == list(STAGES)
    assert not is_mapped()


def test_ctx_above_trained_is_a_notice(tiny_llama: TinyModel) -> None:
    with LLM(tiny_llama.path, ctx=1024) as llm:
        assert llm.context == 1024
        assert any("1024" in notice and "512" in notice for notice in llm.runtime.notices)
    with LLM(tiny_llama.path) as llm:
        assert llm.context == 512 and llm.runtime.notices == []


def test_memory_and_footprint(tiny_llama: TinyModel) -> None:
    with LLM(tiny_llama.path, ctx=128) as llm:
        llm.generate([1], 2)
        assert llm.memory["copied"] == 0 and llm.memory["weights"] > 0 and llm.memory["kv"] > 0
        assert llm.memory["registered"] == llm.memory["device"] == 0  # the cpu reads in place without
        assert (llm.memory_report["strategy"], llm.memory_report["way"]) == ("direct", None)
        (item,) = llm.footprint().files
        assert item.permissions == ("r--s",) and item.anonymous == 0
        assert "copied 0, anonymous 0; ctx 128" in llm.summary()
    with LLM(tiny_llama.path, ctx=128, copy_weights=True) as copy, LLM(tiny_llama.path, ctx=128) as plain:
        assert copy.memory["copied"] == tiny_llama.path.stat().st_size
        np.testing.assert_array_equal(copy.logits([1, 2, 3]), plain.logits([1, 2, 3]))


def test_precision_and_kv_types(tiny_llama: TinyModel) -> None:
    ids = list(range(5, 60))
    with LLM(tiny_llama.path, ctx=128) as llm:
        exact = llm.logits(ids)
    with LLM(tiny_llama.path, ctx=128, kv_type="f16") as llm:
        half = llm.logits(ids)
    assert 0 < np.abs(exact - half).max() < 0.05


def test_a_truncated_file_fails_the_engine_and_names_the_file(tmp_path: Path) -> None:
    path = tiny_gemma3_gguf(tmp_path / "m.gguf", V=4096).path
    with LLM(path, ctx=128, threads=1) as llm:
        llm.generate([1], 2)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 4)
        with pytest.raises(MappingError, match=r"m\.gguf"):
            for _ in range(3):
                llm.generate([1, 2, 3], 4, ignore_eos=True)
        eventually(lambda: llm.engine.status().state == "failed")
        with pytest.raises(MappingError, match=r"m\.gguf"):
            llm.logits([1])


# ---- cancelling


def test_leaving_a_stream_cancels_it(tmp_path: Path) -> None:
    path = tiny_llama_gguf(tmp_path / "m.gguf", context=8192).path
    with LLM(path, ctx=8192) as llm:
        with llm.stream([5], ignore_eos=True) as generation:
            while len(generation.tokens) < 3:
                next(generation, None)
        assert generation.result.finish_reason == "cancelled"
        assert 3 <= len(generation.tokens) < 8000
        for _ in llm.stream([5], ignore_eos=True):
            break  # the generation is dropped here
        eventually(lambda: llm.engine.status().running == 0, 2)
        assert llm.generate([5], 2, ignore_eos=True).finish_reason == "length"


@pytest.mark.alone
def test_cancel_in_a_long_prefill_acts_at_once(tmp_path: Path) -> None:
    path = tiny_llama_gguf(tmp_path / "m.gguf", layers=4, D=128, H=4, K=4, F=512, context=2048).path
    with LLM(path, ctx=2048, batch=2048, threads=1) as llm:
        before = llm.generate([5, 6, 7], 5, temperature=0, ignore_eos=True).tokens
        start = time.monotonic()
        prompt = [3 + i % 200 for i in range(2000)]
        whole = llm.generate(prompt, 1, ignore_eos=True).timings.prompt_seconds
        events: list[object] = []
        job = Job(prompt, SamplingParams(), 5, frozenset(), lambda _, event: events.append(event))
        llm.engine.submit(job)
        time.sleep(whole / 10)
        start = time.monotonic()
        llm.engine.cancel(job)
        eventually(lambda: bool(events), 10)
        waited = time.monotonic() - start
        assert isinstance(events[0], Done) and events[0].reason == "cancelled"
        assert waited < whole / 2, f"cancelling took {waited:.3f} s of a prefill of {whole:.3f} s"
        assert llm.generate([5, 6, 7], 5, temperature=0, ignore_eos=True).tokens == before
