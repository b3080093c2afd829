"""Rules between keys, most of them TRL's, checked before a machine is paid for.

Each check is one function over an `EffectiveRun`. A check is skipped if a value it needs was reported already.
Functions that add notices on the same subject follow their checks; `notices` calls them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.config.datasets import each_dataset
from grpo_orch.orchestrator.config.effective import (
    AlreadyReported,
    EffectiveRun,
    check_batch_keys,
    check_batch_size,
    check_bounds,
    check_eval_batch_size,
    check_save_steps,
    save_steps_of,
)
from grpo_orch.orchestrator.config.foreign_keys import grpo_value
from grpo_orch.orchestrator.config.problems import Findings, KeyPath
from grpo_orch.orchestrator.config.reward_functions import is_model
from grpo_orch.orchestrator.config.shorthand import TARGETS, target_problem
from grpo_orch.orchestrator.config.user_code import function_problem
from grpo_orch.policies.fleet.plan import wanted_slots
from grpo_orch.policies.model.gpus import VISIBLE, DriverFailed, engine_gpus, gpus_of, named_gpus, requests_gpus
from grpo_orch.policies.model.spec import (
    STALE_DEFAULTS,
    RunSpec,
    deepspeed_file,
    generates_itself,
    gpu_counts,
    processes_of,
    shards_weights,
)
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.sizing.engine import MAX_MODEL_LEN, context_problem, whole_number
from grpo_orch.policies.weights.adapters import QUANTISED, QUANTISED_WORDS

# Secrets. run.yaml is copied to the store, so it may name secrets but not contain them.

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_PREFIX = "GRPO_ORCH_"
EXPECTED = "expected the name of an environment variable, as in HF_TOKEN"
EXPECTED_URL = "expected the name of an environment variable that holds the URL, as in SLACK_URL"
# Prefixes of well-known services' keys.
_SECRET_VALUE = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:
        hf_[A-Za-z0-9]{16,}                      # Hugging Face
      | sk-[A-Za-z0-9_-]{16,}                    # OpenAI, Anthropic and others
      | wandb_v1_[A-Za-z0-9_]{16,}
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
      | (?:AKIA|ASIA)[0-9A-Z]{16}                # AWS
      | AIza[A-Za-z0-9_-]{35}                    # Google
      | xox[abprs]-[A-Za-z0-9-]{10,}             # Slack
      | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----
    )""",
    re.VERBOSE,
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|KEY|APIKEY|PASSWORD|PASSWD)(_|$)")
_REFERENCE_NAME = re.compile(r"_(FILE|PATH|DIR|URL|ID|NAME)$")
_HARMLESS_VALUE = re.compile(r"(?i)|true|false|none|null|[-+.0-9e]+|/.*")
SECRET_FIX = "this file is copied to the store; export it where you start the run, and list it under `secrets:`"


def check_secrets(run: EffectiveRun, findings: Findings) -> None:
    """Check the names of variables in `secrets` and `notify.url_env`. Messages quote valid names only."""
    secrets: list[Any] = run.at("secrets") or []
    for index, name in enumerate(secrets):
        path: KeyPath = ("secrets", index)
        if problem := _variable_problem(name, EXPECTED, "secret"):
            findings.add(path, problem)
        elif name in secrets[:index]:
            findings.add(path, f"{name} is listed twice; remove one of the two")
        else:
            for section in ("trainer", "rollout"):
                if name in (run.at(section, "env") or {}):
                    findings.add(path, f"{name} is also set in {section}.env; remove it there")
    for index, name in enumerate(run.at("notify", "url_env") or ()):
        path = ("notify", "url_env", index)
        if problem := _variable_problem(name, EXPECTED_URL, "URL"):
            findings.add(path, problem)
        elif name in secrets:
            findings.add(path, f"{name} is for the daemon only; remove it from `secrets`, which machines receive")


def _variable_problem(name: str, expected: str, what: str) -> str:
    if not _VARIABLE_NAME.fullmatch(name) or looks_like_secret("", name):
        return f"{expected}; do not put the {what} in this file, which is copied to the store"
    return f"{name} is set by grpo-orch; remove it" if name.startswith(_OWN_PREFIX) else ""


