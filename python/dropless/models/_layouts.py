"""How checkpoints lay out a block's tensors, and the checked conversion both ways."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dropless._config import MoEConfig, RouterConfig

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, Any]

# Parameters are named by group and leaf in this module, as in ``experts.gate``.

_PER_EXPERT_NAME = re.compile(r"experts\.\d+\.")
# Fields of MoEConfig that say which function the block is; the others say how it is computed.
_BLOCK_FIELDS = (
    "num_experts",
    "experts_per_token",
    "expert_dim",
    "router",
    "activation",
    "expert_bias",
)
_LISTED = 6  # names an error shows of each kind: enough to see the pattern, short with 128 experts


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes a config names."""

    model_dim: int  # H
    num_experts: int  # E
    expert_dim: int  # I


@dataclasses.dataclass(frozen=True)
class Part:
    """Some tensors of a checkpoint and the parameters that hold the same numbers."""

    tensors: Callable[[Dims], Shapes]
    params: Callable[[Dims], Shapes]
    read: Callable[[Dims, Mapping[str, Any]], Arrays]  # tensors to parameters
    write: Callable[[Dims, Mapping[str, Any]], Arrays]  # parameters to tensors


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: how its config reads, and its tensors in each layout."""

    name: str  # ``model_type`` of its config
    read_config: Callable[[Mapping[str, Any]], tuple[MoEConfig, Dims]]
    layouts: Mapping[str, tuple[Part, ...]]


def router_linear(name: str) -> Part:
    """A bias-free router linear ``[E,H]``, ours ``[H,E]``."""
    return Part(
        tensors=lambda d: {name: (d.num_experts, d.model_dim)},
        params=lambda d: {"router.kernel": (d.model_dim, d.num_experts)},
        read=lambda d, t: {"router.kernel": _transpose(t[name])},
        write=lambda d, p: {name: _transpose(p["router.kernel"])},
    )


def fused_experts(gate_up: str, down: str) -> Part:
    """Experts in two tensors: ``gate_up [E,2I,H]``, gate rows first, and ``down [E,H,I]``."""

    def read(d: Dims, t: Mapping[str, Any]) -> Arrays:
        gate, up = t[gate_up][:, : d.expert_dim], t[gate_up][:, d.expert_dim :]
        return _experts(_transpose(gate), _transpose(up), _transpose(t[down]))

    def write(d: Dims, p: Mapping[str, Any]) -> Arrays:
        pair = [_transpose(p["experts.gate"]), _transpose(p["experts.up"])]
        return {
            gate_up: _numpy_of(pair).concatenate(pair, axis=1),
            down: _transpose(p["experts.down"]),
        }

    def tensors(d: Dims) -> Shapes:
        return {
            gate_up: (d.num_experts, 2 * d.expert_dim, d.model_dim),
            down: (d.num_experts, d.model_dim, d.expert_dim),
        }

    return Part(tensors, _expert_shapes, read, write)


def expert_linears(gate: str, up: str, down: str) -> Part:
    """Linears ``experts.<e>.<name>.weight``, e from 0: gate and up ``[I,H]``, down ``[H,I]``."""
    leaves = {"experts.gate": gate, "experts.up": up, "experts.down": down}

    def names(d: Dims, linear: str) -> list[str]:
        return [f"experts.{expert}.{linear}.weight" for expert in range(d.num_experts)]

    def read(d: Dims, t: Mapping[str, Any]) -> Arrays:
        stacks = {leaf: [t[name] for name in names(d, linear)] for leaf, linear in leaves.items()}
        return {leaf: _transpose(_numpy_of(stack).stack(stack)) for leaf, stack in stacks.items()}

    def write(d: Dims, p: Mapping[str, Any]) -> Arrays:
        return {
            name: _transpose(p[leaf][expert])
            for leaf, linear in leaves.items()
            for expert, name in enumerate(names(d, linear))
        }

    def tensors(d: Dims) -> Shapes:
        shapes = {leaf: shape[:0:-1] for leaf, shape in _expert_shapes(d).items()}
        return {name: shapes[leaf] for leaf, linear in leaves.items() for name in names(d, linear)}

    return Part(tensors, _expert_shapes, read, write)


def common_layouts(gate: str, up: str, down: str) -> dict[str, tuple[Part, ...]]:
    """The layouts of a block with a plain router and experts whose linears have these names."""
    router = router_linear("gate.weight")
    return {
        "fused": (router, fused_experts("experts.gate_up_proj", "experts.down_proj")),
        "per_expert": (router, expert_linears(gate, up, down)),
    }


def softmax_config(
    config: Mapping[str, Any], *, expert_dim: str, renormalize: bool
) -> tuple[MoEConfig, Dims]:
    """Config of a block that ranks and weights by the softmax over all experts, taken in float32.

    Args:
      config: the model's ``config.json``.
      expert_dim: the setting that holds I.
      renormalize: whether the k weights are divided by their sum.
    """
    dims = Dims(
        model_dim=size(config, "hidden_size"),
        num_experts=size(config, "num_experts", "num_local_experts"),
        expert_dim=size(config, expert_dim),
    )
    router = RouterConfig(score="softmax", score_before_topk=True, renormalize=renormalize)
    cfg = MoEConfig(
        num_experts=dims.num_experts,
        experts_per_token=size(config, "num_experts_per_tok"),
        expert_dim=dims.expert_dim,
        router=router,
        activation=activation(config),
    )
    return cfg, dims


def layout_of(family: Family, tensors: Mapping[str, Any]) -> str:
    """The layout these tensors are in, by their names."""
    check_mapping("tensors", tensors)
    odd = [name for name in tensors if not isinstance(name, str)]
    if odd:
        raise TypeError(f"tensors: expected names, got {odd[0]!r}")
    per_expert = any(_PER_EXPERT_NAME.match(name) for name in tensors)
    return "per_expert" if per_expert and "per_expert" in family.layouts else "fused"


def default_layout(config: Mapping[str, Any]) -> str:
    # Release 5.0 of transformers replaced the experts' linears by the fused tensors.
    version = re.match(r"\d+", str(config.get("transformers_version") or "5"))
    return "per_expert" if version and int(version[0]) < 5 else "fused"


def read(
    family: Family, layout: str, dims: Dims, tensors: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Tensors to parameters, after checking that they are exactly those of the layout."""
    parts = family.layouts[layout]
    if layout == "per_expert" and len(tensors) < dims.num_experts:
        # Before the names of all tensors are made: there may be absurdly many.
        raise ValueError(
            f"{family.name}, layout {layout}: tensors do not fit; the config says "
            f"{dims.num_experts} experts of several tensors each, but there are {len(tensors)} in "
            f"all: {_some(list(tensors))}"
        )
    arrays = {name: _as_array(value) for name, value in tensors.items()}
    expected = _union(part.tensors(dims) for part in parts)
    _check(f"{family.name}, layout {layout}: tensors", expected, arrays)
    flat = _union(part.read(dims, arrays) for part in parts)
    params: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        group, leaf = name.split(".")
        params.setdefault(group, {})[leaf] = value
    return params


