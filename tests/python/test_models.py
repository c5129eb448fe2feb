"""Conversion of checkpoints: layouts, round trips, and errors that list both sides."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dropless

H, I, E, K = 10, 6, 5, 2  # noqa: E741 - pairwise different, so that no swapped axis goes unseen
LINEARS = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "olmoe": ("gate_proj", "up_proj", "down_proj"),
}
FAMILIES = list(LINEARS)
DTYPES = [np.float32, ml_dtypes.bfloat16]


def config_of(family, **settings):
    experts = {"mixtral": "num_local_experts"}.get(family, "num_experts")
    width = {"qwen3_moe": "moe_intermediate_size"}.get(family, "intermediate_size")
    return {
        "model_type": family,
        "hidden_size": H,
        "num_experts_per_tok": K,
        "hidden_act": "silu",
        experts: E,
        width: I,
    } | settings


def fused_tensors(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    return {
        "gate.weight": make(E, H),
        "experts.gate_up_proj": make(E, 2 * I, H),
        "experts.down_proj": make(E, H, I),
    }


def split_experts(family, fused):
    gate, up, down = LINEARS[family]
    tensors = {"gate.weight": fused["gate.weight"]}
    for e in range(E):
        tensors[f"experts.{e}.{gate}.weight"] = fused["experts.gate_up_proj"][e, :I]
        tensors[f"experts.{e}.{up}.weight"] = fused["experts.gate_up_proj"][e, I:]
        tensors[f"experts.{e}.{down}.weight"] = fused["experts.down_proj"][e]
    return tensors


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert np.asarray(got[name]).tobytes() == np.asarray(want[name]).tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_o2_both_layouts_give_the_same_params(family, dtype):
    fused = fused_tensors(dtype)
    cfg, params = dropless.models.from_hf(config_of(family), fused)
    other_cfg, other = dropless.models.from_hf(config_of(family), split_experts(family, fused))
    assert cfg == other_cfg
    assert params["router"]["kernel"].shape == (H, E)
    assert params["experts"]["gate"].shape == params["experts"]["up"].shape == (E, H, I)
    assert params["experts"]["down"].shape == (E, I, H)
    assert params.keys() == other.keys()
    for group in params:
        assert_same_bits(other[group], params[group])


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_o2_round_trip_is_bit_equal_in_both_layouts(family, dtype, as_array):
    fused = {name: as_array(a) for name, a in fused_tensors(dtype).items()}
    for layout, tensors in ("fused", fused), ("per_expert", split_experts(family, fused)):
        cfg, params = dropless.models.from_hf(config_of(family), tensors)
        kind = type(as_array(0))
        assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(params))
        out = dropless.models.to_hf(cfg, params, config_of(family), layout=layout)
        assert_same_bits(out, tensors)


def test_default_layout_follows_the_release_in_the_config():
    cfg, params = dropless.models.from_hf(config_of("olmoe"), fused_tensors())
    for version, layout in (None, "fused"), ("5.17.0", "fused"), ("4.57.1", "per_expert"):
        config = config_of("olmoe", transformers_version=version)
        want = fused_tensors() if layout == "fused" else split_experts("olmoe", fused_tensors())
        assert_same_bits(dropless.models.to_hf(cfg, params, config), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_params_fit_init_and_run(family):
    cfg, params = dropless.models.from_hf(config_of(family), fused_tensors())
    want = jax.eval_shape(lambda key: dropless.init(key, H, cfg), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, want)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((7, H)), jnp.float32)
    y, _ = dropless.moe(x, jax.tree.map(jnp.asarray, params), cfg)
    assert y.shape == x.shape and bool(jnp.isfinite(y).all())


def test_o4_layers_stacked_in_front_convert_under_vmap():
    layers = 3
    stacked = {
        name: jnp.stack([fused_tensors(seed=layer)[name] for layer in range(layers)])
        for name in fused_tensors()
    }
    config = config_of("qwen3_moe")
    cfg, _ = dropless.models.from_hf(config, fused_tensors())
    params = jax.vmap(lambda tensors: dropless.models.from_hf(config, tensors)[1])(stacked)
    assert params["experts"]["gate"].shape == (layers, E, H, I)
    out = jax.vmap(lambda params: dropless.models.to_hf(cfg, params, config))(params)
    assert_same_bits(out, stacked)


def test_to_hf_is_linear():
    config = config_of("mixtral")
    cfg, params = dropless.models.from_hf(config, fused_tensors())
    twice = dropless.models.to_hf(cfg, jax.tree.map(lambda a: 2 * a, params), config)
    assert_same_bits(twice, {name: 2 * a for name, a in fused_tensors().items()})


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_o1_every_source_tensor_is_consumed_or_listed(layout):
    tensors = fused_tensors()
    if layout == "per_expert":
        tensors = split_experts("mixtral", tensors)
    lost = next(name for name in tensors if "down" in name or name.endswith("3.w2.weight"))
    tensors["experts.stray"] = tensors.pop(lost)
    tensors["gate.weight"] = tensors["gate.weight"].T
    with pytest.raises(ValueError) as error:
        dropless.models.from_hf(config_of("mixtral"), tensors)
    message = str(error.value)
    assert f"missing: {lost} " in message
    assert "unexpected: experts.stray" in message
    assert f"gate.weight expected ({E}, {H}), got ({H}, {E})" in message


def test_a_config_with_absurdly_many_experts_is_refused_at_once():
    config = config_of("mixtral") | {"num_local_experts": 10**15}
    with pytest.raises(ValueError, match="num_experts must be at most 16777216; got 10{15}"):
        dropless.models.from_hf(config, fused_tensors())
    config["num_local_experts"] = 2**24  # as many as a config may have
    with pytest.raises(ValueError, match=r"16777216 experts .* and \d+ more$") as error:
        dropless.models.from_hf(config, split_experts("mixtral", fused_tensors()))
    assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match=r"gate.weight expected \(16777216, "):
        dropless.models.from_hf(config, fused_tensors())


def test_mixed_layouts_are_refused():
    tensors = fused_tensors() | split_experts("mixtral", fused_tensors())
    with pytest.raises(ValueError, match="unexpected: experts.gate_up_proj"):
        dropless.models.from_hf(config_of("mixtral"), tensors)


def test_o1_every_target_is_written_or_listed():
    config = config_of("mixtral")
    cfg, params = dropless.models.from_hf(config, fused_tensors())
    experts = dict(params["experts"])
    experts["gates"] = experts.pop("gate")
    experts["up"] = experts["up"][:, :, 1:]
    with pytest.raises(ValueError) as error:
        dropless.models.to_hf(cfg, {"router": params["router"], "experts": experts}, config)
    message = str(error.value)
    assert f"missing: experts.gate ({E}, {H}, {I})" in message
    assert "unexpected: experts.gates" in message
    assert f"experts.up expected ({E}, {H}, {I}), got ({E}, {H}, {I - 1})" in message


def test_unknown_family_names_the_known_ones():
    for call in (
        lambda config: dropless.models.from_hf(config, fused_tensors()),
        lambda config: dropless.models.to_hf(dropless.MoEConfig(num_experts=E), {}, config),
    ):
        for config in {"model_type": "gpt2"}, {}:
            with pytest.raises(ValueError, match="mixtral.*qwen3_moe.*olmoe"):
                call(config)


@pytest.mark.parametrize("missing", ["hidden_size", "num_experts_per_tok", "intermediate_size"])
def test_missing_setting_is_named(missing):
    config = config_of("mixtral")
    del config[missing]
    with pytest.raises(ValueError, match=missing):
        dropless.models.from_hf(config, fused_tensors())


def test_settings_that_contradict_are_refused():
    with pytest.raises(ValueError, match="num_local_experts.*7"):
        dropless.models.from_hf(config_of("qwen3_moe", num_local_experts=7), fused_tensors())


def test_settings_not_supported_are_refused():
    with pytest.raises(ValueError, match="hidden_act.*relu6"):
        dropless.models.from_hf(config_of("mixtral", hidden_act="relu6"), fused_tensors())


def test_jitter_is_read_and_settings_by_layer_count_where_layers_agree():
    cfg, _ = dropless.models.from_hf(config_of("mixtral", router_jitter_noise=0.1), fused_tensors())
    assert cfg.router.jitter == 0.1
    cfg, _ = dropless.models.from_hf(
        config_of("mixtral", num_experts_per_tok=[K, K]), fused_tensors()
    )
    assert cfg.experts_per_token == K
    with pytest.raises(ValueError, match="num_experts_per_tok.*layers differ"):
        dropless.models.from_hf(config_of("mixtral", num_experts_per_tok=[1, K]), fused_tensors())


@pytest.mark.parametrize("value", ["8", -8, 0, 8.0, True])
def test_n2_a_size_that_is_none_is_named(value):
    with pytest.raises(ValueError, match=f"hidden_size to be an int >= 1, got {value!r}"):
        dropless.models.from_hf(config_of("mixtral", hidden_size=value), fused_tensors())


def test_n2_what_is_no_mapping_is_named():
    config = config_of("mixtral")
    cfg, params = dropless.models.from_hf(config, fused_tensors())
    for call, name in (
        (lambda: dropless.models.from_hf(None, fused_tensors()), "config"),
        (lambda: dropless.models.from_hf(config, None), "tensors"),
        (lambda: dropless.models.from_hf(config, {1: 2}), "tensors"),
        (lambda: dropless.models.to_hf(None, params, config), "cfg"),
        (lambda: dropless.models.to_hf(cfg, None, config), "params"),
        (lambda: dropless.models.to_hf(cfg, {"router": None}, config), r"params\['router'\]"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected"):
            call()


def test_cfg_of_another_block_is_refused():
    config = config_of("olmoe")
    cfg, params = dropless.models.from_hf(config, fused_tensors())
    other = dataclasses.replace(cfg, experts_per_token=K + 1)
    with pytest.raises(ValueError, match=f"experts_per_token: config says {K}, cfg has {K + 1}"):
        dropless.models.to_hf(other, params, config)
    with pytest.raises(ValueError, match="layout.*fused.*per_expert.*sideways"):
        dropless.models.to_hf(cfg, params, config, layout="sideways")


SIZES = {  # H, I, E, K, S, renormalisation and scale, from the models' config files
    "mixtral-8x7b": (4096, 14336, 8, 2, None, True, 1.0),
    "mixtral-8x22b": (6144, 16384, 8, 2, None, True, 1.0),
    "qwen1.5-moe-a2.7b": (2048, 1408, 60, 4, 5632, False, 1.0),
    "qwen2-57b-a14b": (3584, 2560, 64, 8, 20480, False, 1.0),
    "qwen3-30b-a3b": (2048, 768, 128, 8, None, True, 1.0),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, None, True, 1.0),
    "qwen3-coder-480b-a35b": (6144, 2560, 160, 8, None, True, 1.0),
    "qwen3-next-80b-a3b": (2048, 512, 512, 10, 512, True, 1.0),
    "deepseek-v2-lite": (2048, 1408, 64, 6, 2816, False, 1.0),
    "deepseek-v2": (5120, 1536, 160, 6, 3072, False, 16.0),
    "deepseek-v3": (7168, 2048, 256, 8, 2048, True, 2.5),
    "deepseek-r1": (7168, 2048, 256, 8, 2048, True, 2.5),
    "deepseek-v4-flash": (4096, 2048, 256, 6, 2048, True, 1.5),
    "kimi-k2": (7168, 2048, 384, 8, 2048, True, 2.827),
    "glm-4.5": (5120, 1536, 160, 8, 1536, True, 2.5),
    "glm-4.5-air": (4096, 1408, 128, 8, 1408, True, 1.0),
    "gpt-oss-20b": (2880, 2880, 32, 4, None, False, 1.0),
    "gpt-oss-120b": (2880, 2880, 128, 4, None, False, 1.0),
    "olmoe-1b-7b": (2048, 1024, 64, 8, None, False, 1.0),
    "flexolmo-7x7b": (4096, 11008, 7, 5, None, False, 1.0),
    "granite-3.0-1b-a400m": (1024, 512, 32, 8, None, False, 1.0),
    "granite-3.0-3b-a800m": (1536, 512, 40, 8, None, False, 1.0),
    "llama-4-scout": (5120, 8192, 16, 1, 8192, False, 1.0),
    "llama-4-maverick": (5120, 8192, 128, 1, 8192, False, 1.0),
    "minimax-m2": (3072, 1536, 256, 8, None, True, 1.0),
    "hunyuan-a13b": (4096, 3072, 64, 8, 3072, True, 1.0),
    "ernie-4.5-21b-a3b": (2560, 1536, 64, 6, 3072, True, 1.0),
    "ernie-4.5-300b-a47b": (8192, 3584, 64, 8, None, True, 1.0),
    "jamba-v0.1": (4096, 14336, 16, 2, None, False, 1.0),
    "jamba-1.5-large": (8192, 24576, 16, 2, None, False, 1.0),
    "phi-3.5-moe": (4096, 6400, 16, 2, None, True, 1.0),
    "dots.llm1": (4096, 1408, 128, 6, 2816, True, 2.5),
    "lfm2-8b-a1b": (2048, 1792, 32, 4, None, True, 1.0),
    "solar-open-100b": (4096, 1280, 128, 8, 1280, True, 1.0),
    "trinity-nano": (1024, 256, 128, 8, 256, True, 2.826),
    "trinity-mini": (2048, 1024, 128, 8, 1024, True, 2.826),
}


@pytest.mark.parametrize("name", SIZES)
def test_presets(name):
    cfg, model_dim = dropless.models.presets[name]
    sizes = (model_dim, cfg.expert_dim, cfg.num_experts, cfg.experts_per_token)
    router = cfg.router
    assert (*sizes, cfg.shared_expert_dim, router.renormalize, router.scale) == SIZES[name]


def test_every_preset_is_checked():
    assert dropless.models.presets.keys() == SIZES.keys()


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(KeyError, match="olmoe-1b-7b"):
        dropless.models.presets["mixtral-9x9b"]
