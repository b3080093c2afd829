"""Rules between keys, most of them TRL's own, checked here and not on a paid machine.

Each check is one function over an `EffectiveRun`. Where a value that it needs was reported already it is
skipped: it could only report the same again. Notes of the same subjects stand next to their checks; `notices`
calls them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.datasets import each_dataset
from orchestrator.config.effective import (
    Doubtful,
    EffectiveRun,
    batch_holds_groups,
    check_bounds,
    eval_batch_holds_groups,
    one_batch_key,
    save_steps,
    save_steps_of,
)
from orchestrator.config.model_size import config_in, json_in
from orchestrator.config.problems import Findings, KeyPath
from orchestrator.config.rewards import is_model
from orchestrator.config.user_code import function_problem
from policies.fleet.plan import wanted_slots
from policies.model.gpus import VISIBLE, DriverFailed, asks_for_gpus, engine_gpus, gpus_of, named_gpus
from policies.model.spec import STALE_DEFAULTS, RunSpec, generates_itself, gpu_counts, processes_of
from policies.model.vocabulary import Role
from policies.sizing.engine import MAX_MODEL_LEN, context_problem, whole_number
from policies.weights.adapters import QUANTISED, QUANTISED_WORDS

# Secrets and run.yaml, which is copied to the store: it names them, and must not hold one.

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = "GRPO_ORCH_"
EXPECTED = "expected the name of an environment variable, as in HF_TOKEN"
EXPECTED_URL = "expected the name of an environment variable that holds the URL, as in SLACK_URL"
# What begins as the keys of well-known services do.
_VALUE = re.compile(
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
_WANDB = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"(^|_)(TOKEN|SECRET|KEY|APIKEY|PASSWORD|PASSWD)(_|$)")
_OF_A_FILE = re.compile(r"_(FILE|PATH|DIR|URL|ID|NAME)$")
_NO_SECRET = re.compile(r"(?i)|true|false|none|null|[-+.0-9e]+|/.*")
NAME_IT = "this file is copied to the store; export it where the run is started, and name it under `secrets:`"


def check_secrets(run: EffectiveRun, findings: Findings) -> None:
    """Check `secrets`: names, each once, none that an `env` sets. Messages quote no value that is no name."""
    names: list[Any] = run.at("secrets") or []
    for index, name in enumerate(names):
        here: KeyPath = ("secrets", index)
        if not _VARIABLE.fullmatch(name) or looks_like_secret("", name):
            findings.add(
                here, f"{EXPECTED}; a secret itself does not belong in a file that is copied to the store"
            )
        elif name.startswith(_OURS):
            findings.add(here, f"{name} is set by grpo-orch itself; remove it")
        elif name in names[:index]:
            findings.add(here, f"{name} is named twice; remove one of the two")
        else:
            for section in ("trainer", "rollout"):
                if name in (run.at(section, "env") or {}):
                    findings.add(here, f"{name} is set in {section}.env as well; remove it there")
    _check_notify_urls(run, names, findings)


def _check_notify_urls(run: EffectiveRun, secrets: list[Any], findings: Findings) -> None:
    for index, name in enumerate(run.at("notify", "url_env") or ()):
        here = ("notify", "url_env", index)
        if not _VARIABLE.fullmatch(name) or looks_like_secret("", name):
            findings.add(
                here, f"{EXPECTED_URL}; the URL itself does not belong in a file that is copied to the store"
            )
        elif name.startswith(_OURS):
            findings.add(here, f"{name} is set by grpo-orch itself; use another name")
        elif name in secrets:
            findings.add(here, f"{name} is for the daemon only; remove it from `secrets`, which machines receive")


def looks_like_secret(name: str, value: str) -> bool:
    """Whether an environment variable of that name and value is likely to be one."""
    if _VALUE.search(value) or _WANDB.fullmatch(value):
        return True
    upper = name.upper()
    return bool(_NAME.search(upper)) and not _OF_A_FILE.search(upper) and not _NO_SECRET.fullmatch(value)


def note_secrets(spec: RunSpec, findings: Findings) -> None:
    """Note what looks like a secret in the file."""
    for section, part in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        for name, value in part.env.items():
            if looks_like_secret(name, value):
                findings.notice((section, "env", name), f"looks like a secret, and {NAME_IT}")
        if _VALUE.search(part.setup):
            findings.notice((section, "setup"), f"holds what looks like a secret, and {NAME_IT}")


# GPUs: those of a node against what works on it; this machine's against the nodes of the local cloud.


def engine_fits(run: EffectiveRun, findings: Findings) -> None:
    """An engine larger than its node never starts."""
    named, takes = named_gpus(run.at("rollout", "resources") or {}), engine_gpus(run.at("rollout", "vllm") or {})
    if named is not None and takes > named:
        message = f"a node has {_gpus(named)}, and with these rollout.vllm flags its engine takes {takes}"
        findings.add(("rollout", "resources", "accelerators"), f"{message}; expected at least as many")


def local_nodes_have_their_own(run: EffectiveRun, findings: Findings) -> None:
    """The local cloud gives each node other GPUs; one list for all nodes of a section would undo that."""
    if run.at("cloud") == "sky":
        return
    for section in ("trainer", "rollout"):
        if run.at(section, "env", VISIBLE) is not None:
            message = "each node is given its own GPUs; remove this, and say how many in resources.accelerators"
            findings.add((section, "env", VISIBLE), message)


def check_local_gpus(spec: RunSpec, gpus_here: Callable[[], int], findings: Findings) -> None:
    """Report a driver that fails where GPUs are asked for, and what this machine's GPUs do not suffice for.

    Args:
        gpus_here: how many this machine has, 0 where it has none; may raise DriverFailed.
    """
    try:
        here = gpus_here()
    except DriverFailed as error:
        asking = [role for role, _, _ in wanted_slots(spec) if asks_for_gpus(role, spec)]
        if asking:
            message = f"{error}; expected a driver that works, or {asking[0]}.resources without accelerators"
            findings.add((asking[0].value, "resources", "accelerators"), message)
        elif any(gpus_of(role, spec) for role, _, _ in wanted_slots(spec)):
            findings.notice(("cloud",), f"{error}, so this machine counts as one without GPUs")
    else:
        too_few(spec, here, findings)


def too_few(spec: RunSpec, here: int, findings: Findings) -> None:
    """Report what the machine of a local run cannot hold; `here` is how many GPUs it has, 0 where it has none."""
    wanted = [(role, gpus_of(role, spec)) for role, _, needed in wanted_slots(spec) if needed]
    total = sum(count for _, count in wanted)
    if not 0 < here < total:
        return
    nodes = [count for role, count in wanted if role is Role.ROLLOUT]
    each = f" and {len(nodes)} rollout node{'s' * (len(nodes) > 1)} {nodes[0]} each" if nodes else ""
    message = f"this machine has {_gpus(here)}, and the run takes {total}: the trainer {wanted[0][1]}{each}"
    findings.add(("rollout", "replicas"), f"{message}; see `resources.accelerators` of both")


def note_idle(spec: RunSpec, findings: Findings) -> None:
    """A node runs as many engines as its GPUs suffice for: what is left is paid for all the same."""
    named, takes = named_gpus(spec.rollout.resources), engine_gpus(spec.rollout.vllm)
    if named is None or named < takes or named % takes == 0 or spec.rollout.replicas.max == 0:
        return
    message = (
        f"each node has {_gpus(named)} and each of its engines takes {takes}, so {named % takes} would be idle"
    )
    better = f"set rollout.vllm.tensor-parallel-size to a divisor of {named}, or have nodes of {takes}"
    findings.notice(("rollout", "resources", "accelerators"), f"{message}; {better}")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


# The processes that train, and the GPUs that they train on: one machine, a process for each GPU.

ACCELERATE = ("trainer", "accelerate")
WHOLE = "FULL_STATE_DICT"  # PyTorch's name
GATHER = "stage3_gather_16bit_weights_on_model_save"  # DeepSpeed's
ACCELERATORS = ("trainer", "resources", "accelerators")


def check_processes(run: EffectiveRun, findings: Findings) -> None:
    _one_machine(run, findings)
    _whole_checkpoints(run, findings)
    counts, named = gpu_counts(run.at("trainer", "resources") or {}), run.at(*ACCELERATE, "num_processes")
    gpus = sorted(count or 0 for count in counts)
    if named is None and len(gpus) > 1:
        message = (
            f"machines of {' or '.join(map(str, gpus))} GPUs, and each would train with batches of another size"
        )
        expected = "expected as many GPUs in each alternative, or trainer.accelerate.num_processes"
        findings.add(("trainer", "resources"), f"{message}; {expected}")
    elif 0 < gpus[0] < run.processes:
        message = f"{run.processes} processes, and trainer.resources may give a machine of {gpus[0]}"
        findings.add((*ACCELERATE, "num_processes"), f"{message} GPUs; expected at most one for each")


def one_generates(run: EffectiveRun, findings: Findings) -> None:
    """Report what is left to rollout nodes, where there are none and the trainer generates."""
    if run.at("rollout", "replicas", "max") != 0:
        return
    for key in ("generation_kwargs", "vllm_structured_outputs_regex"):
        if run.at("grpo", key):
            findings.add(("grpo", key), "vLLM's, and with rollout.replicas: 0 the trainer generates; remove it")
    if run.processes > 1:
        named = run.at(*ACCELERATE, "num_processes") is not None
        message = f"with rollout.replicas: 0 one process trains and generates; expected 1, got {run.processes}"
        findings.add((*ACCELERATE, "num_processes") if named else ACCELERATORS, message)
    divides = (("grpo", "fsdp"), ("grpo", "deepspeed"))
    for path in (*divides, (*ACCELERATE, "deepspeed_config"), (*ACCELERATE, "fsdp_config")):
        if run.at(*path):
            message = "with rollout.replicas: 0 one process holds the whole model to generate; remove it"
            findings.add(path, message)


def _one_machine(run: EffectiveRun, findings: Findings) -> None:
    machines = run.at(*ACCELERATE, "num_machines")
    if machines is not None and machines != 1:
        message = f"one machine trains, and {machines} would never find each other"
        expected = "remove it, and name more GPUs on one machine in trainer.resources.accelerators"
        findings.add((*ACCELERATE, "num_machines"), f"{message}; {expected}")


def _whole_checkpoints(run: EffectiveRun, findings: Findings) -> None:
    """Weights in shards are loaded by no `from_pretrained`. Where nothing is said they are saved whole."""
    told = "checkpoints would hold weights in shards, which no from_pretrained loads; expected {}"
    if run.at(*ACCELERATE, "deepspeed_config", "zero3_save_16bit_model") is False:
        findings.add((*ACCELERATE, "deepspeed_config"), told.format("zero3_save_16bit_model: true"))
    if run.at(*ACCELERATE, "fsdp_config", "fsdp_state_dict_type") not in (None, WHOLE):
        findings.add((*ACCELERATE, "fsdp_config"), told.format(f"fsdp_state_dict_type: {WHOLE}"))
    zero = run.at("grpo", "deepspeed", "zero_optimization") or {}
    if isinstance(zero, dict) and zero.get("stage") == 3 and not zero.get(GATHER):
        findings.add(("grpo", "deepspeed"), told.format(f"{GATHER}: true in zero_optimization"))


def note_processes(spec: RunSpec, findings: Findings) -> None:
    """Say what will be started where the file does not say it itself, and what would be paid for and not used."""
    accelerate, processes, gpus = (
        spec.trainer.accelerate or {},
        processes_of(spec),
        named_gpus(spec.trainer.resources),
    )
    if gpus is None:
        return
    if "num_processes" in accelerate:
        if processes < gpus:
            message = f"{processes} of the trainer's {gpus} GPUs train; the others are yours to use"
            findings.notice((*ACCELERATE, "num_processes"), message)
    elif processes > 1:
        how = accelerate.get("distributed_type") or ("DDP" if not _divides(spec) else "as `grpo` says")
        each = "each takes per_device_train_batch_size completions at once"
        findings.notice(ACCELERATORS, f"{processes} processes train, one for each GPU ({how}); {each}")


def _divides(spec: RunSpec) -> bool:
    return bool(spec.grpo.get("fsdp") or spec.grpo.get("deepspeed"))


# Features of TRL's trainer that hold only with others, or not with a fleet: said before a machine is paid for.

# What `GRPOTrainer.__init__` asks of the correction where the loss is vespo.
OF_SINGLE_TOKENS = ("token_truncate", "token_mask")


def takes_turns(run: EffectiveRun) -> bool:
    """Whether completions are of several turns."""
    return any(run.at("trainer", key) for key in ("tools", "environment_factory", "agent"))


def check_turns(trainer: Mapping[str, Any], workdir: Path, findings: Findings) -> None:
    """Report each import path of a tool, an environment, a rollout function or an agent that leads nowhere."""
    named: list[tuple[KeyPath, str]] = [
        (("trainer", "tools", index), name) for index, name in enumerate(trainer.get("tools", ()))
    ]
    alone = ("environment_factory", "rollout_func")
    named += [(("trainer", key), trainer[key]) for key in alone if key in trainer]
    if isinstance(agent := trainer.get("agent", {}).get("run"), str):
        named.append((("trainer", "agent", "run"), agent))
    for path, name in named:
        has_setup = bool(trainer.get("setup")) or (path[1] == "agent" and "python" in trainer["agent"])
        if problem := function_problem(name, workdir, has_setup=has_setup, misfit=lambda *_: ""):
            findings.add(path, problem)


def check_agent(run: EffectiveRun, findings: Findings) -> None:
    """Check what an agent's sessions go together with."""
    if run.at("trainer", "agent") is None:
        return
    key = ("trainer", "agent")
    others = [one for one in ("tools", "environment_factory", "rollout_func") if run.at("trainer", one)]
    if run.at("trainer", "agent", "run") == []:
        findings.add((*key, "run"), "expected a command's words, got none")
    elif isinstance(run.at("trainer", "agent", "run"), list) and run.at("trainer", "agent", "python"):
        findings.add((*key, "python"), "starts a function; a command names its own interpreter: remove this key")
    elif others:
        findings.add(key, f"an agent brings its own turns; expected no trainer.{others[0]} beside it")
    elif run.at("rollout", "replicas", "max") == 0:
        findings.add(key, "needs rollout nodes: with replicas: 0 there is no gateway that agents could ask")
    if any(name.rpartition(".")[2] == "agent" for name in run.at("trainer", "reward_funcs") or ()):
        findings.add(
            ("trainer", "reward_funcs"), "`agent` is the name of the agent's own reward; rename the function"
        )
    if run.grpo("remove_unused_columns"):
        message = "an agent gets the whole row, and true leaves it the prompt alone; remove this key"
        findings.add(("grpo", "remove_unused_columns"), message)