def looks_like_secret(name: str, value: str) -> bool:
    """Return whether an environment variable probably holds a secret."""
    if _SECRET_VALUE.search(value) or _WANDB_KEY.fullmatch(value):
        return True
    upper = name.upper()
    is_secret_name = _SECRET_NAME.search(upper) and not _REFERENCE_NAME.search(upper)
    return bool(is_secret_name) and not _HARMLESS_VALUE.fullmatch(value)


def note_secrets(spec: RunSpec, findings: Findings) -> None:
    """Add a notice for each value that looks like a secret."""
    for section, part in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        for name, value in part.env.items():
            if looks_like_secret(name, value):
                findings.notice((section, "env", name), f"looks like a secret, but {SECRET_FIX}")
        if _SECRET_VALUE.search(part.setup):
            findings.notice((section, "setup"), f"seems to contain a secret, but {SECRET_FIX}")


# GPUs: those of a node against its engine, and those of this machine against the nodes of the local cloud.


def check_engine_size(run: EffectiveRun, findings: Findings) -> None:
    """Report an engine that needs more GPUs than its node has."""
    node_gpus, needed = (
        named_gpus(run.at("rollout", "resources") or {}),
        engine_gpus(run.at("rollout", "vllm") or {}),
    )
    if node_gpus is not None and needed > node_gpus:
        message = f"a node has {_gpus(node_gpus)}, but with these rollout.vllm flags an engine needs {needed}"
        findings.add(("rollout", "resources", "accelerators"), f"{message}; expected at least {needed}")


def check_visible_gpus(run: EffectiveRun, findings: Findings) -> None:
    """Report CUDA_VISIBLE_DEVICES in an `env`: the local cloud gives each node different GPUs."""
    if run.at("cloud") == "sky":
        return
    for section in ("trainer", "rollout"):
        if run.at(section, "env", VISIBLE) is not None:
            message = "each node gets its own GPUs; remove this, and set their number in resources.accelerators"
            findings.add((section, "env", VISIBLE), message)


def check_local_gpus(spec: RunSpec, gpus_here: Callable[[], int], findings: Findings) -> None:
    """Report a failing driver if the run requests GPUs, and nodes that exceed this machine's GPUs.

    With 0 available, nodes run on CPUs.

    Args:
        gpus_here: counts this machine's GPUs; may raise DriverFailed.
    """
    slots = list(wanted_slots(spec))
    try:
        available = gpus_here()
    except DriverFailed as error:
        roles = [role for role, _, _ in slots if requests_gpus(role, spec)]
        if roles:
            message = f"{error}; expected a working driver, or {roles[0]}.resources without accelerators"
            findings.add((roles[0].value, "resources", "accelerators"), message)
        elif any(gpus_of(role, spec) for role, _, _ in slots):
            findings.notice(("cloud",), f"{error}; the run uses no GPUs of this machine")
        return
    needs = [(role, gpus_of(role, spec)) for role, _, needed in slots if needed]
    total = sum(count for _, count in needs)
    if 0 < available < total:
        nodes = [count for role, count in needs if role is Role.ROLLOUT]
        fleet = f" and {nodes[0]} for {'each' if len(nodes) > 1 else 'the'} rollout node" if nodes else ""
        needed_gpus = f"{total}: {needs[0][1]} for the trainer{fleet}"
        message = f"this machine has {_gpus(available)}, but the run needs {needed_gpus}"
        findings.add(("rollout", "replicas"), f"{message}; lower replicas or `resources.accelerators`")


def note_idle_gpus(spec: RunSpec, findings: Findings) -> None:
    """Add a notice if a node's GPUs are not a multiple of its engine's: the rest is paid for and idle."""
    node_gpus, needed = named_gpus(spec.rollout.resources), engine_gpus(spec.rollout.vllm)
    if node_gpus is None or node_gpus < needed or node_gpus % needed == 0 or spec.rollout.replicas.max == 0:
        return
    idle = node_gpus % needed
    message = f"each node has {_gpus(node_gpus)} and each of its engines needs {needed}, so {idle} would be idle"
    fix = f"set rollout.vllm.tensor-parallel-size to a divisor of {node_gpus}, or use nodes with {needed}"
    findings.notice(("rollout", "resources", "accelerators"), f"{message}; {fix}")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


# Training processes and their GPUs: one machine, one process for each GPU.

ACCELERATE = ("trainer", "accelerate")
FULL_STATE_DICT = "FULL_STATE_DICT"  # PyTorch's name
GATHER = "stage3_gather_16bit_weights_on_model_save"  # DeepSpeed's
ACCELERATORS = ("trainer", "resources", "accelerators")


