"""DeepSeek's FP8 checkpoints: e4m3 matrices [out, in] with a scale for each block of 128 x 128.

``<name>_scale_inv`` holds the scales [ceil(out/128), ceil(in/128)]; a number is its code times its
block's scale. That is the engine's own format, in the orientation [E, out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dropless._params import MATRICES, PreparedExperts, PreparedWeight
from dropless.models._rules import Pair, Rule, Shapes, numpy_of, transpose

BLOCK = 128


def scale_name(name: str) -> str:
    return f"{name}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))


def is_fp8(dtype: Any) -> bool:
    return jnp.dtype(dtype) == jnp.float8_e4m3fn


def decoded(codes: Any, scale: Any) -> Any:
    """[..., out, in] in bfloat16, rounded once from float32."""
    if numpy_of([codes, scale]) is jnp or codes.ndim == 2:
        return _numbers(codes, scale)
    # One expert at a time: float32 copies of all would be four times the source.
    values = np.empty(codes.shape, ml_dtypes.bfloat16)
    for expert in np.ndindex(*codes.shape[:-2]):
        values[expert] = _numbers(codes[expert], scale[expert])
    return values


def _numbers(codes: Any, scale: Any) -> Any:
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


def is_matrix(rule: Rule) -> bool:
    """Whether it is about matrices that ``PreparedExperts`` holds."""
    group, leaf = rule.leaves[0].split(".")
    return group in ("experts", "shared") and leaf in MATRICES


def check_blocks(rule: Rule, shapes: Shapes) -> None:
    """Raises where a block of 128 x 128 of the tensor has numbers of both gate and up."""
    if isinstance(rule, Pair) and (rule.interleaved or shapes[rule.leaf_gate][-1] % BLOCK):
        raise ValueError(
            f"{rule.tensor}: expected gate and up in blocks of {BLOCK} of their own, which takes "
            f"them side by side and I a multiple of {BLOCK}; got I = {shapes[rule.leaf_gate][-1]}"
            f"{', interleaved' if rule.interleaved else ''}. The layout per_expert has no such "
            f"blocks."
        )


def check_prepared(experts: Any, shapes: Shapes) -> None:
    """Raises unless these are the block's experts in FP8."""
    if not isinstance(experts, PreparedExperts):
        raise TypeError(
            f"prepared: expected dropless.PreparedExperts, got {type(experts).__name__}"
        )
    if experts.precision != "fp8":
        raise ValueError(f'prepared: expected precision "fp8", got {experts.precision!r}')
    for leaf, shape in shapes.items():
        group, name = leaf.split(".")
        if group not in ("experts", "shared") or name not in MATRICES:
            continue
        holder = experts if group == "experts" else experts.shared
        weight = getattr(holder, name, None)
        expected = shape if group == "experts" else (1, *shape)
        got = None if weight is None else tuple(weight.q.shape)
        if got != expected:
            raise ValueError(f"prepared: expected {leaf} of shape {expected}, got {got}")


def written(rule: Rule, shapes: Shapes, experts: PreparedExperts) -> Iterator[tuple[str, Any]]:
    """The tensors of a rule about matrices, codes and scales as ``experts`` holds them."""
    check_blocks(rule, shapes)
    group = rule.leaves[0].split(".")[0]
    holder = experts if group == "experts" else experts.shared
    weights = {leaf: getattr(holder, leaf.split(".")[1]) for leaf in rule.leaves}
    only = (lambda value: value) if group == "experts" else (lambda value: value[0])
    yield from rule.write(shapes, {leaf: only(w.q) for leaf, w in weights.items()})
    for name, scale in rule.write(shapes, {leaf: only(w.scale) for leaf, w in weights.items()}):
        yield scale_name(name), scale


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
        if not is_matrix(rule):
            continue
        check_blocks(rule, shapes)
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