def write(
    family: Family, layout: str, dims: Dims, params: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Parameters to tensors, after checking that they are exactly those of the family."""
    parts = family.layouts[layout]
    check_mapping("params", params)
    for group, leaves in params.items():
        check_mapping(f"params[{group!r}]", leaves)
    arrays = {
        f"{group}.{leaf}": _as_array(value)
        for group, leaves in params.items()
        for leaf, value in leaves.items()
    }
    _check(f"{family.name}: params", _union(part.params(dims) for part in parts), arrays)
    return _union(part.write(dims, arrays) for part in parts)


def check_mapping(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what}: expected a mapping, got {type(value).__name__}")


def check_config(family: str, expected: MoEConfig, given: MoEConfig) -> None:
    """Refuses a config whose block is another than the one the checkpoint's config describes."""
    if not isinstance(given, MoEConfig):
        raise TypeError(f"cfg: expected dropless.MoEConfig, got {type(given).__name__}")
    pairs = [(name, getattr(expected, name), getattr(given, name)) for name in _BLOCK_FIELDS]
    wrong = [f"{name}: config says {a}, cfg has {b}" for name, a, b in pairs if a != b]
    if wrong:
        raise ValueError(f"cfg: not the {family} block that config describes; " + "; ".join(wrong))


def setting(config: Mapping[str, Any], *names: str) -> Any:
    """The one value that a config gives under any of these names (releases differ in spelling)."""
    values = {name: config[name] for name in names if config.get(name) is not None}
    if not values:
        raise ValueError(f"config: expected {' or '.join(names)}, found neither")
    if len(set(values.values())) > 1:
        raise ValueError(f"config: expected one value, got {values}")
    return next(iter(values.values()))


def size(config: Mapping[str, Any], *names: str) -> int:
    """A ``setting`` that is a size."""
    value = setting(config, *names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config: expected {' or '.join(names)} to be an int >= 1, got {value!r}")
    return value


def activation(config: Mapping[str, Any]) -> str:
    """Our name of the config's ``hidden_act``."""
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"config['hidden_act']: expected one of {list(known)}, got {name!r}")
    return known[name]


def _check(what: str, expected: Shapes, given: Mapping[str, Any]) -> None:
    missing = [f"{name} {expected[name]}" for name in expected if name not in given]
    unexpected = [f"{name} {given[name].shape}" for name in given if name not in expected]
    wrong = [
        f"{name} expected {shape}, got {given[name].shape}"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": wrong}
    if any(problems.values()):
        parts = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
        raise ValueError(f"{what} do not fit; " + "; ".join(parts))


def _some(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _union(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for mapping in mappings:
        twice = out.keys() & mapping.keys()
        if twice:
            raise ValueError(f"written twice: {sorted(twice)}")
        out.update(mapping)
    return out


def _expert_shapes(d: Dims) -> Shapes:
    wide = (d.num_experts, d.model_dim, d.expert_dim)
    narrow = (d.num_experts, d.expert_dim, d.model_dim)
    return {"experts.gate": wide, "experts.up": wide, "experts.down": narrow}


def _experts(gate: Any, up: Any, down: Any) -> Arrays:
    return {"experts.gate": gate, "experts.up": up, "experts.down": down}


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)


def _numpy_of(values: Iterable[Any]) -> Any:
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def _transpose(value: Any) -> Any:
    """Swaps the last two axes; NumPy results are copies, so that no view keeps a source alive."""
    swapped = value.swapaxes(-1, -2)
    return swapped if isinstance(value, jax.Array) else np.ascontiguousarray(swapped)
