"""What a first start tries: each mistake ends it with one line, before any rollout machine is asked for."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl.trainer.utils import get_callable_name

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.tick.snapshot import BEFORE_TRAINING
from grpo_orch.tasks.machine.exit_note import take_exit_code, take_reason
from grpo_orch.tasks.rewards.user_calls import guarded
from grpo_orch.tasks.trainer import reports
from grpo_orch.tasks.trainer.preflight import check_rewards
from grpo_orch.tasks.trainer.time_limit import kill_after
from grpo_orch.tasks.trainer.user_objects import BadSpec, guarded_rewards, load_rewards
from tests.budget import HANG_S, until
from tests.node.trainer.rig import Rig, open_rig
from tests.node.trainer.rig_rewards import lower_share
from tests.stand_ins.world import spec

TEXTS = {"trainer.dataset": {"prompt": "1+1", "answer": "2"}}
CHATS = {"trainer.dataset": {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}}


def config_of(*, group: int = 2, max_steps: int = -1, only_prompts: bool = False) -> SimpleNamespace:
    """What is read of TRL's."""
    return SimpleNamespace(num_generations=group, max_steps=max_steps, remove_unused_columns=only_prompts)


def of_a_chat(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [float(one[0]["content"] == right) for one, right in zip(completions, answer, strict=True)]


async def awaited(completions: list[str], **_: Any) -> list[float | None]:
    return [None for _ in completions]


def test_rewards_of_every_form_pass() -> None:
    check_rewards([lower_share, awaited, lambda **_: (1, True)], ["a", "b", "c"], TEXTS, config_of())
    check_rewards([of_a_chat], ["d"], CHATS, config_of())
    with pytest.raises(BadSpec, match="'answer'"):
        check_rewards([of_a_chat], ["d"], CHATS, config_of(only_prompts=True))


def test_a_column_that_trl_passes_something_else_under_is_named() -> None:
    rows = {"trainer.dataset": {"prompt": "1+1", "completions": "2"}}
    with pytest.raises(
        BadSpec, match=r"^trainer\.dataset: its column `completions` has the name of what TRL passes"
    ):
        check_rewards([lower_share], ["a"], rows, config_of())
    check_rewards([lower_share], ["a"], rows, config_of(only_prompts=True))


@pytest.mark.parametrize("max_steps", [-1, 40])
def test_preflight_calls_reward_as_training_does(max_steps: int) -> None:
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


def test_trl_reward_with_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.rewards import accuracy_reward

    monkeypatch.setattr("trl.rewards.accuracy_rewards.is_math_verify_available", lambda: False)
    rows = {"trainer.dataset": {"prompt": [{"role": "user", "content": "1+1"}], "solution": "$2$"}}
    with pytest.raises(BadSpec, match="math_verify"):
        check_rewards([accuracy_reward], ["trl.rewards.accuracy_reward"], rows, config_of())


@pytest.mark.parametrize("leaves", [False, True])
def test_reward_that_returns_in_time_passes(leaves: bool, tmp_path: Path) -> None:
    """Also where it leaves a process behind, which holds the other end of all that was open."""
    left = 0
    with kill_after(HANG_S, tmp_path, "late"):
        if leaves and (left := os.fork()) == 0:
            signal.pause()
    if left:
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)
    assert take_exit_code(tmp_path) is None


