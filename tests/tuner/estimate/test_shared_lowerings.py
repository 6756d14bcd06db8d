"""What workers tell each other of what they have lowered."""

from automesh.tuner.estimate.shared_lowerings import SharedLowerings
from automesh.worker.messages import LOWERINGS

USUAL, OTHER = ((), ()), ((), (("remat", "full"),))


def say(listener, *new, heard=0, claim=None, state="open"):
    event = {"event": LOWERINGS, "new": list(new), "heard": heard, "claim": claim, "state": state}
    return listener(event)


def test_a_worker_hears_what_others_of_its_call_have_lowered_and_not_its_own():
    shared = SharedLowerings()
    one, two, stranger = shared.listener(USUAL), shared.listener(USUAL), shared.listener(OTHER)
    assert say(one, {"sizes": {"dp": 2}})["known"] == []
    reply = say(two, {"sizes": {"dp": 4}})
    assert reply["known"] == [{"sizes": {"dp": 2}}] and reply["heard"] == 2
    assert say(one, heard=1)["known"] == [{"sizes": {"dp": 4}}]
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


def test_other_events_are_not_answered():
    assert SharedLowerings().listener(USUAL)({"event": "stage", "stage": "lower"}) is None