def check_processes(run: EffectiveRun, findings: Findings) -> None:
    _check_num_machines(run, findings)
    _check_full_checkpoints(run, findings)
    counts, num_processes = gpu_counts(run.at("trainer", "resources") or {}), run.at(*ACCELERATE, "num_processes")
    gpus = sorted(count or 0 for count in counts)
    if num_processes is None and len(gpus) > 1:
        message = f"alternatives with {' or '.join(map(str, gpus))} GPUs would train with different batch sizes"
        expected = "expected the same number of GPUs in each, or trainer.accelerate.num_processes"
        findings.add(("trainer", "resources"), f"{message}; {expected}")
    elif 0 < gpus[0] < run.processes:
        message = f"{run.processes} processes, but trainer.resources allows a machine with {_gpus(gpus[0])}"
        findings.add((*ACCELERATE, "num_processes"), f"{message}; expected at most one process per GPU")


def check_no_rollout_nodes(run: EffectiveRun, findings: Findings) -> None:
    """Report keys that need rollout nodes if the run has none and the trainer generates."""
    if run.at("rollout", "replicas", "max") != 0:
        return
    for key in ("generation_kwargs", "vllm_structured_outputs_regex"):
        if run.at("grpo", key):
            message = "needs vLLM, but with rollout.replicas: 0 the trainer generates; remove it"
            findings.add(("grpo", key), message)
    if run.processes > 1:
        has_num_processes = run.at(*ACCELERATE, "num_processes") is not None
        message = f"with rollout.replicas: 0 one process trains and generates; expected 1, got {run.processes}"
        findings.add((*ACCELERATE, "num_processes") if has_num_processes else ACCELERATORS, message)
    sharding = (("grpo", "fsdp"), ("grpo", "deepspeed"))
    for path in (*sharding, (*ACCELERATE, "deepspeed_config"), (*ACCELERATE, "fsdp_config")):
        if run.at(*path):
            message = "with rollout.replicas: 0 one process holds the whole model to generate; remove it"
            findings.add(path, message)


def _check_num_machines(run: EffectiveRun, findings: Findings) -> None:
    machines = run.at(*ACCELERATE, "num_machines")
    if machines is not None and machines != 1:
        message = f"training on several machines is not supported; expected 1, got {machines}"
        fix = "for more GPUs, use one larger machine in trainer.resources.accelerators"
        findings.add((*ACCELERATE, "num_machines"), f"{message}; {fix}")


def _check_full_checkpoints(run: EffectiveRun, findings: Findings) -> None:
    """Report sharded checkpoints, which `from_pretrained` cannot load. By default they are saved in full."""
    message = "checkpoints would be sharded, and from_pretrained cannot load those; expected {}"
    if run.at(*ACCELERATE, "deepspeed_config", "zero3_save_16bit_model") is False:
        findings.add((*ACCELERATE, "deepspeed_config"), message.format("zero3_save_16bit_model: true"))
    if run.at(*ACCELERATE, "fsdp_config", "fsdp_state_dict_type") not in (None, FULL_STATE_DICT):
        findings.add((*ACCELERATE, "fsdp_config"), message.format(f"fsdp_state_dict_type: {FULL_STATE_DICT}"))
    for path in ((*ACCELERATE, "fsdp_config", "fsdp_version"), ("grpo", "fsdp_config", "version")):
        if run.at(*path) not in (None, 2):
            findings.add(path, f"only FSDP2 is supported; expected 2, got {run.at(*path)}")
    zero = run.at("grpo", "deepspeed", "zero_optimization") or {}
    if isinstance(zero, dict) and zero.get("stage") == 3 and not zero.get(GATHER):
        findings.add(("grpo", "deepspeed"), message.format(f"{GATHER}: true in zero_optimization"))


def note_processes(spec: RunSpec, findings: Findings) -> None:
    """Add a notice of the number of processes if the file does not set it, or of GPUs that stay unused."""
    accelerate, processes, gpus = (
        spec.trainer.accelerate or {},
        processes_of(spec),
        named_gpus(spec.trainer.resources),
    )
    if gpus is None:
        return
    if "num_processes" in accelerate:
        if processes < gpus:
            message = f"{processes} of the trainer's {gpus} GPUs train; the others stay free for your own use"
            findings.notice((*ACCELERATE, "num_processes"), message)
    elif processes > 1:
        strategy = accelerate.get("distributed_type") or ("as set in `grpo`" if _shards_model(spec) else "DDP")
        batch = "per_device_train_batch_size counts for each of them"
        findings.notice(ACCELERATORS, f"{processes} processes train, one for each GPU ({strategy}); {batch}")


