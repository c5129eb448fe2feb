"""Parameters: their shapes, their initial values, their checks, and what the GEMMs read of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dropless._call import call
from dropless._checks import check_integer, check_key
from dropless._config import MoEConfig, check_config, device_in_use
from dropless._precision import LayerSizes, choose_precision

# Tokens that experts are prepared for where nobody says: a full batch, so that weights, which are
# prepared once, weigh little beside the rows of every call.
_TOKENS = 16384

# Leaves that are state: no gradient and no optimiser changes them.
STATE_NAMES = frozenset({"selection_bias", "expert_table"})

PARAM_DTYPES = (jnp.float32, jnp.bfloat16)
MATRICES = ("gate", "up", "down")
SHARED_MATRICES = (*MATRICES, "output_gate")

Params = Mapping[str, Mapping[str, jax.Array]]


def check_float_dtype(name: str, dtype: Any) -> None:
    if isinstance(dtype, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be float32 or bfloat16; got an array.")
    try:
        dtype = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be float32 or bfloat16; got {dtype!r}.") from None
    if dtype == jnp.float16:
        raise TypeError(
            f"{name} must be float32 or bfloat16; got float16, whose range is too small for "
            f"training. Use bfloat16."
        )
    if dtype not in PARAM_DTYPES:
        came = "None" if dtype is None else dtype.name
        raise TypeError(f"{name} must be float32 or bfloat16; got {came}.")


def check_kernel_init(kernel_init: Any) -> None:
    if kernel_init is not None and not callable(kernel_init):
        raise TypeError(f"kernel_init must be a function or None; got {kernel_init!r}.")


def param_shapes(model_dim: int, cfg: MoEConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every parameter of a layer of width H, by group and name."""
    h, e, i = model_dim, cfg.num_experts, cfg.resolved_expert_dim(model_dim)
    router = {"kernel": (h, e)}
    if cfg.router.bias:
        router["bias"] = (e,)
    if cfg.router.selection_bias:
        router["selection_bias"] = (e,)
    if cfg.router.expert_scale:
        router["expert_scale"] = (e,)
    if cfg.router.expert_table is not None:
        router["expert_table"] = (cfg.router.expert_table, cfg.experts_per_token)
    experts = {"gate": (e, h, i), "up": (e, h, i), "down": (e, i, h)}
    if cfg.expert_bias:
        experts |= {"gate_bias": (e, i), "up_bias": (e, i), "down_bias": (e, h)}
    shapes = {"router": router, "experts": experts}
    if cfg.shared_expert_dim is not None:
        s = cfg.shared_expert_dim
        shapes["shared"] = {"gate": (h, s), "up": (h, s), "down": (s, h)}
        if cfg.shared_expert_gate:
            shapes["shared"]["output_gate"] = (h, 1)
    if not cfg.glu.gated:
        for leaves in shapes.values():
            leaves.pop("up", None)
            leaves.pop("up_bias", None)
    return shapes


def initial_vector(name: str, shape: tuple[int, ...], cfg: MoEConfig, dtype: Any) -> jax.Array:
    """What a leaf that is no matrix of the layer starts as; state is float32."""
    if name == "expert_scale":
        return jnp.ones(shape, dtype)
    if name == "expert_table":
        # Neighbours in turn: every expert serves as many tokens of the vocabulary as the next.
        slots = jnp.arange(shape[0] * shape[1]) % cfg.num_experts
        return slots.reshape(shape).astype(jnp.float32)
    return jnp.zeros(shape, jnp.float32 if name in STATE_NAMES else dtype)