def check_vespo(run: EffectiveRun, findings: Findings) -> None:
    mode = run.grpo("vllm_importance_sampling_mode")
    if run.grpo("loss_type") != "vespo" or not run.grpo("vllm_importance_sampling_correction"):
        return
    if mode not in OF_SINGLE_TOKENS:
        needed = f"vespo needs vllm_importance_sampling_mode {' or '.join(OF_SINGLE_TOKENS)}, and it is {mode}"
        findings.add(("grpo", "loss_type"), f"{needed}; set one of them")


def check_staleness(spec: RunSpec, findings: Findings) -> None:
    """Check that windows can be sampled ahead: of what the dataset alone says, by rollout nodes, and corrected."""
    key = ("rollout", "max_staleness")
    if not spec.rollout.max_staleness:
        return
    if generates_itself(spec):
        findings.add(key, "needs rollout nodes: with replicas: 0 the trainer generates with its present weights")
    for name in ("environment_factory", "rollout_func"):
        if getattr(spec.trainer, name) is not None:
            findings.add(key, f"does not work with trainer.{name}, whose prompts are not known before")
    if not spec.grpo.get("vllm_importance_sampling_correction", True):
        why = "without it completions of an older policy count as the present one's"
        findings.add(key, f"needs grpo.vllm_importance_sampling_correction: {why}")