@pytest.mark.parametrize(
    ("named", "timeline", "name"), [(None, 0, "digits"), (None, 2, "digits-t2"), ("own", 1, "own-t1")]
)
def test_each_timeline_is_one_run_of_the_sinks(
    named: str | None, timeline: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_RUN_ID", "WANDB_RUN_GROUP"):
        monkeypatch.setenv(variable, "")  # so that it is as it was afterwards
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_RESUME", "never")  # as `trainer.env` would have it
    config = SimpleNamespace(run_name=named)
    reports.name_reports(config, "digits", "digits-0a1b2c3d", timeline)
    assert config.run_name == name
    assert os.environ["WANDB_RUN_ID"] == f"digits-0a1b2c3d-t{timeline}"
    assert os.environ["WANDB_RUN_GROUP"] == (named or "digits")
    assert os.environ["WANDB_RESUME"] == "never"


MODULE = """
import asyncio, functools, sys
import numpy, torch

class Judge:
    def __call__(self, completions, **columns): return [1.0] * len(completions)

class Asked:
    async def __call__(self, completions, **columns): return [1.0] * len(completions)

def weighs(completions, weight, **columns): return [weight] * len(completions)
async def waits(completions, **columns): return [1.0] * len(completions)
def made(share):
    def reward(completions, **columns): return [share] * len(completions)
    return reward

polite, correct = made(0.1), made(0.2)
def hands_on(completions, **columns): return waits(completions)
def drops(completions, **columns): completions.clear(); return []
def without_kwargs(completions): return [0.0] * len(completions)
def wants_solution(completions, solution, **columns): return [0.0] * len(completions)
def of_a_chat(completions, **columns): return [one[0]["content"] for one in completions]
def one_number(**columns): return 1.0
def too_few(**columns): return [1.0]
def nothing(**columns): return None
def words(**columns): return ["right", "wrong"]
def lists(**columns): return [[0.5], [0.5]]
def endless(**columns): return [0.0, float("inf")]
def leaves(completions, **columns): sys.exit(3)
def maps(completions, **columns): return {one: 1.0 for one in completions}
def towers(completions, **columns): return [10**400] * len(completions)
def arrays(completions, **columns): return numpy.ones(len(completions), numpy.float32)
def tensors(completions, **columns): return [torch.tensor(1.0)] * len(completions)
def yields(completions, **columns):
    for _ in completions: yield True

judge, asked, half = Judge(), Asked(), functools.partial(weighs, weight=1.0)
short = lambda completions, **columns: [1.0] * len(completions)
"""


def tried(tmp_path: Path, name: str, **arguments: Any) -> Callable[..., Any]:
    """Load and try a reward of a module beside run.yaml."""
    spec: Any = SimpleNamespace(reward_funcs=(name,), reward_args=arguments)
    (function,) = load_rewards(spec, tmp_path)
    assert not isinstance(function, str)
    check_rewards([function], [name], TEXTS, config_of())
    return function


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of run.yaml with a module and a package that imports from itself."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text(
        "from my_rewards import correct as polite\nfrom .inner import one\n"
    )
    (tmp_path / "my_package" / "inner.py").write_text(
        "def one(completions, **_): return [1.0] * len(completions)\n"
    )
    (tmp_path / "my_raising.py").write_text("raise RuntimeError('no key')\n")
    (tmp_path / "my_leaving.py").write_text("import sys; sys.exit(4)\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [
        *(f"my_rewards.{one}" for one in ("judge", "asked", "short", "half", "arrays", "tensors", "yields")),
        "my_package.one",
        "my_package.inner.one",
    ],
)
def test_any_callable_import_path_is_a_reward(name: str, beside: Path) -> None:
    function = tried(beside, name)
    assert function.__name__ == name.rpartition(".")[2]
    scores = guarded(function, name, "fail", HANG_S, lambda _: False)(prompts=["p"], completions=["c"])
    assert (asyncio.run(scores) if asyncio.iscoroutine(scores) else scores) == [1.0]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("my_rewards.polite", "my_rewards.correct"), ["polite", "correct"]),
        (("my_rewards.polite", "my_package.polite"), ["my_rewards.polite", "my_package.polite"]),
    ],
)
def test_scores_are_logged_by_distinct_names(paths: tuple[str, ...], names: list[str], beside: Path) -> None:
    run = spec()
    run = replace(run, trainer=replace(run.trainer, reward_funcs=paths))
    rewards = guarded_rewards(load_rewards(run.trainer, beside), run)
    assert [get_callable_name(one) for one in rewards] == names
    scores = [one(prompts=["p"], completions=["c"]) for one in rewards if callable(one)]
    assert scores == [[0.1], [0.2]]


def test_arguments_of_a_partial(beside: Path) -> None:
    assert tried(beside, "my_rewards.half", half={"weight": 0.25})(completions=["c"], prompts=["p"]) == [0.25]
    with pytest.raises(BadSpec, match="takes no argument `height`"):
        tried(beside, "my_rewards.short", short={"height": 1})


