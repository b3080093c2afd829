"""The evaluator: base against a trained checkpoint, by a stand-in gateway and by its own model; killed in the
middle."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_orch.checkpoint.records import documents, evaluations
from grpo_orch.checkpoint.records.evaluations import EvaluationResult, ScoredSample
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.policies.evaluation.evaluation_spec import as_run
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.node_contract import EVALUATOR
from grpo_orch.policies.model.spec import Dataset, Replicas
from grpo_orch.policies.model.vocabulary import BASE, Evaluation, PolicyVersion, Subject
from grpo_orch.tasks.evaluating.evaluator import run_evaluation
from grpo_orch.tasks.machine.leaving import Leaving
from tests.budget import HANG_S
from tests.node.trainer.rig import PROMPTS, Rig, open_rig

STEPS = 2
ROWS = PROMPTS
TOKENS = 6
LORA = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Rig]:
    yield from _trained(tmp_path_factory.mktemp("trained"), tiny)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Rig]:
    yield from _trained(tmp_path_factory.mktemp("adapted"), tiny, peft=LORA)


def _trained(folder: Path, tiny: Path, **spec: Any) -> Iterator[Rig]:
    """A run of two steps with its checkpoint, large steps so that greedy completions change."""
    grpo = {"max_steps": STEPS, "save_steps": STEPS, "learning_rate": 0.1, "temperature": 0.9}
    with open_rig(folder, tiny, replicas=0, grpo=grpo, **spec) as rig:
        rig.train()
        assert rig.stored() == [PolicyVersion(0, STEPS)]
        yield rig


def evaluation_of(parent: Rig) -> Evaluation:
    catalog = Catalog(parent.store, "test")
    one = catalog.newest().find(PolicyVersion(0, STEPS))
    catalog.pin(time.time(), one.at, pinned=True)
    return Evaluation(
        parent.store.url, (Subject(BASE), Subject(one.version, one.manifest, one.digest, True)), ROWS
    )


def evaluating(parent: Rig, tiny: Path, folder: Path, replicas: int) -> Any:
    """A rig for an evaluation of the parent's two policies."""
    problems = Dataset(path=str(tiny / "prompts.jsonl"))
    spec = as_run(parent.spec, "", problems)
    rollout = replace(spec.rollout, replicas=Replicas(min=replicas, max=replicas))
    return open_rig(folder, tiny, ready=replace(spec, rollout=rollout), evaluation=evaluation_of(parent))


def evaluate(rig: Rig, attempt: int = 1) -> tuple[int, str]:
    """Run the evaluator in this process."""
    run, leaving = documents.read_run(rig.store), Leaving(rig.work, attempt)
    return run_evaluation(rig.env(attempt), run, rig.store, rig.heartbeat(attempt), leaving)


def found(rig: Rig, subject: str) -> tuple[EvaluationResult, list[ScoredSample]]:
    summary = evaluations.evaluated(subject).read(rig.store)
    assert summary is not None
    lines = rig.store.get(layout.evaluated_samples(subject)).splitlines()
    return summary, [msgspec.json.decode(line, type=ScoredSample) for line in lines]


