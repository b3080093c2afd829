"""In which order a download asks whom."""

from __future__ import annotations

from pathlib import Path

from checkpoint.stream.elsewhere import LOOKED_AT, Job, Jobs


def jobs(count: int) -> list[Job]:
    return [Job(f"{at:05d}", "model.safetensors", Path("model"), at, 1, begun=False) for at in range(count)]


def test_each_side_takes_its_own_first_and_then_what_is_left() -> None:
    left = Jobs(jobs(6), lambda chunk: int(chunk) % 3 == 2)
    taken = [left.take(expected=expected) for expected in (True, False, True, True, False, False, True)]
    assert [job and int(job.chunk) for job in taken] == [2, 0, 5, 1, 3, 4, None]


def test_to_take_a_job_of_140_gb_few_are_looked_at() -> None:
    asked = list[str]()

    def expects(chunk: str) -> bool:
        asked.append(chunk)
        return True

    left = Jobs(jobs(9000), expects)
    for number in range(100):
        job = left.take(expected=False)
        assert job is not None
        assert int(job.chunk) == number
    assert len(asked) == 100 * LOOKED_AT