def check_reference_model(run: EffectiveRun, findings: Findings) -> None:
    """Check a reference model that moves: it is part of the run, and must come through a restart."""
    if not run.at("grpo", "sync_ref_model"):
        return
    if run.grpo("beta") == 0:
        findings.add(("grpo", "sync_ref_model"), "needs grpo.beta above 0: without it there is no reference model")
    if run.at("trainer", "peft") is not None:
        message = "adapters are their own reference when they are taken off; remove this one, or trainer.peft"
        findings.add(("grpo", "sync_ref_model"), message)
    if where := _shards_the_reference(run):
        message = (
            f"a reference model in shards ({where}) does not survive a restart; expected ZeRO stage 0 to 2, or DDP"
        )
        findings.add(("grpo", "sync_ref_model"), message)


def _shards_the_reference(run: EffectiveRun) -> str:
    """What spreads the reference model over the processes, or may; empty where each has all of it."""
    if run.at("grpo", "fsdp") or run.at("trainer", "accelerate", "distributed_type") == "FSDP":
        return "FSDP"
    for path in (("grpo", "deepspeed"), ("trainer", "accelerate", "deepspeed_config")):
        if (config := run.at(*path)) and _zero_stage(config) not in (0, 1, 2):
            return f"{'.'.join(path)}, ZeRO stage {_zero_stage(config)}"
    return ""


