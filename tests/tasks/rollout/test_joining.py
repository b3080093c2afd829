"""A node on its way to its first policy: it is fetched while vLLM starts, which may do so without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.joining import POLICY, Stage
from grpo_orch.tasks.rollout.policy_check import PolicyCheck
from grpo_orch.tasks.rollout.policy_folders import PolicyFolders
from grpo_orch.tasks.rollout.vllm.flags import argv_of
from grpo_orch.tasks.rollout.vllm.server import PolicyRefused, ServerFailed, Unfit
from tests.rigs.rollout_machine import Boot, Machine, spec_of


async def test_policies_are_fetched_while_vllm_starts(machine: Machine) -> None:
    first, second = machine.publish(0), machine.publish(1, size_bytes=1000)
    machine.comes_up.clear()
    machine.start(first)
    policies = machine.workdir / "policies"
    await machine.eventually((policies / first.label).is_dir)
    machine.wanted = second
    await machine.eventually((policies / second.label).is_dir)
    assert (len(machine.boots), machine.said, machine.loads) == (1, [], [])
    machine.comes_up.set()
    said = await machine.holds(second)
    assert machine.loads == [second.label]
    assert said.stages is not None
    assert said.stages.fetched_bytes > 1000  # not those of the second look, which found all there


def test_fetch_of_whole_policy_reports_progress(machine: Machine, tmp_path: Path) -> None:
    wanted = machine.publish(0, size_bytes=1000)
    folders, seen = PolicyFolders(machine.store, tmp_path / "policies"), list[Stage | None]()

    def still() -> bool:
        seen.append(folders.fetching)
        return True

    folders.fetch(wanted, still)
    last = seen[-1]
    assert last is not None
    assert (last.name, last.done_bytes) == (POLICY, last.total_bytes)
    assert last.total_bytes > 1000
    assert folders.fetching is None


@pytest.mark.parametrize(
    ("when", "error"),
    [
        ("on_load", ServerFailed("500")),
        ("on_load", PolicyRefused("no", touched=True)),
        ("on_load", PolicyRefused("no", touched=False)),
        ("on_start", Unfit("draws anew")),
        ("on_start", ServerFailed("ended with exit code 1")),
    ],
)
async def test_vllm_lacking_weights_restarts_with_base_weights(
    machine: Machine, when: str, error: Exception
) -> None:
    async def fails(boot: Boot) -> None:
        if boot.bare:
            raise error

    setattr(machine, when, fails)
    wanted = machine.publish(0)
    machine.start(wanted)
    said = await machine.until(lambda one: one.policy == wanted.label or bool(one.unfit))
    assert (said.policy, said.unfit) == (wanted.label, "")
    assert [boot.bare for boot in machine.boots] == [True, False]


async def test_each_boot_starts_bare_while_that_works(machine: Machine) -> None:
    wanted = machine.publish(0)
    machine.start(wanted)
    said = await machine.holds(wanted)
    await machine.boots[0].stop()  # as a crash does
    await machine.until(lambda one: one.policy == wanted.label and one.boot_id != said.boot_id)
    assert [boot.bare for boot in machine.boots] == [True, True]


def tensor_file(names: list[str]) -> bytes:
    tensors = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)
    }
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


def a_run(folder: Path, config: dict[str, Any], names: list[str], flags: dict[str, Any]) -> RunSpec:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    if names:
        (folder / "model" / "model.safetensors").write_bytes(tensor_file(names))
    return spec_of(folder, flags)


BODY = ["model.embed_tokens.weight", "model.layers.0.mlp.weight"]
HEAD = "lm_head.weight"
UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "names", "flags", "peft", "covers"),
    [
        (UNTIED, [*BODY, HEAD], {}, None, True),
        ({"tie_word_embeddings": True}, BODY, {}, None, True),
        ({}, BODY, {"enforce_eager": True}, None, True),
        ({"tie_word_embeddings": True}, [*BODY, HEAD], {}, None, False),  # vLLM may make two of them
        (UNTIED, [], {}, None, False),  # what there is to overwrite is not known
        ({**UNTIED, "quantization_config": {}}, [*BODY, HEAD], {}, None, False),
        (UNTIED, [*BODY, HEAD], {"quantization": "fp8"}, None, False),
        (UNTIED, [*BODY, HEAD], {"load_format": "safetensors"}, None, False),
        (UNTIED, [*BODY, HEAD], {"speculative-config": {"model": "small"}}, None, False),
        (UNTIED, [*BODY, HEAD], {}, {"target_modules": ["q_proj"]}, False),  # adapters need what is below them
        (UNTIED, [*BODY, HEAD], {}, {"bias": "all"}, True),  # which is published merged
    ],
)
def test_vllm_starts_bare_only_if_a_policy_covers_it(
    config: dict[str, Any],
    names: list[str],
    flags: dict[str, Any],
    peft: dict[str, Any] | None,
    tmp_path: Path,
    *,
    covers: bool,
) -> None:
    spec = a_run(tmp_path, {"architectures": ["LlamaForCausalLM"], **config}, names, flags)
    spec = replace(spec, trainer=replace(spec.trainer, peft=peft))
    assert PolicyCheck(spec).covers_engine() is covers


def test_tensor_lacking_in_trainer_must_exist_in_engine(
    tmp_path: Path,
) -> None:
    spec = a_run(tmp_path, UNTIED, [*BODY, HEAD, "mtp.weight"], {})
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(tensor_file([*BODY, HEAD]))
    canary = Canary([1, 2], [-1.0], "float32", 2, ["^mtp"])
    (policy / layout.CANARY).write_bytes(to_json(canary))
    assert PolicyCheck(spec).verify(policy) == canary
    with pytest.raises(PolicyRefused, match=r"missing tensors: mtp\.weight"):
        PolicyCheck(spec).verify(policy, bare=True)


def test_users_load_format_is_kept_and_bare_start_has_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"load-format": "safetensors"})
    assert "safetensors" in argv_of(spec, "127.0.0.1", 1, None)
    assert "dummy" in argv_of(spec_of(tmp_path, {}), "127.0.0.1", 1, None, bare=True)
