"""The samples' pages over HTTP: what is wanted is there, every name leads to it, and all of it is text."""

from __future__ import annotations

from grpo_orch.orchestrator.web.pages import SAMPLES_ON_A_PAGE as ON_A_PAGE
from tests.generators.samples import group, handed_over, sample, store_step
from tests.orchestrator.web.test_site import HOSTILE, ask, run_of, visit


def test_groups_filters_and_names_that_last() -> None:
    world = run_of()
    for policy in ("0-4", "0-9"):
        store_step(
            world.store,
            policy,
            group("what is 1 + 1?", handed_over("it is two"), sample("3", 0.0, cut=True)),
            group("what is 2 + 2?", sample("4", 1.0), sample("it is 5", 0.25)),
        )

    def told(query: str) -> list[str]:
        (found,) = ask(world, f"/samples?format=json&{query}")
        return [one["link"] for each in found["groups"] for one in each["completions"]]

    text, whole = visit(world, "/samples", "/samples/0-5/0/0")
    parts = "Step 0-10", "Prompt 1", "what is 2 + 2?", 'href="/samples/0-10/1/0"', "cut", "1 handed over"
    assert [part for part in parts if part not in text] == []
    assert "⇥ moved from rollout-1-i1 after 3 tokens" in text
    assert 'step=0-5">← 0-5</a>' in text
    assert "it i" in whole
    assert "what is 1 + 1?" in whole
    assert told("") == ["0-10/0/0", "0-10/0/1", "0-10/1/0", "0-10/1/1"]
    assert told("step=5&order=worst") == ["0-5/0/1", "0-5/1/1", "0-5/0/0", "0-5/1/0"]
    assert told("order=best&search=IT+IS") == ["0-10/0/0", "0-10/1/1"]
    assert told("low=0.2&high=0.6") == ["0-10/0/0", "0-10/1/1"]
    assert told("only=cut") == ["0-10/0/1"]
    assert told("only=handed_over&node=rollout-1-i1&policy=0-4") == ["0-10/0/0"]
    assert told("policy=0-9") == []
    (one,) = ask(world, "/samples/0-5/0/0?format=json")
    assert one["completion"]["completion"][0]["text"] == "it is two"
    visit(world, "/samples?order=dear", "/samples?low=much", status=400)
    (near,) = visit(world, "/samples?step=7", status=404)
    assert "the nearest are 0-5, 0-10" in near
    missing = "?step=x", "/0-5/9/0", "/0-5/0/2", "/0-6/0/0", "/a/b/c"
    visit(world, *(f"/samples{path}" for path in missing), status=404)


def test_run_without_samples_reports_it() -> None:
    assert "no step has been scored yet" in visit(run_of(), "/samples")[0]


def test_hostile_completions_are_text() -> None:
    world = run_of()
    names = {"node": HOSTILE[:300], "policy": HOSTILE[:300]}
    made = [sample(HOSTILE + "the end", n / 100, **names) for n in range(ON_A_PAGE + 3)]
    store_step(world.store, "0-4", group(HOSTILE, *made, sample("", None, refused=HOSTILE)))

    paths = "/samples", "/samples?first=32", "/samples/0-5/0/0", f"/samples?search={'%3Cb%3E' * 9}"
    pages, _, shown, _ = drawn = visit(world, *paths)
    for text in drawn:
        assert "<script>alert" not in text
        assert not set("\x1b\u202e\u2066") & set(text)
        assert len(text) < 400_000
    assert "&lt;script&gt;alert(1)&lt;/script&gt;‹U+001B›[2J‹U+202E›gpj.exe‹U+2066›" in shown
    assert "x" * 1999 in shown
    assert "the end" in shown
    assert ">next</a>" in pages
