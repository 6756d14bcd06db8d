"""Readers of the same thing share a look, and nobody sees what another one may."""

from __future__ import annotations

import asyncio
import threading

from automesh_service.serve.looks import LookResult, Looks

EVERY_S = 0.05


class Thing:
    """Something that is watched; it counts how often it is looked at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.looks = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def read(self) -> LookResult | None:
        self.may_answer.wait(20)
        self.looks += 1
        return LookResult(text=f"{self.name} {self.looks}", sign=str(self.looks), is_over=False)


def test_readers_of_the_same_share_a_look_and_later_ones_take_a_new_one() -> None:
    thing, looks = Thing("a"), Looks()

    async def watch() -> None:
        views = [looks.view("a", thing.read) for _ in range(20)]
        first = await asyncio.gather(*(view.look(EVERY_S) for view in views))
        assert {one.text for one in first if one} == {"a 1"}
        await asyncio.sleep(EVERY_S)
        again = await asyncio.gather(*(view.look(EVERY_S) for view in views))
        assert {one.text for one in again if one} == {"a 2"}

    asyncio.run(watch())
    assert thing.looks == 2


def test_readers_of_other_things_or_with_other_rights_look_themselves() -> None:
    mine, yours, looks = Thing("mine"), Thing("yours"), Looks()

    async def watch() -> None:
        seen = await asyncio.gather(
            looks.view(("ann", "study"), mine.read).look(EVERY_S),
            looks.view(("bob", "study"), yours.read).look(EVERY_S),
        )
        assert [one.text for one in seen if one] == ["mine 1", "yours 1"]

    asyncio.run(watch())


def test_a_reader_who_leaves_takes_no_look_from_the_others() -> None:
    thing, looks = Thing("a"), Looks()
    thing.may_answer.clear()

    async def watch() -> None:
        leaving = asyncio.create_task(looks.view("a", thing.read).look(EVERY_S))
        await asyncio.sleep(0)
        staying = asyncio.create_task(looks.view("a", thing.read).look(EVERY_S))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        thing.may_answer.set()
        seen = await staying
        assert seen is not None and seen.text == "a 1"
        assert leaving.cancelled()

    asyncio.run(watch())
    assert thing.looks == 1


def test_what_nobody_watches_any_more_is_forgotten() -> None:
    thing, looks = Thing("a"), Looks()

    async def watch() -> None:
        await looks.view("a", thing.read).look(EVERY_S)
        assert len(looks) == 1
        await asyncio.sleep(4 * EVERY_S)
        assert len(looks) == 0

    asyncio.run(watch())


def test_a_look_that_fails_fails_for_all_and_the_next_one_is_tried_again() -> None:
    looks, told = Looks(), list[str]()

    def read() -> LookResult | None:
        told.append("looked")
        if len(told) == 1:
            raise OSError("the disk is away")
        return None

    async def watch() -> None:
        views = [looks.view("a", read) for _ in range(3)]
        failed = await asyncio.gather(
            *(view.look(EVERY_S) for view in views), return_exceptions=True
        )
        assert [str(one) for one in failed] == ["the disk is away"] * 3
        await asyncio.sleep(EVERY_S)
        assert await views[0].look(EVERY_S) is None

    asyncio.run(watch())
    assert len(told) == 2