def _shards_model(spec: RunSpec) -> bool:
    return bool(spec.grpo.get("fsdp") or spec.grpo.get("deepspeed"))


# Features of TRL's trainer that need other keys, or do not work with a fleet.

# Required by `GRPOTrainer.__init__` with loss_type vespo.
TOKEN_MODES = ("token_truncate", "token_mask")


def check_turns(trainer: Mapping[str, Any], workdir: Path, findings: Findings) -> None:
    """Report invalid import paths of tools, environments, rollout functions and agents."""
    import_paths: list[tuple[KeyPath, str]] = [
        (("trainer", "tools", index), name) for index, name in enumerate(trainer.get("tools", ()))
    ]
    single_keys = ("environment_factory", "rollout_func")
    import_paths += [(("trainer", key), trainer[key]) for key in single_keys if key in trainer]
    if isinstance(agent := trainer.get("agent", {}).get("run"), str):
        import_paths.append((("trainer", "agent", "run"), agent))
    for path, name in import_paths:
        has_setup = bool(trainer.get("setup")) or (path[1] == "agent" and "python" in trainer["agent"])
        if problem := function_problem(name, workdir, has_setup=has_setup, misfit=lambda *_: ""):
            findings.add(path, problem)


def check_agent(run: EffectiveRun, findings: Findings) -> None:
    """Check keys that do not work with an agent."""
    if run.at("trainer", "agent") is None:
        return
    path = ("trainer", "agent")
    others = [key for key in ("tools", "environment_factory", "rollout_func") if run.at("trainer", key)]
    if run.at("trainer", "agent", "run") == []:
        findings.add((*path, "run"), "expected a command, got an empty list")
    elif isinstance(run.at("trainer", "agent", "run"), list) and run.at("trainer", "agent", "python"):
        findings.add((*path, "python"), "starts a function; a command names its own interpreter: remove this key")
    elif others:
        findings.add(path, f"cannot be combined with trainer.{others[0]}; remove one of the two")
    elif run.at("rollout", "replicas", "max") == 0:
        findings.add(path, "needs rollout nodes: with replicas: 0 there is no gateway for agents to call")
    if any(name.rpartition(".")[2] == "agent" for name in run.at("trainer", "reward_funcs") or ()):
        message = "`agent` is the name of the agent's own reward; rename the function"
        findings.add(("trainer", "reward_funcs"), message)
    if run.grpo("remove_unused_columns"):
        message = "an agent gets the whole row, but true removes all columns except the prompt; remove this key"
        findings.add(("grpo", "remove_unused_columns"), message)


def check_vespo(run: EffectiveRun, findings: Findings) -> None:
    mode = run.grpo("vllm_importance_sampling_mode")
    if run.grpo("loss_type") != "vespo" or not run.grpo("vllm_importance_sampling_correction"):
        return
    if mode not in TOKEN_MODES:
        needed = f"vespo needs vllm_importance_sampling_mode {' or '.join(TOKEN_MODES)}, got {mode}"
        findings.add(("grpo", "loss_type"), f"{needed}; set one of them")


def check_staleness(spec: RunSpec, findings: Findings) -> None:
    """Check that windows can be sampled ahead: by rollout nodes, from the dataset alone, with correction."""
    key = ("rollout", "max_staleness")
    if not spec.rollout.max_staleness:
        return
    if generates_itself(spec):
        findings.add(key, "needs rollout nodes: with replicas: 0 the trainer generates with its current weights")
    for name in ("environment_factory", "rollout_func"):
        if getattr(spec.trainer, name) is not None:
            findings.add(key, f"does not work with trainer.{name}: its prompts are not known in advance")
    if not spec.grpo.get("vllm_importance_sampling_correction", True):
        why = "without it, completions of an older policy count as the current policy's"
        findings.add(key, f"needs grpo.vllm_importance_sampling_correction: {why}")


