"""Keys of TRL, PEFT, Accelerate, vLLM and SkyPilot: which exist, what they take, and which are not a user's to
set.

The tables in `tables` are made from the packages themselves by `tests/generators/config_tables.py`; nothing is
renamed. What a run sets itself is refused here with the reason, so that a value is never silently overridden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from orchestrator.config.problems import Findings, KeyPath, unknown_key
from orchestrator.config.structure import Kind, mismatch, shown
from policies.model.spec import ALTERNATIVES
from policies.weights import disks

_GATEWAY = "completions come through the gateway"
_NODE = "it belongs to the rollout nodes; set rollout.vllm.{}"
_STORE = "checkpoints go to `storage` and are restored from there"
_EXPORT = "`grpo-orch checkpoints export` writes them as from_pretrained reads them, ready to be pushed"
_HUB = f"weights go to `storage`; {_EXPORT}"
_OWN_ORDER = "GRPO goes through the prompts in an order of its own; see shuffle_dataset"
_OWN_GENERATION = "it belongs to TRL's own generation; " + _GATEWAY
_NO_BEST = "no checkpoint is chosen by a metric; see checkpoints for those that stay"

REFUSED_GRPO = {
    "use_vllm": _GATEWAY,
    "vllm_mode": _GATEWAY,
    "vllm_server_base_url": _GATEWAY,
    "vllm_server_host": _GATEWAY,
    "vllm_server_port": _GATEWAY,
    "vllm_server_timeout": _GATEWAY + "; how long a request may wait is rollout.deadline_s",
    "vllm_group_port": "weights go through the store; there is no such port",
    "vllm_gpu_memory_utilization": _NODE.format("gpu-memory-utilization"),
    "vllm_max_model_length": _NODE.format("max-model-len"),
    "vllm_tensor_parallel_size": _NODE.format("tensor-parallel-size"),
    "vllm_model_impl": _NODE.format("model-impl"),
    "vllm_enable_sleep_mode": "it belongs to TRL's colocate mode; rollout nodes have machines of their own",
    "output_dir": _STORE,
    "resume_from_checkpoint": _STORE,
    "save_strategy": "checkpoints are saved by steps; set save_steps",
    "save_only_model": "such a checkpoint cannot be resumed",
    "save_total_limit": "the machine's disk keeps none; how many the store keeps is checkpoints.keep_last",
    "load_best_model_at_end": "the machine's disk keeps none to load; see checkpoints for those that stay",
    "metric_for_best_model": _NO_BEST,
    "greater_is_better": _NO_BEST,
    "enable_jit_checkpoint": "a run saves by itself when its machine is told to leave",
    "ignore_data_skip": "a restart would train on other prompts than the next ones",
    "restore_callback_states_from_checkpoint": "the run's own watch keeps its state in the store",
    "train_sampling_strategy": _OWN_ORDER,
    "length_column_name": _OWN_ORDER,
    "dataloader_in_order": "rows would come in the order in which workers end, another after a restart",
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
    "do_predict": "a run trains; what it has trained is scored with trainer.eval_dataset",
    "logging_strategy": "metrics are logged by steps; set logging_steps",
    "do_train": "a run trains",
    "local_rank": "the launcher sets it",
    "auto_find_batch_size": "GRPO cannot change its batch; lower per_device_train_batch_size",
    "parallelism_config": "YAML cannot spell that object; set trainer.accelerate.parallelism_config",
    "hub_token": "a secret does not belong in a file that is copied to the store; set HF_TOKEN in the environment",
}
GONE_GRPO = {
    "max_prompt_length": "TRL has removed it; filter long prompts out of the dataset, and let "
    "rollout.vllm.max-model-len bound prompt and completion together",
}
_SERVED = "every node is given its own"
_CLOSED = "the node's server is reached by the gateway alone"
REFUSED_VLLM = {
    "model": "the nodes serve trainer.model",
    "served-model-name": "the nodes serve trainer.model under one name",
    "host": _SERVED,
    "port": _SERVED,
    "uds": _SERVED,
    "api-key": _SERVED + ", from the run's own secret",
    "seed": "every request carries its own seed, derived from grpo.seed",
    "middleware": "the nodes have one, which guards the policy they hold",
    "worker-extension-cls": "the nodes have one, by which a completion can go on at another",
    "enable-scale-out": "it is on: the gateway has chats turned into tokens, and tokens into messages",
    "logprobs-mode": "it is what importance sampling needs",
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
    "config": "write its keys here instead: what they are is checked",
    "api-server-count": "one process must know which policy the node holds",
    "data-parallel-size": "a node starts an engine for every GPU, or tensor-parallel-size of them, by itself",
    "hf-token": "a secret does not belong in a file that is copied to the store; set HF_TOKEN in the environment",
}
REFUSED_LORA = {
    "peft_type": "adapters are LoRA",
    "inference_mode": "nothing would be trained",
    "base_model_name_or_path": "it is trainer.model",
    "auto_mapping": "PEFT sets it",
    "peft_version": "PEFT sets it",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Keys of one foreign vocabulary; `whose` is how a message calls it."""

    whose: str
    keys: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, str]
    gone: Mapping[str, str]

    def kind(self, key: str) -> Kind:
        """What the key takes."""
        entry = self.keys[key]
        return Kind(entry["type"], tuple(entry.get("choices", ())))

    def default(self, key: str) -> Any:
        """The package's own default."""
        return self.keys[key]["default"]