def _zero_stage(config: Any) -> int | str:
    """Of a DeepSpeed configuration, DeepSpeed's own or accelerate's; a text where that is elsewhere."""
    if not isinstance(config, Mapping) or "deepspeed_config_file" in config:
        return "in a file"
    zero = config.get("zero_optimization")
    stage = config.get("zero_stage", zero.get("stage", 0) if isinstance(zero, Mapping) else 0)
    return stage if isinstance(stage, int) else str(stage)


def check_quantised(spec: RunSpec, findings: Findings) -> None:
    """Report a quantised model: rollout nodes take the weights that the trainer computes with, by name and type.

    Of a model that is on the hub alone nothing is known here; its trainer says so before it asks for nodes.
    """
    if generates_itself(spec):
        return
    message = f"{QUANTISED}; expected the model as it was before, with adapters (trainer.peft) to save memory"
    extra = spec.grpo.get("model_init_kwargs") or {}
    if any(extra.get(word) if isinstance(extra, dict) else word in str(extra) for word in QUANTISED_WORDS):
        findings.add(("grpo", "model_init_kwargs"), message)
    elif json_in(Path(spec.workdir, spec.trainer.model, "config.json")).get("quantization_config"):
        findings.add(("trainer", "model"), message)


# Whether prompts have room before a completion of full length: in vLLM's context, and in that of a model here.


