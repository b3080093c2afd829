"""Build vLLM's command line and environment for a run."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Any

from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.wire import MODEL
from grpo_orch.policies.weights.adapters import adapter_obstacle, engine_flags
from grpo_orch.policies.weights.tensors import Tensor
from grpo_orch.tasks.machine.base_model import hub_tensors, model_config, model_folder
from grpo_orch.tasks.models.base import Source, source_of

PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")
# With these flags an engine holds more than the policy's tensors, or holds them in another format.
HELD_OTHERWISE = ("load-format", "model-loader-extra-config", "quantization", "speculative-config")

# run.yaml may change these flags.
DEFAULTS: dict[str, Any] = {
    # Tokens per event. Fewer events are less work for the gateway; a lost node loses half of this per request.
    "stream-interval": 8,
    # Otherwise the model's generation_config.json would set top_k and others that run.yaml does not name.
    "generation-config": "vllm",
    "disable-uvicorn-access-log": True,
}
# run.yaml may not change these, since the rest of the run depends on them.
FIXED: dict[str, Any] = {
    "logprobs-mode": "processed_logprobs",  # of the sampled distribution, with its temperature
    "served-model-name": MODEL,
    "enable-scale-out": True,  # endpoints to convert between chats and tokens outside the engine
    "middleware": "grpo_orch.tasks.rollout.vllm.guard.Guard",
    "worker-extension-cls": "grpo_orch.tasks.rollout.vllm.worker.Extension",
}


def argv_of(
    spec: RunSpec, host: str, port: int, pem: Path | None, *, adapters: bool = False, bare: bool = False
) -> list[str]:
    """Return the interpreter's arguments that start vLLM for this run.

    Args:
        pem: identity for mutual TLS.
        adapters: policies are adapters.
        bare: start without the base model's weights.
    """
    flags = {**DEFAULTS, **one_process_flags(spec), **_user_flags(spec), **FIXED}
    flags |= engine_flags(spec) if adapters else {}
    flags |= {"load-format": "dummy"} if bare else {}
    flags |= {"model": model_of(spec), "host": host, "port": port}
    if pem is not None:
        flags |= {"ssl-keyfile": pem, "ssl-certfile": pem, "ssl-ca-certs": pem}
        flags["ssl-cert-reqs"] = int(ssl.CERT_REQUIRED)
    return ["-m", "grpo_orch.tasks.rollout.vllm.api_server", *flags_of(flags)]


def flags_of(flags: dict[str, Any]) -> list[str]:
    """Convert flags to command-line arguments.

    True and false become --x and --no-x, a list becomes its items, a mapping becomes JSON, and null is omitted.
    """
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
    """Return flags that make vLLM's CPU build run the worker in the engine's process.

    By default a separate process binds the worker's threads to cores. With nobind one process suffices, as on one
    GPU. That saves 15 of 35 s of CPU time at each start, for imports.
    """
    flags = _user_flags(spec)
    env = {**os.environ, **spec.rollout.env}
    if env.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind" or any(flags.get(name, 1) != 1 for name in PARALLEL):
        return {}
    return {"distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def uncompiled_env(spec: RunSpec) -> dict[str, str]:
    """Return variables that disable compilation in the CPU build if run.yaml sets enforce-eager.

    vLLM compiles one small function even with that flag: 25 s of CPU time on a new machine, 3 s with its cache.
    """
    eager = _user_flags(spec).get("enforce-eager") is True
    return {"TORCHDYNAMO_DISABLE": "1"} if eager and one_process_flags(spec) else {}


def model_of(spec: RunSpec) -> str:
    """Return the model's folder, relative to that of run.yaml, or its name on the hub."""
    folder = Path(spec.workdir) / spec.trainer.model
    return str(folder) if folder.is_dir() else spec.trainer.model


def source(spec: RunSpec) -> Source | None:
    """Return the source of vLLM's base model; None for a folder, or if flags make vLLM read unusual files."""
    flags = _user_flags(spec)
    if any(flags.get(name) for name in ("load-format", "config-format", "hf-config-path")):
        return None
    settings = {"revision": flags.get("revision"), "trust_remote_code": flags.get("trust-remote-code")}
    return source_of(spec, settings, flags.get("download-dir"))


def base_folder(spec: RunSpec) -> Path | None:
    """Return the folder of the base model: that of the run, or in this machine's hub cache."""
    return model_folder(model_of(spec), **_hub_of(spec))


def base_bytes(spec: RunSpec) -> int:
    """Return the size of the base model's weights on this machine."""
    folder = base_folder(spec)
    return 0 if folder is None else sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def base_config(spec: RunSpec) -> dict[str, Any]:
    """Return the base model's config.json; empty if it is unavailable."""
    return model_config(model_of(spec), **_hub_of(spec))


def base_on_hub(spec: RunSpec) -> dict[str, Tensor]:
    """Return the base model's tensors from the hub; empty if they are unavailable."""
    model = model_of(spec)
    return {} if Path(model).is_dir() else hub_tensors(model, _hub_of(spec)["revision"])


def takes_adapters(spec: RunSpec) -> bool:
    """Return whether this run's policies are adapters."""
    return not adapter_obstacle(spec, base_config(spec) if spec.trainer.peft is not None else {})


def may_start_bare(spec: RunSpec) -> bool:
    """Return whether an engine of this run holds only the policy's tensors, in their own types."""
    flags = _user_flags(spec)
    return not any(flags.get(name) for name in HELD_OTHERWISE) and "quantization_config" not in base_config(spec)


def _hub_of(spec: RunSpec) -> dict[str, Any]:
    flags = _user_flags(spec)
    return {"revision": flags.get("revision"), "cache_dir": flags.get("download-dir")}


def _user_flags(spec: RunSpec) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items()}
