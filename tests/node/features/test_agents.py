"""A run whose completions are an agent's sessions, through deaths of all kinds."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_orch.checkpoint.records.rollouts import EVALUATION_CALLS, Rollout, read_rollout
from grpo_orch.checkpoint.records.samples import read_samples, stored_calls
from grpo_orch.checkpoint.store import layout
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import AgentSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.rewards.user_calls import BadReward
from grpo_orch.tasks.trl.parts.agents import plain_rows
from grpo_orch.tasks.trl.parts.rewards import NothingToLearn
from tests.node.trainer.rig import GRPO, PROMPTS, Rig, open_rig
from tests.node.trainer.rig_agents import FAULTS
from tests.stand_ins.stand_in_sessions import StandInSessions

STEPS = 4
GROUP = GRPO["per_device_train_batch_size"]  # sessions of a step
TURNS = 3  # of a session
HANGS_S = 20.0  # of an agent's own time: eight that start at once on a busy machine take seconds of it
AGENT = AgentSpec(run="rig_agents.solve", tokens=100)


def of_agent(agent: AgentSpec = AGENT, **spec: Any) -> dict[str, Any]:
    grpo = {"max_steps": STEPS, **spec.pop("grpo", {})}
    return {"reward": None, "trainer": {"agent": agent}, "grpo": grpo, "on_bad_reward": "none", **spec}


def sessions_of(rig: Rig, tiny: Path) -> StandInSessions:
    return rig.gateway.take_sessions(AutoTokenizer.from_pretrained(tiny / "model"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Rig]:
    with open_rig(tmp_path_factory.mktemp("calm"), tiny, **of_agent()) as rig:
        sessions_of(rig, tiny)
        assert rig.wait(rig.start_trainer()) == 0
        yield rig


def test_sessions_are_trained_on_with_their_masks(calm: Rig) -> None:
    rows = calm.trained()
    assert len(rows) == STEPS
    assert len({loss for *_, loss in calm.results()}) == STEPS
    for row in rows:
        assert row["agent/turns"] == TURNS
        assert row["agent/failed"] == 0
        assert 0 < row["rewards/agent/mean"] == row["reward"]
        assert row["sampling/sampling_logp_difference/max"] < 1e-4  # what the agent said is in no sum
    assert calm.gateway.sessions is not None
    assert len(calm.gateway.sessions.opened) == STEPS * GROUP
    assert len(set(calm.gateway.sessions.forgotten)) >= (STEPS - 1) * GROUP


def test_killed_trainer_takes_stored_sessions_and_recorded_turns(calm: Rig, tiny: Path, tmp_path: Path) -> None:
    turns = random.SystemRandom().randrange(GROUP * TURNS + 1, GROUP * TURNS * 2 - GROUP)
    print(f"killed after {turns} turns")
    with open_rig(tmp_path, tiny, **of_agent()) as rig:
        sessions = sessions_of(rig, tiny)

        def kills(_: str) -> None:
            if len(sessions.made) >= turns and trainer.poll() is None:
                trainer.kill()

        sessions.on_turn = kills
        trainer = rig.start_trainer()
        trainer.wait()
        made, opened = list(sessions.made), len(sessions.opened)
        sessions.on_turn = lambda _: None
        assert rig.wait(rig.start_trainer(attempt=2), attempt=2) == 0
        assert rig.digests() == calm.digests()
        again = {name for name, _ in sessions.opened[opened:]}
        assert not [name for name in again if name.startswith("0-0-")], "the first step's are stored"
        assert {name for name in again if name.startswith("0-1-")}, "the second's were not"
        assert calm.gateway.sessions is not None
        assert sorted(sessions.made) == sorted(calm.gateway.sessions.made), "a turn was sampled twice"
        assert len(made) >= turns
    assert rig.results() == calm.results()


def test_windows_ahead_are_the_same_after_any_death(tiny: Path, tmp_path: Path) -> None:
    spec = of_agent(max_staleness=1)
    with open_rig(tmp_path / "calm", tiny, **spec) as calm:
        sessions = sessions_of(calm, tiny)
        assert calm.wait(calm.start_trainer()) == 0
        policies = {(name.split("-")[1], at) for at, name in asked_of(calm, sessions)}
        assert policies == {("0", "0-0"), ("1", "0-0"), ("2", "0-1"), ("3", "0-2")}
    with open_rig(tmp_path / "killed", tiny, **spec) as rig:
        sessions = sessions_of(rig, tiny)

        def kills(_: str) -> None:
            if len(sessions.made) >= GROUP * TURNS * 2 + 3 and trainer.poll() is None:
                trainer.kill()

        sessions.on_turn = kills
        trainer = rig.start_trainer()
        trainer.wait()
        sessions.on_turn = lambda _: None
        assert rig.wait(rig.start_trainer(attempt=2), attempt=2) == 0
        assert rig.digests() == calm.digests()
        assert len(set(sessions.made)) == len(sessions.made) == STEPS * GROUP * TURNS
    assert rig.results() == calm.results()


def asked_of(rig: Rig, sessions: StandInSessions) -> set[tuple[str, str]]:
    """Of which policy each session was, and its name; of those that the gateway still has and those it had."""
    assert rig.gateway.sessions is sessions
    return {(policy, name) for name, policy in sessions.policies.items()}


def test_faulty_agents_cost_their_samples_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    for fault in ("crash", "hang", "rewrite", "silent"):
        (faults / fault).touch()
    monkeypatch.setenv(FAULTS, str(faults))
    agent = AgentSpec(run="rig_agents.faulty", tokens=100, time_s=HANGS_S)
    spec = of_agent(agent, reward="rig_agents.share_of_messages", grpo={"max_steps": 2})
    with open_rig(tmp_path / "rig", tiny, **spec) as rig:
        sessions_of(rig, tiny)
        trainer = rig.train()
        first, second = rig.trained()
        [step] = [one for one in rollouts_of(rig) if one.at == "0-0"]
        _, groups = read_samples(rig.store, stored_calls(rig.store)[PolicyVersion(0, 0)][0])
        shown = [one for group in groups for one in group.samples]
    assert not list(faults.iterdir())
    assert sorted(bool(one.branches) for one in step.sessions) == [False, *[True] * (GROUP - 1)]
    failed = {one.failed for one in step.sessions if one.failed}
    late = f"it took longer than {HANGS_S:g} s of its own (trainer.agent.time_s)"
    assert failed == {"it ended with exit code 1", late}
    assert (first["agent/failed"], second["agent/failed"]) == (2 / GROUP, 0)
    assert (first["agent/further_branches"], second["agent/further_branches"]) == (1, 0)
    assert first["agent/untrained_tokens"] == 0
    assert not [name for name in first if "clipped" in name or "terminated" in name]
    assert first["rewards/share_of_messages/mean"] > 0
    assert trainer.reward_func_names == ["share_of_messages", "agent"]
    assert max(row["sampling/sampling_logp_difference/max"] for row in (first, second)) < 1e-4
    assert {one.failed for one in shown if one.failed} == {*failed, "it asked for no turn"}
    assert {tuple(one.rewards) for one in shown if one.failed} == {(None, None)}, "it has a reward of a function"
    assert [one.failed for one in shown if one.cut] == [one for one in failed if "took longer" in one]
    whole = max((one for one in shown if not one.failed), key=lambda one: len(one.completion))
    assert [one.role for one in whole.completion] == ["user", "assistant"] * TURNS
    assert sum(one.tokens or 0 for one in whole.completion) == whole.tokens
    assert whole.rewards[0] is not None
    assert whole.rewards[1] is not None


def test_row_is_the_same_in_every_attempt() -> None:
    first, second = (
        {"q": "é", "picture": object(), "at": date(2026, 1, 2), "more": {"n": None}} for _ in range(2)
    )
    assert plain_rows([first]) == plain_rows([second])
    assert plain_rows([first])[0]["at"] == "2026-01-02"


@pytest.mark.parametrize("agent", ["rig_agents.unsure", "rig_agents.fails", ("no-such-program",)])
def test_steps_without_any_reward_end_the_run(tiny: Path, tmp_path: Path, agent: str | tuple[str, ...]) -> None:
    reward = "rig_agents.share_of_messages" if agent == "rig_agents.fails" else None
    spec = of_agent(AgentSpec(run=agent, tokens=100), reward=reward, grpo={"max_steps": 30})
    with open_rig(tmp_path, tiny, **spec) as rig:
        sessions_of(rig, tiny)
        with pytest.raises(NothingToLearn, match=f"none of {GROUP} completions had a reward"):
            rig.train()


def rollouts_of(rig: Rig) -> list[Rollout]:
    found = [read_rollout(rig.store, entry.key) for entry in rig.store.entries(layout.ROLLOUTS)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("batches", [1, 2])
def test_further_branches_are_rows_with_their_sessions_advantage(tiny: Path, tmp_path: Path, batches: int) -> None:
    parts = {"per_device_train_batch_size": GROUP // batches, "gradient_accumulation_steps": batches}
    spec = of_agent(AgentSpec(run="rig_agents.branches", tokens=100), grpo={"max_steps": 1, **parts})
    with open_rig(tmp_path, tiny, **spec) as rig:
        sessions_of(rig, tiny)
        trainer = rig.assemble()
        extended, outputs = trainer.agents.extended, list[dict[str, Any]]()

        def kept(*arguments: Any) -> dict[str, Any]:
            outputs.append(extended(*arguments))
            return outputs[-1]

        trainer.agents.extended = kept
        trainer.train()
        [row] = rig.trained()
        [made] = rollouts_of(rig)
    [found] = outputs
    of_session = dict(zip([one.session for one in made.sessions], found["advantages"].tolist(), strict=False))
    branches = [one.branches[-1] for one in made.sessions]
    further = [(branch, of_session[one.session]) for one in made.sessions for branch in one.branches[:-1]]
    further.sort(key=lambda one: -sum(one[0].mask))
    branches += [branch for branch, _ in further]
    assert len(branches) == 2 * GROUP == len(found["advantages"])
    assert found["advantages"].tolist()[GROUP:] == pytest.approx([advantage for _, advantage in further])
    assert len(set(found["advantages"].tolist())) > 1
    trained = found["completion_mask"] * found["tool_mask"]
    assert int(trained.sum()) == int(found["num_items_in_batch"]) == sum(sum(one.mask) for one in branches)
    apart = (found["old_per_token_logps"] - found["sampling_per_token_logps"]).abs() * trained
    assert float(apart.max()) < 1e-4
    assert bool(found["prompt_mask"][:, -1].all() and found["completion_mask"][:, 0].all()), (
        "a gap between the two"
    )
    for at, branch in enumerate(branches):
        prompt = found["prompt_ids"][at][found["prompt_mask"][at] == 1].tolist()
        completion = found["completion_ids"][at][found["completion_mask"][at] == 1].tolist()
        assert prompt + completion == branch.token_ids
        assert trained[at][: len(completion)].tolist() == branch.mask[len(prompt) :]
    assert (row["agent/turns"], row["agent/further_branches"], row["agent/untrained_tokens"]) == (5, GROUP, 0)
    assert row["completions/mean_length"] == sum(map(sum, (one.mask for one in branches[:GROUP]))) / GROUP


def test_failing_agent_ends_a_run_that_wants_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "crash").touch()
    monkeypatch.setenv(FAULTS, str(tmp_path / "faults"))
    spec = of_agent(AgentSpec(run="rig_agents.faulty", tokens=100), on_bad_reward="fail")
    with open_rig(tmp_path / "rig", tiny, **spec) as rig:
        sessions_of(rig, tiny)
        trainer = rig.assemble()
        with pytest.raises(BadReward, match="exit code 1; session 0-0-0-"):
            trainer.train()
        assert rollouts_of(rig) == []


def test_several_processes_ask_for_what_one_asks_for(calm: Rig, tiny: Path, tmp_path: Path) -> None:
    """An agent that earns the same as the calm run's, and has further branches."""
    parts = {"max_steps": 2, "per_device_train_batch_size": GROUP // 2}
    spec = of_agent(AgentSpec(run="rig_agents.branches", tokens=100), grpo=parts, accelerators="H100:2")
    with open_rig(tmp_path, tiny, **spec) as rig:
        sessions = sessions_of(rig, tiny)
        assert rig.wait(rig.start_ranks()) == exit_codes.OK
        assert calm.gateway.sessions is not None
        assert sorted(sessions.opened) == sorted(calm.gateway.sessions.opened)[: 2 * GROUP]
        rows = rig.trained()
    assert [row["agent/further_branches"] for row in rows] == [GROUP, GROUP]
    assert rows[0]["rewards/agent/mean"] == pytest.approx(calm.trained()[0]["rewards/agent/mean"])


def test_evaluation_and_agent_that_is_a_command(chatty: Path, tmp_path: Path) -> None:
    """On prompts that are chats."""
    (chatty / "held_out.jsonl").write_text((chatty / "chats.jsonl").read_text())
    script = "import os, json; from rig_agents import *; print(json.dumps({'reward': command()}))"
    grpo = {"max_steps": 1, "eval_steps": 1, "per_device_eval_batch_size": 8, "num_generations_eval": 2}
    spec = of_agent(
        AgentSpec(run=(sys.executable, "-c", script), tokens=100), dataset="chats.jsonl", evaluates=True, grpo=grpo
    )
    with open_rig(tmp_path, chatty, **spec) as rig:
        sessions = sessions_of(rig, chatty)
        rig.train()
        [row] = rig.rows().values()
        evaluated = {name for name, _ in sessions.opened if int(name.split("-")[2]) >= EVALUATION_CALLS}
    assert len(evaluated) == PROMPTS * 2
    assert row["reward"] > 0
    assert row["eval_reward"] > 0
