"""What the tests of the store have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.run_store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store in memory that tries once. `store/test_conformance` says that any other does the same."""
    return Store(f"memory://{tmp_path}", retry_s=0.0)
