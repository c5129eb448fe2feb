"""Writes the README's results table, and a roofline plot, from the committed result files.

python bench/report.py                      rewrite the table in README.md
python bench/report.py --check              exit 1 if README.md does not hold it
python bench/report.py --roofline PLOT.png  draw the GPU's layers under its roofline
"""

import argparse
import json
import sys
from pathlib import Path

import shapes

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def machine(environment: dict) -> str:
    """One line that says where the figures come from."""
    device = f"{environment['cpu']}, {environment['cpus']} cores"
    if environment["gpu"]:
        name, driver = environment["gpu"].split(", ")[:2]
        device = f"{name}, driver {driver}"
    features = environment.get("cpu_features") or []
    if not environment["gpu"] and "amx_bf16" in features:
        device += " with AMX"
    return f"{device}, jax {environment['jax']}, {environment['date'][:10]}"


def milliseconds(time: dict) -> str:
    return f"{time['median_ms']:.1f}" if time["median_ms"] < 1000 else f"{time['median_ms']:.0f}"


def operands(precision: str, key: str) -> str:
    """What a variant of our layer multiplies, from its name in a result file."""
    words = key.split("_")[1:]  # dropless_fp8_prepared
    kind = "fp8" if "fp8" in words else precision
    rest = {"prepared": "experts prepared before", "zipf": "zipf", "params": "float32 parameters"}
    return ", ".join([kind, *(rest[word] for word in words if word in rest)])


def layer_table(path: Path) -> str:
    """The layer benchmark of one file as Markdown."""
    data = json.loads(path.read_text())
    lines = [
        (
            f"Layer, forward and backward with every gradient; {machine(data['environment'])} "
            f"([{path.name}](bench/results/{path.name})):"
        ),
        "",
        "| shape | operands | ms | TFLOP/s "
        "| dense FFN of the same FLOPs, ms | its GEMMs alone, ms | `ragged_dot` layer, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in data["layer"]:
        times = row["times"]
        name = row["shape"]["name"] + ("" if row["routing"] == "uniform" else ", " + row["routing"])
        peers = [times.get(peer) for peer in ("dense_ffn", "six_gemms", "ragged_dot")]
        work = row["tflops"] * times["dropless"]["median_ms"]
        for key in (key for key in times if key.startswith("dropless")):
            ours = times[key]["median_ms"]
            cells = (
                name,
                operands(row["precision"], key),
                milliseconds(times[key]),
                f"{work / ours:.3g}",
                *("-" if peer is None else milliseconds(peer) for peer in peers),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def roofline(path: str) -> None:
    """The layers of layer_gpu_h200.json under the ceilings that gpu_products_h200.json measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = ROOT / "bench" / "results"
    layers = json.loads((results / "layer_gpu_h200.json").read_text())
    ceilings = json.loads((results / "gpu_products_h200.json").read_text())["dense"]
    peak, rate = ceilings["dense_tflops"], ceilings["copy_bytes_per_second"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log")
    intensity = [2.0 ** (i / 8) for i in range(40, 89)]  # 32 to 2048
    roof = [min(peak, rate * x * 1e-12) for x in intensity]
    axes.plot(intensity, roof, color="black", label="copy, and one dense product, as measured")
    labels: dict[tuple[int, int], tuple[float, float, list[str]]] = {}
    for row in layers["layer"]:
        if row["routing"] != "uniform" or row["precision"] != "bf16":
            continue
        shape = shapes.Shape(**row["shape"])
        dense = min(row["times"][name]["median_ms"] for name in ("dense_ffn", "six_gemms"))
        x = shape.flops / shape.bytes
        axes.plot(x, row["tflops"], "o", color="tab:blue")
        axes.plot(x, shape.flops / dense / 1e9, "_", color="tab:orange", markersize=12)
        # Shapes of the same proportions lie on one spot, too close for a label each.
        spot = (round(x / 8), round(row["tflops"] / 8))
        labels.setdefault(spot, (x, row["tflops"], []))[2].append(shape.name.split("-")[0])
    for x, tflops, names in labels.values():
        axes.annotate(
            ", ".join(names), (x, tflops), xytext=(6, -4), textcoords="offset points", fontsize=8
        )
    axes.plot([], [], "o", color="tab:blue", label="layer, forward and backward")
    axes.plot([], [], "_", color="tab:orange", label="D, the dense GEMMs of the same FLOPs")
    axes.set(
        xlabel="FLOP a byte, every launch's operands read once",
        ylabel="TFLOP/s",
        ylim=(0, None),
        title=f"bfloat16, {machine(layers['environment'])}",
    )
    axes.title.set_fontsize(9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> int:
    """Replaces what stands between the README's two markers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--roofline", metavar="PLOT.png", help="draw the roofline instead")
    args = parser.parse_args()
    if args.roofline:
        roofline(args.roofline)
        return 0
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    files = sorted((ROOT / "bench" / "results").glob("layer_*.json"))
    body = "\n\n".join(layer_table(path) for path in files)
    new = f"{head}{BEGIN}\n{body}\n{END}{tail}"
    if args.check:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
