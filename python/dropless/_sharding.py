"""What a mesh changes: how tokens are split over devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dropless._config import warn_once


@dataclasses.dataclass(frozen=True)
class TokenSharding:
    """How ``moe`` is split: one ``shard_map`` over all free axes of ``mesh``.

    Attributes:
      mesh: a mesh, abstract where one is ambient.
      x_spec: of x [..., H].
      axes: mesh axes that tokens are split over.
      manual: all axes that the ``shard_map`` makes manual.
    """

    mesh: Any
    x_spec: PartitionSpec
    axes: tuple[str, ...]
    manual: frozenset[str]

    @property
    def parts(self) -> int:
        """Into how many parts tokens are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def axes_of(self, dimension: int) -> tuple[str, ...]:
        """Mesh axes that split one dimension of x."""
        spec = tuple(self.x_spec)
        return _axes_of(spec[dimension]) if len(spec) >= -dimension else ()


def complain(strict: bool, text: str) -> None:
    """A slow path: an error if strict, else one warning."""
    if strict:
        raise ValueError(f"{text} (strict=True)")
    warn_once(text)


def _axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


_NO_MESH = AbstractMesh((), ())


def axis_names(argument: str, value: Any) -> tuple[str, ...]:
    """One name, several or None as a tuple."""
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a mesh axis's name or several; got {value!r}.")
    return tuple(names)


def bound_axis_names(argument: str, value: Any) -> tuple[str, ...]:
    """``axis_names``, each the name of an axis of the ``shard_map`` around the caller."""
    names = axis_names(argument, value)
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"{argument} must name axes of the shard_map (or vmap, pmap) that calls; got "
                f"{name!r}, which is bound by none."
            ) from None
    return names


def _mesh_for(x: jax.Array, mesh: Any) -> Any:
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, an AbstractMesh or None; got {type(mesh).__name__}."
        )
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        return ambient
    if mesh is not None:
        return mesh
    # An array that was taken off a mesh keeps the mesh in its type; where it lies tells.
    is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if is_concrete and not isinstance(x.sharding, NamedSharding):
        return _NO_MESH
    return jax.typeof(x).sharding.mesh


def _check_axes(mesh: Any, given: bool, token_axes: Sequence[str], expert_axis: str | None) -> None:
    names = tuple(mesh.axis_names)
    if expert_axis is not None:
        if not isinstance(expert_axis, str):
            raise TypeError(f"expert_axis must be a mesh axis's name; got {expert_axis!r}.")
        if expert_axis not in names:
            raise ValueError(
                f'expert_axis="{expert_axis}" must be an axis of the mesh; got a mesh with '
                f"axes {names}. Give mesh=, or call under jax.set_mesh."
            )
        if mesh.shape[expert_axis] > 1:
            raise NotImplementedError(
                f'expert_axis="{expert_axis}" has {mesh.shape[expert_axis]} devices, but experts '
                f"sharded over devices are not supported yet. Leave expert_axis out: experts are "
                f"then replicated and tokens are split over token_axes."
            )
    if given and not set(token_axes) & set(names):
        raise ValueError(
            f"token_axes must name an axis of the mesh; got token_axes={tuple(token_axes)} and a "
            f"mesh with axes {names}."
        )


def token_sharding(
    x: jax.Array, mesh: Any, token_axes: Sequence[str], expert_axis: str | None, strict: bool
) -> TokenSharding | None:
    """How to split x [..., H] over devices; None: nothing to do here.

    Under Explicit axes x's type says it, under Auto axes ``token_axes`` does, on x's first axis.
    """
    given = mesh is not None
    token_axes = axis_names("token_axes", token_axes)
    mesh = _mesh_for(x, mesh)
    _check_axes(mesh, given, token_axes, expert_axis)
    free = {
        name: kind
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    }
    if not any(mesh.shape[name] > 1 for name in free):
        return None
    typed = jax.typeof(x).sharding
    spec = list(typed.spec) + [None] * (x.ndim - len(typed.spec))
    if spec and spec[-1] is not None:
        complain(
            strict,
            f"x is sharded over {spec[-1]!r} along its last axis, the model width, which every "
            f"expert needs whole: it is gathered. Shard x along its other axes.",
        )
        spec[-1] = None
    axes = [name for entry in spec for name in _axes_of(entry)]
    # Auto axes that may split tokens further; the type of x does not mention them.
    auto = [a for a in token_axes if free.get(a) == AxisType.Auto and mesh.shape[a] > 1]
    if auto and x.ndim > 1:
        first = (*_axes_of(spec[0]), *auto)
        devices = math.prod(mesh.shape[a] for a in first)
        if x.shape[0] % devices:
            complain(
                strict,
                f"x's first axis, {x.shape[0]}, is not divisible by the {devices} devices of mesh "
                f"axes {first}: x is gathered and every device computes all of it. Pad the batch.",
            )
        else:
            spec[0] = first
            axes += auto
    # Outside a shard_map, arrays with an Explicit mesh need one even where nothing is split:
    # without it the results of custom calls would lose the mesh.
    explicit = AxisType.Explicit in free.values() and len(free) == len(mesh.axis_names)
    if not axes and not explicit:
        return None
    return TokenSharding(mesh, PartitionSpec(*spec), tuple(axes), frozenset(free))


def _place(array: jax.Array, spec: PartitionSpec, mesh: Any) -> jax.Array:
    """Makes the type say what ``shard_map`` is told, as Explicit axes ask; else does nothing."""
    sharding = jax.typeof(array).sharding
    want = tuple(spec) + (None,) * (array.ndim - len(spec))
    if sharding.mesh.empty or tuple(sharding.spec) == want:
        return array
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(entry):
        names = tuple(a for a in _axes_of(entry) if kinds[a] == AxisType.Explicit)
        return names or None

    have = tuple(explicit(entry) for entry in sharding.spec)
    target = tuple(explicit(entry) for entry in want)
    if have == target:
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*target)))


def sharded(
    function: Callable[..., Any],
    sharding: TokenSharding,
    strict: bool,
    x: jax.Array,
    per_token: Any,
    replicated: Any,
) -> Any:
    """``function(x, per_token, replicated)`` on every device's tokens.

    The leaves of ``per_token`` have the leading axes of x [..., H]. Returns (like x, replicated).
    """

    def gathered(path, leaf):
        spec = jax.typeof(leaf).sharding.spec
        if any(entry is not None for entry in spec):
            complain(
                strict,
                f"a parameter, {jax.tree_util.keystr(path)}, is sharded as {spec}, but experts are "
                f"replicated here: it is gathered.",
            )
        return _place(leaf, PartitionSpec(), sharding.mesh)

    token_spec = PartitionSpec(*tuple(sharding.x_spec)[:-1])
    x = _place(x, sharding.x_spec, sharding.mesh)
    per_token = jax.tree.map(lambda leaf: _place(leaf, token_spec, sharding.mesh), per_token)
    replicated = jax.tree_util.tree_map_with_path(gathered, replicated)
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=(sharding.x_spec, token_spec, PartitionSpec()),
        out_specs=(sharding.x_spec, PartitionSpec()),
        axis_names=sharding.manual,
    )(x, per_token, replicated)
