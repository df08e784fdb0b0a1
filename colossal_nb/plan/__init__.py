"""What should happen: plain arithmetic about strategies, meshes, layouts and schedules. No torch, no processes."""

from colossal_nb.plan.layout import Layout, On, Partial, Placement, Replicate, Shard
from colossal_nb.plan.mesh import AXES, Mesh
from colossal_nb.plan.moves import Move
from colossal_nb.plan.schedule import Action, Exchange, Transfer, in_flight, program, schedule, validate
from colossal_nb.plan.simulate import simulate
from colossal_nb.plan.strategy import FIELDS, Strategy
from colossal_nb.plan.volume import sent_bytes

__all__ = [
    "AXES", "FIELDS", "Action", "Exchange", "Layout", "Mesh", "Move", "On", "Partial", "Placement", "Replicate",
    "Shard", "Strategy", "Transfer", "in_flight", "program", "schedule", "sent_bytes", "simulate", "validate",
]  # fmt: skip
