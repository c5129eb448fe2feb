"""DeepSeek's FP8 checkpoints: e4m3 matrices [out, in] with a scale for each block of 128 x 128.

``<name>_scale_inv`` holds the scales [ceil(out/128), ceil(in/128)]; a number is its code times its
block's scale. That is the engine's own format, in the orientation [E, out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dropless._params import PreparedExperts, PreparedWeight
from dropless.models._rules import Rule, Shapes, numpy_of, transpose

BLOCK = 128


def scale_name(name: str) -> str:
    return f"{name}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))


def is_fp8(dtype: Any) -> bool:
    return jnp.dtype(dtype) == jnp.float8_e4m3fn


def decoded(codes: Any, scale: Any) -> Any:
    """[..., out, in] in bfloat16, rounded once from float32."""
    numpy = numpy_of([codes, scale])
    rows, columns = codes.shape[-2:]
    scale = numpy.repeat(scale.astype(numpy.float32), BLOCK, axis=-2)[..., :rows, :]
    scale = numpy.repeat(scale, BLOCK, axis=-1)[..., :columns]
    return (codes.astype(numpy.float32) * scale).astype(ml_dtypes.bfloat16)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises if the config describes another FP8 format."""
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if block is not None and list(block) != [BLOCK, BLOCK]:
        raise ValueError(
            f"config['quantization_config']['weight_block_size']: expected [{BLOCK}, {BLOCK}], got "
            f"{block}"
        )


def prepared(
    rules: tuple[Rule, ...], shapes: Shapes, tensors: Mapping[str, Any]
) -> PreparedExperts:
    """The experts' codes and scales as the GEMMs read them, with no other rounding between."""

    def codes(name: str) -> Any:
        value = np.asarray(tensors[name])
        if not is_fp8(value.dtype):
            raise ValueError(
                f"{name}: expected float8_e4m3fn with {scale_name(name)}, got {value.dtype.name}; "
                f"dropless.prepare_experts quantises other checkpoints"
            )
        return value

    def scales(name: str) -> Any:
        return np.asarray(tensors[scale_name(name)], np.float32)

    groups: dict[str, dict[str, Any]] = {"experts": {}, "shared": {}}
    for rule in rules:
        group = rule.leaves[0].split(".")[0]
        if group not in groups or rule.leaves == ("shared.output_gate",):
            continue
        q, scale = rule.read(shapes, codes), rule.read(shapes, scales)
        for leaf in rule.leaves:
            values = (q[leaf], transpose(q[leaf]), scale[leaf], transpose(scale[leaf]))
            stacks = values if group == "experts" else (v[None] for v in values)
            weight = PreparedWeight(*(jnp.asarray(v) for v in stacks))
            groups[group][leaf.split(".")[1]] = weight
    made = {
        group: PreparedExperts(**weights, shared=None, precision="fp8", scale_rounding="fp32")
        for group, weights in groups.items()
        if weights
    }
    if "shared" not in made:
        return made["experts"]
    routed = made["experts"]
    return PreparedExperts(
        routed.gate, routed.up, routed.down, made["shared"], "fp8", routed.scale_rounding
    )
