"""Replaces TRL's client of a vLLM server: completions come from the fleet, weights go to the run store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Protocol

import structlog
import torch

from grpo_orch.checkpoint.records.rollouts import Rollout, Session
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.wire import Completion, PolicyRef
from grpo_orch.tasks.completions.rollout_source import RolloutSource
from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.publish import AdapterPublisher
from grpo_orch.tasks.storing.tensors import LazyTensor
from grpo_orch.tasks.trl.windows_ahead import WindowsAhead

log = structlog.get_logger()


class Instead(Enum):
    """What all processes do before there are completions. TRL broadcasts it to them instead of completions."""

    LEAVING = "leave this machine"
    WEIGHTS_FIRST = "publish the weights together"


class NoPrompt(Enum):
    """Replaces a prompt where another process has one more. Its completion has no token."""

    NO_PROMPT = "no prompt"


NO_PROMPT = NoPrompt.NO_PROMPT
Prompt = list[int] | NoPrompt
Weights = Iterator[tuple[str, torch.Tensor | LazyTensor]]


class _WeightsFirst(Exception):
    """The weights must be published before generation, and are divided over all processes."""


_INSTEAD: dict[type[Exception], Instead] = {
    LeaveNow: Instead.LEAVING,
    _WeightsFirst: Instead.WEIGHTS_FIRST,
}


class Publishes(Protocol):
    """Publishes weights as a policy version."""

    def publish(
        self,
        version: PolicyVersion,
        named: Iterable[tuple[str, torch.Tensor | LazyTensor]],
        canary: Canary | None,
        since_step: int | None = None,
    ) -> PolicyRef:
        """Publish weights, and delete policies older than `since_step`. Raises StoreError."""

    def published(self, version: PolicyVersion) -> PolicyRef | None:
        """Return the stored policy of a version, or None. Raises StoreError."""


class FleetClient:
    """Replaces TRL's VLLMClient.

    Args:
        rollouts: answers its generate calls.

    Attributes:
        on_policy_gone: called if the weights compute no finite number, with the present step and the first step
            that may have caused it. No node would serve such weights.
        foresees: whether to announce an evaluation's prompts. False where the trainer's own model would take them
            all as one batch.
        windows: requests windows ahead; None: each step is sampled from its own policy.
        trained_on: the training calls since the caller last emptied the list.
    """

    def __init__(self, rollouts: RolloutSource) -> None:
        self._rollouts = rollouts
        self._trainer: Any = None
        self._publisher: Publishes | None = None
        self._timeline = 0
        self._weights: Weights | None = None
        self._published: PolicyRef | None = None
        self._canary: Canary | None = None  # what the weights of the present step compute
        self._finite_at: int | None = None  # the last step whose weights computed numbers
        self.on_policy_gone: Callable[[int, int], None] = lambda *_: None
        self.foresees = False
        self._foreseen: list[list[int]] = []
        self._answers: dict[tuple[int, ...], deque[list[Completion]]] = {}  # by foreseen prompt
        self.windows: WindowsAhead | None = None
        self._turn = (-1, 0)  # the window, and how many of its calls are made
        self.trained_on: list[Rollout] = []

    def attach(self, trainer: Any, publisher: Publishes | None, timeline: int) -> None:
        """Set the trainer before its first generate call. `publisher` is None except in its first process."""
        self._trainer, self._publisher, self._timeline = trainer, publisher, timeline

    @property
    def publishes_adapters(self) -> bool:
        """Whether a policy is the trained adapter alone, without the base model's weights."""
        return isinstance(self._publisher, AdapterPublisher)

    def take_canary(self, canary: Canary) -> None:
        """Set the canary of the present step's weights."""
        self._canary, step = canary, self._version().step
        if any(logprob is not None for logprob in canary.logprobs):
            self._finite_at = step
        else:
            self.on_policy_gone(step, step if self._finite_at is None else self._finite_at + 1)

    def foresee(self, prompts: list[list[int]]) -> None:
        """Announce the prompts of an evaluation, which its first generate call completes together.

        TRL makes one generate call after the other, each for `per_device_eval_batch_size` completions: with 8
        completions of a prompt, 500 prompts would be 500 calls of one prompt, on a fleet that completes hundreds
        in parallel. A call with other prompts is made on demand.
        """
        self._foreseen, self._answers = prompts, {tuple(prompt): deque() for prompt in prompts}

    def get_server_info(self) -> dict[str, Any]:
        """Return the settings that TRL checks. Every rollout node has them; run.yaml cannot change them."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def image_features(self, *_: Any) -> Any:
        raise NotImplementedError("prompts with images are not supported by the rollout fleet")

    def take_weights(self, weights: Weights | None) -> None:
        """Set the weights of the present step; None if reading them takes all processes.

        They are published when the step's first completion has to be generated. A replayed step publishes nothing.
        """
        self._weights, self._published = weights, None

    def generate(
        self,
        prompts: list[Prompt],
        features: list[Any] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return `n` completions of each prompt in TRL's shapes, prompt by prompt.

        A refused completion is one end token without a log-probability (`tasks.trl.parts.refused`).
        NO_PROMPT gets none (`tasks.trl.parts.tool_turns`).
        """
        if features is not None or logprobs != 0:
            raise NotImplementedError(
                "the rollout fleet serves text prompts, and the sampled tokens' logprobs alone"
            )
        sampling: dict[str, Any] = {
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
        }  # `logprobs=0`: the sampled token's log-probability, which the gateway always returns
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        sampling.update(generation_kwargs or {})
        present: list[Any] = [prompt for prompt in prompts if prompt is not NO_PROMPT]
        is_foreseen = bool(self._foreseen) and {tuple(prompt) for prompt in present} <= self._answers.keys()
        completions = (self._complete_foreseen if is_foreseen else self._completions)(present, n, sampling)
        if isinstance(completions, Instead):  # the other processes wait for an answer
            return {"prompt_ids": prompts, "completion_ids": [completions] * (len(prompts) * n), "logprobs": None}
        return self._in_shape(prompts, n, completions)

    def _complete_foreseen(
        self, prompts: list[list[int]], samples: int, sampling: dict[str, Any]
    ) -> list[Completion] | Instead:
        """Return completions of some prompts of an evaluation. The first call completes all of them."""
        if not any(self._answers.values()):
            completions = self._completions(self._foreseen, samples, sampling)
            if isinstance(completions, Instead):
                return completions
            for number, prompt in enumerate(self._foreseen):
                self._answers[tuple(prompt)].append(completions[number * samples : (number + 1) * samples])
        found: list[Completion] = []
        for prompt in prompts:
            answers = self._answers[tuple(prompt)]
            found += answers[0]
            answers.rotate(-1)  # the next row with this prompt gets other completions
        return found

    def _completions(
        self, prompts: list[Any], samples: int, sampling: dict[str, Any]
    ) -> list[Completion] | Instead:
        rollout = self._complete(prompts, samples, sampling)
        return rollout if isinstance(rollout, Instead) else rollout.completions

    def run_agents(
        self, rows: list[dict[str, Any]], samples: int, sampling: dict[str, Any]
    ) -> list[Session] | Instead:
        """Return `samples` sessions of the run's agent on each row, row by row."""
        rollout = self._complete(rows, samples, sampling)
        return rollout if isinstance(rollout, Instead) else rollout.sessions

    def _complete(self, prompts: list[Any], samples: int, sampling: dict[str, Any]) -> Rollout | Instead:
        training = bool(self._trainer.model.training)
        windows = self.windows if training else None
        try:
            of_window = {} if windows is None else self._of_window(windows, samples, sampling)
            rollout = self._rollouts.complete(
                self._version(),
                prompts,
                samples,
                sampling,
                training=training,
                policies=self._policy,
                **of_window,
            )
        except (LeaveNow, _WeightsFirst) as interruption:
            return _INSTEAD[type(interruption)]
        if training:
            self._turn = self._turn[0], self._turn[1] + 1
            self.trained_on.append(rollout)
        return rollout

    def _of_window(self, windows: WindowsAhead, samples: int, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return policy and number of the present window's next call.

        The first call of a round begins all calls whose policies are published.
        """
        window = windows.present
        if self._turn[0] != window:
            if self._turn[0] < 0:
                windows.start()
            if windows.begins_round(window):
                self._rollouts.begin(windows.calls(samples, sampling), self._policy)
            self._turn = window, 0
        return {"policy": windows.policy_of(window), "number": windows.number_of(*self._turn)}

    def _in_shape(self, prompts: list[Prompt], n: int, completions: list[Completion]) -> dict[str, Any]:
        """Convert completions to the form of a server's answer."""
        end = [self._trainer.eos_token_ids[0]]
        received = iter(completions)
        completion_ids, logprobs = list[list[int]](), list[list[float | None]]()
        for prompt in (prompt for prompt in prompts for _ in range(n)):
            completion = None if prompt is NO_PROMPT else next(received)
            if completion is None:
                row: tuple[list[int], list[float | None]] = [], []
            elif completion.refused:
                row = end, [None]
            else:
                row = completion.token_ids, list(completion.logprobs)
            completion_ids.append(row[0])
            logprobs.append(row[1])
        return {
            "prompt_ids": prompts,
            "completion_ids": completion_ids,
            "logprobs": [[[logprob] for logprob in row] for row in logprobs],
            "logprob_token_ids": [[[token] for token in row] for row in completion_ids],
        }

    def _version(self) -> PolicyVersion:
        return PolicyVersion(self._timeline, self._trainer.state.global_step)

    def publish(self) -> PolicyRef:
        """Publish the weights of this step, once. Raises StoreError."""
        if self._published is None:
            if self._publisher is None:
                raise RuntimeError("TRL generates before it has synchronized its weights")
            if self._weights is None:
                raise _WeightsFirst
            oldest = None if self.windows is None else self.windows.policy_of(self.windows.present).step
            self._published = self._publisher.publish(self._version(), self._weights, self._canary, oldest)
            self._weights = None
        return self._published

    def _policy(self, version: PolicyVersion) -> PolicyRef:
        """Return a policy: the present step's, published now, or an older one from the store.

        The present policy replaces an older one that is not stored, as after `max_staleness` was raised. Raises
        StoreError.
        """
        if version != self._version():
            assert self._publisher is not None
            found = self._publisher.published(version)
            if found is not None:
                return found
            log.warning("older_policy_not_stored", policy=str(version), instead=str(self._version()))
        return self.publish()
