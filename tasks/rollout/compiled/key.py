"""What compiled code depends on: machines on which all of it is the same may use what one of them has compiled.

vLLM and Inductor look into their caches by keys of their own, which cover the model's code and configuration. This
one covers what they leave out: the processor for which C++ was compiled, and everything that is installed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

from policies.model.spec import RunSpec

KEY_CHARS = 32
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
ASKED_S = 30.0  # a driver that is being initialised takes seconds
AMD = Path("/dev/kfd")  # whose kinds are not told apart here


def key_of(spec: RunSpec, config: dict[str, Any]) -> str | None:
    """Names what is compiled for this run, whose model has that config.json, on machines like this one; None where
    this one's kind is unknown."""
    accelerators = kind_of_accelerators()
    if accelerators is None:
        return None
    on = {"environment": environment(), "processor": processor(), "accelerators": accelerators}
    of = {
        "model": spec.trainer.model,
        "config": config,
        "flags": spec.rollout.vllm,
        "env": spec.rollout.env,
        "peft": spec.trainer.peft is not None,
    }
    text = json.dumps([on, of], sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest()[:KEY_CHARS]


@cache
def environment() -> tuple[str, ...]:
    """Python, where it is, the C library, and each package with its version, as they are at the first call."""
    packages = {f"{one.name}=={one.version}" for one in metadata.distributions()}
    return (sys.version, sys.prefix, " ".join(platform.libc_ver()), *sorted(packages))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its architecture and instructions: Inductor compiles C++ for the machine that it runs on."""
    lines = cpuinfo.read_text().splitlines()
    sets = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    return f"{platform.machine()} {' '.join(sorted({one for some in sets for one in some.split()}))}"


def kind_of_accelerators() -> str | None:
    """The kinds of NVIDIA GPUs here, with their driver; empty without any; None where they cannot be told."""
    if AMD.exists():
        return None
    try:
        said = subprocess.run(NVIDIA_SMI, stdout=subprocess.PIPE, timeout=ASKED_S, check=True, env=os.environ)
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(sorted(set(said.stdout.decode(errors="replace").split("\n")) - {""}))
