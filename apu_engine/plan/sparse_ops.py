"""The part of a PlanBuilder for hyper-connections and for attention over a window and compressed rows."""

from __future__ import annotations

from collections.abc import Sequence

from apu_engine._native import PAGE_TOKENS, lib
from apu_engine.plan.emitter import Emitter
from apu_engine.plan.operands import Pages, Rope, Streams
from apu_engine.plan.spec import State, Tensor


class SparseOps(Emitter):
    """States and ops of DeepSeek V4."""

    def shared_cache(self, pages: Pages, dtype: int) -> State:
        """The current layer's rows that are key and value of all heads, (pages, 128, d)."""
        return self._add_state("cache_shared", pages.group, pages.window, pages.count, dtype)

    def compressed_cache(
        self, name: str, size: int, tokens: int, series: int, open_pages: Pages, row_pages: Pages, dtype: int
    ) -> tuple[State, State]:
        """What the current layer compresses, (pages, 128, 2 * series * size) in F32, and the rows of `size` elements
        made of each `tokens` tokens, (pages, 128 / tokens, size).
        """
        at, to = open_pages, row_pages
        whole = PAGE_TOKENS // tokens
        return (
            self._add_state(f"{name}_open", at.group, at.window, at.count, lib.APU_F32, 2 * series * size),
            self._add_state(f"{name}_rows", to.group, to.window, to.count, dtype, size, whole),
        )

    def streams_in(
        self, name: str, x: Tensor, matrix: Tensor, scale: Tensor, offset: Tensor, streams: Streams, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(T, S*D) -> what a block reads (T, D), and how its result and the streams mix (T, S + S*S).

        Their weights come from rms(x) by `matrix` (S*(S+2), S*D), times `scale` (3), plus `offset` (S*(S+2)).
        """
        out, mix = self.scratch(name, "T D"), self.scratch(f"{name}_mix", f"T {streams.count * (streams.count + 1)}")
        ints, floats = (streams.count, streams.iterations), (eps, streams.eps)
        weights = (matrix, scale, offset)
        self._op(lib.APU_OP_STREAMS_IN, inputs=(x,), outputs=(out, mix), weights=weights, ints=ints, floats=floats)
        return out, mix

    def streams_out(self, x: Tensor, made: Tensor, mix: Tensor, streams: Streams) -> Tensor:
        """x (T, S*D) in place: the streams mixed, and what the block made of them (T, D) given to each."""
        self._op(lib.APU_OP_STREAMS_OUT, inputs=(x, made, mix), outputs=(x,), ints=(streams.count,))
        return x

    def streams_head(
        self, x: Tensor, matrix: Tensor, scale: Tensor, offset: Tensor, streams: Streams, eps: float
    ) -> Tensor:
        """(T, S*D) -> (T, D): the streams' sum after the last block; `matrix` (S, S*D), `scale` (1), `offset` (S)."""
        out = self.scratch("streams_head", "T D")
        self._op(
            lib.APU_OP_STREAMS_IN,
            inputs=(x,),
            outputs=(out,),
            weights=(matrix, scale, offset),
            ints=(streams.count,),
            floats=(eps, streams.eps),
        )
        return out

    def shared_store(
        self, q: Tensor, kv: Tensor, rope: Rope, cache: State, *, norm: Tensor, eps: float, rounding: int
    ) -> None:
        """q (T, H*d) in place, heads normed and rotated; kv (T, d) normed, rotated and rounded to the cache."""
        self._expect(q, "T H*d")
        self._expect(kv, "T d")
        self._rotating(
            lib.APU_OP_SHARED_STORE,
            rope,
            inputs=(q, kv),
            outputs=(q,),
            weights=(norm,),
            states=(cache,),
            eps=eps,
            rounding=rounding,
        )

    def compress(
        self,
        values: Tensor,
        gate: Tensor,
        rope: Rope,
        cache: tuple[State, State],
        *,
        offset: Tensor,
        norm: Tensor,
        eps: float,
        rounding: int,
    ) -> None:
        """values and gate, (T, C*d), to the open pages; a row for each m tokens to the others. `offset` (m, C*d)."""
        self._rotating(
            lib.APU_OP_COMPRESS,
            rope,
            inputs=(values, gate),
            weights=(offset, norm),
            states=cache,
            eps=eps,
            rounding=rounding,
        )

    def index(self, q: Tensor, weights: Tensor, rope: Rope, cache: State, *, scale: float, rounding: int) -> Tensor:
        """q (T, Hi*di), which is used up, and weights (T, Hi) -> ids (T, ki) of the rows with the best scores."""
        self._expect(q, "T Hi*di")
        self._expect(weights, "T Hi")
        ids = self.scratch("compressed_ids", "T ki", lib.APU_I32)
        self._rotating(
            lib.APU_OP_INDEX,
            rope,
            inputs=(q, weights),
            outputs=(ids, q),
            states=(cache,),
            scale=scale,
            rounding=rounding,
        )
        return ids

    def sparse_attention(
        self, q: Tensor, ids: Tensor | None, rope: Rope, cache: Sequence[State], *, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """(T, H*d) -> (T, H*d): softmax(scale q c^T) c, rotated back, over the cache's window and its compressed rows,
        where there are any: those of `ids`, or all.
        """
        out = self.scratch("attention", "T H*d")
        self._rotating(
            lib.APU_OP_SPARSE_ATTENTION,
            rope,
            inputs=(q, ids),
            outputs=(out,),
            weights=(sinks,),
            states=cache,
            scale=scale,
        )
        return out

    def _rotating(
        self,
        kind: int,
        rope: Rope,
        *,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor] = (),
        weights: Sequence[Tensor | None] = (),
        states: Sequence[State],
        eps: float = 0.0,
        scale: float = 0.0,
        rounding: int = 0,
    ) -> None:
        ints, floats = rope.ints(rounding), (*rope.floats(eps), scale)
        self._op(kind, inputs=inputs, outputs=outputs, weights=weights, states=states, ints=ints, floats=floats)
