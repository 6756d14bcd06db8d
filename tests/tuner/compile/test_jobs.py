"""What a compile for absent devices says of its plan, of plans like it, and where it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from automesh.cost.roofline import predict
from automesh.errors import UsageError
from automesh.hardware.chips import chip_called
from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.hardware.model import HardwareModel
from automesh.hlo.store import ModuleStore, Stored
from automesh.mesh.axes import Plan, parse_mesh
from automesh.outcomes import Compiled, Counts, Failed, Memory, OutOfMemory
from automesh.program.nouns import CompileAnswer, Entry, StepRef
from automesh.tuner.compile.jobs import CompilingAhead, CompilingHere
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.compile.replay import Player
from tests.support.fakes.absent_search import play, replayed

GIB = 2**30
CHIP = chip_called("h100")
MEMORY = Memory(
    argument_bytes=GIB,
    output_bytes=GIB,
    alias_bytes=GIB,
    temporary_bytes=GIB,
    peak_bytes=2 * GIB,
)
COUNTS = Counts(flops=10**12, hbm_bytes=10**9, collectives=())
ANSWER = CompileAnswer(
    fingerprint="f", memory=MEMORY, counts=COUNTS, compile_s=1.0, stored="key", asked=("devices",)
)


def plan(mesh: str) -> Plan:
    return Plan(axes=parse_mesh(mesh, ("dp", "tp")))


def player(folder: Path, module: bytes = b"a module") -> Player:
    store = ModuleStore(folder)
    stored = Stored(
        module=module,
        memory=MEMORY,
        counts=COUNTS,
        compile_s=1.0,
        effort="default",
        target="gpu",
        label="dp:2",
        versions=(),
    )
    store.keep("key", stored)
    fabric = Fabric(kind="switch", chip=CHIP, num_granules=1, granule_devices=4)
    layouts = Layouts(shapes=((4, 1),), spans=(((), ()),))
    return Player(
        store=store,
        hardware=HardwareModel(
            fabric=fabric, layouts=layouts, speeds=SimpleNamespace(origin="made up")
        ),
    )


def compiling(folder: Path, *, low: bool = False, reserve: int = 0) -> CompilingAhead:
    one = player(folder)
    device_memory = DeviceMemory(limit_bytes=3 * GIB, reserve_bytes=reserve)
    return CompilingAhead(
        preparation=SimpleNamespace(device_memory=device_memory, chip=CHIP),
        effort="low" if low else "default",
        store=one.store,
        player=None if low else one,
    )


def test_the_schedule_gives_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Player, "play", play)
    ours = compiling(tmp_path)
    found = ours.outcome(plan("tp:4"), ANSWER)
    assert isinstance(found, Compiled)
    assert found.replay == replace(replayed(plan("tp:4")), speeds="made up")
    assert found.step_s == found.replay.step_s
    assert list(ours.asked) == ["devices"]
    # The same program on another plan is played with that one's names.
    twin = ours.again(plan("dp:4"), replace(found, same_as="tp:4"))
    assert isinstance(twin, Compiled)
    assert twin.replay == replace(replayed(plan("dp:4")), speeds="made up")
    assert twin.same_as == "tp:4"


def test_low_effort_is_not_played(tmp_path: Path) -> None:
    ours = compiling(tmp_path, low=True)
    found = ours.outcome(plan("tp:4"), replace(ANSWER, effort="low"))
    assert isinstance(found, Compiled)
    assert found.replay is None and found.effort == "low" and found.step_s > 0
    assert ours.again(plan("dp:4"), found) == found
    assert ours.keeps(replace(found, stored="gone"))


def test_what_the_compiler_does_not_refuse_is_refused_here(tmp_path: Path) -> None:
    large = replace(ANSWER, memory=replace(MEMORY, peak_bytes=4 * GIB))
    found = compiling(tmp_path, reserve=GIB).outcome(plan("tp:4"), large)
    assert isinstance(found, OutOfMemory)
    # Stored without the reserve, which another run may have another one of.
    assert (found.needed_bytes, found.limit_bytes, found.reserve_bytes) == (4 * GIB, 3 * GIB, 0)


def test_a_reserve_is_no_part_of_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Player, "play", play)
    ours = compiling(tmp_path, reserve=2 * GIB)
    found = ours.outcome(plan("tp:4"), ANSWER)
    assert isinstance(found, Compiled)
    assert isinstance(ours.preparation.device_memory.judged(found), OutOfMemory)


def test_what_was_removed_from_the_store_is_compiled_again(tmp_path: Path) -> None:
    ours = compiling(tmp_path)
    known = Compiled(
        fingerprint="f", memory=MEMORY, counts=COUNTS, step_s=1.0, compile_s=1.0, stored="key"
    )
    assert ours.keeps(known)
    ours.store.clear()
    assert not ours.keeps(known)
    with pytest.raises(UsageError, match=r"is not in .* where it should have been kept"):
        ours.again(plan("tp:4"), known)


def test_a_schedule_that_cannot_be_read_is_a_failure_of_its_plan(tmp_path: Path) -> None:
    found = player(tmp_path).replayed(
        plan("dp:4"),
        Compiled(
            fingerprint="f", memory=MEMORY, counts=COUNTS, step_s=1.0, compile_s=1.0, stored="key"
        ),
    )
    assert isinstance(found, Failed)
    assert found.stage == "replay" and "cannot be replayed" in found.reason


# Devices that are here: an accelerator's schedule is played as well, and nothing depends on it.


def here(folder: Path) -> CompilingHere:
    preparation = SimpleNamespace(
        device_memory=DeviceMemory(limit_bytes=3 * GIB, reserve_bytes=0),
        chip=CHIP,
        step=StepRef(entry=Entry(kind="script", location="train.py")),
    )
    return CompilingHere(preparation=preparation, player=player(folder), cache_dir=folder / "cache")


def test_the_schedule_of_an_attached_accelerator_gives_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Player, "play", play)
    ours = here(tmp_path)
    assert ours.job(plan("tp:4")).store_dir == str(tmp_path)
    found = ours.outcome(plan("tp:4"), ANSWER)
    assert isinstance(found, Compiled)
    assert found.replay == replace(replayed(plan("tp:4")), speeds="made up")
    assert found.step_s == found.replay.step_s
    again = ours.again(plan("dp:4"), found)
    assert isinstance(again, Compiled) and again.replay is not None
    assert again.step_s == replayed(plan("dp:4")).step_s


@pytest.mark.parametrize("stored", ["", "gone", "key"])
def test_a_schedule_that_is_not_there_or_cannot_be_read_leaves_the_counts(
    tmp_path: Path, stored: str
) -> None:
    ours = here(tmp_path)
    found = ours.outcome(plan("tp:4"), replace(ANSWER, stored=stored))
    assert isinstance(found, Compiled) and found.replay is None
    assert found.step_s == predict(COUNTS, CHIP).step_s
    assert ours.keeps(found)
    # What an earlier run has played, at other speeds, is no replay of this one.
    before = replace(found, replay=replayed(plan("dp:4")), step_s=1.0)
    assert ours.again(plan("tp:4"), before) == found


def test_virtual_devices_are_not_played(tmp_path: Path) -> None:
    ours = replace(here(tmp_path), player=None)
    assert ours.job(plan("tp:4")).store_dir == ""
    found = ours.outcome(plan("tp:4"), ANSWER)
    assert isinstance(found, Compiled) and found.replay is None