def test_a_call_that_ends_the_process_is_named(tmp_path: Path) -> None:
    said = tmp_path / "said"
    if (pid := os.fork()) == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        with kill_after(HANG_S, tmp_path, "late", "trainer.reward_funcs: my.own"):
            os._exit(3)
    os.waitpid(pid, 0)
    until("what the process beside it says, which outlives it for a moment", lambda: "\n" in said.read_text())
    assert said.read_text() == "grpo-orch trainer: the process ended within trainer.reward_funcs: my.own\n"
    assert take_exit_code(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_rewards.without_kwargs", r"raised TypeError: without_kwargs\(\) got an unexpected keyword argument"),
        ("my_rewards.wants_solution", "missing 1 required positional argument: 'solution'; it was called on "),
        ("my_rewards.of_a_chat", "raised TypeError: string indices must be integers"),
        ("my_rewards.one_number", "returned 1.0; expected 2 numbers or None, one for each completion"),
        ("my_rewards.too_few", "returned 1 values; expected 2 numbers"),
        ("my_rewards.nothing", "returned None; expected 2"),
        ("my_rewards.words", "returned 'right' among its values"),
        ("my_rewards.lists", r"returned \[0.5\] among its values"),
        ("my_rewards.endless", "returned inf among its values"),
        ("my_rewards.hands_on", "hands_on returned a coroutine, which TRL awaits of an `async def` alone"),
        ("my_rewards.drops", "my_rewards.drops returned 0 values; expected 2 numbers"),
        ("my_rewards.leaves", "my_rewards.leaves raised SystemExit: 3; it was called on the first row"),
        ("my_rewards.maps", "my_rewards.maps returned a dict; expected 2 numbers or None"),
        ("my_rewards.towers", "my_rewards.towers returned 1000"),
        ("my_raising.one", "my_raising.one: RuntimeError was raised as it was imported: no key"),
        ("my_leaving.one", "my_leaving.one: SystemExit was raised as it was imported: 4"),
        ("openenv.envs.Echo", "openenv.envs.Echo: No module named 'openenv'"),
    ],
)
def test_faulty_module_or_reward_is_one_line(name: str, says: str, beside: Path) -> None:
    with pytest.raises(BadSpec, match=says) as caught:
        tried(beside, name)
    assert "\n" not in str(caught.value)


def refused(tiny: Path, folder: Path, **spec: Any) -> str:
    """Why no trainer is made of a run: one line, said before any rollout node is asked for."""
    rig = Rig(folder, tiny, **{"grpo": {}, **spec})
    with pytest.raises(BadSpec) as caught:
        rig.assemble()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"model": "./nowhere"}, "trainer.model: there is no folder"),
        ({"dataset": "nowhere.jsonl"}, "trainer.dataset: there is no file or folder"),
        ({"reward": "rig_rewards.lower_shares"}, "has no attribute 'lower_shares'"),
        ({"reward": "no_such_module.reward"}, "No module named 'no_such_module'"),
        ({"peft": {"rank": 4}}, "trainer.peft: "),
        ({"grpo": {"num_generations": 3}}, "grpo: generation_batch_size (8) must be divisible by num_generations"),
        ({"grpo": {"learning_rat": 1e-3}}, "unexpected keyword argument 'learning_rat'"),
        ({"grpo": {"generation_kwargs": {"seed": 1}}}, "generation_kwargs: remove `seed`"),
        (
            {"grpo": {"max_completion_length": 100_000}},
            "100000 leaves no room for a prompt in the model's context",
        ),
    ],
)
def test_users_mistakes_are_named(spec: dict[str, Any], says: str, tiny: Path, tmp_path: Path) -> None:
    assert says in refused(tiny, tmp_path, **spec)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (['{"prompt": "1 apples:"}'], "it has 1 row, and a batch takes 2 prompts (8 completions, 4 of each"),
        (
            ['{"prompt": [{"role": "user", "content": "1 apples:"}]}'] * 3,
            "its prompts are chats, and trainer.model MODEL has no chat template; put a chat_template.jinja into",
        ),
        (['{"prompt": 7}'] * 3, "its first prompt is 7; expected a text, or a list of messages"),
        (['{"prompt": ["a", "b"]}'] * 3, "its first prompt is ['a', 'b']"),
        (['{"prompt": [{"from": "human", "value": "x"}]}'] * 3, "each with `role` and `content`"),
    ],
)
def test_data_that_no_step_can_be_made_of_end_the_first_attempt(
    rows: list[str], says: str, tiny: Path, tmp_path: Path
) -> None:
    (tiny / "own.jsonl").write_text("\n".join(rows) + "\n")
    why = refused(tiny, tmp_path, dataset="own.jsonl", reward="rig_rewards.none")
    assert why.startswith("trainer.dataset: ")
    assert says.replace("MODEL", str(tiny / "model")) in why


