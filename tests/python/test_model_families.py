"""Every family: its tensors both ways, and its block against the published formulas in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dropless
import oracle

H, I, E, K, S = 10, 6, 12, 3, 14  # noqa: E741 - pairwise different but for E = 2 I
N_SHARED = 2

COMMON = {"hidden_size": H, "num_experts_per_tok": K, "hidden_act": "silu"}
V3 = {"n_routed_experts": E, "moe_intermediate_size": I, "n_shared_experts": N_SHARED}
V2 = {**V3, "topk_method": "group_limited_greedy", "n_group": 4}
WIDE = {"num_experts": E, "intermediate_size": I}
NARROW = {"num_experts": E, "moe_intermediate_size": I}
CONFIGS = {
    "mixtral": {"num_local_experts": E, "intermediate_size": I},
    "qwen2_moe": {**NARROW, "shared_expert_intermediate_size": S},
    "qwen3_next": {**NARROW, "shared_expert_intermediate_size": S, "norm_topk_prob": True},
    "qwen3_5_moe_text": {**NARROW, "shared_expert_intermediate_size": S},
    "qwen3_5_moe": {**NARROW, "shared_expert_intermediate_size": S},
    "qwen3_moe": {**NARROW, "norm_topk_prob": True},
    "olmoe": WIDE,
    "flex_olmo": WIDE,
    "deepseek_v2": {**V2, "topk_group": 2},
    "deepseek_v2 normalised": {
        **V2,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 16.0,
    },
    # One group of three experts is kept, so that two of the five others come in with weight 0.
    "deepseek_v2 few kept": {
        **V2,
        "topk_group": 1,
        "num_experts_per_tok": 5,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {**V3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "deepseek_v32": {**V3, "n_group": 4, "topk_group": 2},
    "deepseek_v4": {
        **V3,
        "n_shared_experts": 1,
        "mlp_layer_types": ["moe", "moe"],
        "swiglu_limit": 1.5,
    },
    "kimi_k2": {**V3, "routed_scaling_factor": 2.827},
    "glm4_moe": V3,
    "dots1": {**V3, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "solar_open": {**V3, "norm_topk_prob": True},
    "afmoe": {**NARROW, "num_shared_experts": 1, "route_scale": 2.826},
    "lfm2_moe": {**NARROW, "norm_topk_prob": True, "use_expert_bias": True},
    "minimax_m2": {"num_local_experts": E, "intermediate_size": I},
    "ernie4_5_moe": {
        "moe_num_experts": E,
        "moe_k": K,
        "moe_intermediate_size": I,
        "moe_num_shared_experts": N_SHARED,
    },
    "gpt_oss": {"num_local_experts": E, "intermediate_size": I},
    "granitemoe": {"num_local_experts": E, "intermediate_size": I},
    "llama4_text": {"num_local_experts": E, "intermediate_size": I, "num_experts_per_tok": 2},
    "llama4": {"num_local_experts": E, "intermediate_size": I, "num_experts_per_tok": 1},
    "hunyuan_v1_moe": {**WIDE, "moe_topk": [K, K]},
    "jamba": WIDE,
    "phimoe": {
        "num_local_experts": E,
        "intermediate_size": I,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.3,  # wide, so that several logits are near
    },
}
LAYOUTS = {
    "granitemoe": ["fused", "released"],
    "gpt_oss": ["fused"],
    "llama4_text": ["fused"],
    "llama4": ["fused"],
}


def config_of(family):
    return {"model_type": family.split()[0], **COMMON, **CONFIGS[family]}


def layouts(family):
    return LAYOUTS.get(family, ["fused", "per_expert"])


def config_only(config):
    return dropless.models.block_config(config)[0]


def random_params(cfg, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    params = dropless.init(jax.random.key(0), H, cfg)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(dtype), params)


def test_every_family_is_here():
    assert set(dropless.models.families) == {name.split()[0] for name in CONFIGS}


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("family", CONFIGS)
def test_o2_params_to_tensors_and_back_are_bit_equal(family, as_array):
    config = config_of(family)
    cfg, model_dim = dropless.models.block_config(config)
    assert model_dim == H
    params = jax.tree.map(as_array, random_params(cfg))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    for layout in layouts(family):
        tensors = dropless.models.to_hf(cfg, params, config, layout=layout)
        assert sum(t.size for t in tensors.values()) == numbers
        got_cfg, got = dropless.models.from_hf(config, tensors)
        assert got_cfg == cfg
        jax.tree.map(np.testing.assert_array_equal, got, params)


# ---- The router of each family, [T, E] logits and a selection bias to [T, E] weights, transcribed
# from the reference implementations.


def top(values, k=K):
    ids = jnp.argsort(-values, axis=-1)[:, :k]
    return jax.nn.one_hot(ids, values.shape[-1]).sum(1)


def softmax_all(z, bias):
    s = jax.nn.softmax(z, -1)
    return s * top(s)


def softmax_renormalised(z, bias):
    w = softmax_all(z, bias)
    return w / w.sum(-1, keepdims=True)


def softmax_of_top(z, bias):
    return jax.nn.softmax(jnp.where(top(z) > 0, z, -jnp.inf), -1)


def sigmoid(eps, scale, groups=None):
    def weights(z, bias):
        s = jax.nn.sigmoid(z)
        ranked = s + bias
        if groups is not None:
            count, kept = groups
            best = jnp.sort(ranked.reshape(len(z), count, -1), -1)[..., -2:].sum(-1)
            open_groups = jnp.repeat(top(best, kept), E // count, axis=-1)
            ranked = jnp.where(open_groups > 0, ranked, -jnp.inf)
        w = s * top(ranked)
        return scale * w / (w.sum(-1, keepdims=True) + eps)

    return weights


def deepseek_v2(kept, k=K, scale=1.0, normalised=False):
    def weights(z, bias):
        s = jax.nn.softmax(z, -1)
        best = s.reshape(len(z), 4, -1).max(-1)
        open_groups = jnp.repeat(top(best, kept), E // 4, axis=-1)
        masked = jnp.where(open_groups > 0, s, 0.0)
        w = masked * top(masked, k)
        return w / (w.sum(-1, keepdims=True) + 1e-20) if normalised else w * scale

    return weights


def ernie(z, bias):
    s = jax.nn.softmax(z, -1)
    w = s * top(s + bias)
    return w / jnp.maximum(w.sum(-1, keepdims=True), 1e-12)


def deepseek_v4(z, bias):
    s = jnp.sqrt(jnp.log1p(jnp.exp(z)))
    w = s * top(s + bias)
    return 1.5 * w / (w.sum(-1, keepdims=True) + 1e-20)


def phimoe(z, bias):
    def weight_of_best(rest):
        best = rest.max(-1, keepdims=True)
        far = (best - z) / jnp.maximum(jnp.abs(z), best) > 2 * 0.3
        near = jnp.where(jax.lax.stop_gradient(far), -jnp.inf, rest)
        return jax.nn.softmax(near, -1) * top(rest, 1)

    return weight_of_best(z) + weight_of_best(jnp.where(top(z, 1) > 0, -jnp.inf, z))


ROUTERS = {
    "phimoe": phimoe,
    "llama4_text": lambda z, bias: jax.nn.sigmoid(z) * top(z, 2),
    "llama4": lambda z, bias: jax.nn.sigmoid(z) * top(z, 1),
    "mixtral": softmax_renormalised,
    "qwen2_moe": softmax_all,
    "qwen3_next": softmax_renormalised,
    "qwen3_5_moe_text": softmax_renormalised,
    "qwen3_moe": softmax_renormalised,
    "olmoe": softmax_all,
    "flex_olmo": softmax_all,
    "deepseek_v2": deepseek_v2(2),
    "deepseek_v2 normalised": deepseek_v2(2, normalised=True),
    "deepseek_v2 few kept": deepseek_v2(1, k=5, scale=16.0),
    "deepseek_v3": sigmoid(1e-20, 2.5, (4, 2)),
    "deepseek_v32": sigmoid(1e-20, 1.0, (4, 2)),
    "deepseek_v4": deepseek_v4,
    "kimi_k2": sigmoid(1e-20, 2.827),
    "glm4_moe": sigmoid(1e-20, 1.0),
    "dots1": sigmoid(1e-20, 2.5),
    "solar_open": sigmoid(1e-20, 1.0),
    "afmoe": sigmoid(1e-20, 2.826),
    "lfm2_moe": sigmoid(1e-6, 1.0),
    "minimax_m2": sigmoid(0.0, 1.0),
    "ernie4_5_moe": ernie,
    "gpt_oss": softmax_of_top,
    "granitemoe": softmax_of_top,
    "hunyuan_v1_moe": softmax_renormalised,
    "jamba": softmax_all,
}


def block(family, x, params):
    """The published block, every expert on every token."""
    router, experts = params["router"], params["experts"]
    z = x @ router["kernel"] + router.get("bias", 0.0)
    weights = ROUTERS[family](z, router.get("selection_bias", 0.0))
    on_input = family.startswith("llama4")
    rows = x[:, None] * weights[..., None] if on_input else x[:, None]

    def inward(name):
        return jnp.einsum("teh,ehi->tei", jnp.broadcast_to(rows, (len(x), E, H)), experts[name]) + (
            experts.get(f"{name}_bias", 0.0)
        )

    def clamped(gate, up):
        cut = family == "deepseek_v4"
        return (jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)) if cut else (gate, up)

    gate, up = clamped(inward("gate"), inward("up"))
    if family == "gpt_oss":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0) + 1.0
        a = gate * jax.nn.sigmoid(1.702 * gate) * up
    else:
        a = jax.nn.silu(gate) * up
    out = jnp.einsum("tei,eih->teh", a, experts["down"]) + experts.get("down_bias", 0.0)
    # An expert that reads zeros answers zeros: all may be added where the input is weighted.
    y = out.sum(1) if on_input else jnp.einsum("te,teh->th", weights, out)
    if "shared" in params:
        shared = params["shared"]
        gate, up = clamped(x @ shared["gate"], x @ shared["up"])
        dense = jax.nn.silu(gate) * up @ shared["down"]
        if "output_gate" in shared:
            dense = dense * jax.nn.sigmoid(x @ shared["output_gate"])
        y = y + dense
    return y


@pytest.mark.parametrize("family", ROUTERS)
def test_block_and_every_gradient_follow_the_published_formulas(family):
    cfg = dataclasses.replace(config_only(config_of(family)), precision="f32")
    params = random_params(cfg)
    params["router"] = {
        name: 0.2 * a if name == "selection_bias" else a for name, a in params["router"].items()
    }
    if family == "gpt_oss":  # some pre-activations beyond the limits
        params["experts"]["gate"] *= 2
        params["experts"]["up"] *= 2
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal((9, H)).astype(np.float32) for _ in range(2))
    with jax.enable_x64(True):
        want, vjp = jax.vjp(lambda x, p: block(family, x, p), *oracle.to64((x, params)))
        dx_want, dparams_want = vjp(dy.astype(np.float64))
    got, vjp = jax.vjp(jax.jit(lambda x, p: dropless.moe(x, p, cfg)[0]), x, params)
    dx, dparams = vjp(jnp.asarray(dy))
    limit = oracle.bound("f32", max(H, E, I, S), 14)
    oracle.assert_close("y", got, want, limit)
    oracle.assert_close("dx", dx, dx_want, limit)
    wanted = dict(oracle.leaves(dparams_want))
    for path, gradient in oracle.leaves(dparams):
        if "selection_bias" in path:
            assert not np.asarray(gradient).any()
        else:
            oracle.assert_close(path, gradient, wanted[path], limit, groups=gradient.ndim == 3)


@pytest.mark.parametrize(
    ("family", "missing", "default"),
    [
        ("qwen3_next", "norm_topk_prob", True),
        ("qwen3_moe", "norm_topk_prob", False),
        ("dots1", "norm_topk_prob", False),
        ("solar_open", "norm_topk_prob", True),
        ("lfm2_moe", "norm_topk_prob", True),
        ("glm4_moe", "routed_scaling_factor", 1.0),
        ("phimoe", "router_jitter_noise", 0.01),
        ("gpt_oss", "swiglu_limit", 7.0),
        ("mixtral", "hidden_act", "silu"),
    ],
)
def test_a_missing_setting_has_the_default_of_the_published_config_class(family, missing, default):
    config = config_of(family)
    without = {name: value for name, value in config.items() if name != missing}
    got = dropless.models.block_config(without)
    assert got == dropless.models.block_config(without | {missing: default})
    assert got == dropless.models.block_config(without | {missing: None})


@pytest.mark.parametrize("family", CONFIGS)
def test_settings_of_the_rest_of_the_model_change_nothing(family):
    config = config_of(family)
    other = {
        "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}, "num_hidden_layers": 2,
        "mlp_only_layers": [], "first_k_dense_replace": 1, "torch_dtype": "bfloat16",
        "architectures": ["ForCausalLM"], "quantization_config": None, "aux_loss_alpha": 1e-3,
    }  # fmt: skip
    assert dropless.models.block_config(config | other) == dropless.models.block_config(config)


def test_f5_experts_of_other_groups_lose_against_a_negative_bias():
    """With ranked values below 0 everywhere, a mask of 0 would choose them first."""
    cfg = config_only(config_of("deepseek_v3"))
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((31, E)), jnp.float32)
    routing = dropless.route(logits, cfg, selection_bias=jnp.full(E, -2.0))
    ranked = 1 / (1 + np.exp(-np.asarray(logits, np.float64))) - 2
    best = np.sort(ranked.reshape(31, 4, E // 4), -1)[..., -2:].sum(-1)
    kept = np.argsort(-best, axis=1)[:, :2]
    for ids, groups in zip(np.asarray(routing.ids), kept, strict=True):
        assert set(ids // (E // 4)) <= set(groups)


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_deepseek_v4_layers_with_a_table_take_its_experts(layout):
    vocabulary = 17
    config = config_of("deepseek_v4") | {"mlp_layer_types": "hash_moe", "vocab_size": vocabulary}
    cfg = dataclasses.replace(config_only(config), precision="f32")
    assert cfg.router.expert_table == vocabulary and not cfg.router.selection_bias
    params = random_params(cfg)
    rng = np.random.default_rng(5)
    table = np.argsort(rng.standard_normal((vocabulary, E)), axis=1)[:, :K].astype(np.int64)
    params["router"]["expert_table"] = table.astype(np.float32)
    tensors = dropless.models.to_hf(cfg, params, config, layout=layout)
    assert tensors["gate.tid2eid"].dtype == np.int64
    np.testing.assert_array_equal(tensors["gate.tid2eid"], table)
    _, read = dropless.models.from_hf(config, tensors)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    x = rng.standard_normal((9, H)).astype(np.float32)
    token_ids = rng.integers(0, vocabulary, 9)
    y, _ = dropless.moe(x, jax.tree.map(jnp.asarray, read), cfg, token_ids=token_ids)
    chosen = np.zeros((9, E))
    np.put_along_axis(chosen, table[token_ids], 1e3, axis=1)  # which then are the K largest
    with jax.enable_x64(True):
        wide = oracle.to64((x, {**params, "router": {"kernel": params["router"]["kernel"]}}))
        wide[1]["router"]["selection_bias"] = jnp.asarray(chosen)
        want = block("deepseek_v4", *wide)
    oracle.assert_close("y", y, want, oracle.bound("f32", max(H, E, I, S), 14))
    with pytest.raises(ValueError, match="mlp_layer_types.*layers differ"):
        dropless.models.block_config(config | {"mlp_layer_types": ["hash_moe", "moe"]})
    floats = tensors | {"gate.tid2eid": table.astype(np.float32)}
    with pytest.raises(ValueError, match="gate.tid2eid: expected integers, got float32"):
        dropless.models.from_hf(config, floats)


def test_a_text_config_inside_a_multimodal_one_is_read():
    config = config_of("llama4_text")
    outer = {"model_type": "llama4", "text_config": config}
    assert dropless.models.block_config(outer) == dropless.models.block_config(config)
    # What the outer one says of the whole model holds, and the inner one comes first.
    inner = {name: value for name, value in config.items() if name != "model_type"}
    assert dropless.models.block_config(outer | {"text_config": inner})
    blocks = {"quantization_config": {"weight_block_size": [64, 64]}}
    with pytest.raises(ValueError, match="weight_block_size"):
        dropless.models.from_hf(outer | blocks, {})
    with pytest.raises(ValueError, match="expected intermediate_size, found none"):
        dropless.models.block_config({"model_type": "llama4", "text_config": {}, **COMMON})


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("afmoe", "score_func", "softmax"),
        ("afmoe", "route_norm", False),
        ("ernie4_5_moe", "use_bias", True),
    ],
)
def test_settings_not_supported_are_refused(family, name, value):
    with pytest.raises(ValueError, match=f"{name}.*got {value!r}"):
        dropless.models.block_config({**config_of(family), name: value})
