"""The processes that train, and the GPUs that they train on: one machine, a process for each GPU."""

from __future__ import annotations

from orchestrator.config.effective import EffectiveRun
from orchestrator.config.problems import Findings
from policies.model.gpus import named_gpus
from policies.model.processes import gpu_counts
from policies.model.spec import RunSpec, processes_of

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
