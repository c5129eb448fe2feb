"""Times torch's dense and grouped bf16 products: the ceiling and the peer of the same run."""

import json
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import shapes


def median_ms(run, *operands, rounds=15, **options):
    """Median of event-timed calls `run(*operands, **options)` after two warm-up calls."""
    times = []
    for i in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(*operands, **options)
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def report(op, shape, variant, ms, flops):
    """One JSON line, as the harness prints them."""
    print(
        json.dumps(
            {
                "op": op,
                "shape": shape,
                "variant": variant,
                "ms": round(ms, 4),
                "tflops": round(flops / ms * 1e-9, 1),
            }
        ),
        flush=True,
    )


def main():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    report("dense", "8192", "torch", median_ms(torch.matmul, a, b), 2 * 8192**3)
    c = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    d = torch.empty_like(c)
    ms = median_ms(d.copy_, c)
    print(json.dumps({"op": "copy", "ms": round(ms, 4), "tb_per_s": round(2**32 / ms * 1e-9, 3)}))
    for name, (rows, experts, cols, depth) in shapes.PRODUCTS.items():
        offs = torch.tensor(shapes.ragged_ends(rows, experts), device="cuda", dtype=torch.int32)
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(experts, depth, cols, device="cuda", dtype=torch.bfloat16)
        report(
            "gemm_N",
            name,
            "torch_grouped_mm",
            median_ms(torch._grouped_mm, x, w, offs=offs),
            2 * rows * cols * depth,
        )
        del w
        dy = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        report(
            "wgrad",
            name,
            "torch_grouped_mm",
            median_ms(torch._grouped_mm, x.t(), dy, offs=offs),
            2 * rows * cols * depth,
        )


if __name__ == "__main__":
    main()
