"""Times torch's dense and grouped FP8 products: the ceiling and the peer of the same run."""

import random

import torch
from peers_grouped import SHAPES, median_ms, report


def codes(*shape):
    """e4m3 codes of normal values that fill the format's range."""
    out = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    for part in out if len(shape) == 3 else (out,):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16).mul_(120))
    return out


def main():
    a, b = codes(8192, 8192), codes(8192, 8192)
    one = torch.ones((), device="cuda")
    for fast in (False, True):
        ms = median_ms(
            torch._scaled_mm,
            *(a, b.t(), one, one),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        report("dense_fp8", "8192", f"torch_fast_{fast}", ms, 2 * 8192**3)
    for name, (rows, experts, cols, depth) in SHAPES.items():
        random.seed(7)
        weight = [random.uniform(0.7, 1.3) for _ in range(experts)]
        running, offsets = 0.0, []
        for w in weight:
            running += w
            # It wants groups of a multiple of 16 rows.
            offsets.append(round(running / sum(weight) * rows / 16) * 16)
        offs = torch.tensor(offsets, device="cuda", dtype=torch.int32)
        lhs, rhs = codes(rows, depth), codes(experts, cols, depth)
        ms = median_ms(
            torch._scaled_grouped_mm,
            lhs,
            rhs.transpose(-2, -1),
            torch.rand(rows, device="cuda"),
            torch.rand(experts, cols, device="cuda"),
            offs=offs,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        report("grouped_gemm_fp8", name, "torch_rowwise", ms, 2 * rows * cols * depth)
        del lhs, rhs


if __name__ == "__main__":
    main()
