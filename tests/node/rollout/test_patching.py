"""Changes that a real vLLM overwrites in its parameters: the same bits as after a whole reload, or not used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.rollout.policy_loader import PolicyLoader
from grpo_orch.tasks.rollout.vllm import flags as vllm_flags
from grpo_orch.tasks.storing.publish import PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.trl.canary import canary_of
from tests.node.rollout.deltas.world import settle
from tests.node.rollout.engines import VOCABULARY, Node, completed, make_model

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 80,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def tied_qwen() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def llama_with_biases() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))


class Following:
    """A trainer's publisher, and a node whose engine follows it."""

    def __init__(self, folder: Path, model: Any, flags: dict[str, Any]) -> None:
        torch.manual_seed(0)
        make_model(folder / "base", seed=0)  # for its tokenizer
        self.model = model.float().eval()
        self.model.save_pretrained(folder / "base")
        assert AutoTokenizer.from_pretrained(folder / "base")
        self.node = Node(folder, "bfloat16", flags=flags)
        self.store = Store(f"memory://{folder}")
        served = ServedTypes("BF16", "F32")
        self.publisher = PolicyPublisher(
            self.store, self.model.config, folder / "scratch", (0, 1, 1), served, StepCosts()
        )
        self.folders = PolicyFolders(self.store, folder / "policies")
        self.loader = PolicyLoader(self.folders)
        self.step, self.holds, self.ranks = 0, "", flags.get("tensor-parallel-size", 1)

    def publish(self) -> PolicyRef:
        named = {name: one for name, one in self.model.state_dict().items() if name != self._tied()}
        version = PolicyVersion(0, self.step)
        ref = self.publisher.publish(version, named.items(), canary_of(self.model, "no"))
        settle(self.publisher)
        self.step += 1
        return ref

    def _tied(self) -> str:
        return "lm_head.weight" if self.model.config.tie_word_embeddings else ""

    def train(self) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += 0.1 * torch.randn_like(weight) * (torch.rand_like(weight) < 0.05)

    def follow(self, ref: PolicyRef) -> tuple[bool, list[str]]:
        """Load it; whether that was by changes alone, and what is said of changes that are of no use."""

        async def story() -> bool:
            ready = await self.loader.fetch([self.node.server], ref, self.holds, lambda: True)
            canary = ready.canary if ready.folder is None else self.node.check.verify(ready.folder)
            await self.loader.load(self.node.server, ready, canary)
            await self.loader.loaded(ready, [self.node.server])
            await self.loader.settled()
            return ready.folder is None

        with capture_logs() as logs:
            alone = self.node.do(story())
        failures = {"engine_proof_failed", "policy_file_update_failed"}
        assert not [one for one in logs if one["event"] in failures], logs
        self.holds = ref.label
        return alone, [one["reason"] for one in logs if one["event"] == "delta_fallback_full_load"]

    def checksums(self, label: str, folder: Path) -> list[dict[str, str]]:
        """vLLM's, of each worker's parameters; those that were overwritten are compared with the file too."""
        assert self.node.do(self.node.server.prove(label, folder, 0, 1))
        return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{layout.MODEL}.*"))]


@pytest.fixture(params=[(tied_qwen, 1), (llama_with_biases, 2)], ids=["tied-tp1", "biases-tp2"])
def plain(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    """A node whose linear layers are as a GPU's."""
    made, ranks = request.param
    monkeypatch.setitem(vllm_flags.FIXED, "worker-extension-cls", "tests.stand_ins.plain_linears.Extension")
    following = Following(tmp_path, made(), {"tensor-parallel-size": ranks})
    yield following
    following.node.stop()


def test_packed_matrices_cause_full_reload_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters are empty then; a head that is the embedding is not."""
    monkeypatch.setitem(vllm_flags.FIXED, "worker-extension-cls", "tests.stand_ins.packed_linears.Extension")
    following = Following(tmp_path, tied_qwen(), {})
    try:
        assert following.follow(following.publish()) == (False, [])
        said = list[str]()
        for _ in range(2):
            following.train()
            alone, why = following.follow(ref := following.publish())
            said += why
            assert not alone
            assert completed(following.node, ref.label)
        assert len(said) == 1
        assert said[0].startswith("cannot trace vLLM's loader of this model: ")
    finally:
        following.node.stop()


def test_overwritten_parameters_equal_a_whole_reload(plain: Following) -> None:
    by_changes = [plain.follow(plain.publish())[0]]
    for _ in range(4):
        plain.train()
        by_changes.append(plain.follow(ref := plain.publish())[0])
        folder, again = plain.folders.fetch(ref, lambda: True), f"again-{ref.version}"
        overwritten, said = plain.checksums(ref.label, folder), completed(plain.node, ref.label)
        plain.node.load(again, folder, None)
        reloaded = plain.checksums(again, folder)
        assert len(reloaded) == plain.ranks
        assert reloaded == overwritten
        assert completed(plain.node, again) == said
        plain.node.load(ref.label, folder, None)
    assert by_changes == [False, False, True, True, True]
