"""What workers tell each other of what they have lowered."""

from automesh.tuner.estimate import shared_lowerings
from automesh.tuner.estimate.shared_lowerings import SharedLowerings
from automesh.worker.messages import LOWERINGS

USUAL, OTHER = ((), ()), ((), (("remat", "full"),))


def lowered(**sizes):
    rest = {"text": "t", "signature": "s", "asked": True, "numbers": "", "elements": ""}
    return {"sizes": sizes, **rest}


def say(listener, *new, heard=0, claim=None, state="open"):
    event = {"event": LOWERINGS, "new": list(new), "heard": heard, "claim": claim, "state": state}
    return listener(event)


def test_a_worker_hears_what_others_of_its_call_have_lowered_and_not_its_own():
    shared = SharedLowerings()
    one, two, stranger = shared.listener(USUAL), shared.listener(USUAL), shared.listener(OTHER)
    assert say(one, lowered(dp=2))["known"] == []
    reply = say(two, lowered(dp=4))
    assert reply["known"] == [lowered(dp=2)] and reply["heard"] == 2
    assert say(one, heard=1)["known"] == [lowered(dp=4)]
    assert say(one, heard=2)["known"] == []
    assert say(stranger)["known"] == []


def test_claims_are_told_to_others_until_the_job_says_more_or_ends():
    shared = SharedLowerings()
    one, two = shared.listener(USUAL), shared.listener(USUAL)
    assert say(one, claim={"dp": 2})["claimed"] == []
    assert say(two)["claimed"] == [{"dp": 2}]
    say(one)
    assert say(two)["claimed"] == []
    say(one, claim={"dp": 4})
    assert say(shared.listener(OTHER))["claimed"] == []
    one.close()
    assert say(two)["claimed"] == []


def test_a_step_is_alike_elsewhere_if_it_was_with_other_knobs_and_varied_with_none():
    shared = SharedLowerings()
    usual, other = shared.listener(USUAL), shared.listener(OTHER)
    assert not say(usual, state="alike")["alike"]
    assert say(other)["alike"]
    assert not say(usual, state="alike")["alike"]
    assert not say(other, state="varied")["alike"]
    assert not say(shared.listener(((), (("remat", "dots"),))))["alike"]


def test_what_is_known_of_a_call_only_grows():
    shared = SharedLowerings()
    usual, other = shared.listener(USUAL), shared.listener(OTHER)
    say(usual, state="alike")
    say(other, state="varied")
    third = shared.listener(((), (("remat", "dots"),)))
    assert not say(third)["alike"]
    say(shared.listener(OTHER))  # A worker that has just turned to it.
    say(shared.listener(USUAL))
    assert not say(third)["alike"]
    shared.distrust(OTHER)
    assert say(third)["alike"]


def test_what_was_dropped_hides_nothing_that_comes_later():
    shared = SharedLowerings()
    one, two = shared.listener(USUAL), shared.listener(USUAL)
    say(one, lowered(dp=2), lowered(dp=4), lowered(dp=8))
    heard = say(two)["heard"]
    shared.forget(USUAL)
    later = [lowered(dp=size) for size in (10, 11, 12, 13)]
    say(one, *later, heard=heard)
    assert say(two, heard=heard)["known"] == later


def test_calls_that_nobody_is_at_make_room(monkeypatch):
    monkeypatch.setattr(shared_lowerings, "MOST_CHARS", 30)
    shared = SharedLowerings()
    full = {**lowered(dp=2), "numbers": "x" * 20}
    busy, idle = shared.listener(USUAL), shared.listener(OTHER)
    say(busy, full)
    say(idle, full)
    idle.close()
    third = shared.listener(((), (("remat", "dots"),)))
    say(third, full)
    assert list(shared.records) == [USUAL, third.call]
    assert say(shared.listener(USUAL))["known"] == [full]


def test_a_job_in_a_fresh_process_neither_hears_nor_tells():
    shared = SharedLowerings()
    say(shared.listener(USUAL), lowered(dp=2))
    deaf = shared.listener(USUAL, is_isolated=True)
    event = {"event": LOWERINGS, "new": [lowered(dp=4)], "heard": 0, "claim": None, "state": "open"}
    assert deaf(event) is None
    assert say(shared.listener(USUAL))["known"] == [lowered(dp=2)]


def test_a_malformed_event_ends_nothing():
    shared = SharedLowerings()
    listener = shared.listener(USUAL)
    for event in (
        {},
        {"heard": "x", "new": 3, "claim": [], "state": {}},
        {"heard": -1, "new": [None, {"sizes": {"dp": "2"}}, {"sizes": {"dp": 2}}]},
    ):
        reply = listener({"event": LOWERINGS, **event})
        assert reply is not None and reply["known"] == [] and reply["heard"] == 0
    listener({"event": LOWERINGS, "new": [{"sizes": {"dp": 2}, "refused": True}]})
    assert say(shared.listener(USUAL))["known"] == [{"sizes": {"dp": 2}, "refused": True}]


def test_other_events_are_not_answered():
    assert SharedLowerings().listener(USUAL)({"event": "stage", "stage": "lower"}) is None
