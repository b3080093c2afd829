"""Keys of TRL, PEFT, Accelerate, vLLM and SkyPilot: their types, and which of them a user may not set.

`tests/generators/config_tables.py` makes the files in `tables` from the packages; no key is renamed. Keys that a
run sets are refused with the reason, so that no value is silently overridden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from grpo_orch.orchestrator.config.problems import Findings, KeyPath, unknown_key
from grpo_orch.orchestrator.config.structure import Kind, format_value, mismatch
from grpo_orch.policies.model.spec import ALTERNATIVES
from grpo_orch.policies.weights import disk_sizes

_GATEWAY = "completions come from the gateway"
_NODE = "set rollout.vllm.{} instead"
_STORE = "checkpoints are stored in `storage` and restored from there"
_EXPORT = "`grpo-orch checkpoints export` writes them for from_pretrained, ready to push"
_HUB = f"weights are stored in `storage`; {_EXPORT}"
_OWN_ORDER = "GRPO orders the prompts itself; see shuffle_dataset"
_OWN_GENERATION = "for TRL's own generation only; " + _GATEWAY
_NO_BEST = "checkpoints are not selected by a metric; see `checkpoints` for which are kept"

REFUSED_GRPO = {
    "use_vllm": _GATEWAY,
    "vllm_mode": _GATEWAY,
    "vllm_server_base_url": _GATEWAY,
    "vllm_server_host": _GATEWAY,
    "vllm_server_port": _GATEWAY,
    "vllm_server_timeout": _GATEWAY + "; set rollout.deadline_s instead",
    "vllm_group_port": "weights are published through the store, without a port",
    "vllm_gpu_memory_utilization": _NODE.format("gpu-memory-utilization"),
    "vllm_max_model_length": _NODE.format("max-model-len"),
    "vllm_tensor_parallel_size": _NODE.format("tensor-parallel-size"),
    "vllm_model_impl": _NODE.format("model-impl"),
    "vllm_enable_sleep_mode": "for TRL's colocate mode only; rollout nodes have their own machines",
    "output_dir": _STORE,
    "resume_from_checkpoint": _STORE,
    "save_strategy": "checkpoints are saved by steps; set save_steps",
    "save_only_model": "such a checkpoint cannot be resumed",
    "save_total_limit": "set checkpoints.keep_last instead, which limits the checkpoints in the store",
    "load_best_model_at_end": "checkpoints are kept only in the store; see `checkpoints` for which",
    "metric_for_best_model": _NO_BEST,
    "greater_is_better": _NO_BEST,
    "enable_jit_checkpoint": "a run saves automatically before its machine is preempted",
    "ignore_data_skip": "after a restart the run would train on the wrong prompts",
    "restore_callback_states_from_checkpoint": "the run's own callbacks keep their state in the store",
    "train_sampling_strategy": _OWN_ORDER,
    "length_column_name": _OWN_ORDER,
    "dataloader_in_order": "rows would arrive in a different order after a restart",
    "data_seed": _OWN_ORDER + " and seed",
    "push_to_hub": _HUB,
    "hub_always_push": _HUB,
    "hub_model_id": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_strategy": _HUB,
    "cache_implementation": _OWN_GENERATION,
    "use_transformers_continuous_batching": _OWN_GENERATION,
    "transformers_continuous_batching_config": _OWN_GENERATION,
    "use_transformers_paged": _OWN_GENERATION,
    "do_predict": "a run trains; set trainer.eval_dataset to evaluate the model",
    "logging_strategy": "metrics are logged by steps; set logging_steps",
    "do_train": "a run trains",
    "local_rank": "the launcher sets it",
    "auto_find_batch_size": "GRPO cannot change its batch; lower per_device_train_batch_size",
    "parallelism_config": "set trainer.accelerate.parallelism_config instead",
    "hub_token": "this file is copied to the store; set HF_TOKEN in the environment instead",
}
REMOVED_GRPO = {
    "max_prompt_length": "TRL has removed it; filter long prompts out of the dataset, and limit prompt and "
    "completion together with rollout.vllm.max-model-len",
}
_SERVED = "every node gets its own"
_CLOSED = "only the gateway connects to a node's server"
REFUSED_VLLM = {
    "model": "the nodes serve trainer.model",
    "served-model-name": "the nodes serve trainer.model under one name",
    "host": _SERVED,
    "port": _SERVED,
    "uds": _SERVED,
    "api-key": _SERVED + ", from the run's own secret",
    "seed": "every request carries its own seed, derived from grpo.seed",
    "middleware": "the nodes set their own, which checks the policy version of each request",
    "worker-extension-cls": "the nodes set their own, which lets completions continue on other nodes",
    "enable-scale-out": "the nodes set it, so that the gateway can convert chats to tokens and back",
    "logprobs-mode": "importance sampling requires a fixed mode",
    "root-path": _CLOSED,
    "ssl-keyfile": _CLOSED,
    "ssl-certfile": _CLOSED,
    "ssl-ca-certs": _CLOSED,
    "ssl-cert-reqs": _CLOSED,
    "ssl-ciphers": _CLOSED,
    "enable-ssl-refresh": _CLOSED,
    "headless": _CLOSED,
    "grpc": _CLOSED,
    "grpc-port": _CLOSED,
    "config": "write its keys here instead, where they are checked",
    "api-server-count": "a single process must track the node's policy",
    "data-parallel-size": "a node automatically starts one engine per tensor-parallel-size GPUs",
    "hf-token": "this file is copied to the store; set HF_TOKEN in the environment instead",
}
REFUSED_LORA = {
    "peft_type": "adapters are LoRA",
    "inference_mode": "nothing would be trained",
    "base_model_name_or_path": "trainer.model sets it",
    "auto_mapping": "PEFT sets it",
    "peft_version": "PEFT sets it",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Keys of another project. `vocabulary` describes them in messages, as in `a key of GRPOConfig`."""

    vocabulary: str
    keys: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, str]
    removed: Mapping[str, str]

    def kind(self, key: str) -> Kind:
        """Return the types and choices of a key."""
        entry = self.keys[key]
        return Kind(entry["type"], tuple(entry.get("choices", ())))

    def default(self, key: str) -> Any:
        """Return the package's default."""
        return self.keys[key]["default"]