@cache
def grpo_table() -> Table:
    return _table("grpo_keys.json", "trl", "GRPOConfig's (TRL {})", REFUSED_GRPO, GONE_GRPO)


@cache
def lora_table() -> Table:
    return _table("lora_keys.json", "peft", "LoraConfig's (PEFT {})", REFUSED_LORA)


@cache
def accelerate_table() -> Table:
    return _table("accelerate_keys.json", "accelerate", "an accelerate config file's (Accelerate {})", {})


@cache
def vllm_table() -> Table:
    return _table("vllm_flags.json", "vllm", "the flags of `vllm serve` (vLLM {})", REFUSED_VLLM)


@cache
def shipped_reward_functions() -> tuple[str, ...]:
    """Import paths of the reward functions that come with TRL, which the controller need not have installed."""
    return tuple(_read("grpo_keys.json")["reward_funcs"])


def check_keys(data: Mapping[str, Any], path: KeyPath, table: Table, findings: Findings) -> None:
    """Report every unknown, refused or mistyped key of a mapping."""
    for key, value in data.items():
        if key in table.refused:
            findings.add((*path, key), f"cannot be set, remove it: {table.refused[key]}")
        elif key in table.gone:
            findings.add((*path, key), table.gone[key])
        elif key not in table.keys:
            findings.add((*path, key), unknown_key(key, table.keys.keys() - table.refused.keys(), table.whose))
        elif message := mismatch(value, table.kind(key)):
            findings.add((*path, key), message)


def as_vllm_spells(data: Mapping[str, Any], path: KeyPath, findings: Findings) -> dict[str, Any]:
    """vLLM's flags in vLLM's own spelling: `max_model_len` and `no-enable-prefix-caching: true` are understood."""
    table = vllm_table()
    plain: dict[str, Any] = {}
    for key, value in data.items():
        name = key.removeprefix("--").replace("_", "-")
        twin = name.removeprefix("no-")
        if name not in table.keys and table.keys.get(twin, {}).get("negatable"):
            if not isinstance(value, bool):
                findings.add((*path, key), f"expected true or false, got {shown(value)}")
                continue
            name, value = twin, not value
        if name in plain:
            findings.add((*path, key), f"given twice, in two spellings; keep {name}")
            continue
        findings.rename((*path, key), (*path, name))
        plain[name] = value
    return plain


def without_idle_switches(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags without those that are set to false and cannot be said on a command line, having no `--no-` twin."""
    keys = vllm_table().keys
    return {
        name: value for name, value in flags.items() if value is not False or keys.get(name, {}).get("negatable")
    }


def _table(
    file: str, package: str, whose: str, refused: Mapping[str, str], gone: Mapping[str, str] | None = None
) -> Table:
    document = _read(file)
    return Table(whose.format(document[package]), document["keys"], refused, gone or {})


@cache
def _read(file: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (resources.files("orchestrator.config") / "tables" / file).read_text("utf-8")
    )
    return document


# SkyPilot's `resources` keys, as its own schema (0.14.1, `sky/utils/schemas.py`) has them. Values beyond their
# type are SkyPilot's to judge: it knows the clouds, and its catalogs change.

OF_SKYPILOT = "SkyPilot's resources keys (0.14.1)"
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
PORTS = "ports stay closed: nodes reach each other without; leave it out"


def check_resources(data: dict[str, Any], path: KeyPath, findings: Findings, *, nested: bool = False) -> None:
    """Report unknown, refused and mistyped keys, those inside `any_of` and `ordered` too."""
    allowed = RESOURCE_KEYS if nested else {**RESOURCE_KEYS, **dict.fromkeys(ALTERNATIVES, "list")}
    for key, value in data.items():
        below = (*path, key)
        if key == "ports":
            findings.add(below, PORTS)
        elif key not in allowed:
            findings.add(below, unknown_key(key, allowed, OF_SKYPILOT))
        elif message := mismatch(value, Kind(allowed[key])):
            findings.add(below, message)
        elif key == disks.DISK_SIZE and disks.gb_of(value) is None:
            findings.add(below, f"{disks.DISK_SIZE_EXPECTED}, got {shown(value)}")
        elif key in ALTERNATIVES:
            for index, item in enumerate(value):
                if message := mismatch(item, Kind("dict")):
                    findings.add((*below, index), message)
                else:
                    check_resources(item, (*below, index), findings, nested=True)


def named_regions(resources: Mapping[str, Any]) -> set[str]:
    """The regions that checked resources name, alternatives included, as in `aws/us-east-1`."""
    return {"/".join(parts[:2]) for parts in _places(resources) if len(parts) > 1 and "*" not in parts[:2]}


def named_clouds(resources: Mapping[str, Any]) -> set[str]:
    """The clouds that checked resources name, alternatives included, in lower case."""
    return {parts[0].lower() for parts in _places(resources)} - {"*"}


def _places(resources: Mapping[str, Any]) -> list[list[str]]:
    nested = [one for key in ALTERNATIVES for one in resources.get(key) or ()]
    return [_place(one) for one in (resources, *nested)]


def _place(entry: Mapping[str, Any]) -> list[str]:
    words = entry.get("infra") or "/".join(str(entry.get(key) or "*") for key in ("cloud", "region"))
    return [part.strip() for part in str(words).split("/")]
