"""How vLLM is started for a run: its command line and its environment."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Any

from policies.model.spec import RunSpec
from policies.serving.wire import MODEL
from policies.weights.adapters import engine_flags, why_whole
from policies.weights.tensors import Tensor
from tasks.machine.base_model import hub_tensors, model_config, model_folder
from tasks.models.base import Source, source_of

PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
# With these an engine holds more than its policies' tensors, or holds them in another way.
HELD_OTHERWISE = ("load-format", "model-loader-extra-config", "quantization", "speculative-config")

# What run.yaml may change ...
DEFAULTS: dict[str, Any] = {
    # Tokens an event: fewer events are less work for the gateway; a lost node loses half as many a request.
    "stream-interval": 8,
    # Else the model's generation_config.json would set top_k and others that run.yaml does not name.
    "generation-config": "vllm",
    "disable-uvicorn-access-log": True,
}
# ... and what it may not: the rest of the run depends on it.
FIXED: dict[str, Any] = {
    "logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from, temperature included
    "served-model-name": MODEL,
    "enable-scale-out": True,  # chats become tokens, and tokens messages, beside the engine
    "middleware": "tasks.rollout.vllm.guard.Guard",
    "worker-extension-cls": "tasks.rollout.vllm.worker.Extension",
}


def argv_of(
    spec: RunSpec, host: str, port: int, pem: Path | None, *, adapters: bool = False, bare: bool = False
) -> list[str]:
    """The interpreter's arguments that start vLLM for this run, under mutual TLS with the identity in `pem`; for
    its adapters, if these travel alone; and `bare`, without the base model's weights."""
    flags = {**DEFAULTS, **one_process_flags(spec), **_user_flags(spec), **FIXED}
    flags |= engine_flags(spec) if adapters else {}
    flags |= {"load-format": "dummy"} if bare else {}
    flags |= {"model": model_of(spec), "host": host, "port": port}
    if pem is not None:
        flags |= {"ssl-keyfile": pem, "ssl-certfile": pem, "ssl-ca-certs": pem}
        flags["ssl-cert-reqs"] = int(ssl.CERT_REQUIRED)
    return ["-m", "tasks.rollout.vllm.main", *flags_of(flags)]


def flags_of(flags: dict[str, Any]) -> list[str]:
    """Command line flags as vLLM reads them: true and false are --x and --no-x, a list is its items, a mapping is
    JSON, null leaves the flag out."""
    argv: list[str] = []
    for name, value in flags.items():
        match value:
            case None:
                continue
            case bool():
                argv.append(f"--{name}" if value else f"--no-{name}")
            case list() | tuple():
                argv += [f"--{name}", *(str(item) for item in value)]
            case dict():
                argv += [f"--{name}", json.dumps(value)]
            case _:
                argv += [f"--{name}", str(value)]
    return argv


def one_process_flags(spec: RunSpec) -> dict[str, Any]:
    """Flags that spare a process of the CPU build.

    It starts one for the worker, to bind its threads to cores. Where it is told to bind none, the engine may be
    the worker, as it is on one GPU: of 35 s of CPU time at each start 15 went into that process's imports.
    """
    flags = _user_flags(spec)
    env = {**os.environ, **spec.rollout.env}
    if env.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind" or any(flags.get(name, 1) != 1 for name in PARALLEL):
        return {}
    return {"distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def uncompiled_env(spec: RunSpec) -> dict[str, str]:
    """Environment that spares the CPU build a compilation where run.yaml wants none: vLLM compiles one small
    function even so, in 25 s of CPU time on a new machine, and in 3 on one where it did so before."""
    eager = _user_flags(spec).get("enforce-eager") is True
    return {"TORCHDYNAMO_DISABLE": "1"} if eager and one_process_flags(spec) else {}


def model_of(spec: RunSpec) -> str:
    """The model's folder, found from the folder of run.yaml, or its name on the hub."""
    folder = Path(spec.workdir) / spec.trainer.model
    return str(folder) if folder.is_dir() else spec.trainer.model


def source(spec: RunSpec) -> Source | None:
    """Where vLLM's base model comes from; None where it is a folder, or vLLM reads other files than usual."""
    flags = _user_flags(spec)
    if any(flags.get(name) for name in ("load-format", "config-format", "hf-config-path")):
        return None
    settings = {"revision": flags.get("revision"), "trust_remote_code": flags.get("trust-remote-code")}
    return source_of(spec, settings, flags.get("download-dir"))


def base_folder(spec: RunSpec) -> Path | None:
    """Where vLLM reads the base model from: the run's folder, or the hub's cache on this machine."""
    return model_folder(model_of(spec), **_hub_of(spec))


def base_bytes(spec: RunSpec) -> int:
    """What vLLM reads of the base model, as far as that is on this machine."""
    folder = base_folder(spec)
    return 0 if folder is None else sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def base_config(spec: RunSpec) -> dict[str, Any]:
    """The base model's config.json; empty where there is none to be had."""
    return model_config(model_of(spec), **_hub_of(spec))


def base_on_hub(spec: RunSpec) -> dict[str, Tensor]:
    """The base model's tensors as the hub tells them; empty where they are not there."""
    model = model_of(spec)
    return {} if Path(model).is_dir() else hub_tensors(model, _hub_of(spec)["revision"])


def takes_adapters(spec: RunSpec) -> bool:
    """Whether this run's policies come as adapters."""
    return not why_whole(spec, base_config(spec) if spec.trainer.peft is not None else {})


def may_start_bare(spec: RunSpec) -> bool:
    """Whether an engine for this run holds its policies' tensors and nothing else, in their own types."""
    flags = _user_flags(spec)
    return not any(flags.get(name) for name in HELD_OTHERWISE) and "quantization_config" not in base_config(spec)


def _hub_of(spec: RunSpec) -> dict[str, Any]:
    flags = _user_flags(spec)
    return {"revision": flags.get("revision"), "cache_dir": flags.get("download-dir")}


def _user_flags(spec: RunSpec) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items()}