@cache
def grpo_table() -> Table:
    return _table("grpo_keys.json", "trl", "a key of GRPOConfig (TRL {})", REFUSED_GRPO, REMOVED_GRPO)


def grpo_value(grpo: Mapping[str, Any], key: str) -> Any:
    """Return a GRPOConfig key of a run's `grpo`, else TRL's default."""
    value = grpo.get(key)
    return grpo_table().default(key) if value is None else value


@cache
def lora_table() -> Table:
    return _table("lora_keys.json", "peft", "a key of LoraConfig (PEFT {})", REFUSED_LORA)


@cache
def accelerate_table() -> Table:
    return _table("accelerate_keys.json", "accelerate", "a key of an accelerate config file (Accelerate {})", {})


@cache
def vllm_table() -> Table:
    return _table("vllm_flags.json", "vllm", "a flag of `vllm serve` (vLLM {})", REFUSED_VLLM)


# Where run.yaml has which keys.
VLLM: KeyPath = ("rollout", "vllm")
TABLES: Mapping[KeyPath, Callable[[], Table]] = {
    ("grpo",): grpo_table,
    ("trainer", "peft"): lora_table,
    ("trainer", "accelerate"): accelerate_table,
    VLLM: vllm_table,
}


@cache
def shipped_reward_functions() -> tuple[str, ...]:
    """Return the import paths of TRL's reward functions; the controller need not have TRL installed."""
    return tuple(_read("grpo_keys.json")["reward_funcs"])


def check_keys(data: Mapping[str, Any], path: KeyPath, table: Table, findings: Findings) -> None:
    """Report every unknown, refused or mistyped key of a mapping."""
    for key, value in data.items():
        if key in table.refused:
            findings.add((*path, key), f"cannot be set; remove it: {table.refused[key]}")
        elif key in table.removed:
            findings.add((*path, key), table.removed[key])
        elif key not in table.keys:
            allowed = table.keys.keys() - table.refused.keys()
            findings.add((*path, key), unknown_key(key, allowed, table.vocabulary))
        elif message := mismatch(value, table.kind(key)):
            findings.add((*path, key), message)


def drop_false_switches(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Drop flags set to false that have no `--no-` form for the command line."""
    keys = vllm_table().keys
    return {
        name: value for name, value in flags.items() if value is not False or keys.get(name, {}).get("negatable")
    }


def _table(
    file: str, package: str, vocabulary: str, refused: Mapping[str, str], removed: Mapping[str, str] | None = None
) -> Table:
    document = _read(file)
    return Table(vocabulary.format(document[package]), document["keys"], refused, removed or {})


@cache
def _read(file: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (resources.files("grpo_orch.orchestrator.config") / "tables" / file).read_text("utf-8")
    )
    return document


# SkyPilot's `resources` keys, from its schema (0.14.1, `sky/utils/schemas.py`). Only types are checked here:
# SkyPilot checks values against its catalogs, which change.

SKYPILOT_RESOURCES = "a key of SkyPilot's `resources` (0.14.1)"
RESOURCE_KEYS = {
    "accelerator_args": "dict",
    "accelerators": "str | dict | list[str]",
    "autostop": "bool | int | str | dict",
    "cloud": "str",
    "cpus": "str | float",
    "disk_size": "str | int",
    "disk_tier": "str",
    "image_id": "str | dict | None",
    "infra": "str",
    "instance_type": "str",
    "job_recovery": "str | dict",
    "labels": "dict[str]",
    "local_disk": "str",
    "max_hourly_cost": "float",
    "memory": "str | float",
    "network_tier": "str",
    "priority": "int",
    "priority_class": "str",
    "region": "str",
    "use_spot": "bool",
    "volumes": "list",
    "zone": "str",
}
RESOURCES: tuple[KeyPath, ...] = (("trainer", "resources"), ("rollout", "resources"))


def resource_keys(*, nested: bool) -> dict[str, str]:
    """Return the type of each key of `resources`, or of an alternative nested in it."""
    return RESOURCE_KEYS if nested else {**RESOURCE_KEYS, **dict.fromkeys(ALTERNATIVES, "list")}


def check_resources(data: dict[str, Any], path: KeyPath, findings: Findings, *, nested: bool = False) -> None:
    """Report unknown, refused and mistyped keys, including those in `any_of` and `ordered`."""
    keys = {key: {"type": kind} for key, kind in resource_keys(nested=nested).items()}
    check_keys(data, path, Table(SKYPILOT_RESOURCES, keys, {"ports": "nodes need no open ports"}, {}), findings)
    for key, value in data.items():
        below = (*path, key)
        if findings.is_reported(below):
            continue
        if key == disk_sizes.DISK_SIZE and disk_sizes.gb_of(value) is None:
            findings.add(below, f"{disk_sizes.DISK_SIZE_EXPECTED}, got {format_value(value)}")
        for index, item in enumerate(value if key in ALTERNATIVES else ()):
            if message := mismatch(item, Kind("dict")):
                findings.add((*below, index), message)
            else:
                check_resources(item, (*below, index), findings, nested=True)
