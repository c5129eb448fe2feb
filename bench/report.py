"""Writes the README's results table from the committed result files.

python bench/report.py          rewrite the table in README.md
python bench/report.py --check  exit 1 if README.md does not hold it
"""

import argparse
import json
import sys
from pathlib import Path

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
        ragged = times.get("ragged_dot")
        cells = (
            row["shape"]["name"] + ("" if row["routing"] == "uniform" else ", " + row["routing"]),
            row["precision"],
            f"{times['dropless']['median_ms']:.1f}",
            f"{row['tflops']:.3g}",
            f"{times['dense_ffn']['median_ms']:.1f}",
            f"{times['six_gemms']['median_ms']:.1f}",
            "-" if ragged is None else f"{ragged['median_ms']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Replaces what stands between the README's two markers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
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
