"""The home of the account's owner, and what homes on its machines have of it: not its keys.

All have where AWS is, and a catalog for SkyPilot, which needs no network then.

Prices and zones are made up; of the instance types those that tests name.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ZONES = {"us-east-1": ("use1-az1", "use1-az2", "use1-az4"), "us-west-2": ("usw2-az1", "usw2-az2")}
_IMAGES = ("cpu-ubuntu", "gpu-ubuntu", "gpu-ubuntu-cuda12", "gpu-ubuntu-cuda13")
_IMAGE_ID = "ami-785db401"  # one that moto knows; the machines have the rig's image, whatever is asked for
_CREDENTIALS = """[default]
aws_access_key_id = AKIAFAKEFAKEFAKEFAKE
aws_secret_access_key = fakefakefakefakefakefakefakefakefakefake
"""


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    cpus: int
    memory_gib: int
    on_demand: float  # dollars an hour
    spot: float
    gpu: str = ""
    gpus: int = 0
    gpu_memory_mib: int = 0

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "InstanceType": self.name,
                "AcceleratorName": self.gpu,
                "AcceleratorCount": self.gpus or "",
                "vCPUs": self.cpus,
                "MemoryGiB": self.memory_gib,
                "GpuInfo": self._gpu_info(),
                "Price": self.on_demand,
                "SpotPrice": round(self.spot * (1 + 0.03 * nth_zone + 0.05 * nth_region), 4),
                "Region": region,
                "AvailabilityZone": zone,
                "Arch": "x86_64",
                "LocalDiskType": "",
                "NVMeSupported": False,
                "LocalDiskSize": "",
                "LocalDiskCount": "",
                "MaximumEfaInterfaces": "",
            }
            for nth_region, (region, zones) in enumerate(ZONES.items())
            for nth_zone, zone in enumerate(zones)
        ]

    def _gpu_info(self) -> str:
        if not self.gpu:
            return ""
        memory = {"SizeInMiB": self.gpu_memory_mib}
        kind = {"Name": self.gpu, "Manufacturer": "NVIDIA", "Count": self.gpus, "MemoryInfo": memory}
        return str({"Gpus": [kind], "TotalGpuMemoryInMiB": self.gpu_memory_mib * self.gpus})


_TYPES = (
    _Type("m6i.large", 2, 8, 0.096, 0.035),
    _Type("m6i.2xlarge", 8, 32, 0.384, 0.14),
    _Type("m6i.4xlarge", 16, 64, 0.768, 0.29),
    _Type("g5.xlarge", 4, 16, 1.006, 0.42, "A10G", 1, 24576),
    _Type("g5.12xlarge", 48, 192, 5.672, 2.3, "A10G", 4, 24576),
    _Type("p5.48xlarge", 192, 2048, 55.04, 21.5, "H100", 8, 81920),
)


def make_home(home: Path, endpoint: str, wheels: Path) -> None:
    """Fill the folder `home`. `wheels`: what SkyPilot would build and ship at a launch, else from the network."""
    make_outside(home, endpoint)
    (home / ".aws/credentials").write_text(_CREDENTIALS)
    shutil.copytree(wheels, home / ".sky/wheels", copy_function=shutil.copyfile)  # newer than the package


def make_outside(home: Path, endpoint: str) -> None:
    """Fill the folder `home` with what anybody finds on the internet without being told: AWS and the catalog."""
    aws = home / ".aws"
    aws.mkdir(parents=True)
    (aws / "config").write_text(f"[default]\nregion = {next(iter(ZONES))}\nendpoint_url = {endpoint}\n")
    _make_catalog(home / ".sky/catalogs/v8")


def _make_catalog(folder: Path) -> None:
    _write(folder / "aws/vms.csv", [row for kind in _TYPES for row in kind.rows()])
    image = {"OS": "ubuntu", "OSVersion": "24.04", "ImageId": _IMAGE_ID, "CreationDate": "20260101"}
    tags = [f"skypilot:custom-{name}" for name in _IMAGES]
    _write(folder / "aws/images.csv", [{"Tag": tag, "Region": region} | image for tag in tags for region in ZONES])
    # No type has a quota: SkyPilot need not ask.
    (folder / "aws/instance_quota_mapping.csv").write_text("InstanceType,SpotInstanceCode,OnDemandInstanceCode\n")
    gpus = {kind.gpu: kind.gpu_memory_mib for kind in _TYPES if kind.gpu}
    _write(folder / "common/accelerators.csv", [{"AcceleratorName": gpu, "Clouds": "['aws']"} for gpu in gpus])
    memory = [{"GPU": gpu, "MemoryGB": mib // 1024, "MemoryMB": mib} for gpu, mib in gpus.items()]
    _write(folder / "common/metadata.csv", memory)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