def check_lengths(data: dict[str, Any], workdir: Path, findings: Findings) -> None:
    """Report lengths with which every prompt would be refused."""
    run = EffectiveRun(data, findings)
    try:
        generates_itself = run.at("rollout", "replicas", "max") == 0
        flags = {} if generates_itself else run.at("rollout", "vllm") or {}
        env, length = run.at("rollout", "env") or {}, int(run.grpo("max_completion_length"))
        room, turns = whole_number(run.at("rollout", "vllm", MAX_MODEL_LEN)), takes_turns(run)
        config = config_in(workdir / str(run.at("trainer", "model")) / "config.json")
    except Doubtful:
        return
    if found := context_problem(flags, env, length, config):
        findings.add(*found)
    elif flags and turns and 0 < room <= 2 * length:
        message = f"{room} leaves no room for another turn, whose prompt holds the turns before it"
        expected = f"expected more than twice grpo.max_completion_length, {length}"
        findings.add(("rollout", "vllm", MAX_MODEL_LEN), f"{message}; {expected}")


# Single checks, and the list of all.

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # it becomes part of machine names
LOGGING_STEPS = 1
EVAL_STEPS = 50


def name_problem(name: str) -> str:
    """What is wrong with a run's name; empty where nothing is."""
    if NAME.fullmatch(name):
        return ""
    expected = "expected 1 to 40 lower-case letters, digits and dashes, no dash at either end"
    return f"{name!r} cannot be part of a machine's name; {expected}"


def _name(run: EffectiveRun, findings: Findings) -> None:
    name = run.at("name")
    if name is not None and (problem := name_problem(name)):
        findings.add(("name",), problem)


