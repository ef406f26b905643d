"""The columns of the tables that a fused step reads; ``native.c`` names them in the same order."""

__all__ = ["NUMBERS", "SHARED", "TENSORS"]

# A row for each tensor (int64): addresses, its size, its group, its place among all parameters, and its first block.
TENSORS = ("w", "m", "v", "step", "numel", "group", "place", "compensation", "first_block")
# A row for each group (float64).
NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "log_beta1", "log_beta2", "seed")
# A row for each tensor, worked out at each step: what its coordinates share.
SHARED = (
    "moves", "started", "size", "shrink", "beta1", "beta1_rest", "beta2", "beta2_rest",
    "eps", "weight_decay", "inverse_past", "inverse_next", "unscale", "counts", "key", "_",
)  # fmt: skip
