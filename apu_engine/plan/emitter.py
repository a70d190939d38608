"""What every builder of plans does: tensors, states and ops are added to a spec, their shapes written in letters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from apu_engine._native import NONE, PAGE_TOKENS, lib
from apu_engine.errors import ApuError
from apu_engine.plan.spec import Limits, Op, PlanSpec, Segment, State, Tensor


class Emitter:
    """Collects tensors, states and ops; `layer` is stamped on what is added, -1 outside the layers.

    `dims` gives the letters' sizes; T and O are the limits' rows and outputs.
    """

    def __init__(self, limits: Limits, dims: Mapping[str, int]) -> None:
        self.layer = -1
        self._spec = PlanSpec(limits, dict(dims))
        self._dims = {**dims, "T": limits.max_rows, "O": limits.max_outputs}

    def shape(self, letters: str) -> tuple[int, ...]:
        """ "T H*d 2*d" -> (512, 576, 128)."""
        size = self._dims
        return tuple(
            math.prod(int(letter) if letter.isdigit() else size[letter] for letter in axis.split("*"))
            for axis in letters.split()
        )

    def scratch(self, name: str, letters: str, dtype: int = lib.APU_F32) -> Tensor:
        """A scratch tensor, float32 or int32; a leading T or O makes its rows those of the step."""
        rows = {"T": lib.APU_ROWS_STEP, "O": lib.APU_ROWS_OUTPUT}.get(letters.split()[0], lib.APU_ROWS_FIXED)
        prefix = f"blk.{self.layer}." if self.layer >= 0 else ""
        return self._add(prefix + name, letters, self.shape(letters), dtype, rows, ())

    def _add(
        self,
        name: str,
        letters: str,
        shape: tuple[int, ...],
        dtype: int,
        rows: int,
        segments: tuple[Segment, ...],
    ) -> Tensor:
        tensor = Tensor(len(self._spec.tensors), name, letters, shape, dtype, rows, segments)
        self._spec.tensors.append(tensor)
        return tensor

    def _add_state(
        self, name: str, group: int, window: int, page_count: int, dtype: int, size: int = 0, rows: int = PAGE_TOKENS
    ) -> State:
        """Rows of `size` elements, 0: of K heads."""
        state = State(
            id=len(self._spec.states),
            name=f"blk.{self.layer}.{name}",
            dtype=dtype,
            layer=self.layer,
            group=group,
            window=window,
            heads=1 if size else self._dims["K"],
            head_size=size or self._dims["d"],
            page_count=page_count,
            rows_per_page=rows,
        )
        self._spec.states.append(state)
        return state

    def _op(
        self,
        kind: int,
        *,
        inputs: Sequence[Tensor | None] = (),
        outputs: Sequence[Tensor] = (),
        weights: Sequence[Tensor | None] = (),
        states: Sequence[State] = (),
        ints: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
    ) -> None:
        def ids(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
            return tuple(NONE if tensor is None else tensor.id for tensor in tensors)

        op = Op(
            kind,
            self.layer,
            ids(inputs),
            ids(outputs),
            ids(weights),
            tuple(state.id for state in states),
            ints,
            floats,
        )
        self._spec.ops.append(op)

    def _expect(self, tensor: Tensor, letters: str) -> None:
        expected = self.shape(letters)
        if tensor.shape != expected:
            raise ApuError(f'tensor "{tensor.name}": expected shape ({letters}) = {expected}, found {tensor.shape}')

    def _expect_columns(self, matrix: Tensor, x: Tensor) -> None:
        if len(matrix.shape) != 2 or matrix.shape[1] != x.shape[1]:
            raise ApuError(
                f"matrix {matrix.name}: expected (N, {x.shape[1]}) to multiply {x.name}, found {matrix.shape}"
            )
