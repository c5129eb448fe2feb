"""What devices can do at most, from their makers' data sheets."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Rates:
    """A device's peak rates.

    Attributes:
      compute_capability: as JAX spells it, such as ``"9.0"``.
      flops: floating-point operations a second by precision, dense and without sparsity.
      bandwidth: of device memory, bytes a second.
    """

    compute_capability: str
    flops: dict[str, float]
    bandwidth: float


def _rates(capability: str, f32: float, bf16: float, fp8: float, terabytes: float) -> Rates:
    """From teraFLOP/s and TB/s; a precision without a rate is 0 and left out."""
    flops = {"f32": f32, "bf16": bf16, "fp8": fp8}
    flops = {name: rate * 1e12 for name, rate in flops.items() if rate}
    return Rates(capability, flops, terabytes * 1e12)


FP8_CAPABILITY = "9.0"  # Hopper's

# By ``jax.Device.device_kind``. f32 is the rate of the CUDA cores, as products are never TF32 here.
# Tensor-core rates are half of those that the sheets print, which are with sparsity.
KNOWN = {
    # NVIDIA H200 Tensor Core GPU datasheet, table of specifications, SXM and NVL.
    "NVIDIA H200": _rates("9.0", 67, 989.5, 1979, 4.8),
    "NVIDIA H200 NVL": _rates("9.0", 60, 835.5, 1671, 4.8),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM and NVL; its first edition for PCIe.
    "NVIDIA H100 80GB HBM3": _rates("9.0", 67, 989.5, 1979, 3.35),
    "NVIDIA H100 NVL": _rates("9.0", 60, 835.5, 1671, 3.9),
    "NVIDIA H100 PCIe": _rates("9.0", 51.2, 756, 1513, 2.0),
    # NVIDIA A100 Tensor Core GPU datasheet, 40 GB and 80 GB, PCIe and SXM.
    "NVIDIA A100-SXM4-40GB": _rates("8.0", 19.5, 312, 0, 1.555),
    "NVIDIA A100-PCIE-40GB": _rates("8.0", 19.5, 312, 0, 1.555),
    "NVIDIA A100-SXM4-80GB": _rates("8.0", 19.5, 312, 0, 2.039),
    "NVIDIA A100 80GB PCIe": _rates("8.0", 19.5, 312, 0, 1.935),
}


@dataclasses.dataclass(frozen=True)
class NamedDevice:
    """A device that is spoken of and need not be here; it has what precision choices look at."""

    platform: str
    device_kind: str
    compute_capability: str | None = None

    def __str__(self) -> str:
        return self.device_kind


def device_of(device: str | jax.Device | NamedDevice) -> jax.Device | NamedDevice:
    """A device by name: ``"cpu"``, or a GPU's ``device_kind``, whole or a part that one name has.

    Raises:
      ValueError: a name that fits no device of the table, or several.
      TypeError: neither a name nor a device.
    """
    if isinstance(device, jax.Device | NamedDevice):
        return device
    if not isinstance(device, str):
        raise TypeError(
            f'device must be a jax.Device, "cpu", or the name of a GPU; got {device!r}.'
        )
    if device.lower() == "cpu":
        return NamedDevice("cpu", "cpu")
    wanted = device.lower()
    exact = [kind for kind in KNOWN if kind.lower().removeprefix("nvidia ") == wanted]
    found = [device] if device in KNOWN else exact or [k for k in KNOWN if wanted in k.lower()]
    if len(found) != 1:
        raise ValueError(
            f'device must be a jax.Device, "cpu", or name one of {list(KNOWN)}; got {device!r}'
            + (f", which fits {found}." if found else ".")
        )
    return NamedDevice("gpu", found[0], KNOWN[found[0]].compute_capability)


def has_fp8(device: jax.Device | NamedDevice) -> bool:
    """Whether a GPU runs the FP8 kernels (sm_90a), which no other generation does."""
    return str(getattr(device, "compute_capability", None)) == FP8_CAPABILITY


def rates_of(device: jax.Device | NamedDevice) -> Rates | None:
    """Peak rates of a device; None if the table does not have it."""
    return KNOWN.get(device.device_kind) if device.platform != "cpu" else None
