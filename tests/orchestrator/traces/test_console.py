"""Console logs as each trainer writes them. tests/node/test_trainer_log.py has what transformers itself writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from grpo_orch.orchestrator.traces.formats import Log, read_console
from grpo_orch.orchestrator.traces.read import runs

VERL = (
    "step:{step} - global_seqlen/min:1182 - global_seqlen/mean:1480.25 - actor/entropy:np.float64(0.31) "
    "- actor/kl_loss:0.000{step} - actor/pg_loss:-0.01 - actor/ppo_kl:7.5 - actor/grad_norm:np.float32(0.25) "
    "- training/global_step:{step} - training/epoch:0 - critic/score/mean:0.5 - critic/rewards/mean:0.4 "
    "- response_length/mean:210.5 - timing_s/step:61.2"
)
VERL_VALUES = {"entropy": 0.31, "loss": -0.01, "grad_norm": 0.25, "reward": 0.5, "completions/mean_length": 210.5}


def points(text: str) -> dict[int, dict[str, float | None]]:
    ((_, found),) = runs(Log(read_console(text)))
    return {point.step: dict(point.values) for point in found}


@pytest.mark.parametrize(
    "before", ["", "(TaskRunner pid=4242) ", "\x1b[36m(TaskRunner pid=4242, ip=10.0.0.7)\x1b[0m ", "[rank0]: "]
)
def test_verls_lines(before: str) -> None:
    lines = ["Size of train dataloader: 8", "step:0 - val-core/gsm8k/reward/mean@1:0.4"]
    lines += [VERL.format(step=step) for step in (1, 2, 3)]
    found = points("".join(f"{before}{line}\n" for line in lines))
    assert list(found) == [1, 2, 3]
    for step, values in found.items():
        assert values.items() >= {**VERL_VALUES, "kl": step / 10_000}.items()


# prime-rl, OpenRLHF, slime, ms-swift, and loops of one's own; below each line what it holds.
LINES = """
12:00:01 \x1b[32mSUCCESS\x1b[0m Step 7 | Time: 3s | Loss: 0.0021 | Entropy: 0.31 | Mismatch KL: 0.4
    loss=0.0021 entropy=0.31 Mismatch·KL=0.4
SUCCESS Step 7 | Time: 9.02s | Reward: 0.4353 | Seq. Length: 2069.9 tokens/sample
    reward=0.4353
2026-01-01 12:00:01.5 | INFO | ✨ Global step 7: {'policy_loss': 0.01, 'kl': 0.2, 'ppo_kl': 3.0}
    loss=0.01 kl=0.2 ppo_kl=3.0
(MegatronTrainRayActor pid=3) step 7: {'train/loss': 0.1, 'train/kl_loss': 0.2, 'train/ppo_kl': 3.0}
    loss=0.1 kl=0.2 ppo_kl=3.0
{'loss': 0.1, 'kl': 0.2, 'global_step/max_steps': '7/500', 'elapsed_time': '6s'}
    loss=0.1 kl=0.2
step=7 reward=0.3 kl=0.01
    reward=0.3 kl=0.01
[12:00:01] INFO epoch=0 global_step=7/500, loss=+1e-3, kl=nan | solved=3/8 lr=1e-6 s/step=2.1
    loss=0.001 kl=none learning_rate=1e-6 s/step=2.1
reward=0.3 step=7
    reward=0.3
  3%|▎   | 7/500 [00:01<00:41]step=7 reward=0.3
    reward=0.3
[Step 7/500] Reward: 0.3 | KL: 0.01
    reward=0.3 kl=0.01
[Step 7/500] loss=-0.00 reward_avg=0.125 tokens_per_sec=27.3 avg_response_len=6.6 entropy_avg=1.24
    loss=0.0 reward=0.125 tokens_per_sec=27.3 completions/mean_length=6.6 entropy=1.24
Epoch: 2, Step: 7/500, Actor Loss: 0.1, KL: 0.2, LR: 1e-6
    loss=0.1 kl=0.2 learning_rate=1e-6
"""


@pytest.mark.parametrize("case", LINES.strip("\n").replace("\n    ", "\0").splitlines())
def test_lines_that_name_their_step(case: str) -> None:
    line, _, held = case.partition("\0")
    named = [value.rpartition("=") for value in held.replace("·", "\xa0").split(" ")]
    values = {name.replace("\xa0", " "): None if value == "none" else float(value) for name, _, value in named}
    assert points(f"started\n{line}\n{{'learning_rate': 1e-6}}\n") == {7: values}


def test_a_dictionary_that_the_terminal_broke_is_whole() -> None:
    assert points("{'loss': 0.0\n5, 'comple\r\ntions/mean_length': 2\n10.5}\n") == {
        1: {"loss": 0.05, "completions/mean_length": 210.5}
    }


def shown(steps: Iterable[int], every: int, *, redrawn: bool = True, evaluated: bool = False) -> Iterator[str]:
    """A bar for each step, and a dictionary that belongs to the bar before it."""
    for step in steps:
        bar = f"\r  3%|▎         | {step}/1875 [01:00<10:00,  1.20s/it]"
        yield bar
        if step % every == 0:
            yield f"{{'loss': 0.1, 'kl': {step / 1000}}}\n"
            yield bar if redrawn else ""
        if step % every == 0 and evaluated:
            yield "".join(f"\n\r {n}0%|▎   | {n}/8 [00:01<00:01,  7.0it/s]" for n in range(1, 9))
            yield "\r{'eval_loss': '0.2'}\n"


@pytest.mark.parametrize("redrawn", [True, False])
@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("every", [1, 25])
def test_step_is_of_the_progress_bar_next_to_the_dictionary(every: int, evaluated: bool, redrawn: bool) -> None:
    found = points("".join(shown(range(1, 101), every, redrawn=redrawn, evaluated=evaluated)))
    assert list(found) == list(range(every, 101, every))
    assert all(values["kl"] == step / 1000 for step, values in found.items())


BAR = "{{'kl': 0.1}}\n  3%|▎   | {step}/300 [01:00<10:00]\n"


@pytest.mark.parametrize(
    "row",
    [
        BAR,
        "Step 1, add them\n" + BAR,  # in a completion
        "\rscoring: 50%|▎   | {scored}/900 [00:00<00:01]\r100%|███| 8/8 [00:00<00:00]\r" + BAR,
    ],
)
def test_bar_below_its_row_counts_among_others(row: str) -> None:
    loading = "Loading checkpoint shards: 100%|███| 2/2 [00:01<00:00]\n"
    steps = range(5, 45, 5)
    text = loading + "".join(row.format(step=step, scored=10 * step) for step in steps)
    assert list(points(text)) == list(steps)


def test_a_resumed_run_is_numbered_from_where_it_went_on() -> None:
    text = "".join([*shown(range(1, 61), 10), "\nTraceback: preempted\n", *shown(range(41, 101), 10)])
    assert list(points(text)) == list(range(10, 101, 10))
