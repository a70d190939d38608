"""A Hugging Face folder as a ModelFile: safetensors in one file or in shards, config.json, tokenizer, chat template.

The names and keys that architectures read are GGUF's; families/ says how a model's own are translated. Weights stay in
the files: what GGUF would have stacked, split or permuted is a tensor in pieces here, or is read in the order that it
has. An index decides which shard counts for a tensor. Shard names are checked as text, links are followed: the hub's
cache consists of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import FormatError, ModelError
from apu_engine.weights.families import FAMILIES, Family, Hyper, Parts, Rewritten, Rule
from apu_engine.weights.fp8 import METHODS, Fp8, read_fp8, scaling, split_scales
from apu_engine.weights.ggml_types import F8_E4M3, TYPES
from apu_engine.weights.made import BF16, F32, made
from apu_engine.weights.model_file import Extent, ModelFile, Scaling, TensorRef
from apu_engine.weights.safetensors import Entry, read_header
from apu_engine.weights.strict_json import read_object
from apu_engine.weights.tokenizer_json import template_keys, tokenizer_keys

MAX_CONFIG = 8 << 20
MAX_INDEX = 64 << 20
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_TYPES = {"F32": 0, "F16": 1, "BF16": 30, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28}  # GGUF's numbers
# Formats of quantised weights that nothing here reads, as quantization_config.quant_method names them.
_REFUSED = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
    "quark": "Quark",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "aqlm": "AQLM",
    "torchao": "torchao",
    "quanto": "Quanto",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "auto-round": "AutoRound",
}
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?(?:layers\.(\d{1,5})\.)?(.+)", re.DOTALL)
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")
_TOWER = re.compile(r"(?:model\.)?(\w*(?:vision|visual|audio|multi_modal|multimodal|image)\w*)\.")


def is_folder(path: Path) -> bool:
    """Whether a folder holds safetensors and what belongs to them."""
    return (path / CONFIG).is_file() and ((path / INDEX).is_file() or any(path.glob("*.safetensors")))


def open_folder(folder: Path, whole: bool = True) -> ModelFile:
    """Reads the headers in a folder; files may end early unless `whole`.

    Raises FormatError naming file and field, ModelError for what is not supported."""
    config = folder / CONFIG
    document = read_object(config, MAX_CONFIG)
    family, hyper, fp8 = _family(config, document)
    files, sizes, entries = _entries(folder, whole)
    generation = folder / "generation_config.json"
    settings = read_object(generation, MAX_CONFIG) if generation.is_file() else {}
    metadata: dict[str, Any] = {"general.architecture": family.architecture, "general.name": folder.resolve().name}
    metadata |= _hyperparameters(family, hyper)
    metadata |= _sampling(settings)
    translation = _Translation(family, hyper, entries, fp8)
    tensors = translation.tensors()
    table = tensors.get("token_embd.weight")
    metadata |= tokenizer_keys(folder, hyper, settings, table.shape[0] if table is not None and table.shape else 0)
    metadata |= template_keys(folder)
    return ModelFile(
        path=folder,
        files=tuple(files),
        file_sizes=tuple(sizes),
        version=0,
        alignment=1,
        metadata=metadata,
        tensors=tensors,
        notices=translation.notices(),
        origin=_origin(family, config),
    )


def _family(config: Path, document: dict[str, Any]) -> tuple[Family, Hyper, Fp8 | None]:
    kind = document.get("model_type")
    if not isinstance(kind, str):
        raise FormatError(config, "model_type", f"expected a string, found {kind!r:.80}")
    if kind not in FAMILIES:
        raise ModelError(
            f"{config}: model_type {kind!r:.80} is not supported; supported are {', '.join(FAMILIES)}", (kind,)
        )
    fp8 = None
    inner = document.get("text_config")
    for place in (document, inner if isinstance(inner, dict) else {}):
        if (quantised := place.get("quantization_config")) is not None:
            fp8 = _quantisation(config, quantised)
    return FAMILIES[kind], Hyper(config, document, FAMILIES[kind].defaults), fp8


def _quantisation(config: Path, quantised: Any) -> Fp8:
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if isinstance(quantised, dict) and method in METHODS:
        return read_fp8(config, quantised)
    name = _REFUSED.get(method, f"{method!r:.80}") if isinstance(method, str) else f"{method!r:.80}"
    raise ModelError(
        f"{config}: quantization_config: weights quantised as {name} are not supported; "
        "use the model in BF16, F16, F32 or FP8, or a GGUF file of it",
        (str(method),),
    )


def _hyperparameters(family: Family, hyper: Hyper) -> dict[str, Any]:
    named = {key: hyper.get(name) for key, name in family.keys.items() if hyper.has(name)}
    found = {key: value for key, value in (named | family.more(hyper)).items() if value is not None}
    return {f"{family.architecture}.{key}": value for key, value in found.items()}


def _sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """What generation_config.json recommends."""
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    names |= {"repetition_penalty": "penalty_repeat"}
    return {f"general.sampling.{key}": settings[name] for name, key in names.items() if settings.get(name) is not None}


def _origin(family: Family, config: Path) -> Callable[[str], tuple[Path, str]]:
    """How errors call a metadata key or a tensor: as the folder has it, with the name that is ours."""
    ours = {f"{family.architecture}.{key}": name for key, name in family.keys.items()}
    theirs = {name: module for module, name in (*family.outer.items(), *family.names.items()) if isinstance(name, str)}

    def origin(field: str) -> tuple[Path, str]:
        if field in ours:
            return config, f"{ours[field]} ({field})"
        match = re.fullmatch(r'tensor "(?:blk\.(\d+)\.)?(.+?)(\.weight|\.bias)"', field)
        if match and match[2] in theirs:
            layer = f"layers.{match[1]}." if match[1] else ""
            head = "" if match[2] == "output" else "model."
            return config.parent, f'tensor "{head}{layer}{theirs[match[2]]}{match[3]}" ({field[8:-1]})'
        return config.parent, field

    return origin


# ---------------------------------------------------------------- files


def file_tensors(folder: Path) -> dict[str, tuple[int, Entry]]:
    """The tensors of a folder by the names in its files, with the number of their file in the ModelFile."""
    return _entries(folder, whole=True)[2]


def _entries(folder: Path, whole: bool) -> tuple[list[Path], list[int], dict[str, tuple[int, Entry]]]:
    """(files, their sizes, tensors by name with the number of their file)"""
    index = folder / INDEX
    if not index.is_file():
        names = _shards_without_index(folder)
        headers = [read_header(folder / name, whole) for name in names]
        found: dict[str, tuple[int, Entry]] = {}
        for shard, header in enumerate(headers):
            for name, entry in header.tensors.items():
                if name in found:
                    other = headers[found[name][0]].path
                    raise FormatError(header.path, f'tensor "{name}"', f"is also in {other}, and no {INDEX} decides")
                found[name] = (shard, entry)
        return [header.path for header in headers], [header.size for header in headers], found
    weight_map = read_object(index, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(index, "weight_map", f"expected an object of tensors and files, found {weight_map!r:.80}")
    checked: set[str] = set()
    for name, file in weight_map.items():
        if not isinstance(file, str) or file not in checked:
            _check_shard(index, name, file)
            checked.add(file)
    names = sorted(checked)
    for name in names:
        if not (folder / name).exists():
            raise FormatError(
                index, "weight_map", f"names {name}, which is not there; download the missing shards into the folder"
            )
    headers = [read_header(folder / name, whole) for name in names]
    number = {name: shard for shard, name in enumerate(names)}
    found = {}
    for name, file in weight_map.items():
        header = headers[number[file]]
        if name not in header.tensors:
            raise FormatError(header.path, f'tensor "{name}"', f"is missing, but {INDEX} says that it is here")
        found[name] = (number[file], header.tensors[name])
    return [header.path for header in headers], [header.size for header in headers], found


def _check_shard(index: Path, tensor: str, file: Any) -> None:
    if not isinstance(file, str) or not file.endswith(".safetensors") or "\0" in file or "\\" in file:
        raise FormatError(index, f'weight_map "{tensor[:200]}"', f"expected a .safetensors file, found {file!r:.200}")
    if file.startswith("/") or any(part in ("", ".", "..") for part in file.split("/")):
        raise FormatError(index, f'weight_map "{tensor[:200]}"', f"names {file!r:.200}, outside the folder")


def _shards_without_index(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    numbered = [re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name) for name in names]
    sets = {(match[1], match[2]) for match in numbered if match}
    if len(names) == 1 and not sets:
        return names
    if len(sets) == 1 and all(numbered):
        stem, count = next(iter(sets))
        wanted = [f"{stem}-{i + 1:05}-of-{count}.safetensors" for i in range(int(count))]
        if missing := [name for name in wanted if name not in names]:
            raise FormatError(folder, "", f"{missing[0]} is not there; download the missing shards into the folder")
        return wanted
    raise FormatError(folder, "", f"holds {len(names)} .safetensors files and no {INDEX}; download that too")


# ---------------------------------------------------------------- names


class _Translation:
    """Tensors under the names that architectures ask for."""

    def __init__(
        self, family: Family, hyper: Hyper, entries: dict[str, tuple[int, Entry]], fp8: Fp8 | None = None
    ) -> None:
        self._family, self._hyper, self._fp8 = family, hyper, fp8
        self._entries, self._scales = split_scales(hyper.path.parent, entries) if fp8 else (entries, {})
        self._layers = hyper.integer("num_hidden_layers")
        self._predicting = hyper.integer("num_nextn_predict_layers", 0)
        self._skipped: dict[str, int] = {}
        self._rules: dict[tuple[str, bool], tuple[Rule | None, str]] = {}

    def _fail(self, tensor: str, problem: str) -> FormatError:
        return FormatError(self._hyper.path.parent, f'tensor "{tensor}"', problem)

    def notices(self) -> tuple[str, ...]:
        return tuple(
            f"{name}: {nbytes / 1e6:,.1f} MB of weights are not used; only text is supported"
            for name, nbytes in self._skipped.items()
        )

    def tensors(self) -> dict[str, TensorRef]:
        out: dict[str, TensorRef] = {}
        experts: dict[str, list[tuple[int, int, Entry]]] = {}  # (expert, shard, entry)
        for name, (shard, entry) in self._entries.items():
            match = _LAYER.fullmatch(name)
            assert match is not None
            layer, own = match[1], match[2]
            if layer is None and (tower := _TOWER.match(name)) is not None:
                self._skipped[tower[1]] = self._skipped.get(tower[1], 0) + entry.nbytes
                continue
            if layer is not None and int(layer) >= self._layers:
                if int(layer) >= self._layers + self._predicting:
                    counted = f"{self._layers} layers and {self._predicting} of next-token prediction"
                    raise self._fail(name, f"lies behind the {counted} that {CONFIG} counts")
                continue
            prefix = f"blk.{int(layer)}." if layer is not None else ""
            number = None
            if (expert := _EXPERT.search(own)) is not None:
                number = int(expert[1])
                own = f"{own[: expert.start()]}.experts.*.{own[expert.end() :]}"
            rule, suffix = self._rule(own, layer is not None)
            if rule is None:
                continue
            if number is not None and isinstance(rule, str):
                experts.setdefault(f"{prefix}{rule}{suffix}", []).append((number, shard, entry))
                continue
            parts: Iterable[tuple[str, TensorRef]]
            if isinstance(rule, str):
                parts = [(rule, self._ref(shard, entry))]
            elif isinstance(rule, Parts):
                parts = self._parts(rule, shard, entry)
            else:
                parts = self._rewritten(rule, shard, entry)
            for part, ref in parts:
                ours = f"{prefix}{part}{suffix}"
                if ours in out:
                    raise self._fail(name, f"is a second {ours}")
                out[ours] = self._finished(ours, ref)
        out |= {name: self._stacked(name, found) for name, found in experts.items()}
        out |= {ref.name: ref for ref in self._family.tensors(self._hyper)}
        out |= {ref.scales.ref.name: ref.scales.ref for ref in list(out.values()) if ref.scales is not None}
        if self._hyper.get("tie_word_embeddings") is True:
            out.pop("output.weight", None)
        elif self._hyper.get("tie_word_embeddings") is False and "output.weight" not in out:
            raise self._fail("lm_head.weight", "is missing, and tie_word_embeddings is false")
        return out

    def _rule(self, own: str, in_layer: bool) -> tuple[Rule | None, str]:
        """What the tensor `own` holds, and what follows our name; None when nobody asks for it."""
        found = self._rules.get((own, in_layer))
        if found is None:
            table = self._family.names if in_layer else self._family.outer
            found = table.get(own), ""
            module, dot, suffix = own.rpartition(".")
            if found[0] is None and suffix in ("weight", "bias"):
                found = table.get(module), dot + suffix
            self._rules[own, in_layer] = found
        return found

    def _ref(self, shard: int, entry: Entry) -> TensorRef:
        dtype = self._dtype(entry)
        scales = self._scaling(entry) if dtype == F8_E4M3 else None
        return TensorRef(entry.name, dtype, entry.shape, shard, entry.offset, entry.nbytes, scales=scales)

    def _plain(self, shard: int, entry: Entry) -> TensorRef:
        """A tensor that is taken apart or rewritten, which one with scales cannot be yet."""
        if entry.dtype == "F8_E4M3":
            raise ModelError(
                f'{self._hyper.path.parent}: tensor "{entry.name}" is F8_E4M3 and holds what this engine takes for '
                "several tensors: not supported",
                (entry.name,),
            )
        return self._ref(shard, entry)

    def _scaling(self, entry: Entry) -> Scaling:
        assert self._fp8 is not None
        return scaling(self._hyper.path.parent, self._fp8, entry, self._scales.get(entry.name))

    def _dtype(self, entry: Entry) -> int:
        if entry.dtype == "F8_E4M3" and self._fp8 is not None and entry.nbytes:
            return F8_E4M3
        if entry.dtype not in _TYPES:
            raise ModelError(
                f'{self._hyper.path.parent}: tensor "{entry.name}" has type {entry.dtype}, which is not supported; '
                f"expected one of {', '.join(_TYPES)}",
                (entry.name,),
            )
        if not entry.nbytes:
            raise self._fail(entry.name, f"is empty: {list(entry.shape)}")
        return _TYPES[entry.dtype]

    def _parts(self, rule: Parts, shard: int, entry: Entry) -> Iterable[tuple[str, TensorRef]]:
        """Rows of (..., R, C) for each of the names; of a vector (R), elements."""
        whole = self._plain(shard, entry)
        vector = len(entry.shape) == 1
        *outer, rows, columns = (*entry.shape, 1) if vector else entry.shape
        count = len(rule.names)
        share = rule.rows(self._hyper) if rule.rows else (rows // count,) * count
        if sum(share) != rows or len(share) != count or (rule.interleaved and (vector or len(set(share)) > 1)):
            raise self._fail(
                entry.name,
                f"{rows:,} rows, expected {' + '.join(map(str, share))}",
            )
        row_bytes = whole.nbytes // (math.prod(outer) * rows)
        first = 0
        for i, (name, own) in enumerate(zip(rule.names, share, strict=True)):
            shape = (own,) if vector else (*outer, own, columns)
            nbytes = math.prod(outer) * own * row_bytes
            if rule.interleaved:
                at = entry.offset + i * row_bytes
                pieces = [Extent(shard, at, math.prod(outer) * own, count * row_bytes, row_bytes)]
            else:
                starts = [entry.offset + (o * rows + first) * row_bytes for o in range(math.prod(outer))]
                pieces = [Extent(shard, at, own, row_bytes, row_bytes) for at in starts]
            if vector or (len(pieces) == 1 and not rule.interleaved):
                yield name, TensorRef(name, whole.dtype, shape, shard, pieces[0].offset, nbytes)
            else:
                yield name, TensorRef(name, whole.dtype, shape, shard, pieces[0].offset, nbytes, tuple(pieces))
            first += own

    def _rewritten(self, rule: Rewritten, shard: int, entry: Entry) -> Iterable[tuple[str, TensorRef]]:
        whole = self._plain(shard, entry)
        dtype = whole.dtype if entry.name.endswith("_proj") else F32
        for i, name in enumerate(rule.names):
            shape = rule.take(np.broadcast_to(np.float32(0), entry.shape), i).shape

            def make(values: NDArray[Any], i: int = i) -> NDArray[Any]:
                part = np.ascontiguousarray(rule.take(values.reshape(entry.shape), i))
                return (part.view(np.uint32) >> 16).astype(np.uint16) if dtype == BF16 else part

            yield name, made(name, dtype, shape, "transposed", make, [whole])

    def _finished(self, name: str, ref: TensorRef) -> TensorRef:
        """Under our name; norms with what the architecture adds to them."""
        if ref.made is not None:
            return replace(ref, name=name)
        named = replace(ref, name=name, scales=_named(ref.scales, name))
        offset = self._family.norm_offset
        if not offset or not name.endswith("norm.weight"):
            return named

        def add(values: NDArray[Any]) -> NDArray[np.float32]:
            out: NDArray[np.float32] = np.add(values, offset, dtype=np.float32)
            return out

        return made(name, F32, ref.shape, f"norm + {offset:g}", add, [named])

    def _stacked(self, name: str, found: list[tuple[int, int, Entry]]) -> TensorRef:
        """(E, N, K) from one (N, K) per expert, wherever they lie."""
        found.sort(key=lambda item: item[0])
        first = found[0][2]
        dtype, shape = self._dtype(first), first.shape
        if len(shape) != 2:
            raise self._fail(first.name, f"expected a matrix, found {list(shape)}")
        row_bytes = shape[1] * TYPES[dtype].nbytes
        pieces = []
        for wanted, (number, shard, entry) in enumerate(found):
            if number != wanted:
                problem = f"expert {wanted} of {name} is missing, or there twice; {len(found)} experts were found"
                raise self._fail(entry.name, problem)
            if entry.dtype != first.dtype or entry.shape != shape:
                problem = f"is {entry.dtype} {list(entry.shape)}, expected {first.dtype} {list(shape)}"
                raise self._fail(entry.name, f"{problem} as the first expert's")
            pieces.append(Extent(shard, entry.offset, shape[0], row_bytes, row_bytes))
        at, nbytes = pieces[0], len(found) * first.nbytes
        scales = self._stacked_scales(name, found) if dtype == F8_E4M3 else None
        return TensorRef(name, dtype, (len(found), *shape), at.shard, at.offset, nbytes, tuple(pieces), scales=scales)

    def _stacked_scales(self, name: str, found: list[tuple[int, int, Entry]]) -> Scaling:
        each = [self._scaling(entry) for _, _, entry in found]
        first = each[0].ref
        for scales in each:
            if (scales.ref.dtype, scales.rows) != (first.dtype, each[0].rows):
                problem = (
                    f"is {scales.ref.type_name} {list(scales.ref.shape)}, expected the first expert's type and shape"
                )
                raise self._fail(scales.ref.name, problem)
        pieces = tuple(extent for scales in each for extent in scales.ref.extents)
        ref = replace(first, shape=(len(each), *first.shape), nbytes=len(each) * first.nbytes, pieces=pieces)
        return Scaling(replace(ref, name=_scales_name(name)), each[0].rows, each[0].columns)


def _scales_name(name: str) -> str:
    return f"{name}_scale"


def _named(scales: Scaling | None, name: str) -> Scaling | None:
    """Scales of the tensor that is `name` here."""
    return scales and scales._replace(ref=replace(scales.ref, name=_scales_name(name)))
