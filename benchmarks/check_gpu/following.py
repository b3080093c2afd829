"""Weights from a trainer to a model on the device: published, fetched, overwritten in place, compared bit by bit.

Publisher, folders and what overwrites are the product's. A stand-in is the engine: a model of transformers, whose
loader copies each tensor to where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.check_gpu.lab import Lab, trained
from benchmarks.check_gpu.outcome import Failed
from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.rollout.vllm.worker import Patching
from grpo_orch.tasks.storing.publish import AdapterPublisher, PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts

STEPS = 4
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
PROMPT = [1, *range(5, 45)]


class Engine(Patching):
    """A worker of vLLM, as far as changes of its weights ask for it."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        self.model_runner = SimpleNamespace(get_model=lambda: self)
        self.parameters, self.named_parameters = model.parameters, model.named_parameters

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        own = dict(self.named_parameters())
        for name, one in weights:
            own[name].data.copy_(one)


def always() -> bool:
    """The policy that is fetched is still wanted."""
    return True


def deltas(lab: Lab) -> str:
    """What has changed, overwritten in the device's memory: the same bits as in a model that loads the file."""
    model, costs = lab.model(), StepCosts()
    store, served = Store(f"file://{lab.folder}/deltas"), ServedTypes("BF16", "BF16")
    publisher = PolicyPublisher(store, model.config, lab.folder / "scratch", (0, 1, 1), served, costs)
    folders = PolicyFolders(store, lab.folder / "policies")

    def publish(step: int) -> PolicyRef:
        return publisher.publish(PolicyVersion(0, step), model.named_parameters(), None)

    held = publish(0)
    engine = Engine(lab.model(seed=1).bfloat16())
    engine.load_weights(load_file(folders.fetch(held, always) / layout.MODEL).items())
    costs.take()
    for step in range(1, STEPS + 1):
        trained(model)
        ref = publish(step)
        staged = folders.stage(ref, held.digest, always)
        if staged is None:
            raise Failed(f"step {step} did not travel as what has changed")
        if why := engine.follow_loader([str(one) for one in staged.deltas]):
            raise Failed(f"cannot trace the loader: {why}")
        engine.apply_deltas([str(one) for one in staged.deltas], staged.digests)
        _compare(engine, lab, folders.settle(ref, always) / layout.MODEL)
        held = ref
    took = costs.take()
    share = took[metrics.PUBLISHED_BYTES] / took[metrics.WEIGHTS_BYTES]
    return f"{STEPS} steps; {share:.0%} of the bytes travelled; digests and all bits agree"


def _compare(engine: Engine, lab: Lab, file: Path) -> None:
    if name := engine.find_difference(str(file), 0, 1):
        raise Failed(f"{name} is not in memory as it is in the file")
    whole = Engine(lab.model(seed=2).bfloat16())
    whole.load_weights(load_file(file).items())
    ours, theirs = dict(engine.named_parameters()), dict(whole.named_parameters())
    differ = [name for name, one in ours.items() if not torch.equal(one, theirs[name])]
    if differ:
        raise Failed(f"{differ[0]} differs from a model that loaded the whole file, and {len(differ) - 1} more")


def adapters(lab: Lab) -> str:
    """An adapter, published and loaded by PEFT on another copy of the base model: the same bits come out."""
    from peft import LoraConfig, PeftModel, get_peft_model

    from grpo_orch.tasks.trl.weights import adapter_tensors

    model = get_peft_model(lab.model(), LoraConfig(**LORA, init_lora_weights=False)).eval()
    store, costs = Store(f"file://{lab.folder}/adapters"), StepCosts()
    config = model.peft_config["default"].to_dict()
    publisher = AdapterPublisher(store, config, "base", "", lab.folder / "beside", (0, 1, 1), ServedTypes(), costs)
    folders, inputs = PolicyFolders(store, lab.folder / "adapter-policies"), torch.tensor([PROMPT]).to(lab.device)
    for step in range(2):
        trained(model, rate=1e-3)
        ref = publisher.publish(PolicyVersion(0, step), adapter_tensors(model), None)
        other = PeftModel.from_pretrained(lab.model(), folders.fetch(ref, always)).eval()
        with torch.no_grad():
            ours, theirs = model(input_ids=inputs).logits, other(input_ids=inputs).logits
        if not torch.equal(ours, theirs):
            raise Failed(f"step {step}: logits differ by up to {float((ours - theirs).abs().max()):.2g}")
    return f"2 steps of {costs.take()[metrics.PUBLISHED_BYTES] / 2 / 1024:.0f} KiB; all logits agree bit for bit"
