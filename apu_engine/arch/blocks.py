"""What architectures share: tensors bound by canonical GGUF name with checked shapes, and half-layers.

A Blocks object is one model being built: its file, hyperparameters and plan builder. Matrices may have any
type with a kernel; norms, biases and rotary factors are float32, as every GGUF writer stores them, or of 16 bits.
Tensors nobody asks for are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from apu_engine._native import lib
from apu_engine.arch.config import Config
from apu_engine.errors import FormatError, ModelError
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.spec import State, Tensor
from apu_engine.weights.ggml_types import type_name
from apu_engine.weights.model_file import ModelFile, TensorRef

MATRIX_TYPES: frozenset[int] = frozenset(
    (
        lib.APU_F32,
        lib.APU_F16,
        lib.APU_BF16,
        lib.APU_Q4_0,
        lib.APU_Q4_1,
        lib.APU_Q5_0,
        lib.APU_Q5_1,
        lib.APU_Q8_0,
        lib.APU_Q2_K,
        lib.APU_Q3_K,
        lib.APU_Q4_K,
        lib.APU_Q5_K,
        lib.APU_Q6_K,
        lib.APU_IQ2_XXS,
        lib.APU_IQ2_XS,
        lib.APU_IQ3_XXS,
        lib.APU_IQ1_S,
        lib.APU_IQ4_NL,
        lib.APU_IQ3_S,
        lib.APU_IQ2_S,
        lib.APU_IQ4_XS,
        lib.APU_IQ1_M,
        lib.APU_TQ1_0,
        lib.APU_TQ2_0,
        lib.APU_MXFP4,
        lib.APU_NVFP4,
        lib.APU_F8_E4M3,
    )
)
VECTOR_TYPES: frozenset[int] = frozenset((lib.APU_F32, lib.APU_F16, lib.APU_BF16))  # a plan keeps float32 of them
INDEX_TYPES: frozenset[int] = frozenset((lib.APU_I32,))


class Blocks:
    """`b.matrix("attn_q", "H*d D")` binds `blk.<layer>.attn_q.weight`; outside the layers names have no
    prefix.

    `caches` has K and V of each layer, or its latent rows. Raises FormatError naming the tensor that is missing or
    mis-shaped, ModelError naming those whose type has no kernel.
    """

    def __init__(self, model: ModelFile, config: Config, builder: PlanBuilder) -> None:
        self.model = model
        self.config = config
        self.builder = builder
        self.caches: list[tuple[State, ...]] = []

    def layers(self) -> Iterator[int]:
        """Layer numbers; what is emitted meanwhile belongs to that layer."""
        for layer in range(self.config.layers):
            self.builder.layer = layer
            yield layer
        self.builder.layer = -1

    # ------------------------------------------------------------ tensors

    def matrix(self, name: str, letters: str) -> Tensor:
        """`name`.weight of the current layer, where there is one, in any type that kernels multiply with.

        FormatError when it is missing or its shape is not `letters`, ModelError for another type.
        """
        return self._bind(f"{name}.weight", letters, MATRIX_TYPES)

    def vector(self, name: str, letters: str = "D") -> Tensor:
        """As `matrix`, of floats."""
        return self._bind(f"{name}.weight", letters, VECTOR_TYPES)

    def table(self, name: str, letters: str) -> Tensor:
        """As `matrix`, in I32."""
        return self._bind(f"{name}.weight", letters, INDEX_TYPES)

    def stacked(self, name: str, letters: str) -> Tensor:
        """Matrices of heads, stacked; some converters write their rows as those of one matrix."""
        ref = self.model.tensors.get(self._full(f"{name}.weight"))
        return self.grouped(name, letters) if ref is not None and len(ref.shape) == 2 else self.matrix(name, letters)

    def grouped(self, name: str, letters: str) -> Tensor:
        """A matrix in groups of rows: `letters` say the groups, a group's rows and its columns."""
        shape = self.builder.shape(letters)
        rows = shape[0] * shape[1]
        ref = self._checked(f"{name}.weight", (rows, shape[2]), f"{rows} {letters.split()[2]}", MATRIX_TYPES)
        return self.builder.weight_rows(ref, ref.name, letters, [(0, rows)])

    def bias(self, name: str, letters: str) -> Tensor | None:
        """The bias that belongs to a matrix, when the file has one."""
        return self._bind(f"{name}.bias", letters, VECTOR_TYPES) if self.has(f"{name}.bias") else None

    def stacked_bias(self, name: str, letters: str) -> Tensor | None:
        """The biases of stacked matrices (E, N), when the file has them, as one vector."""
        if not self.has(f"{name}.bias"):
            return None
        ref = self._checked(f"{name}.bias", self.builder.shape(letters), letters, VECTOR_TYPES)
        return self.builder.weight(replace(ref, shape=(ref.elements,)), letters.replace(" ", "*"))

    def has(self, name: str) -> bool:
        """Whether the file has the tensor, in the current layer where there is one."""
        return self._full(name) in self.model.tensors

    def _full(self, name: str) -> str:
        layer = self.builder.layer
        return f"blk.{layer}.{name}" if layer >= 0 else name

    def _bind(self, name: str, letters: str, types: frozenset[int]) -> Tensor:
        return self.builder.weight(self._checked(name, self.builder.shape(letters), letters, types), letters)

    def _checked(self, name: str, shape: tuple[int, ...], letters: str, types: frozenset[int]) -> TensorRef:
        ref = self.model.tensors.get(self._full(name))
        if ref is None:
            raise self._fail(self._full(name), f"is missing; expected shape ({letters}) = {shape}")
        if ref.shape != shape:
            raise self._fail(ref.name, f"expected shape ({letters}) = {shape}, found {ref.shape}")
        if ref.dtype not in types:
            raise self._unsupported(ref, types)
        return ref

    def _fail(self, tensor: str, problem: str) -> FormatError:
        return self.model.fail(f'tensor "{tensor}"', problem)

    def _unsupported(self, ref: TensorRef, types: frozenset[int]) -> ModelError:
        others = [t.name for t in self.model.tensors.values() if t.dtype == ref.dtype]
        known = ", ".join(type_name(dtype) for dtype in sorted(types))
        return ModelError(
            f'{self.model.path}: tensor "{ref.name}" has type {ref.type_name}, which has no kernel here '
            f"({len(others)} tensors have it); expected one of {known}. Use a file quantised to one of these",
            others,
        )

    # ------------------------------------------------------------ parts of a forward pass

    def embed(self) -> Tensor:
        """(T, D): the residual stream, or (T, S*D): all of them."""
        c = self.config
        copies = c.streams.count if c.streams else 0
        return self.builder.embed(self.matrix("token_embd", "V D"), c.embedding_scale, copies)

    def attention(self, x: Tensor, layer: int, *, head_norms: bool = False, sinks: bool = False) -> Tensor:
        """Norm, q, k, v, rotary embedding, cache and attention of one layer: (T, D) -> (T, H*d)."""
        c, b = self.config, self.builder
        letters = {"attn_q": "H*d", "attn_k": "K*d", "attn_v": "K*d"}
        q, k, v = b.matmul(
            ("q", "k", "v"),
            x,
            [self.matrix(name, f"{rows} D") for name, rows in letters.items()],
            biases=[self.bias(name, rows) for name, rows in letters.items()],
            norm=self.vector("attn_norm"),
            eps=c.eps,
        )
        factors = self._rope_factors() if c.rope_factors and not c.windows[layer] else None
        b.rope_store(
            q,
            k,
            v,
            c.ropes[layer],
            self.caches[layer],
            q_norm=self.vector("attn_q_norm", "d") if head_norms else None,
            k_norm=self.vector("attn_k_norm", "d") if head_norms else None,
            eps=c.eps,
            factors=factors,
        )
        sink = self.vector("attn_sinks", "H") if sinks else None
        return b.attention(q, self.caches[layer], c.attention_scale, c.attention_softcap, sink)

    def _rope_factors(self) -> Tensor:
        layer, self.builder.layer = self.builder.layer, -1
        try:
            return self.vector("rope_freqs", "r")
        finally:
            self.builder.layer = layer

    def latent_attention(self, x: Tensor, layer: int) -> Tensor:
        """Latent attention of one layer in its absorbed form (arXiv 2405.04434): (T, D) -> (T, H*dv).

        A head's key matrix goes to the query and its value matrix to the result, so that attention runs over the rows
        of the cache as they are. Files have these matrices as attn_k_b and attn_v_b, or joined in attn_kv_b, where a
        head's dn rows of keys come before its dv rows of values.
        """
        c, b = self.config, self.builder
        assert c.latent is not None
        name, rows = ("attn_q_a", "Rq") if c.latent.q_rank else ("attn_q", "H*dq")
        q, latent = b.matmul(
            ("q", "latent"),
            x,
            [self.matrix(name, f"{rows} D"), self.matrix("attn_kv_a_mqa", "d D")],
            norm=self.vector("attn_norm"),
            eps=c.eps,
        )
        if c.latent.q_rank:
            matrix, norm = self.matrix("attn_q_b", "H*dq Rq"), self.vector("attn_q_a_norm", "Rq")
            (q,) = b.matmul(("q_heads",), q, [matrix], norm=norm, eps=c.eps)
        cache = self.caches[layer]
        b.latent_store(q, latent, c.ropes[layer], cache, norm=self.vector("attn_kv_a_norm", "Rk"), eps=c.eps)
        joined = not self.has("attn_k_b.weight") and self.has("attn_kv_b.weight")
        if joined:
            keys, values = self._joined("attn_k_b", "H dn Rk", 0), self._joined("attn_v_b", "H dv Rk", c.latent.nope)
        else:
            keys, values = self.stacked("attn_k_b", "H Rk dn"), self.stacked("attn_v_b", "H dv Rk")
        absorbed = b.head_matmul("q_absorbed", q, keys, "T H*d", across=joined)
        attended = b.latent_attention(absorbed, cache, c.attention_scale)
        return b.head_matmul("attention_heads", attended, values, "T H*dv")

    def _joined(self, name: str, letters: str, first: int) -> Tensor:
        """A part of each head's rows in attn_kv_b, from row `first` of the head, under the name it has alone."""
        c = self.config
        assert c.latent is not None
        each = c.latent.nope + c.latent.value
        ref = self._checked("attn_kv_b.weight", (c.H * each, c.latent.rank), f"H*{each} Rk", MATRIX_TYPES)
        count = self.builder.shape(letters)[1]
        ranges = [(head * each + first, count) for head in range(c.H)]
        return self.builder.weight_rows(ref, self._full(f"{name}.weight"), letters, ranges)

    def attention_output(self, attended: Tensor, residual: Tensor | None, letters: str = "D H*d") -> Tensor:
        """(T, H*d) -> (T, D), added to `residual` in place when there is one."""
        return self._project("attn_output", attended, letters, residual)

    def feed_forward(self, x: Tensor, residual: Tensor | None, *, norm: str = "ffn_norm") -> Tensor:
        """Norm and gated feed-forward: (T, D) -> (T, D), added to `residual` in place when there is one."""
        c = self.config
        hidden = self.builder.glu(
            "ffn",
            x,
            self.matrix("ffn_gate", "F D"),
            self.matrix("ffn_up", "F D"),
            c.activation,
            biases=(self.bias("ffn_gate", "F"), self.bias("ffn_up", "F")),
            norm=self.vector(norm),
            eps=c.eps,
        )
        return self._project("ffn_down", hidden, "D F", residual)

    def experts(
        self,
        x: Tensor,
        residual: Tensor | None,
        *,
        norm: str = "ffn_norm",
        table: Tensor | None = None,
        limits: tuple[float, float] = (0.0, 0.0),
    ) -> Tensor:
        """Norm, router and the chosen experts' gated feed-forward: (T, D) -> (T, D), added to `residual` in place when
        there is one. With a `table` (V, k) tokens have their experts; `limits`, of theirs and of shared ones, bound
        what meets the activation.
        """
        c, b = self.config, self.builder
        assert c.experts is not None
        weight = self.vector(norm)
        ids, weights = b.route(
            x,
            self.matrix("ffn_gate_inp", "E D"),
            norm=weight,
            eps=c.eps,
            score=c.experts.score,
            normalise=c.experts.normalise,
            scale=c.experts.scale,
            added=self.bias("ffn_gate_inp", "E"),
            bias=None if table else self.bias("exp_probs_b", "E"),
            groups=c.experts.groups,
            groups_used=c.experts.groups_used,
            group_score="sum2" if c.experts.score == "sigmoid" else "max",
            table=table,
        )
        gate, up = self.matrix("ffn_gate_exps", "E Fe D"), self.matrix("ffn_up_exps", "E Fe D")
        biases = self.stacked_bias("ffn_gate_exps", "E Fe"), self.stacked_bias("ffn_up_exps", "E Fe")
        hidden = b.experts_glu(
            "ffn", x, ids, gate, up, c.activation, biases=biases, norm=weight, eps=c.eps, limit=limits[0]
        )
        down, bias = self.matrix("ffn_down_exps", "E D Fe"), self.stacked_bias("ffn_down_exps", "E D")
        if not c.experts.shared:
            return b.experts_sum("ffn_down", hidden, ids, weights, down, bias=bias, residual=residual, out=residual)
        gate, up = self.matrix("ffn_gate_shexp", "Fs D"), self.matrix("ffn_up_shexp", "Fs D")
        shared = b.glu("ffn_shared", x, gate, up, c.activation, norm=weight, eps=c.eps, limit=limits[1])
        out = b.experts_sum("ffn_down", hidden, ids, weights, down, bias=bias, residual=residual, out=residual)
        return self._project("ffn_down_shexp", shared, "D Fs", residual=out)

    def _project(self, name: str, x: Tensor, letters: str, residual: Tensor | None) -> Tensor:
        biases: Sequence[Tensor | None] = (self.bias(name, "D"),)
        matrix = self.matrix(name, letters)
        (out,) = self.builder.matmul((name,), x, [matrix], biases=biases, residual=residual, out=residual)
        return out

    def head(self, x: Tensor) -> None:
        """Final norm, logits and sampling; without an output matrix the embedding table serves (tied).

        Nothing after the logits averages errors out: precision "fine" quantises their input to two terms, which on
        SmolLM2 and Gemma 3 takes a quarter to a third off the divergence from float activations.
        """
        c = self.config
        hidden = self.builder.gather_norm(x, self.vector("output_norm"), c.eps)
        name = "output" if self.has("output.weight") else "token_embd"
        matrix = self.matrix(name, "V D")
        (logits,) = self.builder.matmul(("logits",), hidden, [matrix], softcap=c.final_softcap, head=True)
        self.builder.sample(logits)
