"""docs/run-yaml.md against the code: every key, its type and its default."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV
from grpo_orch.orchestrator.config import effective as batches
from grpo_orch.orchestrator.config import foreign_keys, load
from grpo_orch.orchestrator.config import rules as checks
from grpo_orch.orchestrator.config import shorthand as rehearsal
from grpo_orch.orchestrator.config import shorthand as storage
from grpo_orch.orchestrator.config.structure import NOT_IN_FILE
from grpo_orch.orchestrator.home import SINKS
from grpo_orch.policies.model import spec
from grpo_orch.policies.model.spec import generates_itself
from tests.generators.config_world import furnish, schema_problems

DOCS = Path(__file__).parents[3] / "docs" / "run-yaml.md"
SECTIONS = {
    "The file": spec.RunSpec,
    "trainer": spec.TrainerSpec,
    "trainer.agent": spec.AgentSpec,
    "trainer.dataset, trainer.eval_dataset": spec.Dataset,
    "rollout": spec.RolloutSpec,
    "rollout.replicas": spec.Replicas,
    "policies": spec.PoliciesSpec,
    "policies.kl": spec.KlPolicy,
    "policies.kl.on_rollback": spec.OnRollback,
    "policies.kl.budget": spec.RollbackBudget,
    "policies.fleet": spec.FleetPolicy,
    "checkpoints": spec.CheckpointsSpec,
    "budget": spec.Budget,
    "notify": spec.Notify,
    "rehearse.prices": spec.Prices,
}
TYPES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "string",
    bool: "true or false",
}


def tables(section: str) -> list[list[list[str]]]:
    """The rows of each table of a section, heads left out."""
    text = DOCS.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return [rows[2:] for rows in found]


def spoken(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return spoken(next(part for part in get_args(hint) if part is not types.NoneType))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is dict:
        return "mapping of strings" if get_args(hint)[1] is str else "mapping"
    if get_origin(hint) is tuple:
        return "list of integers" if hint == tuple[int, ...] else "list of strings"
    return "section" if dataclasses.is_dataclass(hint) else TYPES[hint]


def default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "as below" if dataclasses.is_dataclass(field.default_factory) else ""
    if field.default is dataclasses.MISSING:
        return "required"
    return "" if field.default in (None, ()) else str(field.default)


@pytest.mark.parametrize("section", SECTIONS)
def test_keys_types_and_defaults(section: str) -> None:
    cls = SECTIONS[section]
    hints = get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name not in NOT_IN_FILE]
    expected = [[f"`{field.name}`", spoken(hints[field.name]), default(field)] for field in fields]
    assert [row[:3] for row in tables(section)[0]] == expected
    assert all(row[3] for row in tables(section)[0])


def test_every_dataclass_of_the_spec_has_its_section() -> None:
    undescribed = {spec.Rehearsal, spec.Rehearsed, spec.RehearsedPrices}  # their tables are not of fields
    assert {cls for cls in vars(spec).values() if dataclasses.is_dataclass(cls)} == {
        *SECTIONS.values(),
        *undescribed,
    }


@pytest.mark.parametrize(
    ("section", "refused"), [("grpo", foreign_keys.REFUSED_GRPO), ("rollout", foreign_keys.REFUSED_VLLM)]
)
def test_refused_keys(section: str, refused: dict[str, str]) -> None:
    assert tables(section)[-1] == [[f"`{key}`", why] for key, why in refused.items()]


def test_our_defaults() -> None:
    documented = {row[0].strip("`"): row[1] for row in tables("grpo")[0]}
    ours = {
        "save_steps": batches.SAVE_STEPS,
        "logging_steps": checks.LOGGING_STEPS,
        "eval_strategy": "steps",
        "eval_steps": checks.EVAL_STEPS,
    }
    assert documented.items() >= {key: str(value) for key, value in ours.items()}.items()


def test_the_usual_secrets() -> None:
    rows = [tuple(row) for row in tables("secrets")[0]]
    sinks = [
        (", ".join(f"`{name}`" for name in names), "trainer", f"`grpo.report_to` has `{sink}`")
        for sink, names in SINKS.items()
    ]
    assert rows[2:] == sinks
    assert [row[:2] for row in rows[:2]] == [("`HF_TOKEN`", "trainer"), ("`HF_TOKEN`", "rollout nodes")]


def test_storage() -> None:
    assert [row[0].strip("`") for row in tables("storage")[0]] == list(storage.STORAGE_KEYS)
    assert OPTIONS_ENV in DOCS.read_text()


def test_faults() -> None:
    rows = {row[0].strip("`"): row[1] for row in tables("rehearse.faults")[0]}
    targets = {key: ", ".join(f"`{target}`" for target in values) for key, values in rehearsal.TARGETS.items()}
    defaults = {field.name: field.default for field in dataclasses.fields(spec.Rehearsed)}
    assert rows == targets | {
        "at_step": "whole number",
        "notice_s": f"number, default {defaults['notice_s']}",
        "for_s": f"number, default {defaults['for_s']}",
    }


def test_versions() -> None:
    text = DOCS.read_text()
    for table in (
        foreign_keys.grpo_table(),
        foreign_keys.lora_table(),
        foreign_keys.accelerate_table(),
        foreign_keys.vllm_table(),
    ):
        assert table.vocabulary.split("(")[1].rstrip(")") in text


def test_the_examples_load(tmp_path: Path) -> None:
    furnish(tmp_path)
    blocks = [part.split("```")[0] for part in DOCS.read_text().split("```yaml\n")[1:]]
    (store,) = [block for block in blocks if block.startswith("storage:")]
    (one_gpu,) = [block for block in blocks if block.startswith("name: one-gpu")]
    (data,) = [block for block in blocks if block.startswith("trainer:")]
    (over,) = [block for block in blocks if "extends:" in block]
    blocks = [block for block in blocks if block not in (store, one_gpu, data, over)]
    whole = "\n".join(blocks)
    assert set(yaml.safe_load(whole)) >= {"name", "rehearse"}
    (tmp_path / "run.yaml").write_text(whole)
    loaded = load.load_spec(tmp_path / "run.yaml")
    assert schema_problems(tmp_path / "run.yaml") == []
    assert loaded.rehearse is not None
    assert len(loaded.rehearse.faults) == 4
    (tmp_path / "over.yaml").write_text(over)
    assert (load.load_spec(tmp_path / "over.yaml").grpo["loss_type"], loaded.rollout.env != {}) == (
        "dr_grpo",
        True,
    )
    (tmp_path / "run.yaml").write_text(one_gpu)
    assert generates_itself(load.load(tmp_path / "run.yaml", lambda: 1).spec)
    (tmp_path / "run.yaml").write_text(whole.replace("storage: ./run\n", store))
    assert load.load_spec(tmp_path / "run.yaml").storage == "s3://my-bucket/runs/demo"
    (tmp_path / "held_out.jsonl").write_text('{"question": "1"}\n')
    (tmp_path / "rewards.py").write_text("def exact(**kwargs):\n    return []\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load(whole) | yaml.safe_load(data)))
    (dataset,) = spec.datasets_of(load.load_spec(tmp_path / "run.yaml").trainer.dataset)
    assert isinstance(dataset.prompt, tuple)