def init(
    key: jax.Array,
    model_dim: int,
    cfg: MoEConfig,
    *,
    param_dtype: Any = jnp.float32,
    kernel_init: Callable[..., jax.Array] | None = None,
) -> dict[str, dict[str, jax.Array]]:
    """Parameters of a layer as a plain dict pytree.

    ``router``: ``kernel [H,E]``, and as configured ``bias [E]``, ``expert_scale [E]`` (ones),
    ``selection_bias [E]`` (float32) and ``expert_table [V,K]`` (float32; neighbouring experts in
    turn until a table is given).
    ``experts``: ``gate [E,H,I]``, ``up [E,H,I]``, ``down [E,I,H]``, and as configured ``gate_bias
    [E,I]``, ``up_bias [E,I]``, ``down_bias [E,H]``. ``shared``, as configured: ``gate [H,S]``, ``up
    [H,S]``, ``down [S,H]``, ``output_gate [H,1]``. Experts that are not gated have no ``up``.
    Biases start at zero.

    Args:
      key: a PRNG key.
      model_dim: H.
      cfg: the layer.
      param_dtype: float32 or bfloat16.
      kernel_init: called as ``kernel_init(key, (in, out), dtype)`` for the router and for every
        matrix of every expert on its own, so that the fan does not depend on E. Default: LeCun
        normal.
    """
    check_key("key", key)
    check_integer("model_dim", model_dim, 1)
    check_config(cfg)
    check_float_dtype("param_dtype", param_dtype)
    check_kernel_init(kernel_init)
    kernel_init = jax.nn.initializers.lecun_normal() if kernel_init is None else kernel_init

    def matrices(matrix_key, shape):
        def one(expert_key):
            matrix = jnp.asarray(kernel_init(expert_key, shape[-2:], param_dtype))
            if matrix.shape != shape[-2:] or matrix.dtype != param_dtype:
                raise ValueError(
                    f"kernel_init(key, {shape[-2:]}, {jnp.dtype(param_dtype).name}) must return "
                    f"that shape and dtype; got {matrix.dtype.name}{list(matrix.shape)}."
                )
            return matrix

        return one(matrix_key) if len(shape) == 2 else jax.vmap(one)(split(matrix_key, shape[0]))

    split = jax.random.split
    shapes = param_shapes(model_dim, cfg)
    # Keys do not depend on what else a config has, so that equal matrices start equal.
    router_key, *keys = split(key, 1 + len(MATRICES))
    shared_keys = split(jax.random.fold_in(key, 1), len(SHARED_MATRICES))
    keys = {
        "router": {"kernel": router_key},
        "experts": dict(zip(MATRICES, keys, strict=True)),
        "shared": dict(zip(SHARED_MATRICES, shared_keys, strict=True)),
    }
    params = {
        group: {n: matrices(k, leaves[n]) for n, k in keys[group].items() if n in leaves}
        for group, leaves in shapes.items()
    }
    for group, leaves in shapes.items():
        for name, shape in leaves.items():
            if name not in params[group]:
                params[group][name] = initial_vector(name, shape, cfg, param_dtype)
    return params


