"""What a former version has pickled is read: classes that have moved to this plug-in."""

from __future__ import annotations

import pickle

from automesh import pipeline


def test_a_state_that_a_former_version_has_pickled_is_read() -> None:
    state = pipeline.TrainState(params={"w": 1.0}, optimizer=())
    kept = pickle.dumps(state, protocol=0)
    home = b"pipeline.runtime.training"
    former = kept.replace(b"automesh_" + home, b"automesh." + home)
    assert former != kept
    found = pickle.loads(former)
    assert isinstance(found, pipeline.TrainState)
    assert found.params == {"w": 1.0}
