"""Plans: built from op methods over named tensors, placed in an arena, listed, and run step by step."""

from __future__ import annotations

from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.operands import Rope
from apu_engine.plan.plan import Event, Plan, reserve_states
from apu_engine.plan.spec import Limits, PlanSpec, State, Tensor
from apu_engine.plan.step import HIDDEN, LOGITS, MAX_TOP, SAMPLE, TOP, Step
from apu_engine.plan.weights import OfflineBinder

__all__ = [
    "HIDDEN",
    "LOGITS",
    "MAX_TOP",
    "SAMPLE",
    "TOP",
    "Event",
    "Limits",
    "OfflineBinder",
    "Plan",
    "PlanBuilder",
    "PlanSpec",
    "Rope",
    "State",
    "Step",
    "Tensor",
    "reserve_states",
]
