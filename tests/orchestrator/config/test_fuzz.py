"""Whatever a file holds: a spec that can be stored, or a ConfigError with one line for each problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.orchestrator.config.foreign_keys import grpo_table, vllm_table
from grpo_orch.orchestrator.config.load import ConfigError, load_spec
from grpo_orch.policies.model.spec import RunSpec
from tests.budget import examples
from tests.generators.config_world import VALID, furnish

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-2, max_value=40),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["x", "0", "1e-3", "s3://b/p", "file://", "~", "rewards.digit_share", "rollout-1", "a.b.c"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KNOWN = (
    "min max kill for_s eval_dataset peft any_of resources accelerate cloud setup checkpoints storage options url "
    "max_behind_steps on_rollback budget beta_factor"
)
KEYS = st.one_of(
    st.text(max_size=10),
    st.sampled_from(KNOWN.split()),
    st.sampled_from(sorted(grpo_table().keys)),
    st.sampled_from(sorted(vllm_table().keys)),
)


def outcome(run_yaml: Path) -> tuple[RunSpec | None, list[str]]:
    """The spec, or the printed lines, of which there is one for each problem."""
    try:
        return load_spec(run_yaml), []
    except ConfigError as error:
        printed = str(error).splitlines()
        return None, printed if len(printed) == len(error.problems) else []


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], None]:
    folder = tmp_path_factory.mktemp("fuzz")
    run_yaml = furnish(folder)

    def check_bytes(source: bytes) -> None:
        run_yaml.write_bytes(source)
        spec, printed = outcome(run_yaml)
        if spec is None:
            assert printed
            assert all(line.startswith(f"{run_yaml}:") for line in printed)
        else:
            assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec

    return check_bytes


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every container of the document, by its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [place for key, item in items for place in places(item, (*here, key))]
    return [here, *inner] if isinstance(value, dict | list) else []


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The valid file with a few values replaced, added or taken away."""
    data = yaml.safe_load(VALID)
    for _ in range(draw(st.integers(min_value=1, max_value=4))):
        target = data
        for part in draw(st.sampled_from(places(data))):
            target = target[part]
        if isinstance(target, list):
            target.insert(0, draw(VALUES))
        elif target and draw(st.booleans()):
            key = draw(st.sampled_from(sorted(target)))
            target[key] = draw(VALUES)
            if draw(st.booleans()):
                del target[key]
        else:
            target[draw(KEYS)] = draw(VALUES)
    return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=mutated())
def test_changed_values(check: Callable[[bytes], None], source: bytes) -> None:
    check(source)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_changed_bytes(check: Callable[[bytes], None], data: st.DataObject) -> None:
    source = bytearray(VALID.encode())
    for _ in range(data.draw(st.integers(min_value=1, max_value=5))):
        at = data.draw(st.integers(min_value=0, max_value=len(source) - 1))
        until = at + data.draw(st.integers(min_value=0, max_value=8))
        source[at:until] = data.draw(
            st.sampled_from(
                [b"&a ", b"*a", b"!!int ", b"? ", b"<<: ", b"|", b"'", b'"', b"\t", b"\n", b"{", b"-\n"]
            )
            | st.binary(max_size=4)
        )
    check(bytes(source))