@pytest.mark.parametrize("what", ["template", "token"])
def test_prompts_the_model_cannot_take_end_the_first_attempt(what: str, tiny: Path, tmp_path: Path) -> None:
    """A template that raises, and a special token that the tokenizer has and the model has no embedding for."""
    model, chat = tmp_path / "model", '{"prompt": [{"role": "user", "content": "1 apples:"}]}\n'
    shutil.copytree(tiny / "model", model)
    if what == "template":
        (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
        says = "its first prompt cannot be made into tokens: TemplateError: roles must alternate"
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens(["<think>"], special_tokens=True)
        tokenizer.save_pretrained(model)
        says = "<think> is token 84, and the model has only 84 embeddings; call `resize_token_embeddings`"
    (tiny / "own.jsonl").write_text((chat if what == "template" else '{"prompt": "1 apples:<think>"}\n') * 3)
    spec = {"dataset": "own.jsonl", "model": str(model), "reward": "rig_rewards.none"}
    assert says in refused(tiny, tmp_path / "run", **spec)


@pytest.mark.parametrize(
    ("grpo", "package", "says"),
    [
        ({"report_to": "wandb"}, "wandb", "grpo.report_to: WandbCallback requires wandb to be installed"),
        ({"use_liger_kernel": True}, "liger_kernel", "grpo.use_liger_kernel: it is not installed"),
    ],
)
def test_missing_package_ends_the_first_attempt(
    grpo: dict[str, Any], package: str, says: str, tiny: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    assert says in refused(tiny, tmp_path, grpo=grpo)


def test_first_attempt_ends_before_nodes_are_requested(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process itself, by a home that cannot be written; the model is a name that no hub has."""
    for variable in ("HF_HOME", "XDG_CACHE_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with open_rig(tmp_path, tiny, grpo={}) as rig:
        assert rig.start_trainer(forked=False).wait(HANG_S) == exit_codes.BAD_SPEC
        assert rig.last_beat().activity in BEFORE_TRAINING, "the controller asks for no rollout node"
        assert rig.published() == []
        last = rig.last_line()
        assert "Traceback" not in rig.log().read_text()
        assert take_reason(rig.work) == last.removeprefix("grpo-orch trainer: ")
    assert "trainer.env: /proc/nowhere/.cache/huggingface/datasets cannot be written (" in last
    assert "HF_HOME: /tmp/huggingface" in last


def test_a_reward_that_never_returns_ends_the_first_attempt(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={}, reward="rig_rewards.endless", boot_timeout_s=10.0) as rig:
        assert rig.start_trainer().wait(HANG_S) != exit_codes.OK
        assert take_exit_code(rig.work) == exit_codes.BAD_SPEC
        said = "grpo-orch trainer: trainer.reward_funcs: rig_rewards.endless did not return within 10 s"
        assert rig.last_line().startswith(said)


def test_completions_table_is_written_next_to_the_spool(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, grpo={"log_completions": True, "max_steps": 2, "save_steps": 2}) as rig:
        rig.train()
        tables = sorted(path.name for path in (rig.work / "reports" / "completions").iterdir())
    assert tables == ["completions_00001.parquet", "completions_00002.parquet"]
