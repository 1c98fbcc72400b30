"""Names of a row's columns that several parts know."""

LAYOUT = "layout"
"""In the first row, and in those from which on it is another one."""

ROLLED_BACK_FROM, ROLLBACKS, ROLLBACK_LOST_S = "rolled_back_from", "rollbacks", "rollback_lost_s"
"""In the first row after the run went back: from which step, the how-manieth time, and how much time was lost."""

UNIX_S = "unix_s"
TIME_MS = "time_per_iteration_ms"
VALIDATION_MS, SAVING_MS = "validation_ms", "saving_ms"
APART = (VALIDATION_MS, SAVING_MS)
"""What a step's time leaves out."""

EXPERT_LOAD, EXPERT_LOAD_LAYER = "expert_load", "expert_load_layer"
ROUTER_ENTROPY, DROPPED_TOKENS = "router_entropy", "dropped_tokens"
"""Of sparse models. Some steps have the first and the third of each layer too: ``expert_load/layers.0``."""

# Only measured steps have these: ``update_ratio/layers.0.attn.q.weight``, ``slowest_rank``.

WEIGHT_NORM = "weight_norm"
GRAD_NORM = "grad_norm"
UPDATE_RATIO = "update_ratio"
ACTIVATION_NORM = "activation_norm"
NORMS = (WEIGHT_NORM, GRAD_NORM, UPDATE_RATIO, ACTIVATION_NORM)
"""What stands before the slash; after it the parameter's global name, or the place of an activation."""

SLOWEST_RANK, SLOWEST_RANK_MS, MEDIAN_RANK_MS = "slowest_rank", "slowest_rank_ms", "median_rank_ms"
SLOWEST_HOST, SLOWEST_SINCE = "slowest_host", "slowest_since"
FULLEST_RANK, FULLEST_RANK_GIB = "fullest_rank", "fullest_rank_gib"
