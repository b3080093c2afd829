"""What a first start tries: each mistake ends it with one line, before any rollout machine is asked for."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from policies.control.snapshot import BEFORE_TRAINING
from policies.model import exit_codes
from tasks.machine.processes.exit_note import take_exit_code
from tasks.trainer import reports
from tasks.trainer.overdue import ended_after
from tasks.trainer.preflight import check_prompts, check_rewards
from tasks.trainer.user_objects import BadSpec
from tests.budget import HANG_S
from tests.node.trainer.rig import make_tiny, open_rig
from tests.node.trainer.rig_rewards import lower_share

TEXTS = {"trainer.dataset": {"prompt": "1+1", "answer": "2"}}
CHATS = {"trainer.dataset": {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def config_of(*, group: int = 2, max_steps: int = -1, only_prompts: bool = False) -> SimpleNamespace:
    """What is read of TRL's."""
    return SimpleNamespace(num_generations=group, max_steps=max_steps, remove_unused_columns=only_prompts)


def without_kwargs(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def wants_solution(completions: list[str], solution: list[str], **_: Any) -> list[float]:
    return [float(one in solution) for one in completions]


def of_a_chat(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [float(one[0]["content"] == right) for one, right in zip(completions, answer, strict=True)]


async def awaited(completions: list[str], **_: Any) -> list[float | None]:
    return [None for _ in completions]


def returns(value: Any) -> Callable[..., Any]:
    def reward(**_: Any) -> Any:
        return value

    return reward


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (without_kwargs, "raised TypeError: without_kwargs() got an unexpected keyword argument"),
        (
            wants_solution,
            "missing 1 required positional argument: 'solution'; it was called on ",
        ),
        (of_a_chat, "raised TypeError: string indices must be integers"),
        (returns(1.0), "returned 1.0; expected 2 numbers or None, one for each completion"),
        (returns([1.0]), "returned 1 values; expected 2 numbers"),
        (returns(None), "returned None; expected 2"),
        (returns(["right", "wrong"]), "returned 'right' among its values"),
        (returns([[0.5], [0.5]]), "returned [0.5] among its values"),
        (returns([0.0, float("inf")]), "returned inf among its values"),
    ],
)
def test_a_reward_function_that_trl_could_not_work_with_is_named(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(BadSpec) as caught:
        check_rewards([lower_share, function], ["r.good", "r.bad"], TEXTS, config_of())
    assert str(caught.value).startswith("trainer.reward_funcs: r.bad ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rewards_of_every_form_pass() -> None:
    check_rewards([lower_share, awaited, returns((1, True))], ["a", "b", "c"], TEXTS, config_of())
    check_rewards([of_a_chat], ["d"], CHATS, config_of())
    with pytest.raises(BadSpec, match="'answer'"):
        check_rewards([of_a_chat], ["d"], CHATS, config_of(only_prompts=True))


@pytest.mark.parametrize("max_steps", [-1, 40])
def test_a_reward_gets_what_it_may_count_on_in_training(max_steps: int) -> None:
    """A whole group, the share of the steps that is done, and TRL's names for what it logs."""

    def best_of_group(completions: list[str], **_: Any) -> list[float]:
        groups = [completions[i : i + 8] for i in range(0, len(completions), 8)]
        assert all(len(group) == 8 for group in groups)
        return [float(one == max(group)) for group in groups for one in group]

    def by_progress(completions: list[str], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric(name="progress", value=trainer_state.global_step / trainer_state.max_steps)
        return [trainer_state.epoch + 1.0 for _ in completions]

    config = config_of(group=8, max_steps=max_steps)
    check_rewards([best_of_group, by_progress], ["best", "progress"], TEXTS, config)


def test_a_service_out_of_reach_is_not_the_functions_fault() -> None:
    def judged(**_: Any) -> list[float]:
        raise ConnectionRefusedError("the judge is away")

    with pytest.raises(ConnectionRefusedError):
        check_rewards([judged], ["judged"], TEXTS, config_of())


def test_trls_own_reward_without_what_it_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.rewards import accuracy_reward

    monkeypatch.setattr("trl.rewards.accuracy_rewards.is_math_verify_available", lambda: False)
    rows = {"trainer.dataset": {"prompt": [{"role": "user", "content": "1+1"}], "solution": "$2$"}}
    with pytest.raises(BadSpec, match="math_verify"):
        check_rewards([accuracy_reward], ["trl.rewards.accuracy_reward"], rows, config_of())


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": 7}, "its first prompt is 7; expected a text, or a list of messages"),
        ({"prompt": ["a", "b"]}, "its first prompt is ['a', 'b']"),
        ({"prompt": [{"from": "human", "value": "x"}]}, "each with `role` and `content`"),
    ],
)
def test_prompts_are_texts_or_chats(row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSpec, match=r"^trainer\.dataset: ") as caught:
        check_prompts({"trainer.dataset": row})
    assert says in str(caught.value)


def test_a_report_that_cannot_begin_is_told_in_one_line() -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("api_key not configured\ntry wandb login")

    with pytest.raises(BadSpec, match=r"^grpo\.report_to: RuntimeError: api_key not configured$"):
        reports._begin(refused, None)


@pytest.mark.parametrize(
    ("grpo", "package", "says"),
    [
        ({"report_to": "wandb"}, "wandb", "grpo.report_to: WandbCallback requires wandb to be installed"),
        ({"use_liger_kernel": True}, "liger_kernel", "grpo.use_liger_kernel: it is not installed"),
    ],
)
def test_a_package_that_is_not_there_ends_the_first_attempt(
    grpo: dict[str, Any], package: str, says: str, tiny: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with open_rig(tmp_path, tiny, grpo=grpo) as rig:
        assert rig.wait(rig.start_trainer()) == exit_codes.BAD_SPEC
        assert says in rig.log().read_text().splitlines()[-1]
        beat = rig.beat()
    assert beat is not None
    assert beat.activity in BEFORE_TRAINING, "the controller asks for no rollout node"


def test_a_reward_that_never_returns_ends_the_first_attempt(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}, reward="rig_rewards.endless", boot_timeout_s=1.0) as rig:
        assert rig.start_trainer().wait(HANG_S) != exit_codes.OK
        assert take_exit_code(rig.work) == exit_codes.BAD_SPEC
        said = rig.log().read_text().splitlines()[-1]
    assert said.startswith(
        "grpo-orch trainer: trainer.reward_funcs: rig_rewards.endless did not return within 1 s"
    )


@pytest.mark.parametrize("leaves", [False, True])
def test_what_returns_in_time_is_left_alone(leaves: bool, tmp_path: Path) -> None:
    """Also where it leaves a process behind, which holds the other end of all that was open."""
    left = 0
    with ended_after(HANG_S, tmp_path, "late"):
        if leaves and (left := os.fork()) == 0:
            signal.pause()
    if left:
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)
    assert take_exit_code(tmp_path) is None


def test_a_table_of_completions_is_written_beside_the_spool(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={"log_completions": True, "max_steps": 2, "save_steps": 2}) as rig:
        assert rig.wait(rig.start_trainer()) == exit_codes.OK
        tables = sorted(path.name for path in (rig.work / "reports" / "completions").iterdir())
    assert tables == ["completions_00001.parquet", "completions_00002.parquet"]


def test_reports_are_asked_once_they_exist() -> None:
    assert issubclass(reports._kinds(type("config", (), {"report_to": ["tensorboard"]}))[0], TrainerCallback)
