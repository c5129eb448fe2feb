"""The one place that makes an XLA FFI call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dropless import _library

# Attributes that are not int32 enums or flags (docs/architecture.md).
_ATTRIBUTE_TYPES = {
    "capacity": np.int64,
    "experts_per_token": np.int64,
    "renormalize_eps": np.float32,
    "scale": np.float32,
    "activation_slope": np.float32,
    "gate_limit": np.float32,
    "up_limit": np.float32,
    "up_offset": np.float32,
}

# The grouped products, which alone can be kept to some of a GPU's multiprocessors.
_PRODUCTS = {
    "expert_up",
    "grouped_gemm",
    "expert_down_backward",
    "expert_up_backward",
    "grouped_wgrad",
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(op: str, arrays: Any) -> Any:
    """``arrays``, with an error in words where a derivative is asked of the operation itself."""
    del op
    return arrays


@_once.defjvp
def _refuse_second_derivative(op, primals, tangents):
    raise NotImplementedError(
        f"the operation {op} of Dropless has no derivative of its own: dropless.moe, route and "
        f"unpermute with weights can be differentiated once, in reverse mode, and this is a second "
        f"derivative. dropless.ragged_dot, grouped_wgrad and permute have one: jax.grad of "
        f"jax.grad, or jax.jacrev of jax.jacrev for a Hessian."
    )


# A result: its shape and dtype, or None when the caller does not want it.
Result = tuple[tuple[int, ...], Any] | None


def varying_axes(tree: Any) -> frozenset[str]:
    """Manual mesh axes over which any array of the tree differs between devices."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    return axes


def unify_axes(tree: Any) -> Any:
    """Casts every array of the tree to vary over the union of their manual axes.

    Call it outside a ``custom_vjp``: the cast's transpose sums the gradient over the axes, where
    XLA and JAX can see it.
    """
    axes = varying_axes(tree)

    def cast(leaf):
        # An axis that the array is "reduced" over has a cast, and hence a transpose, of its own.
        have = jax.typeof(leaf).manual_axis_type
        for source in (have.reduced, axes - have.reduced):
            missing = tuple(sorted((axes & source) - have.varying))
            if missing:
                leaf = jax.lax.pcast(leaf, missing, to="varying")
        return leaf

    return jax.tree.map(cast, tree) if axes else tree


def call(
    op: str,
    results: Sequence[Result],
    operands: Sequence[jax.Array | None],
    *,
    aliases: dict[int, int] | None = None,
    workspace: tuple[int, ...] | None = None,
    **attributes: Any,
) -> list[Any]:
    """Calls the target of ``op``; operands and results that are None travel as arrays of shape
    (0,).

    Args:
      op: the operation's stem, for example ``"route"``.
      results: one ``(shape, dtype)`` or None a result, in the target's order.
      operands: one array or None an operand, in the target's order.
      aliases: operand index to the index of the result that reuses its memory.
      workspace: for a target with a workspace result, the sizes that
        ``dropless_<op>_workspace_bytes`` takes.
      **attributes: Python numbers; converted to the C types of the targets' table. ``num_sms`` of
        a product is 0 (all) unless given.

    Returns:
      One array a result, None for those not wanted.
    """
    specs = list(results)
    if workspace is not None:
        specs.append(((_library.workspace_bytes(op, *workspace),), jnp.uint8))
    arrays = [jnp.zeros((0,), jnp.float32) if o is None else o for o in operands]
    arrays = _once(op, jax.tree.leaves(unify_axes(arrays)))
    axes = varying_axes(arrays)
    where = {}
    if axes:
        # Without it the results would claim to be equal on all devices of a shard_map.
        mesh = jax.sharding.get_abstract_mesh()
        where = {
            "sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
            "manual_axis_type": jax.sharding.ManualAxisType(varying=axes),
        }

    def spec(result: Result) -> jax.ShapeDtypeStruct:
        shape, dtype = ((0,), jnp.float32) if result is None else result
        return jax.ShapeDtypeStruct(shape, dtype, **where)

    function = jax.ffi.ffi_call(
        _library.target(op),
        [spec(r) for r in specs],
        vmap_method="sequential",
        input_output_aliases=aliases,
    )
    if op in _PRODUCTS:
        attributes = {"num_sms": 0, **attributes}
    typed = {k: _ATTRIBUTE_TYPES.get(k, np.int32)(v) for k, v in attributes.items()}
    outputs = function(*arrays, **typed)[: len(results)]
    return [None if r is None else o for r, o in zip(results, outputs, strict=True)]
