"""Emits a plan: one small method per op, each checking shapes where a mistake is made, not where it surfaces.

An architecture calls these in the order of its forward pass; the result holds for any number of rows. Shapes
are written in letters ("T H*d") that `dims` resolves, so that an error and the dump speak the language of the
model. Scratch is named after the layer and the method's `name`; the arena is laid out at the end, in
`finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apu_engine._native import lib
from apu_engine.errors import ApuError
from apu_engine.plan.liveness import place
from apu_engine.plan.operands import Rope
from apu_engine.plan.sparse_ops import SparseOps
from apu_engine.plan.spec import Limits, PlanSpec, Segment, State, Tensor
from apu_engine.plan.weights import Binder, scale_rows, scales_of
from apu_engine.weights.model_file import TensorRef

ACTIVATIONS: dict[str, int] = {
    "silu": lib.APU_ACT_SILU,
    "gelu_tanh": lib.APU_ACT_GELU_TANH,
    "gelu_erf": lib.APU_ACT_GELU_ERF,
    "swiglu_oai": lib.APU_ACT_SWIGLU_OAI,
}
SCORES: dict[str, int] = {
    "softmax": lib.APU_SCORE_SOFTMAX,
    "sigmoid": lib.APU_SCORE_SIGMOID,
    "sqrt_softplus": lib.APU_SCORE_SQRT_SOFTPLUS,
}
GROUP_SCORES: dict[str, int] = {"max": lib.APU_GROUP_MAX, "sum2": lib.APU_GROUP_SUM2}
PRECISIONS: dict[str, int] = {  # of the layers' matrices; "fine" gives the output head two terms
    "default": lib.APU_PRECISION_DEFAULT,
    "fine": lib.APU_PRECISION_DEFAULT,
    "exact": lib.APU_PRECISION_EXACT,
}
MAX_MATRICES = 4  # of one matmul op
SMALLEST_SUM = 2.0**-14  # that a row's expert weights are divided by; below it they vanish instead


class PlanBuilder(SparseOps):
    """Tensors, states and ops of the layers that all architectures have; those of streams and compressed rows are
    SparseOps'.
    """

    def __init__(self, binder: Binder, limits: Limits, dims: Mapping[str, int], precision: str = "default") -> None:
        super().__init__(limits, dims)
        self._binder = binder
        self._precision = PRECISIONS[precision]
        self._fine_head = precision == "fine"
        self._weights: dict[str, Tensor] = {}

    # ------------------------------------------------------------ tensors and states

    def weight(self, ref: TensorRef, letters: str) -> Tensor:
        """The weight tensor for `ref`; the same one when it is asked for twice (tied output)."""
        found = self._weights.get(ref.name)
        if found is None:
            found = self._add(ref.name, letters, ref.shape, ref.dtype, lib.APU_ROWS_FIXED, self._binder.segments(ref))
            found.scales = scales_of(ref, self._binder)
            self._weights[ref.name] = found
        return found

    def weight_rows(self, ref: TensorRef, name: str, letters: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Rows (first, count) of `ref`, one range after the other, as a weight of their own over the same bytes."""
        parts: list[Segment] = []
        row = 0
        given = self._binder.segments(ref)
        for first, count in ranges:
            for s in given:
                begin, end = max(first, s.row_begin), min(first + count, s.row_begin + s.row_count)
                if begin >= end:
                    continue
                after = (s.row_begin + s.row_count - end) * s.row_stride
                address = s.address + (begin - s.row_begin) * s.row_stride
                parts.append(Segment(address, row, end - begin, s.row_stride, s.padding + after))
                row += end - begin
        out = self._add(name, letters, self.shape(letters), ref.dtype, lib.APU_ROWS_FIXED, tuple(parts))
        out.scales = scale_rows(scales_of(ref, self._binder), ranges)
        return out

    def kv_cache(self, group: int, window: int, page_count: int, dtype: int) -> tuple[State, State]:
        """K and V of the current layer, (pages, K, 128, d); `window` tokens are seen, 0 means all."""
        return (
            self._add_state("cache_k", group, window, page_count, dtype),
            self._add_state("cache_v", group, window, page_count, dtype),
        )

    def latent_cache(self, group: int, window: int, page_count: int, dtype: int) -> tuple[State]:
        """The latent rows of the current layer, (pages, 128, d): keys and values of all heads; K is 1."""
        return (self._add_state("cache_latent", group, window, page_count, dtype),)

    # ------------------------------------------------------------ ops, in the order of a forward pass

    def embed(self, table: Tensor, scale: float = 1.0, copies: int = 0) -> Tensor:
        """(V, D) -> (T, D): the rows of the step's tokens, times `scale`; (T, S*D) of S `copies`."""
        out = self.scratch("x", "T S*D" if copies else "T D")
        self._expect(table, "V D")
        self._op(lib.APU_OP_EMBED, outputs=(out,), weights=(table,), ints=(copies,), floats=(scale,))
        return out

    def rms_norm(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(T, D) -> (T, D): x / rms(x) * weight, plus `residual`, which may be `out` itself."""
        out = out or self.scratch(name, x.letters)
        self._expect(weight, x.letters.split()[-1])
        self._op(lib.APU_OP_RMS_NORM, inputs=(x, residual), outputs=(out,), weights=(weight,), floats=(eps,))
        return out

    def matmul(
        self,
        names: Sequence[str],
        x: Tensor,
        matrices: Sequence[Tensor],
        *,
        biases: Sequence[Tensor | None] = (),
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
        head: bool = False,
    ) -> tuple[Tensor, ...]:
        """(T, K) by up to four (N, K) -> one (T, N) each: norm(x) W^T + bias, plus `residual` on the first.

        `out` takes the first result in place of a new tensor; it may be `residual` itself. The output
        `head` takes its input as two int8 terms instead of one when the plan's precision is "fine".
        """
        if not 1 <= len(matrices) <= MAX_MATRICES or len(names) != len(matrices):
            raise ApuError(
                f"matmul {names}: expected 1 to {MAX_MATRICES} matrices, one name each, found {len(matrices)}"
            )
        rows = x.letters.split()[0]
        outputs = []
        for i, (name, matrix) in enumerate(zip(names, matrices, strict=True)):
            self._expect_columns(matrix, x)
            given = out if i == 0 else None
            outputs.append(given or self.scratch(name, f"{rows} {matrix.letters.split()[0]}"))
        precision = lib.APU_PRECISION_FINE if head and self._fine_head else self._precision
        self._matmul(x, outputs, matrices, biases, norm, (lib.APU_ACT_NONE, precision), eps, residual, softcap)
        return tuple(outputs)

    def glu(
        self,
        name: str,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        *,
        biases: Sequence[Tensor | None] = (),
        norm: Tensor | None = None,
        eps: float = 0.0,
        limit: float = 0.0,
    ) -> Tensor:
        """(T, D) -> (T, F): act(norm(x) gate^T) * (norm(x) up^T), biases added before the activation.

        With a `limit` the gate is at most that, and up lies between -limit and limit.
        """
        self._expect_columns(gate, x)
        self._expect_columns(up, x)
        out = self.scratch(name, f"T {gate.letters.split()[0]}")
        ints = (ACTIVATIONS[activation], self._precision)
        self._matmul(x, [out], [gate, up], biases, norm, ints, eps, None, 0.0, limit)
        return out

    def _matmul(
        self,
        x: Tensor,
        outputs: Sequence[Tensor],
        matrices: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        norm: Tensor | None,
        ints: tuple[int, int],
        eps: float,
        residual: Tensor | None,
        softcap: float,
        limit: float = 0.0,
    ) -> None:
        if norm is not None:
            self._expect(norm, x.letters.split()[-1])
        if residual is not None and residual.shape != outputs[0].shape:
            raise ApuError(f'"{outputs[0].name}": residual "{residual.name}" has another shape, {residual.letters}')
        absent: list[Tensor | None] = [None] * (MAX_MATRICES - len(matrices))
        self._op(
            lib.APU_OP_MATMUL,
            inputs=(x, residual),
            outputs=outputs,
            weights=[norm, *matrices, *absent, *biases],
            ints=ints,
            floats=(eps, softcap, limit),
        )

    def route(
        self,
        x: Tensor,
        router: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        score: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        added: Tensor | None = None,
        bias: Tensor | None = None,
        groups: int = 0,
        groups_used: int = 0,
        group_score: str = "max",
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(T, D) by (E, D) -> the k best experts' ids (T, k), ascending, and weights (T, k).

        Weights are scores of norm(x) router^T + `added` (E), divided by their sum over the k where `normalise`, times
        `scale`. The choice alone goes by score + `bias` (E), within the best `groups_used` of `groups` equal parts of
        the experts; a part's score is its largest ("max") or its two largest added ("sum2"). With a `table` (V, k) of
        experts there is no choice: a row goes to its token's.
        """
        self._expect(router, f"E {x.letters.split()[1]}")
        for vector in (added, bias):
            if vector is not None:
                self._expect(vector, "E")
        if table is not None:
            self._expect(table, "V k")
        ids, weights = self.scratch("expert_ids", "T k", lib.APU_I32), self.scratch("expert_weights", "T k")
        self._op(
            lib.APU_OP_ROUTE,
            inputs=(x,),
            outputs=(ids, weights),
            weights=(norm, router, bias, table, added),
            ints=(SCORES[score], int(normalise), groups, groups_used, GROUP_SCORES[group_score]),
            floats=(eps, scale, SMALLEST_SUM),
        )
        return ids, weights

    def experts_glu(
        self,
        name: str,
        x: Tensor,
        ids: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        *,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
        norm: Tensor | None = None,
        eps: float = 0.0,
        limit: float = 0.0,
    ) -> Tensor:
        """(T, D) -> (T, k, Fe): act(norm(x) gate^T) * (norm(x) up^T) of each row's experts; matrices (E, Fe, D).

        `limit` as in `glu`; `biases` (E*Fe) are added before it.
        """
        for matrix in (gate, up):
            self._expect(matrix, "E Fe D")
        for vector in biases:
            if vector is not None:
                self._expect(vector, "E*Fe")
        out = self.scratch(name, "T k Fe")
        ints = (ACTIVATIONS[activation], self._precision)
        self._op(
            lib.APU_OP_EXPERTS,
            inputs=(x, ids),
            outputs=(out,),
            weights=(norm, gate, up, *biases),
            ints=ints,
            floats=(eps, limit),
        )
        return out

    def experts_sum(
        self,
        name: str,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        down: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(T, k, Fe) -> (T, D): residual + sum of weight * (x down^T + `bias`) over each row's experts; matrices
        (E, D, Fe), `bias` (E*D).
        """
        self._expect(x, "T k Fe")
        self._expect(down, "E D Fe")
        if bias is not None:
            self._expect(bias, "E*D")
        out = out or self.scratch(name, "T D")
        self._op(
            lib.APU_OP_EXPERTS,
            inputs=(x, ids, weights, residual),
            outputs=(out,),
            weights=(None, down, None, bias),
            ints=(lib.APU_ACT_NONE, self._precision),
        )
        return out

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope,
        cache: tuple[State, ...],
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        factors: Tensor | None = None,
    ) -> None:
        """q (T, H*d) in place, k and v (T, K*d) to the cache; per-head norms first, then the rotation."""
        for tensor, letters in ((q, "T H*d"), (k, "T K*d"), (v, "T K*d")):
            self._expect(tensor, letters)
        self._op(
            lib.APU_OP_ROPE_STORE,
            inputs=(q, k, v),
            outputs=(q,),
            weights=(q_norm, k_norm, factors),
            states=cache,
            ints=rope.ints(),
            floats=rope.floats(eps),
        )

    def latent_store(
        self, q: Tensor, latent: Tensor, rope: Rope, cache: tuple[State, ...], *, norm: Tensor, eps: float
    ) -> None:
        """The last `rope.dims` of q's heads, (T, H*dq) in place, and of `latent` (T, d) rotated, whose others are
        normed; `latent` goes to the cache.
        """
        self._expect(q, "T H*dq")
        self._expect(latent, "T d")
        self._expect(norm, "Rk")
        self._op(
            lib.APU_OP_LATENT_STORE,
            inputs=(q, latent),
            outputs=(q,),
            weights=(norm,),
            states=cache,
            ints=rope.ints(self._dims["H"]),
            floats=rope.floats(eps),
        )

    def head_matmul(self, name: str, x: Tensor, matrix: Tensor, letters: str, *, across: bool = False) -> Tensor:
        """Head h of x (T, H*(K+r)) by matrix h of (H, N, K), or (H, K, N) where `across`: (T, H*(N+r)), `letters`.

        The last r elements of a head follow its products as they are.
        """
        heads, inner = matrix.shape[0], matrix.shape[1 if across else 2]
        rest = x.shape[1] // heads - inner
        out = self.scratch(name, letters)
        if rest < 0 or out.shape[1] != heads * (matrix.shape[2 if across else 1] + rest):
            raise ApuError(
                f'"{out.name}" {out.shape}: matrices "{matrix.name}" {matrix.shape} do not give it from {x.shape}'
            )
        ints = (int(across), self._precision, rest)
        self._op(lib.APU_OP_HEAD_MATMUL, inputs=(x,), outputs=(out,), weights=(matrix,), ints=ints)
        return out

    def latent_attention(self, q: Tensor, cache: tuple[State, ...], scale: float) -> Tensor:
        """(T, H*d) -> (T, H*Rk): softmax(scale q c^T) over the cache's rows c, of which the first Rk are the values."""
        self._expect(q, "T H*d")
        out = self.scratch("attention", "T H*Rk")
        ints = (self._dims["Rk"],)
        self._op(lib.APU_OP_LATENT_ATTENTION, inputs=(q,), outputs=(out,), states=cache, ints=ints, floats=(scale,))
        return out

    def attention(
        self, q: Tensor, cache: tuple[State, ...], scale: float, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """(T, H*d) -> (T, H*d).

        Softmax(scale q k^T) v over each row's sequence, within the cache's window; `sinks` (H) are scores without a
        value.
        """
        out = self.scratch("attention", "T H*d")
        if sinks is not None:
            self._expect(sinks, "H")
        self._op(
            lib.APU_OP_ATTENTION,
            inputs=(q,),
            outputs=(out,),
            weights=(sinks,),
            states=cache,
            floats=(scale, softcap),
        )
        return out

    def gather_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(T, D) -> (O, D): the normed rows of the step's outputs."""
        self._expect(weight, "D")
        out = self.scratch("hidden", "O D")
        self._op(lib.APU_OP_GATHER_NORM, inputs=(x,), outputs=(out,), weights=(weight,), floats=(eps,))
        return out

    def sample(self, logits: Tensor) -> None:
        """(O, V) -> what each output asked for."""
        self._expect(logits, "O V")
        self._op(lib.APU_OP_SAMPLE, inputs=(logits,))

    def finish(self) -> PlanSpec:
        """Places the scratch and returns the plan: everything before `sample` is the slice "forward"."""
        spec = self._spec
        spec.arena_bytes = place(spec.tensors, spec.ops)
        last = len(spec.ops)
        spec.slices = {"forward": (0, last - 1), "sample": (last - 1, last)}
        if spec.ops[-1].kind != lib.APU_OP_SAMPLE:
            raise ApuError("a plan ends with sample")
        return spec
