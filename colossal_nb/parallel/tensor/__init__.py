"""1D tensor parallelism by rules on the recorded dataflow: `plan` decides on the whole model, `apply` changes it."""

from colossal_nb.parallel.tensor.apply import apply
from colossal_nb.parallel.tensor.layers import Linear1D
from colossal_nb.parallel.tensor.planning import plan
from colossal_nb.parallel.tensor.values import Report, TensorPlan
from colossal_nb.parallel.tensor.vocabulary import ShardedLogits, gather

__all__ = ["Linear1D", "Report", "ShardedLogits", "TensorPlan", "apply", "gather", "plan"]