def greedy(model: Any, tiny: Path, prompts: list[str]) -> list[str]:
    """What transformers completes, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.eval().generate(ids, do_sample=False, max_new_tokens=TOKENS)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def is_as_transformers_says(rig: Rig, parent: Rig, tiny: Path, checkpoint: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    texts = {}
    for subject, model in ((BASE, base), (f"0-{STEPS}", checkpoint)):
        summary, samples = found(rig, subject)
        texts[subject] = [one.completion for one in samples]
        assert len(samples) == ROWS
        assert texts[subject] == greedy(model, tiny, [one.prompt for one in samples])
        expected = [sum(map(str.islower, text)) / max(1, len(text)) for text in texts[subject]]
        assert summary.scores["lower_share"] == pytest.approx(expected)
        assert [one.scores["lower_share"] for one in samples] == summary.scores["lower_share"]
        assert summary.verdicts == ["correct" if one >= 1.0 else "wrong" for one in expected]
    assert texts[BASE] != texts[f"0-{STEPS}"]
    listed = Catalog(parent.store, "test").newest().checkpoints
    assert [one.pinned for one in listed] == [False]


def checkpoint_folder(parent: Rig, to: Path) -> Path:
    parent.restore(PolicyVersion(0, STEPS), to)
    return to


def test_each_policy_is_one_batch_through_the_gateway(trained: Rig, tiny: Path, tmp_path: Path) -> None:
    with evaluating(trained, tiny, tmp_path / "eval", replicas=1) as rig:
        assert evaluate(rig)[0] == exit_codes.OK
        assert rig.gateway.batches == [ROWS, ROWS]
        assert rig.gateway.unproved == []
        model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(trained, tmp_path / "checkpoint"))
        is_as_transformers_says(rig, trained, tiny, model)
        assert evaluate(rig, attempt=2)[0] == exit_codes.OK
        assert rig.gateway.batches == [ROWS, ROWS], "what is there is not made again"


def test_an_adapter_is_evaluated_without_nodes(adapted: Rig, tiny: Path, tmp_path: Path) -> None:
    with evaluating(adapted, tiny, tmp_path / "eval", replicas=0) as rig:
        assert evaluate(rig)[0] == exit_codes.OK
        base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
        model = PeftModel.from_pretrained(base, checkpoint_folder(adapted, tmp_path / "checkpoint"))
        is_as_transformers_says(rig, adapted, tiny, model)


def test_killed_evaluator_repeats_its_current_policy_alone(trained: Rig, tiny: Path, tmp_path: Path) -> None:
    with evaluating(trained, tiny, tmp_path / "eval", replicas=1) as rig:
        argv = [sys.executable, "-m", EVALUATOR]

        def kill(made: int) -> None:
            if made == ROWS + 3:
                first.kill()
                first.wait()

        rig.gateway.on_completion = kill
        first = rig.start_trainer(argv=argv)
        first.wait(HANG_S)
        assert rig.wait(rig.start_trainer(attempt=2, argv=argv), attempt=2) == 0
        assert rig.gateway.batches == [ROWS, ROWS, ROWS]
        model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(trained, tmp_path / "checkpoint"))
        is_as_transformers_says(rig, trained, tiny, model)
        beat = rig.last_beat()
        assert (beat.activity, beat.step, beat.max_steps) == ("done", 2, 2)


def test_missing_checkpoint_is_one_line_and_costs_no_token(trained: Rig, tiny: Path, tmp_path: Path) -> None:
    with evaluating(trained, tiny, tmp_path / "eval", replicas=1) as rig:
        record = documents.read_run(rig.store)
        assert record.evaluation is not None
        manifest = record.evaluation.subjects[1].manifest
        data = trained.store.get(manifest)
        trained.store.delete([manifest])
        try:
            code, why = evaluate(rig)
        finally:
            trained.store.put(manifest, data)
        assert code == exit_codes.BAD_SPEC
        assert "cannot be read" in why
        assert rig.gateway.batches == []


def test_policies_are_compared_on_the_same_problems_alone(trained: Rig, tiny: Path, tmp_path: Path) -> None:
    with evaluating(trained, tiny, tmp_path / "eval", replicas=0) as rig:
        assert evaluate(rig)[0] == exit_codes.OK
        first = documents.read_run(rig.store).spec.trainer.dataset
        rig.store.delete([layout.evaluated(f"0-{STEPS}")])
        assert isinstance(first, Dataset)
        problems = Path(first.path)
        before = problems.read_text()
        problems.write_text(before.replace("1", "2"))
        try:
            code, why = evaluate(rig, attempt=2)
        finally:
            problems.write_text(before)
        assert (code, why.partition(";")[0]) == (
            exit_codes.BAD_SPEC,
            "the problems are others than those that base was evaluated on",
        )
        assert evaluate(rig, attempt=3)[0] == exit_codes.OK
