"""The layer in float64, dense over experts, its gradients by autodiff: what tests compare with.

Written from the formulas alone. Nothing here is shared with the library.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dropless

# Small arrays, many configurations: unoptimised code compiles two to five times faster.
COMPILE_FAST = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    COMPILE_FAST["xla_cpu_use_fusion_emitters"] = False  # gone from later releases

# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"f32": 2.0**-24, "bf16": 2.0**-8, "fp8": 2.0**-4}

# Of the layer's 7 roundings on the way to y, those to FP8 where the GEMMs' operands are: x, gate,
# up, A and down; h and O are bfloat16. Of the 14 on the way to a gradient: x, gate, up, maybe h,
# dy, down, dh, and a second x or gate; the rest, h, dh and the products, are bfloat16.
FP8_FORWARD, FP8_BACKWARD = 5, 8


def to64(tree):
    """Float leaves as float64, the rest unchanged."""

    def widen(a):
        a = np.asarray(a)
        return a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(widen, tree)


def scores_of(logits, kind):
    return {
        "softmax": lambda z: jax.nn.softmax(z, -1),
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda z: jnp.sqrt(jnp.logaddexp(z, 0)),
        "identity": lambda z: z,
    }[kind](logits)


def top_k(values, k):
    """Larger first, equal values lowest index first, NaN last."""
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    return jnp.argsort(-values, axis=-1, stable=True)[:, :k]


def keep_groups(ranked, router):
    """Ranked values [T, E] with those of the groups that are not kept replaced."""
    t, e = ranked.shape
    grouped = ranked.reshape(t, router.num_groups, -1)
    best = -jnp.sort(-grouped, axis=-1)[..., : router.group_score_experts]
    kept = jax.nn.one_hot(top_k(best.sum(-1), router.groups_kept), router.num_groups).sum(1)
    other = 0.0 if router.group_mask == "zero" else -jnp.inf
    return jnp.where(kept[..., None] > 0, grouped, other).reshape(t, e)


def route(logits, router, k, selection_bias=None, mask=None, ids=None, expert_scale=None):
    """ids, weights, and the three sums over real tokens.

    ``ids`` [T, K] are experts that are given, -1 in empty slots.
    """
    t = logits.shape[0]
    real = jnp.ones(t) if mask is None else (jnp.reshape(mask, t) != 0).astype(logits.dtype)
    bias = 0.0 if selection_bias is None else selection_bias
    scores = scores_of(logits, router.score)
    if ids is None:
        ranked = (scores if router.score_before_topk else logits) + bias
        ids = top_k(keep_groups(ranked, router) if router.num_groups > 1 else ranked, k)
    real = real * (ids >= 0).any(-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(ids, 0), -1)
    if router.score != "softmax":
        weights = scores_of(picked, router.score)
    elif router.score_before_topk:
        weights = jnp.take_along_axis(scores, jnp.maximum(ids, 0), -1)
    else:
        weights = jnp.where(ids < 0, 0, jnp.exp(picked))
        weights = weights / jnp.where(real > 0, weights.sum(-1), 1)[:, None]
    weights = jnp.where(ids < 0, 0, weights)
    if router.renormalize:
        total = weights.sum(-1, keepdims=True)
        eps = router.renormalize_eps
        total = jnp.maximum(total, eps) if router.renormalize_clamp else total + eps
        weights = weights / jnp.where(real[:, None] > 0, total, 1)
    weights = weights * router.scale * real[:, None]
    if expert_scale is not None:
        weights = weights * expert_scale[jnp.maximum(ids, 0)]
    share = scores
    if router.score in ("sigmoid", "sqrt_softplus"):
        share = scores / scores.sum(-1, keepdims=True)
    elif router.score == "identity":
        share = jax.nn.softmax(logits, -1)
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0), -1)
    lse = jax.nn.logsumexp(logits, -1)
    sums = (share * real[:, None]).sum(0), (lse**2 * real).sum(), (entropy * real).sum()
    return ids, weights, *sums, real


def activation(kind, z, slope=1.0):
    return {
        "silu": lambda z: z * jax.nn.sigmoid(slope * z),
        "gelu": lambda z: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        "relu": lambda z: jnp.where(z > 0, z, 0),
        "relu_squared": lambda z: jnp.where(z > 0, z * z, 0),
    }[kind](z)


def glu(options, gate, up):
    """A of pre-activations, of a name or a ``dropless.Activation``; no limit is met exactly."""
    if isinstance(options, str):
        return activation(options, gate) * up
    if options.gate_limit is not None:
        gate = jnp.where(gate > options.gate_limit, options.gate_limit, gate)
    a = activation(options.kind, gate, options.slope)
    if not options.gated:
        return a
    if options.up_limit is not None:
        up = jnp.where(jnp.abs(up) > options.up_limit, options.up_limit * jnp.sign(up), up)
    return a * (up + options.up_offset)


def expert_outputs(x, experts, options):
    """[T, E, H]: every expert on its row of x [T, E, H], or on all rows of x [T, H]."""
    rows = "th" if x.ndim == 2 else "teh"

    def inward(name):
        if name not in experts:
            return None
        return jnp.einsum(f"{rows},ehi->tei", x, experts[name]) + experts.get(f"{name}_bias", 0.0)

    a = glu(options, inward("gate"), inward("up"))
    return jnp.einsum("tei,eih->teh", a, experts["down"]) + experts.get("down_bias", 0.0)


def moe(x, params, cfg, mask=None):
    """y and the losses, differentiable."""
    e, k = cfg.num_experts, cfg.experts_per_token
    tokens = x.reshape(-1, x.shape[-1])
    router = params["router"]
    logits = tokens @ router["kernel"] + router.get("bias", 0.0)
    ids, weights, prob_sum, lse2, entropy, real = route(
        logits, cfg.router, k, router.get("selection_bias"), mask,
        expert_scale=router.get("expert_scale"),
    )  # fmt: skip
    chosen = jax.nn.one_hot(ids, e, dtype=x.dtype) * real[:, None, None]  # [T, K, E]
    kept = chosen
    if cfg.overflow == "drop":
        # An expert keeps its first `capacity` assignments, in the order of tokens, then of choice.
        order = jnp.cumsum(chosen.reshape(-1, e), 0).reshape(chosen.shape)
        kept = chosen * (order <= cfg.capacity(len(tokens)))
    combine = jnp.einsum("tk,tke->te", weights, kept)
    rows = jnp.broadcast_to(tokens[:, None], (len(tokens), e, tokens.shape[-1]))
    if cfg.router.weight_on == "input":
        rows, combine = combine[..., None] * rows, kept.sum(1)
    outputs = expert_outputs(rows, params["experts"], cfg.activation)
    y = jnp.einsum("te,teh->th", combine, outputs)
    if "shared" in params:
        shared = {name: matrix[None] for name, matrix in params["shared"].items()}
        out = expert_outputs(tokens[:, None], shared, cfg.activation)[:, 0] * real[:, None]
        if cfg.shared_expert_gate:
            out *= jax.nn.sigmoid(tokens @ params["shared"]["output_gate"])
        y += out
    count = jnp.maximum(real.sum(), 1)
    counts = chosen.sum((0, 1))
    aux = {
        "expert_counts": counts.astype(jnp.int32),
        "load_balance_loss": e * jnp.sum(counts / (k * count) * prob_sum / count),
        "z_loss": lse2 / count,
        "router_entropy": entropy / count,
        "dropped_tokens": (chosen.sum() - kept.sum()).astype(jnp.int32),
    }
    return y.reshape(x.shape), aux


LOSSES = ("load_balance_loss", "z_loss", "router_entropy")


def objective(outputs, dy, coefficients):
    """A scalar that reaches y by a random cotangent and every loss by a coefficient."""
    y, aux = outputs
    aux = aux if isinstance(aux, dict) else vars(aux)
    total = jnp.sum(y.astype(jnp.promote_types(y.dtype, jnp.float32)) * dy)
    return total + sum(c * aux[name] for c, name in zip(coefficients, LOSSES, strict=True))


@functools.cache
def _gradients(cfg):
    def scalar(x, params, mask, dy, coefficients):
        outputs = moe(x, params, cfg, mask)
        return objective(outputs, dy, coefficients), outputs

    gradients = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)
    return jax.jit(gradients, compiler_options=COMPILE_FAST)


def value_and_gradients(cfg, x, params, mask, dy, coefficients):
    """(y, aux), (dx, dparams) in float64."""
    with jax.enable_x64(True):
        arguments = to64((x, params, mask, dy, coefficients))
        (_, outputs), gradients = _gradients(cfg)(*arguments)
        return jax.tree.map(np.asarray, (outputs, gradients))


# Of the central differences below, in float64. Rounding leaves 2^-53 / STEP of a sum of 60 times
# the slope, near 1e-7 of it, truncation far less; and the shorter the step, the fewer of the
# thousands of pre-activations pass a limit on the way.
STEP = 2.0**-22


def assert_slopes(cfg, gradients, x, params, mask, dy, coefficients, bound):
    """Each of ``gradients`` (dx, dparams) against central differences of the float64 forward.

    Along a random direction of length 1 an error of n independent elements shows with its root mean
    square, which is ``bound`` times that of the gradient; eight of them are allowed: four standard
    deviations, and twice for ``spread``. Nothing here uses a derivative.
    """
    rng = np.random.default_rng(11)
    with jax.enable_x64(True):
        x, params, mask, dy, coefficients = to64((x, params, mask, dy, coefficients))
        point = (x, params)
        paths, structure = jax.tree_util.tree_flatten_with_path(point)

        def value(index, moved):
            flat = [moved if i == index else leaf for i, (_, leaf) in enumerate(paths)]
            arguments = (*jax.tree.unflatten(structure, flat), mask, dy, coefficients)
            (total, (_, aux)), _ = _gradients(cfg)(*arguments)
            return float(total), np.asarray(aux["expert_counts"])

        for index, ((path, leaf), gradient) in enumerate(
            zip(paths, jax.tree.leaves(gradients), strict=True)
        ):
            name, gradient = jax.tree_util.keystr(path), np.asarray(gradient, np.float64)
            direction = rng.standard_normal(leaf.shape)
            direction /= np.linalg.norm(direction)
            slopes = []
            for step in (STEP, 2 * STEP):
                (up, counts_up), (down, counts_down) = (
                    value(index, leaf + sign * step * direction) for sign in (1, -1)
                )
                np.testing.assert_array_equal(counts_up, counts_down, err_msg=name)
                slopes.append((up - down) / (2 * step))
            limit = 8 * bound * rms(gradient)
            # Twice the step makes four times the truncation error: the quotients' own error shows.
            unsure = abs(slopes[0] - slopes[1])
            assert unsure <= 0.1 * limit + 1e-12, f"{name}: no slope, {slopes}"
            error = abs(slopes[0] - np.sum(gradient * direction))
            assert error <= limit + unsure, f"{name}: slope off by {error:.2e} > {limit:.2e}"


def layer_case(cfg, shape, x_dtype=jnp.float32, param_dtype=jnp.float32, seed=0):
    """x, params and a cotangent of y: everything of unit scale, nothing special about any value."""
    rng = np.random.default_rng(seed)
    params = dropless.init(jax.random.key(seed), shape[-1], cfg, param_dtype=param_dtype)

    def fill(path, leaf):
        # Biases are half as large as what they are added to.
        scale = (
            0.5
            if leaf.ndim == 1 or "_bias" in jax.tree_util.keystr(path)
            else leaf.shape[-2] ** -0.5
        )
        return jnp.asarray(rng.standard_normal(leaf.shape) * scale, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(fill, params)
    x = jnp.asarray(rng.standard_normal(shape), x_dtype)
    dy = jnp.asarray(rng.standard_normal(shape), x_dtype)
    return x, params, dy


def rms(a):
    return float(np.sqrt(np.mean(np.square(np.asarray(a, np.float64))))) if np.size(a) else 0.0


def spread(values):
    """How far the rms of so many errors may exceed what is expected of it.

    The mean square of n normal errors has a relative standard deviation of sqrt(2 / n); three of
    them are allowed, and never more than twice the rms: the full unit roundoff of each rounding.
    """
    return min(2.0, np.sqrt(1 + 3 * np.sqrt(2 / values)))


def assert_rows_close(name, got, want, bound):
    """The same, with every row of [R, N] that is larger than the whole's rms on its own scale.

    For rows that all come from one number each, as outputs of experts of width 1 do: products of
    three and more normal numbers, which no sum evens out, so that a few rows outweigh the others.
    Relative to the whole their errors would be as many times too large. A row shares one error.
    """
    want = np.asarray(want, np.float64)
    row = np.sqrt(np.square(want).mean(-1, keepdims=True))
    scale = np.maximum(row, rms(want)) / rms(want)
    assert_close(name, np.asarray(got, np.float64) / scale, want / scale, bound, values=[len(want)])


def assert_close(name, got, want, bound, *, groups=False, values=None):
    """Root-mean-square error relative to that of ``want``, at most ``bound`` times ``spread``.

    No error is above 16 times the bound: a number 8 times the rms, as among a thousand products of
    two normal ones, may be off by the unit roundoff, of which the bound takes half.

    With ``groups``, each matrix of the leading axis is judged on its own, relative to the whole.
    ``values``: independent errors in each, where they are fewer than the elements.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    scale = rms(want)
    if scale == 0:
        assert not got.any(), f"{name}: must be exactly 0"
        return
    parts = zip(got, want, strict=True) if groups else [(got, want)]
    for index, (g, w) in enumerate(parts):
        if not w.any():
            assert not g.any(), f"{name}[{index}]: must be exactly 0"
            continue
        independent = w.size if values is None else min(w.size, values[index])
        limit = bound * spread(independent)
        error = rms(g - w) / max(rms(w), 0.1 * scale)
        largest = np.abs(g - w).max() / max(rms(w), 0.1 * scale)
        assert error <= limit, f"{name}[{index}]: rms error {error:.2e} > {limit:.2e}"
        assert largest <= 16 * bound, (
            f"{name}[{index}]: largest error {largest:.2e} > 16 * {bound:.2e}"
        )


def bound(precision, length, roundings, *, fp8=None):
    """Expected rms error: independent roundings, and sqrt(length) for float32 sums of ``length``.

    A rounding's error is uniform within a unit roundoff of the power of two below the number: its
    rms is 1/sqrt(3) = 0.58 units for numbers just above one, 0.29 for those just below the next,
    0.39 where logarithms are evenly spread. 0.5 is taken. float32 also pays for exponentials and
    divisions, of up to 4 units each, per rounding counted. With ``precision="fp8"``, ``fp8`` of the
    roundings are to FP8 and the rest to bfloat16; None: all are to FP8.
    """
    f32 = ROUNDOFF["f32"] * (np.sqrt(length) + 4 * roundings)
    if precision == "f32":
        return 0.5 * f32
    narrow = 0 if precision == "bf16" else roundings if fp8 is None else fp8
    squares = narrow * ROUNDOFF["fp8"] ** 2 + (roundings - narrow) * ROUNDOFF["bf16"] ** 2
    return 0.5 * (f32 + np.sqrt(squares))


def leaves(tree):
    """(path, array) of every leaf."""
    return [
        (jax.tree_util.keystr(p), leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