def check_reference_model(spec: RunSpec, findings: Findings) -> None:
    """Check an updated reference model: it is part of the run's state and must survive a restart."""
    key = ("grpo", "sync_ref_model")
    if not spec.grpo.get("sync_ref_model"):
        return
    if grpo_value(spec.grpo, "beta") == 0:
        findings.add(key, "needs grpo.beta above 0: at 0 there is no reference model")
    if spec.trainer.peft is not None:
        findings.add(key, "with adapters, the base model is the reference; remove this key or trainer.peft")
    if deepspeed_file(spec) or shards_weights(spec):
        expected = "expected DDP, or ZeRO stage 0 to 2 in this file"
        findings.add(key, f"a sharded reference model cannot be resumed; {expected}")


def check_quantised(spec: RunSpec, config: Mapping[str, Any], findings: Findings) -> None:
    """Report a quantised model: rollout nodes load the trainer's weights by name and type.

    A model whose config.json is unknown is checked by its trainer, before nodes are requested.
    """
    if generates_itself(spec):
        return
    message = f"{QUANTISED}; expected the original model, with adapters (trainer.peft) to save memory"
    extra = spec.grpo.get("model_init_kwargs") or {}
    if any(extra.get(word) if isinstance(extra, dict) else word in str(extra) for word in QUANTISED_WORDS):
        findings.add(("grpo", "model_init_kwargs"), message)
    elif config.get("quantization_config"):
        findings.add(("trainer", "model"), message)


# Room for prompts next to a completion of full length: in vLLM's context, and in the model's.


def check_lengths(spec: RunSpec, config: Mapping[str, Any], findings: Findings) -> None:
    """Report lengths that leave no room for a prompt. `config` is the model's config.json; empty: unknown."""
    flags = {} if generates_itself(spec) else spec.rollout.vllm
    length, context = int(grpo_value(spec.grpo, "max_completion_length")), whole_number(flags.get(MAX_MODEL_LEN))
    has_turns = spec.trainer.tools or spec.trainer.environment_factory or spec.trainer.agent
    if problem := context_problem(flags, spec.rollout.env, length, config):
        findings.add(*problem)
    elif has_turns and 0 < context <= 2 * length:
        message = f"{context} leaves no room for a second turn, whose prompt contains the first"
        expected = f"expected more than twice grpo.max_completion_length ({length})"
        findings.add(("rollout", "vllm", MAX_MODEL_LEN), f"{message}; {expected}")


# Checks of single keys, and the list of all checks.

RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # part of machine names
LOGGING_STEPS = 1
EVAL_STEPS = 50


def name_problem(name: str) -> str:
    """Return the problem with a run's name, or an empty string."""
    if RUN_NAME.fullmatch(name):
        return ""
    expected = "expected 1 to 40 lower-case letters, digits and dashes, no dash at either end"
    return f"{name!r} cannot be part of a machine name; {expected}"


def _check_name(run: EffectiveRun, findings: Findings) -> None:
    name = run.at("name")
    if name is not None and (problem := name_problem(name)):
        findings.add(("name",), problem)


def _check_variables(run: EffectiveRun, findings: Findings) -> None:
    for section in ("trainer", "rollout"):
        for name in run.at(section, "env") or {}:
            if not name or "=" in name:
                findings.add((section, "env", name), "expected the name of an environment variable, without =")


def _check_replicas(run: EffectiveRun, findings: Findings) -> None:
    values = [run.at("rollout", "replicas", key) for key in ("min", "max")]
    minimum, maximum = (1 if value is None else value for value in values)
    if minimum > maximum:
        message = f"{minimum} is more than max ({maximum}); expected min <= max"
        findings.add(("rollout", "replicas", "min"), message)
    elif minimum == 0 < maximum:
        message = "a run with rollout nodes needs at least one; expected 1 or more, or replicas: 0"
        findings.add(("rollout", "replicas", "min"), message)


def _check_training_length(run: EffectiveRun, findings: Findings) -> None:
    steps, epochs = run.grpo("max_steps"), run.grpo("num_train_epochs")
    if steps != -1 and steps < 1:
        findings.add(("grpo", "max_steps"), f"expected at least 1, or -1 to train num_train_epochs; got {steps}")
    elif steps == -1 and epochs <= 0:
        findings.add(("grpo", "num_train_epochs"), f"expected more than 0, or max_steps; got {epochs:g}")


