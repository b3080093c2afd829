"""What people read of a step, handed to the writer once TRL has scored it.

TRL gathers prompts, completions and advantages of all processes in `_logs` anyway, and rewards before: `_logs` has
those by the functions' names, of which two may be equal. Lengths and mismatches are each process's own: one small
tensor is gathered for them. Nothing here draws a random number or changes what is trained on, and nothing that
fails is more than a line in the log: that tensor is gathered whatever happens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from checkpoint.records.rollouts import Rollout, Session
from checkpoint.records.samples import SCHEMA, Group, Head, Message, Sample
from checkpoint.store.codec import to_json
from policies.model.vocabulary import PolicyVersion
from policies.serving.wire import Completion
from tasks.storing.sample_writer import SampleWriter

log = structlog.get_logger()

# Finding where in a text a node was left takes decoding what it had made: so many tokens take 50 ms.
DECODED_TOKENS_MAX = 200_000
MEASURES = 4  # of a completion: tokens, cut, mean and greatest mismatch


class KeepsSamples:
    """For a trainer of TRL's, before it in the order of its bases. The first process has `samples`."""

    samples: SampleWriter | None = None
    _made: tuple[list[list[int]], Any] = ([], None)  # ids and tool mask of this process's last completions
    _rewarded: torch.Tensor | None = None  # of all processes' last completions, (completions, functions)
    _scored_at = PolicyVersion(-1, -1)
    _scored_calls = 0

    def _generate(self: Any, prompts: list[Any]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = super()._generate(prompts)  # type: ignore[misc]  # the trainer's
        self._made = found[1], found[2]
        return found

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # the same
        rollouts, self._fleet.trained_on = self._fleet.trained_on, []
        if self.model.training:
            measured = self.accelerator.gather(self._measured_or_not(output))
            if self.samples is not None:
                try:
                    self._offer(self.samples, measured.tolist(), rollouts)
                except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
                    log.warning("samples_not_kept", why=repr(error)[:500])
        return output

    def _measured_or_not(self: Any, output: dict[str, Any]) -> torch.Tensor:
        """The same shape in every process whatever happens: one that did not gather would hold up the others."""
        unknown = torch.full((len(output["completion_ids"]), MEASURES), math.nan, device=self.accelerator.device)
        try:
            measured: torch.Tensor = self._measured(output)
            if measured.shape != unknown.shape:
                raise ValueError(f"measured {tuple(measured.shape)}, expected {tuple(unknown.shape)}")
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
            log.warning("samples_not_measured", why=repr(error)[:500])
            return unknown
        return measured

    def _measured(self: Any, output: dict[str, Any]) -> torch.Tensor:
        """Of each of this process's completions: tokens, whether it was cut, mean and greatest mismatch.

        Shape (completions, MEASURES); NaN is not known.
        """
        ids, mask = self._made
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        tokens = [len(one) for one in ids] if mask is None else [sum(one) for one in mask]
        told = torch.tensor(
            [[of_one, one[-1] not in ends, math.nan, math.nan] for of_one, one in zip(tokens, ids, strict=True)],
            device=self.accelerator.device,
        )
        if {"old_per_token_logps", "sampling_per_token_logps"} <= output.keys():
            known = output["completion_mask"] * output.get("tool_mask", 1)
            apart = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs().float()
            apart = apart.masked_fill(known == 0, math.nan)
            told[:, 2] = apart.nanmean(dim=1)
            told[:, 3] = apart.nan_to_num(nan=-1.0).amax(dim=1)
            told[:, 3].masked_fill_(told[:, 2].isnan(), math.nan)
        return told

    def _offer(self: Any, samples: SampleWriter, measured: list[list[float]], rollouts: list[Rollout]) -> None:
        version, count = PolicyVersion(self._timeline, self.state.global_step), len(measured)
        if version != self._scored_at:
            self._scored_at, self._scored_calls = version, 0
        call, self._scored_calls = self._scored_calls, self._scored_calls + 1
        logs, size = self._logs, self.num_generations
        names = list(self.reward_func_names)
        prompts, completions = list(logs["prompt"])[-count:], list(logs["completion"])[-count:]
        advantages = list(logs["advantages"])[-count:]
        rewards = self._rewarded.tolist()
        if len(rewards) != count:
            raise ValueError(f"{len(rewards)} completions were scored, expected {count}")
        weights = [float(one) for one in self.reward_weights.tolist()]
        first = rollouts[0].completions if rollouts and len(rollouts[0].completions) == count else None
        one_turn = len(rollouts) == 1
        places = _places(first, self._tokenizer) if first is not None and one_turn else {}
        sessions = rollouts[0].sessions if rollouts and len(rollouts[0].sessions) == count else None
        now_s = time.time()

        def build() -> tuple[Head, list[Group]]:
            made = [
                _sample(
                    _messages(completions[at]),
                    rewards[at],
                    weights,
                    advantages[at],
                    measured[at],
                    None if first is None else first[at],
                    places.get(at, []),
                    one_turn,
                )
                for at in range(count)
            ]
            if sessions is not None:
                made = [_of_session(*of_one) for of_one in zip(made, sessions, prompts, strict=True)]
            groups = [Group(_messages(prompts[at]), made[at : at + size]) for at in range(0, count, size)]
            head = Head(SCHEMA, str(version), version.step + 1, call, now_s, names, weights, len(groups))
            return head, groups

        samples.offer(build)


def _sample(
    completion: list[Message],
    rewards: list[float],
    weights: Sequence[float],
    advantage: float,
    measured: Sequence[float],
    made: Completion | None,
    places: list[int],
    one_turn: bool,
) -> Sample:
    given = [_known(one) for one in rewards]
    sums = [one * weight for one, weight in zip(given, weights, strict=True) if one is not None]
    told = None if made is None else made.refused
    tokens, cut, mean, most = measured
    was_cut = _known(cut)
    if made is not None and one_turn:  # a text that ends a completion is no token that TRL knows
        was_cut = float(made.finish_reason == "length")
    count = _known(tokens)
    return Sample(
        completion=[] if told else completion,
        rewards=given,
        reward=_known(sum(sums)) if sums else None,
        advantage=_known(advantage),
        tokens=0 if told else None if count is None else int(count),
        cut=None if told or was_cut is None else bool(was_cut),
        node="" if made is None else made.node,
        policy="" if made is None else made.policy,
        handed_over=[] if made is None else made.handed_over,
        handed_over_chars=places,
        mismatch_mean=_known(mean),
        mismatch_max=_known(most),
        refused=told or "",
    )


def _of_session(sample: Sample, session: Session, prompt: Any) -> Sample:
    """A sample with the conversation that its agent had, from where it goes on from the prompt."""
    if not session.branches:
        return replace(
            sample,
            completion=[],
            cut=session.is_cut,
            failed=session.failed or "it asked for no turn",
            policy=session.policy,
        )
    branch = session.branches[-1]
    said, turns = list(branch.messages), list(branch.turns)
    known = len(prompt) if not isinstance(prompt, str) and said[: len(prompt)] == list(prompt) else 0
    answers = [at for at, message in enumerate(said) if message.get("role") == "assistant"][-len(turns) :]
    tokens = {at: turn.end - turn.start for at, turn in zip(answers, turns, strict=False)}
    messages = [replace(one, tokens=tokens.get(at)) for at, one in enumerate(_messages(said))]
    return replace(
        sample,
        completion=messages[known:],
        cut=session.is_cut,
        node=session.node,
        policy=session.policy,
        handed_over=[part for turn in turns for part in turn.handed_over],
        failed=session.failed,
    )


def _places(made: Sequence[Completion], tokenizer: Any) -> dict[int, list[int]]:
    """Where in their texts completions were handed over, by their place: in the trainer's thread, since no other
    may use its tokenizer."""
    found: dict[int, list[int]] = {}
    left = DECODED_TOKENS_MAX
    for at, one in enumerate(made):
        left -= sum(part.tokens for part in one.handed_over)
        if one.handed_over and left >= 0:
            heads = [one.token_ids[: part.tokens] for part in one.handed_over]
            found[at] = [len(tokenizer.decode(ids, skip_special_tokens=True)) for ids in heads]
    return found


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _messages(told: Any) -> list[Message]:
    """A prompt or completion as TRL has it: text, or messages."""
    if isinstance(told, str):
        return [Message(told)]
    return [Message(_text(one), str(one.get("role") or "")) for one in told]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(map(_part, content)) if isinstance(content, list) else str(content)
    calls = message.get("tool_calls")
    return f"{content}\n{to_json(calls).decode()}".strip() if calls else content


def _part(part: Any) -> str:
    """Of a message in parts; datasets give a part that has no text one that is None."""
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if part.get("text") is not None else f"[{part.get('type')}]"
