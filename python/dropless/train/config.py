"""The settings of a run: presets, overrides, checks, and their place on disk."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from dropless._checks import MAX_EXPERTS
from dropless.train.errors import UserError

RUN_FILE = "run.json"
BYTE_VOCABULARY = 256

# What a resumed run may change without becoming another run: where it stops and how often it looks.
FREE_ON_RESUME = frozenset({"steps", "eval_every", "checkpoint_every"})

# Hours of compilation; the deepest models that people train have a few hundred.
_MOST_LAYERS = 4096
_MOST_TOKENS = 2**31 - 1

# Whole numbers among the settings that are no sizes or counts of at least one.
_MAY_BE_ZERO = frozenset({"seed", "warmup_steps", "schedule_steps"})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's losses; stored as ``run.json``."""

    preset: str
    # The model. Widths: H = model_dim, I = expert_dim, E = num_experts, K = experts_per_token.
    layers: int
    model_dim: int
    heads: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    # Training.
    seq_len: int  # tokens a window
    batch_size: int  # windows a step, over all devices
    steps: int  # the run stops after this step
    learning_rate: float  # at its peak
    warmup_steps: int
    eval_every: int  # steps between two looks at the held-out text
    checkpoint_every: int  # steps
    eval_windows: int = 64  # held-out windows looked at each time, spread evenly over the text
    schedule_steps: int = 0  # length of the cosine; 0 until resolved
    weight_decay: float = 0.1
    load_balance_weight: float = 0.01
    z_loss_weight: float = 1e-3
    seed: int = 0
    ffn: str = "moe"
    overflow: str = "rounds"
    expert_capacity_factor: float = 1.0
    precision: str = "auto"
    mesh: tuple[tuple[str, int], ...] = (("data", 1), ("expert", 1))
    # The text.
    text: tuple[str, ...] = ()  # empty: the standard library's sources
    tokenizer: str | None = None
    vocab_size: int = BYTE_VOCABULARY

    @property
    def data_parallel(self) -> int:
        """Devices that the batch is spread over."""
        return dict(self.mesh).get("data", 1)

    @property
    def tokens_per_step(self) -> int:
        """T: tokens that every layer sees in one step, over all devices."""
        return self.batch_size * self.seq_len


# Sized for two CPU cores and about three minutes, compilation included.
_TINY = RunConfig(
    preset="tiny",
    layers=3,
    model_dim=128,
    heads=4,
    num_experts=8,
    experts_per_token=2,
    expert_dim=192,
    seq_len=128,
    batch_size=16,
    steps=500,
    learning_rate=4e-3,
    warmup_steps=40,
    eval_every=50,
    checkpoint_every=100,
)
# An hour on one data-centre GPU's scale of work; slow on a CPU.
_SMALL = RunConfig(
    preset="small",
    layers=8,
    model_dim=512,
    heads=8,
    num_experts=16,
    experts_per_token=2,
    expert_dim=704,
    seq_len=512,
    batch_size=32,
    steps=5000,
    learning_rate=1e-3,
    warmup_steps=200,
    eval_every=250,
    checkpoint_every=500,
)
# OLMoE's proportions (64 experts, 8 a token, I = H / 2) at a quarter of its width.
_OLMOE_MINI = dataclasses.replace(
    _SMALL,
    preset="olmoe-mini",
    num_experts=64,
    experts_per_token=8,
    expert_dim=256,
    seq_len=1024,
    batch_size=16,
)
PRESETS = {config.preset: config for config in (_TINY, _SMALL, _OLMOE_MINI)}


def parse_mesh(value: str) -> tuple[tuple[str, int], ...]:
    """Reads ``data=2,expert=1`` into pairs; an axis that is not named has size 1."""
    sizes = {"data": 1, "expert": 1}
    for item in value.split(","):
        name, _, size = item.partition("=")
        name = name.strip()
        if name not in sizes or not size.strip().isdecimal() or int(size) < 1:
            raise UserError(
                f"--mesh must look like data=2 or data=2,expert=1, with sizes of at least 1, "
                f"not {value!r}."
            )
        sizes[name] = int(size)
    return tuple(sizes.items())


def resolve(preset: str, overrides: dict[str, Any]) -> RunConfig:
    """A new run's settings: the preset, then what was asked for, then the checks."""
    if preset not in PRESETS:
        raise UserError(f"there is no preset {preset!r}; the presets are {', '.join(PRESETS)}.")
    base = PRESETS[preset]
    config = dataclasses.replace(base, **overrides)
    # The learning rate follows the preset's full length however early a run is stopped, so that a
    # run of 100 steps resumed to 200 has the losses of one run of 200.
    config = dataclasses.replace(config, schedule_steps=max(config.steps, base.steps))
    check(config)
    return config