def _variables(run: EffectiveRun, findings: Findings) -> None:
    """What no process could be started with."""
    for section in ("trainer", "rollout"):
        for name in run.at(section, "env") or {}:
            if not name or "=" in name:
                findings.add((section, "env", name), "expected the name of an environment variable, without any =")


def _replicas(run: EffectiveRun, findings: Findings) -> None:
    found = [run.at("rollout", "replicas", key) for key in ("min", "max")]
    least, most = (1 if one is None else one for one in found)
    if least > most:
        findings.add(("rollout", "replicas", "min"), f"{least} is more than max, {most}; expected min <= max")
    elif least == 0 < most:
        message = "a run with rollout nodes needs one at least; expected 1 or more, or replicas: 0"
        findings.add(("rollout", "replicas", "min"), message)


def _length_of_training(run: EffectiveRun, findings: Findings) -> None:
    steps, epochs = run.grpo("max_steps"), run.grpo("num_train_epochs")
    if steps != -1 and steps < 1:
        findings.add(("grpo", "max_steps"), f"expected at least 1, or -1 to train num_train_epochs; got {steps}")
    elif steps == -1 and epochs <= 0:
        findings.add(("grpo", "num_train_epochs"), f"expected more than 0, or max_steps; got {epochs:g}")


def _limit_needs_beta(run: EffectiveRun, findings: Findings) -> None:
    if run.at("policies", "kl", "limit") is None or run.grpo("beta") > 0:
        return
    if run.at("grpo", "beta") is None:
        message = "needs grpo.beta above 0: at TRL's default of 0.0 no kl is computed; set e.g. grpo.beta: 0.02"
        findings.add(("policies", "kl", "limit"), message)
    else:
        message = "expected more than 0, as policies.kl.limit is set and TRL computes no kl at 0"
        findings.add(("grpo", "beta"), f"{message}; remove one of the two")


def _max_behind_steps(run: EffectiveRun, findings: Findings) -> None:
    behind = run.at("checkpoints", "max_behind_steps")
    every = save_steps_of(run)
    if behind is not None and behind < every:
        message = f"less than grpo.save_steps, {every}: training would wait for what is not due yet"
        findings.add(("checkpoints", "max_behind_steps"), f"{message}; expected at least that, got {behind}")


def _spool(run: EffectiveRun, findings: Findings) -> None:
    spool = run.at("checkpoints", "spool")
    if spool and not spool.startswith("/"):
        message = f"expected a whole path, for it is a folder of the trainer's machine; got {spool!r}"
        findings.add(("checkpoints", "spool"), message)


def _paths_are_shipped(run: EffectiveRun, findings: Findings) -> None:
    """Machines of a cloud get a copy of the folder of run.yaml, and of nothing beside it."""
    if run.at("cloud") != "sky":
        return
    data = [((*path, "path"), one.get("path")) for path, one in each_dataset(run.at("trainer") or {})]
    rewards = enumerate(run.at("trainer", "reward_funcs") or ())
    models = [(("trainer", "reward_funcs", index), one) for index, one in rewards if is_model(one)]
    for path, named in [(("trainer", "model"), run.at("trainer", "model")), *data, *models]:
        if named and os.path.normpath(named).startswith("../"):
            message = f"{named} is outside the folder of this file, and machines get a copy of no other"
            findings.add(path, f"{message}; expected a path below it")


def _streaming(run: EffectiveRun, findings: Findings) -> None:
    if run.grpo("max_steps") != -1:
        return
    for path, one in each_dataset(run.at("trainer") or {}):
        if one.get("streaming"):
            message = "as many rows are read as the run can use, and num_train_epochs does not tell how many"
            findings.add((*path, "streaming"), f"{message}; set grpo.max_steps")


def _logging_steps(run: EffectiveRun, findings: Findings) -> None:
    steps = run.at("grpo", "logging_steps")
    if steps is not None and steps != int(steps):
        findings.add(("grpo", "logging_steps"), f"expected a whole number of steps, got {steps:g}")


