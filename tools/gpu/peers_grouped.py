"""Times torch's dense and grouped bf16 products: the ceiling and the peer of the same run."""

import json
import random

import torch

SHAPES = {
    "olmoe_fc1": (131072, 64, 2048, 2048),
    "olmoe_fc2": (131072, 64, 2048, 1024),
    "qwen3_fc1": (131072, 128, 1536, 2048),
    "qwen3_fc2": (131072, 128, 2048, 768),
    "mixtral_fc1": (16384, 8, 28672, 4096),
    "mixtral_fc2": (16384, 8, 4096, 14336),
    "dsv3_fc1": (16384, 32, 4096, 7168),
    "dsv3_fc2": (16384, 32, 7168, 2048),
}


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
    for name, (rows, experts, cols, depth) in SHAPES.items():
        random.seed(7)
        weight = [random.uniform(0.7, 1.3) for _ in range(experts)]
        offsets, running = [], 0.0
        for w in weight:
            running += w
            offsets.append(round(running / sum(weight) * rows))
        offs = torch.tensor(offsets, device="cuda", dtype=torch.int32)
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