def check(config: RunConfig) -> None:
    """Raises ``UserError`` for settings that contradict one another."""
    experts = dict(config.mesh)["expert"]
    if config.model_dim % (2 * config.heads):
        raise UserError(
            f"--model-dim must be a multiple of twice --heads, for rotary positions turn pairs; "
            f"{config.model_dim} is not a multiple of {2 * config.heads}."
        )
    for flag, value, most, why in (
        ("--layers", config.layers, _MOST_LAYERS, "each is compiled on its own"),
        ("--num-experts", config.num_experts, MAX_EXPERTS, "which float32 can number"),
        ("--batch-size times --seq-len", config.tokens_per_step, _MOST_TOKENS, "numbered in int32"),
        ("--model-dim", config.model_dim, _MOST_TOKENS, "numbered in int32"),
        ("--expert-dim", config.expert_dim, _MOST_TOKENS, "numbered in int32"),
    ):
        if value > most:
            raise UserError(f"{flag} must be at most {most} ({why}), not {value}.")
    if config.ffn == "moe" and config.experts_per_token > config.num_experts:
        raise UserError(
            f"--experts-per-token must be at most --num-experts, but {config.experts_per_token} "
            f"is more than {config.num_experts}."
        )
    if config.num_experts % experts:
        raise UserError(
            f"--mesh expert={experts} does not divide the {config.num_experts} experts; "
            f"use a divisor of {config.num_experts}."
        )
    if experts > 1:
        raise UserError(
            f"--mesh expert={experts} asks for experts spread over devices, which the training "
            f"program does not offer yet; use expert=1 and, for several devices, data=N."
        )
    if config.batch_size % config.data_parallel:
        raise UserError(
            f"--batch-size {config.batch_size} does not divide over "
            f"--mesh data={config.data_parallel}; use a multiple of {config.data_parallel}."
        )
    if config.overflow == "drop" and config.ffn == "dense":
        raise UserError(
            "--overflow drop needs --ffn moe; a dense layer has no experts to overflow."
        )
    if not math.isfinite(config.learning_rate) or config.learning_rate <= 0:
        raise UserError(f"--learning-rate must be a positive number, not {config.learning_rate}.")


def to_json(config: RunConfig) -> dict[str, Any]:
    """The settings as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(values: dict[str, Any]) -> RunConfig:
    """The inverse of ``to_json``.

    Raises:
      ValueError, KeyError, TypeError: these are no settings of a run.
    """
    values = dict(values)
    values["mesh"] = tuple((name, size) for name, size in values["mesh"])
    values["text"] = tuple(values["text"])
    config = RunConfig(**values)
    for name, like in dataclasses.asdict(_TINY).items():
        value = getattr(config, name)
        kinds = {float: (int, float), type(None): (str, type(None))}.get(type(like), type(like))
        least = 0 if name in _MAY_BE_ZERO else 1
        if not isinstance(value, kinds) or (type(like) is int and value < least):
            raise ValueError(f"its {name} is {value!r}")
    return config


def resume(
    stored: RunConfig, preset: str | None, overrides: dict[str, Any], out: pathlib.Path
) -> RunConfig:
    """The settings of a continued run: the stored ones, with only ``FREE_ON_RESUME`` open to
    change.

    Flags that were not given keep their stored values; a flag that contradicts one is an error.
    """
    asked = dict(overrides) if preset is None else dict(overrides, preset=preset)
    for name, value in asked.items():
        old = getattr(stored, name)
        if name not in FREE_ON_RESUME and old != value:
            raise UserError(
                f"{out} holds a run of another config: its {name} is {_show(old)}, but "
                f"{_show(value)} was asked for; leave the flag out, or start a new run with "
                f"another --out."
            )
    config = dataclasses.replace(stored, **asked)
    check(config)
    return config


def _show(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return ",".join(f"{name}={size}" for name, size in value)
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "the standard library"
    return str(value)


def read_run_file(out: pathlib.Path) -> tuple[RunConfig, dict[str, Any]]:
    """The settings and the text's fingerprint that ``out`` was started with."""
    path = out / RUN_FILE
    if not os.path.isfile(path):  # false for names that are too long, too
        raise UserError(f"there is no run to resume in {out}; leave --resume out to start one.")
    try:
        values = json.loads(path.read_text())
        return from_json(values["config"]), values["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as a run of this version ({error}); "
            f"start a new run with another --out."
        ) from error


def write_run_file(out: pathlib.Path, config: RunConfig, data: dict[str, Any]) -> None:
    """Stores the settings, in one step: a kill leaves the old file or the new one."""
    temporary = out / (RUN_FILE + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"config": to_json(config), "data": data}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out / RUN_FILE)
