"""docs/run-yaml.md against the code, as far as people write it: sections, our defaults, examples."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV
from grpo_orch.orchestrator.config import load, rules
from grpo_orch.orchestrator.config.effective import SAVE_STEPS
from grpo_orch.orchestrator.config.structure import section_of
from grpo_orch.policies.model import spec
from grpo_orch.policies.model.spec import generates_itself
from tests.generators.config_world import furnish, schema_problems

DOCS = Path(__file__).parents[3] / "docs" / "run-yaml.md"


def test_every_section_has_its_table() -> None:
    tables = re.findall(r"^<!-- keys ?(\S*) -->$", DOCS.read_text(), re.MULTILINE)
    shown = {_section(path) for path in tables} | {
        spec.Rehearsal,
        spec.Rehearsed,
        spec.RehearsedPrices,
    }  # of another shape in YAML
    assert {cls for cls in vars(spec).values() if dataclasses.is_dataclass(cls)} == shown


def _section(dotted: str) -> Any:
    section: Any = spec.RunSpec
    for key in dotted.split(".") if dotted else ():
        section = section_of(get_type_hints(section)[key])
    return section


def test_our_defaults_and_names() -> None:
    text = DOCS.read_text()
    ours = {"save_steps": SAVE_STEPS, "logging_steps": rules.LOGGING_STEPS, "eval_steps": rules.EVAL_STEPS}
    for key, value in (ours | spec.STALE_DEFAULTS).items():
        assert f"| `{key}` | {value} |" in text
    assert OPTIONS_ENV in text


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