def _check_kl_limit(run: EffectiveRun, findings: Findings) -> None:
    if run.at("policies", "kl", "limit") is None or run.grpo("beta") > 0:
        return
    if run.at("grpo", "beta") is None:
        message = "needs grpo.beta above 0: at TRL's default of 0.0 no KL is computed; set e.g. grpo.beta: 0.02"
        findings.add(("policies", "kl", "limit"), message)
    else:
        message = "expected more than 0: policies.kl.limit is set, and at 0 TRL computes no KL"
        findings.add(("grpo", "beta"), f"{message}; remove one of the two")


def _check_max_behind_steps(run: EffectiveRun, findings: Findings) -> None:
    max_behind_steps = run.at("checkpoints", "max_behind_steps")
    save_steps = save_steps_of(run)
    if max_behind_steps is not None and max_behind_steps < save_steps:
        message = f"expected at least grpo.save_steps ({save_steps}), got {max_behind_steps}"
        why = "training would wait for a checkpoint that is not due yet"
        findings.add(("checkpoints", "max_behind_steps"), f"{message}: {why}")


def _check_spool(run: EffectiveRun, findings: Findings) -> None:
    spool = run.at("checkpoints", "spool")
    if spool and not spool.startswith("/"):
        message = f"expected an absolute path: the folder is on the trainer's machine; got {spool!r}"
        findings.add(("checkpoints", "spool"), message)


def _check_shipped_paths(run: EffectiveRun, findings: Findings) -> None:
    """Report paths outside the folder of run.yaml: cloud machines get a copy of that folder only."""
    if run.at("cloud") != "sky":
        return
    datasets = [((*path, "path"), dataset.get("path")) for path, dataset in each_dataset(run.at("trainer") or {})]
    rewards = enumerate(run.at("trainer", "reward_funcs") or ())
    models = [(("trainer", "reward_funcs", index), reward) for index, reward in rewards if is_model(reward)]
    for path, shipped in [(("trainer", "model"), run.at("trainer", "model")), *datasets, *models]:
        if shipped and os.path.normpath(shipped).startswith("../"):
            message = f"{shipped} is outside the folder of this file, the only one that machines get a copy of"
            findings.add(path, f"{message}; expected a path below it")


def _check_streaming(run: EffectiveRun, findings: Findings) -> None:
    if run.grpo("max_steps") != -1:
        return
    for path, dataset in each_dataset(run.at("trainer") or {}):
        if dataset.get("streaming"):
            message = "the length of a stream is unknown, so num_train_epochs cannot end the run"
            findings.add((*path, "streaming"), f"{message}; set grpo.max_steps")


def _check_evaluation(run: EffectiveRun, findings: Findings) -> None:
    has_data = run.at("trainer", "eval_dataset") is not None
    strategy = run.at("grpo", "eval_strategy")
    keys = [key for key in ("eval_steps", "eval_strategy", "eval_on_start", "do_eval") if run.at("grpo", key)]
    keys = [key for key in keys if key != "eval_strategy" or strategy != "no"]
    if keys and not has_data:
        message = "there is no evaluation dataset; set trainer.eval_dataset or remove this key"
        findings.add(("grpo", keys[0]), message)


def _check_reward_weights(run: EffectiveRun, findings: Findings) -> None:
    weights, functions = run.at("grpo", "reward_weights"), run.at("trainer", "reward_funcs")
    agent, key = run.at("trainer", "agent"), ("trainer", "reward_funcs")
    if run.at("trainer") is not None and functions is None and agent is None:
        findings.missing(key, "missing; expected import paths of reward functions, as in rewards.my_reward")
    elif functions == [] and agent is None and run.at("trainer", "environment_factory") is None:
        findings.add(key, "expected at least one import path, as in rewards.my_reward")
    elif weights is not None:
        expected, more = len(functions or ()), ""
        if agent is not None:
            expected, more = expected + 1, " and the agent's reward"
        if len(weights) != expected:
            message = f"expected one weight for each of {len(functions or ())} reward_funcs{more}"
            findings.add(("grpo", "reward_weights"), f"{message}, got {len(weights)}")


def _check_speculative_decoding(run: EffectiveRun, findings: Findings) -> None:
    if run.at("rollout", "recovery") == "exact":
        return
    for flag in ("speculative-config", "spec-method", "spec-model", "spec-tokens"):
        if run.at("rollout", "vllm", flag) is not None:
            message = "with speculative decoding a completion cannot continue exactly on another node"
            findings.add(("rollout", "vllm", flag), f"{message}; set rollout.recovery: exact")


