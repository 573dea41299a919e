"""The few questions about the machine that the mirrored code asks (upstream: ``vllm.platforms``)."""

from __future__ import annotations

import platform
from enum import Enum


class CpuArchEnum(Enum):
    """Families of CPUs."""

    X86 = "x86"
    ARM = "arm"
    OTHER = "other"


_ARCHITECTURES = {
    "x86_64": CpuArchEnum.X86,
    "amd64": CpuArchEnum.X86,
    "i686": CpuArchEnum.X86,
    "aarch64": CpuArchEnum.ARM,
    "arm64": CpuArchEnum.ARM,
}


class CpuPlatform:
    """The platform of this package: always the CPU."""

    device_name = "cpu"
    device_type = "cpu"

    def is_cpu(self) -> bool:
        """Whether layers run on the CPU."""
        return True

    def get_cpu_architecture(self) -> CpuArchEnum:
        """Family of the CPU of this machine."""
        return _ARCHITECTURES.get(platform.machine().lower(), CpuArchEnum.OTHER)


current_platform = CpuPlatform()