def check_params(params: Params, cfg: MoEConfig, model_dim: int) -> int:
    """Raises unless ``params`` fits the layer at width H; returns I."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dict as dropless.init makes it; got {type(params).__name__}."
        )
    for group in ("router", "experts", "shared"):
        if not isinstance(params.get(group, {}), Mapping):
            raise TypeError(
                f'params["{group}"] must be a dict of arrays; got {type(params[group]).__name__}.'
            )
    gate = params.get("experts", {}).get("gate")
    shapes = param_shapes(model_dim, cfg)
    if cfg.expert_dim is None and gate is not None and jnp.ndim(gate) == 3:
        # Without expert_dim the parameters say how wide the experts are.
        shapes = param_shapes(model_dim, dataclasses.replace(cfg, expert_dim=gate.shape[2]))
    unknown = [g for g in params if g not in shapes]
    unknown += [f"{g}.{n}" for g in shapes for n in params.get(g, {}) if n not in shapes[g]]
    if unknown:
        raise ValueError(
            f"params holds {unknown}, which this config does not use; expected only "
            f"{ {group: list(leaves) for group, leaves in shapes.items()} }."
        )
    for group, leaves in shapes.items():
        for name, shape in leaves.items():
            label = f'params["{group}"]["{name}"]'
            if name not in params.get(group, {}):
                raise ValueError(f"{label} is missing; expected an array of shape {shape}.")
            leaf = params[group][name]
            if not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{label} must be an array of shape {shape}; got {type(leaf).__name__}."
                )
            if jnp.shape(leaf) != shape:
                raise ValueError(
                    f"{label} must have shape {shape} (H = {model_dim}, E = {cfg.num_experts}, "
                    f"I = {shapes['experts']['gate'][2]}); got {jnp.shape(leaf)}."
                )
            check_float_dtype(label, leaf.dtype)
            if name == "expert_table" and leaf.dtype != jnp.float32:
                raise TypeError(
                    f"{label} must be float32, which holds every expert's number exactly; got "
                    f"{leaf.dtype.name}."
                )
    for group in ("experts", "shared"):
        leaves = params[group] if group in shapes else {}
        if "up" in leaves and leaves["gate"].dtype != leaves["up"].dtype:
            raise TypeError(
                f'params["{group}"]["gate"] and ["up"] must have one dtype; got '
                f"{leaves['gate'].dtype.name} and {leaves['up'].dtype.name}."
            )
    return shapes["experts"]["gate"][2]


def trainable_mask(params: Any) -> Any:
    """A pytree like ``params``: False at state, True at all that is trained.

    State is ``selection_bias`` and ``expert_table``.
    For optimisers over plain dicts, for example ``optax.masked(optimizer, trainable_mask)``.
    """

    def trainable(path, _):
        names = {str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path}
        return not names & STATE_NAMES

    return jax.tree_util.tree_map_with_path(trainable, params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedWeight:
    """One stack of expert matrices as the GEMMs read it.

    Attributes:
      q: [E, in, out], in the operands' dtype.
      q_t: [E, out, in], the same codes transposed; FP8 only, else None.
      scale: [E, ceil(in/128), ceil(out/128)] float32; FP8 only.
      scale_t: [E, ceil(out/128), ceil(in/128)] float32, ``scale`` transposed; FP8 only.
    """

    q: jax.Array
    q_t: jax.Array | None = None
    scale: jax.Array | None = None
    scale_t: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedExperts:
    """Expert weights in the GEMMs' precision, made once an optimiser step by ``prepare_experts``.

    No gradient flows to it: ``moe`` sends gradients to the parameters it was made from.

    Attributes:
      gate, up, down: the stacks of matrices; up is None for experts that are not gated.
      shared: the shared expert's, with E = 1; None without one.
      precision: ``"f32"``, ``"bf16"`` or ``"fp8"``.
      scale_rounding: of FP8 scales.
    """

    gate: PreparedWeight
    up: PreparedWeight | None
    down: PreparedWeight
    shared: PreparedExperts | None
    precision: str = dataclasses.field(metadata={"static": True})
    scale_rounding: str = dataclasses.field(metadata={"static": True})


def prepare_weight(w: jax.Array, precision: str, scale_rounding: str) -> PreparedWeight:
    """One stack [E, in, out] in a resolved precision."""
    if precision != "fp8":
        return PreparedWeight(w.astype(_prepared_arrays(w.shape, precision)["q"][1]))
    results = list(_prepared_arrays(w.shape, precision).values())
    return PreparedWeight(
        *call("quantize_weight", results, [w], scale_rounding=scale_rounding == "pow2")
    )


def _prepared_arrays(
    shape: tuple[int, int, int], precision: str
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of the arrays of a ``PreparedWeight``, of weights [E, in, out]."""
    if precision != "fp8":
        return {"q": (shape, jnp.float32 if precision == "f32" else jnp.bfloat16)}
    e, rows, columns = shape
    blocks = (-(-rows // 128), -(-columns // 128))
    f8, f32 = jnp.float8_e4m3fn, jnp.float32
    return {
        "q": (shape, f8),
        "q_t": ((e, columns, rows), f8),
        "scale": ((e, *blocks), f32),
        "scale_t": ((e, *blocks[::-1]), f32),
    }


def prepare(
    experts: Mapping[str, jax.Array], precision: str, scale_rounding: str
) -> PreparedExperts:
    """``prepare_experts`` of one group of params, in a resolved precision."""
    gate, up, down = (
        prepare_weight(experts[name], precision, scale_rounding) if name in experts else None
        for name in MATRICES
    )
    return PreparedExperts(gate, up, down, None, precision, scale_rounding)


def shared_as_experts(shared: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The shared expert's matrices as those of one expert, [1, in, out]."""
    return {name: shared[name][None] for name in MATRICES if name in shared}


def prepare_experts(
    params: Params, cfg: MoEConfig, *, tokens: int | None = None
) -> PreparedExperts:
    """What the GEMMs read of ``params``: FP8 codes and scales in both orientations, or a cast.

    Make it once an optimiser step and give it to every ``moe(..., prepared=)`` of that step, for
    example over microbatches. With ``precision="auto"`` on a CPU the parameters' dtype decides, on
    a Hopper GPU what is expected to be faster in the calls themselves.

    Args:
      params: as ``init`` makes them.
      cfg: the layer; its ``precision`` and ``scale_rounding`` are used.
      tokens: T of those calls on one device, which ``precision="auto"`` looks at on a Hopper GPU.
        None: 16384.

    Raises:
      ValueError, TypeError: ``params`` does not fit ``cfg``.
    """
    check_config(cfg)
    router = params.get("router") if isinstance(params, Mapping) else None
    kernel = router.get("kernel") if isinstance(router, Mapping) else None
    if getattr(kernel, "ndim", None) != 2:
        came = "nothing" if kernel is None else getattr(kernel, "shape", type(kernel).__name__)
        raise ValueError(f'params["router"]["kernel"] must be an array [H, E]; got {came}.')
    if tokens is None:
        tokens = _TOKENS
    check_integer("tokens", tokens, 1)
    expert_dim = check_params(params, cfg, kernel.shape[0])
    params = jax.lax.stop_gradient(params)
    gate = params["experts"]["gate"]
    sizes = LayerSizes(tokens, kernel.shape[0], expert_dim, gate.dtype.itemsize, prepared=True)
    precision = choose_precision(cfg, gate.dtype, device_in_use(gate), sizes).precision
    prepared = prepare(params["experts"], precision, cfg.scale_rounding)
    if "shared" not in params:
        return prepared
    shared = prepare(shared_as_experts(params["shared"]), precision, cfg.scale_rounding)
    return dataclasses.replace(prepared, shared=shared)


def check_prepared(
    prepared: PreparedExperts, params: Params, cfg: MoEConfig, precision: str
) -> None:
    """Raises unless ``prepared`` was made for these parameters' shapes and this precision."""
    if not isinstance(prepared, PreparedExperts):
        raise TypeError(
            f"prepared must come from dropless.prepare_experts; got {type(prepared).__name__}."
        )
    if prepared.precision != precision:
        raise ValueError(
            f'prepared was made for precision="{prepared.precision}", but the layer runs '
            f'precision="{precision}". Prepare again with this config.'
        )
    if precision == "fp8" and prepared.scale_rounding != cfg.scale_rounding:
        raise ValueError(
            f'prepared was made with scale_rounding="{prepared.scale_rounding}", but the config '
            f'says "{cfg.scale_rounding}". Prepare again with this config.'
        )
    _check_prepared_shapes("prepared", prepared, params["experts"], precision)
    if "shared" in params:
        shared = shared_as_experts(params["shared"])
        _check_prepared_shapes("prepared.shared", prepared.shared, shared, precision)


def _check_prepared_shapes(
    label: str, prepared: PreparedExperts | None, experts: Mapping[str, Any], precision: str
) -> None:
    for name in MATRICES:
        if name not in experts:
            continue
        weight, like = getattr(prepared, name, None), experts[name].shape
        for part, (shape, dtype) in _prepared_arrays(like, precision).items():
            have = getattr(weight, part, None)
            came = (getattr(have, "shape", None), getattr(have, "dtype", None))
            if came != (shape, dtype):
                raise ValueError(
                    f"{label}.{name}.{part} must be {jnp.dtype(dtype).name}{list(shape)} for "
                    f"parameters of shape {like}; got "
                    f"{type(have).__name__ if None in came else f'{came[1]}{list(came[0])}'}. "
                    f"Prepare again."
                )