def _check_generation_seed(run: EffectiveRun, findings: Findings) -> None:
    extra = run.at("grpo", "generation_kwargs")
    if isinstance(extra, dict) and "seed" in extra:
        message = "each completion has its own seed, derived from grpo.seed; remove this one"
        findings.add(("grpo", "generation_kwargs", "seed"), message)


def _check_precision(run: EffectiveRun, findings: Findings) -> None:
    if run.at("grpo", "fp16") and run.at("grpo", "bf16"):
        findings.add(("grpo", "fp16"), "TRL accepts fp16 or bf16, not both; remove one")


def _check_rehearsal(run: EffectiveRun, findings: Findings) -> None:
    """Report a rehearsal on a cloud, and faults without one valid target."""
    if run.at("rehearse") is not None and run.at("cloud") == "sky":
        message = "faults can be rehearsed only on the local cloud; set cloud: local or remove this section"
        findings.add(("rehearse",), message)
    replicas_max = run.at("rollout", "replicas", "max")
    for index, fault in enumerate(run.at("rehearse", "faults") or ()):
        path: KeyPath = ("rehearse", "faults", index)
        kinds = [kind for kind in TARGETS if kind in fault]
        if findings.is_reported(path) or findings.is_reported_within(path):
            continue
        if len(kinds) != 1:
            findings.add(path, f"expected exactly one of {', '.join(TARGETS)} in a fault")
            continue
        (kind,) = kinds
        if problem := target_problem(kind, fault[kind], 1 if replicas_max is None else replicas_max):
            findings.add((*path, kind), problem)
        elif "notice_s" in fault and kind != "preempt":
            findings.add((*path, "notice_s"), "a notice precedes only a preemption; remove this key")
        elif "for_s" in fault and kind != "no_capacity" and fault[kind] != "daemon":
            findings.add((*path, "for_s"), "applies only to no_capacity and kill: daemon; remove this key")


def _check_rehearsed_times(run: EffectiveRun, findings: Findings) -> None:
    steps = run.grpo("max_steps")
    for index, fault in enumerate(run.at("rehearse", "faults") or ()):
        path: KeyPath = ("rehearse", "faults", index)
        for key in ("at_step", "notice_s", "for_s"):
            if fault.get(key, 0) < 0:
                findings.add((*path, key), f"expected at least 0, got {fault[key]:g}")
        if 0 < steps <= fault.get("at_step", 0):
            message = f"the run ends at step {steps} (grpo.max_steps); expected at most {steps - 1}"
            findings.add((*path, "at_step"), message)


CHECKS: tuple[Callable[[EffectiveRun, Findings], None], ...] = (
    check_secrets,
    _check_name,
    _check_variables,
    _check_replicas,
    check_no_rollout_nodes,
    check_batch_keys,
    check_batch_size,
    _check_training_length,
    _check_kl_limit,
    check_save_steps,
    _check_max_behind_steps,
    _check_spool,
    _check_shipped_paths,
    _check_streaming,
    _check_evaluation,
    check_eval_batch_size,
    _check_reward_weights,
    _check_speculative_decoding,
    _check_generation_seed,
    _check_precision,
    check_engine_size,
    check_visible_gpus,
    check_agent,
    check_vespo,
    check_processes,
    _check_rehearsal,
    _check_rehearsed_times,
)


def run_checks(data: Mapping[str, Any], findings: Findings) -> None:
    """Run every check, after `check_structure`."""
    run = EffectiveRun(data, findings)
    check_bounds(run, findings)
    for check in CHECKS:
        try:
            check(run, findings)
        except AlreadyReported:
            continue


def grpo_defaults(data: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the GRPOConfig keys that a run sets by default. Requires a file without problems."""
    run = EffectiveRun(data, findings)
    defaults: dict[str, Any] = {
        "save_steps": save_steps_of(run),
        "logging_steps": LOGGING_STEPS,
    }
    if run.at("trainer", "eval_dataset") is not None:
        defaults["eval_strategy"] = "steps"
        if run.at("grpo", "eval_strategy") in (None, "steps"):
            defaults["eval_steps"] = EVAL_STEPS
    if run.at("rollout", "max_staleness"):
        defaults |= STALE_DEFAULTS
    return {key: value for key, value in defaults.items() if run.at("grpo", key) is None}