def _evaluation(run: EffectiveRun, findings: Findings) -> None:
    has_data = run.at("trainer", "eval_dataset") is not None
    strategy = run.at("grpo", "eval_strategy")
    asked = [key for key in ("eval_steps", "eval_strategy", "eval_on_start", "do_eval") if run.at("grpo", key)]
    asked = [key for key in asked if key != "eval_strategy" or strategy != "no"]
    if asked and not has_data:
        message = "set, but there is nothing to score; set trainer.eval_dataset or remove this key"
        findings.add(("grpo", asked[0]), message)


def _reward_weights(run: EffectiveRun, findings: Findings) -> None:
    weights, functions = run.at("grpo", "reward_weights"), run.at("trainer", "reward_funcs")
    agent, key = run.at("trainer", "agent"), ("trainer", "reward_funcs")
    if run.at("trainer") is not None and functions is None and agent is None:
        findings.missing(key, "missing; expected import paths of reward functions, as in rewards.my_reward")
    elif functions == [] and agent is None and run.at("trainer", "environment_factory") is None:
        findings.add(key, "expected at least one import path, as in rewards.my_reward")
    elif weights is not None:
        count, more = (
            len(functions or ()) + (agent is not None),
            "" if agent is None else " and the agent's reward",
        )
        if len(weights) != count:
            message = (
                f"expected one weight for each of {len(functions or ())} reward_funcs{more}, got {len(weights)}"
            )
            findings.add(("grpo", "reward_weights"), message)


def _no_speculative_decoding(run: EffectiveRun, findings: Findings) -> None:
    if run.at("rollout", "recovery") == "exact":
        return
    for flag in ("speculative-config", "spec-method", "spec-model", "spec-tokens"):
        if run.at("rollout", "vllm", flag) is not None:
            message = "speculative decoding draws by what it guessed, so no completion can go on at another node"
            findings.add(("rollout", "vllm", flag), f"{message}; expected rollout.recovery: exact with it")


def _no_common_seed(run: EffectiveRun, findings: Findings) -> None:
    extra = run.at("grpo", "generation_kwargs")
    if isinstance(extra, dict) and "seed" in extra:
        message = "each completion has a seed of its own, derived from grpo.seed; remove this one"
        findings.add(("grpo", "generation_kwargs", "seed"), message)


def _precision(run: EffectiveRun, findings: Findings) -> None:
    if run.at("grpo", "fp16") and run.at("grpo", "bf16"):
        findings.add(("grpo", "fp16"), "TRL takes fp16 or bf16, not both; remove one")


def _rehearsed_faults(run: EffectiveRun, findings: Findings) -> None:
    steps = run.grpo("max_steps")
    for index, fault in enumerate(run.at("rehearse", "faults") or ()):
        here: KeyPath = ("rehearse", "faults", index)
        for key in ("at_step", "notice_s", "for_s"):
            if fault.get(key, 0) < 0:
                findings.add((*here, key), f"expected at least 0, got {fault[key]:g}")
        if 0 < steps <= fault.get("at_step", 0):
            message = f"never comes: the run ends with step {steps} (grpo.max_steps); expected at most {steps - 1}"
            findings.add((*here, "at_step"), message)


CHECKS: tuple[Callable[[EffectiveRun, Findings], None], ...] = (
    check_secrets,
    _name,
    _variables,
    _replicas,
    one_generates,
    one_batch_key,
    batch_holds_groups,
    _length_of_training,
    _limit_needs_beta,
    save_steps,
    _max_behind_steps,
    _spool,
    _paths_are_shipped,
    _streaming,
    _logging_steps,
    _evaluation,
    eval_batch_holds_groups,
    _reward_weights,
    _no_speculative_decoding,
    _no_common_seed,
    _precision,
    engine_fits,
    local_nodes_have_their_own,
    check_reference_model,
    check_agent,
    check_vespo,
    check_processes,
    _rehearsed_faults,
)


def cross_check(data: Mapping[str, Any], findings: Findings) -> None:
    """Run every check on data whose structure was checked."""
    run = EffectiveRun(data, findings)
    check_bounds(run, findings)
    for check in CHECKS:
        try:
            check(run, findings)
        except Doubtful:
            continue


def grpo_defaults(data: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """GRPOConfig keys that a run sets where the file does not. To be asked for once nothing is wrong."""
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
