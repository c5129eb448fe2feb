"""Named shapes: H model width, I expert width, E experts, K experts per token, T tokens."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    model_dim: int
    expert_dim: int
    num_experts: int
    experts_per_token: int

    @property
    def flops(self) -> int:
        """Forward and backward of a gated FFN: 18·T·K·H·I; router and data moves count nothing."""
        return 18 * self.tokens * self.experts_per_token * self.model_dim * self.expert_dim

    @property
    def bytes(self) -> int:
        """Bytes of the same in bfloat16 where each of eight fused launches reads its operands once.

        Up, down, combine; and backward the gradients to A, to both weights, to rows and to x:
        16·M·H + 28·M·I + 18·E·H·I + 4·T·H, with M = T·K rows.
        """
        rows, h, i = self.tokens * self.experts_per_token, self.model_dim, self.expert_dim
        return 16 * rows * h + 28 * rows * i + 18 * self.num_experts * h * i + 4 * self.tokens * h


# Full layers of public models, as one GPU sees them.
GPU = {
    s.name: s
    for s in (
        Shape("S1-mixtral-8x7b", 8192, 4096, 14336, 8, 2),
        Shape("S2-qwen3-30b", 16384, 2048, 768, 128, 8),
        Shape("S3-qwen3-235b", 8192, 4096, 1536, 128, 8),
        Shape("S4-olmoe", 16384, 2048, 1024, 64, 8),
        Shape("S5-gpt-oss-20b", 8192, 2880, 2880, 32, 4),
        Shape("S6-deepseek-v3-rank", 8192, 7168, 2048, 32, 8),
    )
}

# Few and many experts, small and large batches, at a size two cores finish in under a second.
CPU = {
    s.name: s
    for s in (
        Shape("e8-k2-m4096", 2048, 512, 1024, 8, 2),
        Shape("e8-k2-m16384", 8192, 512, 1024, 8, 2),
        Shape("e64-k8-m4096", 512, 512, 512, 64, 8),
        Shape("e64-k8-m16384", 2048, 512, 512, 64, 8),
    )
}

# The products of the same models: name -> M rows, E groups, N columns, C contraction.
PRODUCTS = {
    "olmoe_fc1": (131072, 64, 2048, 2048),
    "olmoe_fc2": (131072, 64, 2048, 1024),
    "qwen3_fc1": (131072, 128, 1536, 2048),
    "qwen3_fc2": (131072, 128, 2048, 768),
    "mixtral_fc1": (16384, 8, 28672, 4096),
    "mixtral_fc2": (16384, 8, 4096, 14336),
    "dsv3_fc1": (16384, 32, 4096, 7168),
    "dsv3_fc2": (16384, 32, 7168, 2048),
}

# Exponent of skewed groups and routing: the most loaded of 64 experts gets about 5 times the mean.
ZIPF = 0.6


def ragged_ends(rows: int, groups: int) -> list[int]:
    """Where each group of rows ends: sizes within 30 % of the mean, multiples of nothing."""
    source = random.Random(7)
    weights = [source.uniform(0.7, 1.3) for _ in range(groups)]
    return [round(sum(weights[: i + 1]) / sum(weights) * rows) for i in range(groups)]
