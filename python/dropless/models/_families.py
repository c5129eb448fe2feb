"""The table of model families: where each reads its settings, and how its tensors are named.

Router rules follow the reference implementations in transformers 5; docs/models.md has the papers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dropless._config import MoEConfig, RouterConfig
from dropless.models import _config_readers as readers
from dropless.models._rules import Copy, Pair, PerExpert, Rule, Table, linear
from dropless.models._settings import Config, activation, size

Layout = tuple[Rule, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family. Settings are given by their names in ``config.json``.

    Attributes:
      names: values of ``model_type``.
      layouts: its tensors, by the layout's name. Rules about parameters that a block does not have
        do not apply to it.
      router: how the config describes the router.
      num_experts, top_k, expert_dim: the settings that hold E, K and I.
      shared_dim: S of the shared expert from the config; None: there is none.
      shared_gate, expert_bias: as in ``MoEConfig``.
      others_weigh_nothing: where K passes the number of experts in the kept groups, the rest of the
        K are experts of other groups with weight 0, which are left out.
      activation: from the config.
    """

    names: tuple[str, ...]
    layouts: Mapping[str, Layout]
    router: Callable[[Config], RouterConfig]
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    expert_dim: tuple[str, ...] = ("moe_intermediate_size",)
    shared_dim: Callable[[Config], int | None] = lambda config: None
    shared_gate: bool = False
    expert_bias: bool = False
    others_weigh_nothing: bool = False
    activation: Callable[[Config], Any] = activation

    def read_config(self, config: Config) -> tuple[MoEConfig, int]:
        """The block's config, and H."""
        shared_dim = self.shared_dim(config)
        router = self.router(config)
        num_experts, top_k = size(config, *self.num_experts), size(config, *self.top_k)
        if self.others_weigh_nothing:
            top_k = min(top_k, num_experts // router.num_groups * router.groups_kept)
        cfg = MoEConfig(
            num_experts=num_experts,
            experts_per_token=top_k,
            expert_dim=size(config, *self.expert_dim),
            router=router,
            activation=self.activation(config),
            expert_bias=self.expert_bias,
            shared_expert_dim=shared_dim,
            shared_expert_gate=self.shared_gate and shared_dim is not None,
        )
        return cfg, size(config, "hidden_size")


# ---- Tensors

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_W1_W3_W2 = ("w1", "w3", "w2")
_LEAVES = ("gate", "up", "down")

# transformers 5: [E, 2I, H] and [E, H, I].
_FUSED: Layout = (
    Pair("experts.gate_up_proj", "experts.gate", "experts.up", transposed=True),
    Copy("experts.down_proj", "experts.down", transposed=True),
)
# [E, H, 2I] and [E, I, H].
_FUSED_IN_OUT: Layout = (
    Pair("experts.gate_up_proj", "experts.gate", "experts.up"),
    Copy("experts.down_proj", "experts.down"),
)
_INTERLEAVED: Layout = (
    Pair("experts.gate_up_proj", "experts.gate", "experts.up", interleaved=True),
    Pair("experts.gate_up_proj_bias", "experts.gate_bias", "experts.up_bias", interleaved=True),
    Copy("experts.down_proj", "experts.down"),
    Copy("experts.down_proj_bias", "experts.down_bias"),
)


def _linears(names: tuple[str, str, str]) -> Layout:
    return tuple(
        PerExpert(f"experts.{{}}.{name}.weight", f"experts.{leaf}")
        for name, leaf in zip(names, _LEAVES, strict=True)
    )


def _shared(module: str, names: tuple[str, str, str] = _GATE_UP_DOWN) -> Layout:
    return tuple(
        linear(f"{module}.{name}.weight", f"shared.{leaf}")
        for name, leaf in zip(names, _LEAVES, strict=True)
    )


def _router(weight: str = "gate.weight", bias: str | None = None) -> Layout:
    rule = (linear(weight, "router.kernel"),)
    return rule if bias is None else (*rule, Copy(bias, "router.selection_bias"))


def _both(
    router: Layout, names: tuple[str, str, str] = _GATE_UP_DOWN, rest: Layout = ()
) -> dict[str, Layout]:
    """The layout in memory since transformers 5, and that of the released files."""
    return {
        "fused": (*router, *_FUSED, *rest),
        "per_expert": (*router, *_linears(names), *rest),
    }


_V3_BIAS = "gate.e_score_correction_bias"
_V4_TABLE = Table("gate.tid2eid", "router.expert_table")
_QWEN2_SHARED = (
    *_shared("shared_expert"),
    linear("shared_expert_gate.weight", "shared.output_gate"),
)
_ERNIE_BIAS = {
    "fused": "gate.moe_statics.e_score_correction_bias",
    "per_expert": "moe_statics.e_score_correction_bias",
}
_INTERMEDIATE = ("intermediate_size",)

_TABLE = (
    Family(
        ("mixtral",), _both(_router(), _W1_W3_W2), readers.softmax(True), expert_dim=_INTERMEDIATE
    ),
    *(
        Family(
            names,
            _both(_router(), rest=_QWEN2_SHARED),
            router,
            shared_dim=readers.shared_width("shared_expert_intermediate_size"),
            shared_gate=True,
        )
        for names, router in (
            (("qwen2_moe",), readers.softmax(None)),
            (("qwen3_next",), readers.softmax(None, default=True)),
            (("qwen3_5_moe_text", "qwen3_5_moe"), readers.softmax(True)),
        )
    ),
    Family(("qwen3_moe",), _both(_router()), readers.softmax(None)),
    Family(
        ("olmoe", "flex_olmo"), _both(_router()), readers.softmax(None), expert_dim=_INTERMEDIATE
    ),
    Family(
        ("deepseek_v2",),
        _both(_router(), rest=_shared("shared_experts")),
        readers.deepseek_v2,
        shared_dim=readers.shared_count("n_shared_experts"),
        others_weigh_nothing=True,
    ),
    *(
        Family(
            names,
            _both(_router(bias=_V3_BIAS), rest=_shared("shared_experts")),
            router,
            shared_dim=readers.shared_count("n_shared_experts"),
        )
        for names, router in (
            (
                ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "solar_open"),
                readers.sigmoid_with_bias(),
            ),
            (("dots1",), readers.sigmoid_with_bias(default=False)),
        )
    ),
    Family(
        ("deepseek_v4",),
        {
            "fused": (*_router(bias=_V3_BIAS), _V4_TABLE, *_FUSED, *_shared("shared_experts")),
            "per_expert": (
                *_router(bias="gate.bias"),
                _V4_TABLE,
                *_linears(_W1_W3_W2),
                *_shared("shared_experts", _W1_W3_W2),
            ),
        },
        readers.deepseek_v4,
        shared_dim=readers.shared_count("n_shared_experts"),
        activation=readers.clamped_silu,
    ),
    Family(
        ("afmoe",),
        _both(_router("router.gate.weight", bias="expert_bias"), rest=_shared("shared_experts")),
        readers.afmoe,
        shared_dim=readers.shared_count("num_shared_experts"),
    ),
    Family(
        ("lfm2_moe",),
        _both(_router(bias="expert_bias"), _W1_W3_W2),
        readers.sigmoid_with_bias(eps=1e-6),
    ),
    Family(
        ("minimax_m2",),
        _both(_router(bias="e_score_correction_bias"), _W1_W3_W2),
        readers.sigmoid_with_bias(eps=0.0),
        expert_dim=_INTERMEDIATE,
    ),
    Family(
        ("ernie4_5_moe",),
        {
            "fused": (
                *_router(),
                Copy(_ERNIE_BIAS["fused"], "router.selection_bias", row=True),
                *_FUSED,
                *_shared("shared_experts"),
            ),
            "per_expert": (
                *_router(),
                Copy(_ERNIE_BIAS["per_expert"], "router.selection_bias", row=True),
                *_linears(_GATE_UP_DOWN),
                *_shared("shared_experts"),
            ),
        },
        readers.ernie,
        num_experts=("moe_num_experts", "num_experts"),
        top_k=("moe_k", "num_experts_per_tok"),
        shared_dim=readers.shared_count("moe_num_shared_experts"),
    ),
    Family(
        ("gpt_oss",),
        {
            "fused": (
                *_router("router.weight"),
                Copy("router.bias", "router.bias"),
                *_INTERLEAVED,
            )
        },
        readers.softmax_of_top_k(bias=True),
        expert_dim=_INTERMEDIATE,
        expert_bias=True,
        activation=readers.gpt_oss_activation,
    ),
    Family(
        ("granitemoe",),
        {
            "fused": (*_router("router.weight"), *_FUSED),
            "released": (
                *_router("router.layer.weight"),
                Pair("input_linear.weight", "experts.gate", "experts.up", transposed=True),
                Copy("output_linear.weight", "experts.down", transposed=True),
            ),
        },
        readers.softmax_of_top_k(),
        expert_dim=_INTERMEDIATE,
    ),
    Family(
        ("llama4_text", "llama4"),
        {"fused": (*_router("router.weight"), *_FUSED_IN_OUT, *_shared("shared_expert"))},
        readers.llama4,
        expert_dim=_INTERMEDIATE,
        shared_dim=readers.shared_width("intermediate_size"),
    ),
    Family(
        ("hunyuan_v1_moe",),
        _both(_router("gate.wg.weight"), rest=_shared("shared_mlp")),
        readers.softmax(True),
        top_k=("moe_topk",),
        expert_dim=_INTERMEDIATE,
        shared_dim=readers.shared_width("intermediate_size"),
    ),
    Family(
        ("phimoe",),
        {
            "fused": (*_router("router.weight"), *_FUSED),
            # The released files are older than the router's name.
            "per_expert": (*_router(), *_linears(_W1_W3_W2)),
        },
        readers.phimoe,
        expert_dim=_INTERMEDIATE,
    ),
    Family(
        ("jamba",),
        _both(_router("router.weight")),
        readers.softmax(False),
        expert_dim=_INTERMEDIATE,
    ),
)

FAMILIES: dict[str, Family] = {name: family for family in _TABLE for name in family.names}
